"""The table of sinks besides `metrics.jsonl`, and a guard that keeps their errors away from training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from dstrain.errors import DstrainError, InvalidConfig, did_you_mean, type_and_line
from dstrain.monitor.sinks import swanlab, tensorboard, wandb
from dstrain.monitor.sinks.sink import End, Opener, Say, Setup, Sink, Table

SINKS: Mapping[str, Opener] = MappingProxyType(
    {
        "swanlab": swanlab.open_sink,
        "tensorboard": tensorboard.open_sink,
        "wandb": wandb.open_sink,
    }
)
"""Name in `monitor: sinks` → the function that opens the sink."""


class Guarded:
    """A sink whose first failure is reported, and no failure reaches training."""

    def __init__(self, name: str, sink: Sink, say: Say) -> None:
        """`name` is for messages."""
        self.name = name
        self.sink = sink
        self._say = say
        self._has_failed = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Adds one point to each curve, unless the sink has failed before."""
        self._try("log", lambda: self.sink.log(values, step))

    def show(self, table: Table) -> None:
        """Adds the report of the run, or generated texts."""
        self._try(table.name, lambda: self.sink.show(table))

    def finish(self, end: End, error: str | None = None) -> None:
        """Flushes and closes the sink."""
        self._try("finish", lambda: self.sink.finish(str(end), error))

    def _try(self, what: str, act: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            act()
        except Exception as error:
            self._has_failed = True
            why = f"{what} failed ({type_and_line(error)})"
            self._say(f"{self.name}: {why}; training continues without it, see metrics.jsonl")


def open_sinks(names: Sequence[str], setup: Setup, say: Say) -> list[Guarded]:
    """Returns the opened sinks; failures to open are reported.

    Raises InvalidConfig for an unknown sink, and DstrainError for problems that the user must fix (a missing package),
    before anything slow starts.
    """
    unknown = [name for name in names if name not in SINKS]
    if unknown:
        raise InvalidConfig(f'monitor: sinks has "{unknown[0]}"', hint=did_you_mean(unknown[0], list(SINKS)))
    opened = []
    for name in dict.fromkeys(names):
        try:
            sink = SINKS[name](setup, say)
        except DstrainError:
            raise
        except Exception as error:
            why = f"failed to start ({type_and_line(error)})"
            say(f"{name}: {why}; training continues without it, see metrics.jsonl")
            continue
        if sink is not None:
            say(sink.place)
            opened.append(Guarded(name, sink, say))
    return opened
