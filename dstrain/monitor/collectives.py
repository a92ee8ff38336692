"""Observes the collectives of this rank, and how long it stands still for them, without synchronizing devices.

DeepSpeed and Transformers call the functions of `torch.distributed`. Each call is counted, and what a rank waits for is
timed: on a CPU by its clock, on a GPU by pairs of events on the stream that computes. Where collectives run on another
stream, that stream shows the time only as the computing one waits for it, or the host for both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dstrain.monitor.traffic import KINDS, LARGE_BYTES, MESSAGES, Kind, Message, Traffic

_FUNCTIONS: Mapping[str, Kind] = MappingProxyType(
    {
        "all_gather": Kind.ALL_GATHER,
        "all_gather_into_tensor": Kind.ALL_GATHER,
        "all_gather_single": Kind.ALL_GATHER,
        "reduce_scatter": Kind.REDUCE_SCATTER,
        "reduce_scatter_tensor": Kind.REDUCE_SCATTER,
        "reduce_scatter_single": Kind.REDUCE_SCATTER,
        "all_reduce": Kind.ALL_REDUCE,
        "all_to_all": Kind.ALL_TO_ALL,
        "all_to_all_single": Kind.ALL_TO_ALL,
        "broadcast": Kind.OTHER,
        "reduce": Kind.OTHER,
        "gather": Kind.OTHER,
        "scatter": Kind.OTHER,
        "send": Kind.OTHER,
        "recv": Kind.OTHER,
        "barrier": Kind.OTHER,
    }
)
"""Function of `torch.distributed` → what it does."""


_PLAIN = (type(None), bool, int)
"""Types of arguments that are neither tensors nor groups."""


class Span(Protocol):
    """A stretch of time that has begun."""

    def end(self) -> None:
        """Ends it, unless it has ended."""

    def seconds(self) -> float | None:
        """Returns its length; None if it, or the device, has not come to its end."""


class _HostSpan:
    """Seconds of the host's clock."""

    __slots__ = ("_began", "_seconds")

    def __init__(self) -> None:
        self._seconds: float | None = None
        self._began = time.perf_counter()

    def end(self) -> None:
        if self._seconds is None:
            self._seconds = time.perf_counter() - self._began

    def seconds(self) -> float | None:
        return self._seconds


class StreamSpan:
    """Seconds between two places of a CUDA stream."""

    __slots__ = ("_began", "_ended")

    def __init__(self) -> None:
        """Begins at what the current stream does next."""
        self._ended: Any = None
        event: Any = torch.cuda.Event
        self._began = event(enable_timing=True)
        self._began.record()

    def end(self) -> None:
        """Ends it at what the current stream does next."""
        if self._ended is None:
            event: Any = torch.cuda.Event
            self._ended = event(enable_timing=True)
            self._ended.record()

    def seconds(self) -> float | None:
        """Returns its length; None if the device has not come to its end."""
        if self._ended is None or not self._ended.query():
            return None
        return float(self._began.elapsed_time(self._ended)) / 1000


