"""Causes that take time: slow ranks, links, data and disks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.health_exam.injection import Injection, change_batches


class _Held:
    """A collective that ends later."""

    def __init__(self, work: Any, hold_up: Callable[[], None]) -> None:
        self._work, self._hold_up = work, hold_up

    def wait(self, *arguments: Any) -> Any:
        """Waits for it, and some time more."""
        self._hold_up()
        return self._work.wait(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


_HELD_UP = (
    *("allreduce", "reduce", "_reduce_scatter_base", "reduce_scatter_single", "_allgather_base"),
    *("all_gather_single", "alltoall_base", "all_to_all_single"),
)
"""Methods of a process group, by their names before and since torch 2.13."""


def hold_up(delay: Callable[[int], None]) -> None:
    """Delays the end of collectives below `torch.distributed`, by the bytes of the whole tensor."""
    group: Any = dist.ProcessGroup
    for name in filter(partial(hasattr, group), _HELD_UP):
        function = getattr(group, name)

        def slower(self: Any, *arguments: Any, function: Any = function, **options: Any) -> Any:
            work = function(self, *arguments, **options)
            tensors = [one for value in arguments for one in (value if isinstance(value, list) else [value])]
            num_bytes = max((one.nbytes for one in tensors if isinstance(one, torch.Tensor)), default=0)
            return _Held(work, lambda: delay(num_bytes))

        setattr(group, name, slower)


def slow_rank(injection: Injection) -> None:
    """Lengthens the forward and backward passes of one rank by a share."""
    if injection.rank == injection.on_rank:
        slow_everywhere(injection)


def slow_everywhere(injection: Injection) -> None:
    """Lengthens the forward and backward passes by a share."""
    _stretch(injection, injection.trainer, "training_step")
    forward = injection.trainer.model.forward

    def slower(*arguments: Any, **options: Any) -> Any:
        with injection.stretched():
            return forward(*arguments, **options)

    injection.trainer.model.forward = slower


def _stretch(injection: Injection, owner: Any, name: str) -> None:
    function = getattr(owner, name)

    def slower(*arguments: Any, **options: Any) -> Any:
        with injection.stretched():
            return function(*arguments, **options)

    setattr(owner, name, slower)


def slow_links(injection: Injection) -> None:
    """Holds up the first collective of each step, on every rank."""
    hold_up(lambda num_bytes: injection.wait())


def throttled_links(injection: Injection) -> None:
    """Lets large collectives move `size` bytes a second at most, on every rank."""

    def throttle(num_bytes: int) -> None:
        if injection.is_active and num_bytes >= 2**20:
            time.sleep(num_bytes / injection.size)

    hold_up(throttle)


def slow_data(injection: Injection) -> None:
    """Makes each step wait for its first micro-batch."""

    def wait(batch: dict[str, Any]) -> dict[str, Any]:
        injection.wait()
        return batch

    change_batches(injection, wait)


def slow_disk(injection: Injection) -> None:
    """Makes each file of a checkpoint take `size` seconds longer."""
    save = torch.save

    def slower(*arguments: Any, **options: Any) -> None:
        if injection.is_active:
            time.sleep(injection.size)
        save(*arguments, **options)

    torch.save = slower
