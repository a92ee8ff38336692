"""Delays collectives of a process group, as slow links do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist


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