class Collectives:
    """The collectives of this rank since the window began."""

    def __init__(self, *, on_gpu: bool = False) -> None:
        """Nothing is observed before `install`."""
        self.on_gpu = on_gpu
        self.new_span: Callable[[], Span] = StreamSpan if on_gpu else _HostSpan
        self._side: dict[Any, int] = {}  # stream with collectives → kind of its last one
        self._members: dict[Any, tuple[int, ...]] = {}
        self._late: list[tuple[int, Span]] = []
        self.restart()

    def install(self) -> None:
        """Observes all collectives of this process from now on. Call it before anything keeps their functions."""
        for name, kind in _FUNCTIONS.items():
            if hasattr(dist, name):
                setattr(dist, name, self._observed(getattr(dist, name), KINDS.index(kind)))
        if self.on_gpu:
            for owner, name in (
                (torch.cuda.Stream, "wait_stream"),
                (torch.cuda.Stream, "synchronize"),
                (torch.cuda, "synchronize"),
            ):
                setattr(owner, name, self._timed_wait(getattr(owner, name)))

    def restart(self) -> None:
        """Starts a new window."""
        self._calls, self._bytes = [0] * len(KINDS), [0] * len(KINDS)
        self.stalls: list[tuple[int, Span]] = []
        """Kind and time of each wait."""
        self._messages: list[list[tuple[Message, Span]]] = [[] for _ in KINDS]

    def close(self) -> Traffic:
        """Returns the window and starts the next one.

        Waits that the device has not come to yet count in the window in which it has.
        """
        exposed = [0.0] * len(KINDS)
        unfinished = []
        for index, span in (*self._late, *self.stalls):
            seconds = span.seconds()
            if seconds is None:
                unfinished.append((index, span))
            else:
                exposed[index] += seconds
        traffic = Traffic(
            calls=tuple(self._calls),
            num_bytes=tuple(self._bytes),
            exposed_s=tuple(exposed),
            messages=tuple(tuple(map(_ended, of_kind)) for of_kind in self._messages),
        )
        self.restart()
        self._late = unfinished
        return traffic

    def _observed(self, function: Callable[..., Any], index: int) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():  # a compiled graph keeps its collectives, which are not observed
                return function(*arguments, **options)
            num_bytes, group = _described((*arguments, *options.values()))
            self._calls[index] += 1
            self._bytes[index] += num_bytes
            whole = self.new_span()
            work = function(*arguments, **options)
            if num_bytes >= LARGE_BYTES and len(self._messages[index]) < MESSAGES:
                self._note(index, num_bytes, group, whole)
            if work is None:
                whole.end()
                self._stood(index, whole)
                return None
            return _Pending(work, self, index, whole)

        return call

    def _note(self, index: int, num_bytes: int, group: Any, whole: Span) -> None:
        """Keeps one of the first large messages."""
        if group not in self._members:
            self._members[group] = tuple(dist.get_process_group_ranks(group))
        message = Message(kind=KINDS[index], num_bytes=num_bytes, ranks=self._members[group], seconds=math.nan)
        self._messages[index].append((message, whole))

    def _stood(self, index: int, span: Span) -> None:
        """Notes that this rank has waited, unless it was a stream beside the one that computes."""
        if not self.on_gpu:
            self.stalls.append((index, span))
            return
        stream: Any = torch.cuda.current_stream()
        if stream == torch.cuda.default_stream():
            self.stalls.append((index, span))
        else:
            self._side[stream] = index

    def wait(self, index: int, work: Any, arguments: tuple[Any, ...]) -> Any:
        """Waits for a collective that was started earlier, and takes the time."""
        span = self.new_span()
        result = work.wait(*arguments)
        span.end()
        self._stood(index, span)
        return result

    def _timed_wait(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Times a function by which the computing stream, or the host, waits for a stream with collectives."""

        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            waited_for = arguments[-1] if arguments else None
            known = list(self._side.values())  # of torch.cuda.synchronize
            if isinstance(waited_for, torch.cuda.Stream):
                known = [self._side[waited_for]] if waited_for in self._side else []
            if not known or torch.compiler.is_compiling():
                return function(*arguments, **options)
            computing: Any = torch.cuda.default_stream()
            if torch.cuda.current_stream() != computing:
                return function(*arguments, **options)
            span = StreamSpan()
            result = function(*arguments, **options)
            span.end()
            self.stalls.append((known[-1], span))
            return result

        return call


class _Pending:
    """The handle of a collective that was started, as `torch.distributed.Work`."""

    def __init__(self, work: Any, collectives: Collectives, index: int, whole: Span) -> None:
        self._work = work
        self._collectives = collectives
        self._index = index
        self._whole = whole

    def wait(self, *arguments: Any) -> Any:
        """Waits as the original does."""
        result = self._collectives.wait(self._index, self._work, arguments)
        self._whole.end()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _described(values: Iterable[Any]) -> tuple[int, Any]:
    """Returns the bytes of the largest argument, which is the whole tensor, and the group, None for all ranks."""
    most, group = 0, None
    for value in values:
        if isinstance(value, _PLAIN):
            continue
        if isinstance(value, torch.Tensor):
            most = max(most, value.nbytes)
        elif isinstance(value, list):
            most = max(most, sum(one.nbytes for one in value if isinstance(one, torch.Tensor)))
        elif isinstance(value, dist.ProcessGroup):
            group = value
    return most, group


def _ended(pair: tuple[Message, Span]) -> Message:
    message, span = pair
    seconds = span.seconds()
    if seconds is None:
        return message
    return Message(kind=message.kind, num_bytes=message.num_bytes, ranks=message.ranks, seconds=seconds)
