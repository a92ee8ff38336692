"""What every injected cause of trouble has: a rank, an onset and a size; and where it takes hold of a rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from transformers import TrainerCallback


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


def change_batches(injection: Injection, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Changes collated micro-batches before they are counted."""
    counting = injection.trainer.data_collator
    collator = counting.collator
    counting.collator = lambda rows: change(collator(rows))
