"""Computes what collectives cost in a logging window: bytes, exposed seconds, bus bandwidth (pure functions)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """Kind of a collective."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    OTHER = "other"
    """Broadcasts, reductions to one rank, and messages between two."""


KINDS = tuple(Kind)
NAMES = tuple(f"comm/{kind}_{figure}" for kind in Kind for figure in ("bytes", "s"))
"""Metrics of each kind that `kinds_of` reads."""
MESSAGES = 16
"""Large collectives of each kind whose time is kept: the first ones of a window."""
LARGE_BYTES = 2**20
"""Size from which bytes determine the time of a collective. Smaller ones are dominated by latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A large collective."""

    kind: Kind
    num_bytes: int
    """Bytes of the whole tensor that is gathered, scattered or reduced; for an all-to-all, all that one rank has."""
    ranks: tuple[int, ...]
    """Ranks that take part."""
    seconds: float
    """From the call to its end; NaN if it is not known."""

    @property
    def moved_bytes(self) -> float:
        """Bytes that pass each link of a ring, from which the bus bandwidth is computed.

        Source: nccl-tests doc/PERFORMANCE.md.
        """
        passes = 2 if self.kind is Kind.ALL_REDUCE else 1
        return passes * self.num_bytes * (len(self.ranks) - 1) / len(self.ranks)


Expected = Callable[[Message], float | None]
"""Returns the seconds that the links of the plan need for a message; None if they are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The collectives of one rank in a window."""

    calls: tuple[int, ...]
    """Number of collectives of each kind."""
    num_bytes: tuple[int, ...]
    """Bytes of each kind, as `Message.num_bytes` counts them."""
    exposed_s: tuple[float, ...]
    """Seconds of each kind in which this rank did nothing else."""
    messages: tuple[tuple[Message, ...], ...]
    """The first large ones of each kind."""

    def numbers(self) -> list[float]:
        """Returns this rank's figures, in order, for a gather: (90,)."""
        seconds = [[one.seconds for one in of_kind] for of_kind in self.messages]
        padded = [values + [math.nan] * (MESSAGES - len(values)) for values in seconds]
        return [*self.exposed_s, *map(float, self.calls), *(value for values in padded for value in values)]


NOTHING = Traffic(
    calls=(0,) * len(KINDS), num_bytes=(0,) * len(KINDS), exposed_s=(0.0,) * len(KINDS), messages=((),) * len(KINDS)
)
"""The traffic of a single rank."""


def communication(
    own: Traffic, ranks: Sequence[Sequence[float]], *, steps: int, step_s: float, expected: Expected | None
) -> dict[str, Any]:
    """Returns the metrics of a window from rank 0's traffic and the numbers of every rank; nothing for a single one.

    Seconds, bytes and calls are per step; seconds of a kind are means over the ranks.

    >>> message = Message(kind=Kind.ALL_GATHER, num_bytes=8_000_000, ranks=(0, 1), seconds=0.004)
    >>> one = Traffic(calls=(1, 0, 0, 0, 0), num_bytes=(8_000_000, 0, 0, 0, 0), exposed_s=(0.5, 0, 0, 0, 0),
    ...     messages=((message,), (), (), (), ()))
    >>> late = Traffic(calls=one.calls, num_bytes=one.num_bytes, exposed_s=(0.1, 0, 0, 0, 0), messages=one.messages)
    >>> found = communication(one, [one.numbers(), late.numbers()], steps=1, step_s=1.0, expected=None)
    >>> found["comm_s"], found["comm_share"], found["comm_s_by_rank"], found["bus_bytes_per_s"]
    (0.3, 0.3, [0.5, 0.1], 1000000000.0)
    """
    if len(ranks) < 2:
        return {}
    steps, count = max(steps, 1), len(KINDS)
    by_rank = [sum(numbers[:count]) / steps for numbers in ranks]
    mean = sum(by_rank) / len(by_rank)
    found: dict[str, Any] = {
        "comm_s": mean,
        "comm_share": mean / max(step_s, 1e-9),
        "comm_s_by_rank": by_rank,
        # rank 0 stands for all: each calls the same collectives, in its own groups
        "comm_bytes": sum(own.num_bytes) / steps,
        "comm_calls": sum(own.calls) / steps,
    }
    for index, kind in enumerate(KINDS):
        if own.calls[index]:
            found[f"comm/{kind}_s"] = sum(numbers[index] for numbers in ranks) / len(ranks) / steps
            found[f"comm/{kind}_bytes"] = own.num_bytes[index] / steps
            found[f"comm/{kind}_calls"] = own.calls[index] / steps
    return found | _bus(own, ranks, expected)


def _bus(own: Traffic, ranks: Sequence[Sequence[float]], expected: Expected | None) -> dict[str, float]:
    """Returns the bus bandwidth of large messages, and what it is of the plan's links; nothing without such messages.

    The last rank to enter a collective waits for nobody, so its time is the transfer's. A collective that runs
    beside computation may end long before anybody waits for it: the upper quartile belongs to calls that do not.
    """
    rates, shares = [], []
    for message, seconds in _fastest(own, ranks):
        rates.append(message.moved_bytes / seconds)
        planned_s = expected(message) if expected is not None else None
        if planned_s is not None:
            shares.append(planned_s / seconds)
    found = {}
    for name, values in (("bus_bytes_per_s", rates), ("bus_share", shares)):
        if values:
            found[name] = sorted(values)[3 * len(values) // 4]
    return found


def _fastest(own: Traffic, ranks: Sequence[Sequence[float]]) -> Iterator[tuple[Message, float]]:
    """Yields each message of rank 0 with the least time of its ranks.

    Kinds of which ranks had different numbers of collectives are left out: their messages have no common order.
    """
    for index, messages in enumerate(own.messages):
        first = 2 * len(KINDS) + MESSAGES * index
        for number, message in enumerate(messages):
            rows = [ranks[rank] for rank in message.ranks]
            calls = {row[len(KINDS) + index] for row in rows}
            seconds = [row[first + number] for row in rows]
            if len(calls) == 1 and len(rows) > 1 and not any(map(math.isnan, seconds)):
                yield message, max(min(seconds), 1e-9)


def kinds_of(window: Any) -> Iterator[tuple[Kind, float, float]]:
    """Yields kind, bytes and exposed seconds of a step's collectives from a logged window, most bytes first.

    >>> list(kinds_of({"comm/all_gather_bytes": 8.0, "comm/all_gather_s": 0.5}))
    [(<Kind.ALL_GATHER: 'all_gather'>, 8.0, 0.5)]
    """
    known = [(kind, window.get(f"comm/{kind}_bytes"), window.get(f"comm/{kind}_s")) for kind in KINDS]
    numbers = [(kind, size, s) for kind, size, s in known if isinstance(size, int | float) and isinstance(s, float)]
    yield from sorted(numbers, key=lambda row: -row[1])
