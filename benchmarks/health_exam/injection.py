"""Causes of trouble that are put into a rank from a step on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.health_exam.delays import hold_up
from dstrain.train.data.tokenize import IGNORED


@dataclass(kw_only=True)
class Injection:
    """One cause in one rank."""

    trainer: Any
    rank: int
    onset: int
    """The first optimizer step with it."""
    size: float
    """How large it is, in the unit of its cause."""
    on_rank: int
    """The rank that has it, if it is the cause of one rank alone."""
    grows_over: int = 0
    """Steps from the onset in which it grows to its size; 0: it has it at once."""
    step_s: list[float] = field(default_factory=list)
    """Seconds of the steps before the onset."""
    kept: list[bytearray] = field(default_factory=list)
    has_waited: bool = False

    @property
    def is_active(self) -> bool:
        """Whether the step that is under way has it."""
        return int(self.trainer.state.global_step) + 1 >= self.onset

    @property
    def size_now(self) -> float:
        """Its size in the step that is under way."""
        steps = int(self.trainer.state.global_step) + 2 - self.onset
        return self.size * min(1.0, steps / self.grows_over) if self.grows_over else self.size

    def wait(self) -> None:
        """Sleeps for `size` of a usual step, once in a step."""
        if self.is_active and not self.has_waited and len(self.step_s) > 5:
            time.sleep(self.size_now * median(self.step_s[5:]))
            self.has_waited = True

    @contextmanager
    def stretched(self) -> Iterator[None]:
        """Makes what runs inside take longer by the share `size`."""
        before = time.perf_counter()
        yield
        if self.is_active:
            time.sleep(self.size_now * (time.perf_counter() - before))


class First(TrainerCallback):
    """Runs this rank before other processes of the machine from the first step on, if it may."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Asks for Linux's real-time scheduling, for all threads: those of gloo carry the collectives."""
        self._schedule(os.SCHED_FIFO, 1)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Returns to the usual scheduling."""
        self._schedule(os.SCHED_OTHER, 0)

    def _schedule(self, policy: int, priority: int) -> None:
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError):
                os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))


class Steps(TrainerCallback):
    """Times steps before the onset."""

    def __init__(self, injection: Injection, at_begin: Callable[[], None]) -> None:
        """`at_begin` is called at the begin of each step with the cause."""
        self._injection, self._at_begin, self._began = injection, at_begin, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Starts a step."""
        self._injection.has_waited = False
        self._began = time.perf_counter()
        if self._injection.is_active:
            self._at_begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends a step."""
        if state.global_step < self._injection.onset:
            self._injection.step_s.append(time.perf_counter() - self._began)


def nothing(_: Injection) -> None:
    """Leaves a run as it is."""


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

    _change_batches(injection, wait)


def leak(injection: Injection) -> None:
    """Keeps `size` MB more in each step, on one rank."""

    def keep() -> None:
        injection.kept.append(bytearray(b"1") * int(injection.size * 1e6))

    if injection.rank == injection.on_rank:
        injection.trainer.add_callback(Steps(injection, keep))


def bad_batch(injection: Injection) -> None:
    """Makes the micro-batches of one step of one rank overflow, whenever they come: their embeddings are NaN."""
    bad: list[torch.Tensor] = []

    def poison(_: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        if _is_onset(injection):
            bad.append(inputs[0].clone())
        is_bad = injection.trainer.model.training and any(torch.equal(inputs[0], each) for each in bad)
        return output * float("nan") if is_bad else output

    if injection.rank == injection.on_rank:
        injection.trainer.model.get_input_embeddings().register_forward_hook(poison)


def bad_step(injection: Injection) -> None:
    """Makes the embeddings of one step of one rank NaN; the same micro-batches later are finite."""

    def poison(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output * float("nan") if _is_onset(injection) else output

    if injection.rank == injection.on_rank:
        injection.trainer.model.get_input_embeddings().register_forward_hook(poison)


def _is_onset(injection: Injection) -> bool:
    trainer = injection.trainer
    return bool(trainer.model.training) and int(trainer.state.global_step) + 1 == injection.onset


def bad_labels(injection: Injection) -> None:
    """Replaces labels by random tokens."""
    random = torch.Generator().manual_seed(injection.rank)

    def shuffle(batch: dict[str, Any]) -> dict[str, Any]:
        labels = batch["labels"]
        if injection.is_active:
            drawn = torch.randint(3, 2000, labels.shape, generator=random)
            batch["labels"] = torch.where(labels == IGNORED, labels, drawn)
        return batch

    _change_batches(injection, shuffle)


def high_rate(injection: Injection) -> None:
    """Multiplies the learning rate by `size`, once."""
    _raise_rate(injection, times=1)


def rising_rate(injection: Injection) -> None:
    """Multiplies the learning rate by `size` in each step from the onset on."""
    _raise_rate(injection, times=sys.maxsize)


def _raise_rate(injection: Injection, *, times: int) -> None:
    left = [times]

    def raise_rate() -> None:
        if left[0]:
            left[0] -= 1
            scheduler = injection.trainer.lr_scheduler
            scheduler.base_lrs = [rate * injection.size for rate in scheduler.base_lrs]
            for group in injection.trainer.optimizer.param_groups:
                group["lr"] *= injection.size

    injection.trainer.add_callback(Steps(injection, raise_rate))


def wrong_weights(injection: Injection) -> None:
    """Scales the last norm, as if head and body belonged to different models."""
    with torch.no_grad():
        injection.trainer.model.model.norm.weight.mul_(injection.size)


def padding(injection: Injection) -> None:
    """Pads each row to `size` times its length."""

    def pad(batch: dict[str, Any]) -> dict[str, Any]:
        if injection.is_active:
            more = int((injection.size - 1) * batch["input_ids"].shape[1])
            for name, value in (("input_ids", 0), ("attention_mask", 0), ("labels", IGNORED)):
                batch[name] = torch.nn.functional.pad(batch[name], (0, more), value=value)
        return batch

    _change_batches(injection, pad)


def masked(injection: Injection) -> None:
    """Removes the labels of one row of each micro-batch."""

    def mask(batch: dict[str, Any]) -> dict[str, Any]:
        if injection.is_active:
            batch["labels"][0] = IGNORED
        return batch

    _change_batches(injection, mask)


def vanishing(injection: Injection) -> None:
    """Multiplies all gradients by `size`."""
    for parameter in injection.trainer.model.parameters():
        parameter.register_hook(lambda grad: grad * injection.size if injection.is_active else grad)


def slow_disk(injection: Injection) -> None:
    """Makes each file of a checkpoint take `size` seconds longer."""
    save = torch.save

    def slower(*arguments: Any, **options: Any) -> None:
        if injection.is_active:
            time.sleep(injection.size)
        save(*arguments, **options)

    torch.save = slower


def _change_batches(injection: Injection, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Changes collated micro-batches before they are counted."""
    counting = injection.trainer.data_collator
    collator = counting.collator
    counting.collator = lambda rows: change(collator(rows))


CAUSES: Mapping[str, Callable[[Injection], None]] = {
    "none": nothing,
    "slow rank": slow_rank,
    "slow hosts": slow_everywhere,
    "slow links": slow_links,
    "throttled links": throttled_links,
    "slow data": slow_data,
    "memory leak": leak,
    "NaN in a batch": bad_batch,
    "NaN once": bad_step,
    "random labels": bad_labels,
    "learning rate x 100": high_rate,
    "rising learning rate": rising_rate,
    "wrong weights": wrong_weights,
    "padding": padding,
    "masked samples": masked,
    "vanishing gradient": vanishing,
    "slow disk": slow_disk,
}
"""Cause → what it does to a rank; others, such as overfitting, are made by the job alone."""


def inject(trainer: Any, rank: int, settings: Mapping[str, Any]) -> None:
    """Puts a cause into this rank."""
    injection = Injection(
        trainer=trainer,
        rank=rank,
        onset=settings["onset"],
        size=settings["size"],
        on_rank=settings["on_rank"],
        grows_over=settings.get("grows_over", 0),
    )
    trainer.add_callback(Steps(injection, lambda: None))
    if settings.get("is_first"):
        trainer.add_callback(First())
    CAUSES[settings["cause"]](injection)
