"""The table of sinks besides `metrics.jsonl`, and a guard that keeps their errors from training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from dstrain.errors import DstrainError, InvalidConfig, did_you_mean
from dstrain.monitor.sinks import swanlab, tensorboard, wandb
from dstrain.monitor.sinks.sink import End, Opener, Say, Setup, Sink

SINKS: Mapping[str, Opener] = MappingProxyType(
    {
        "swanlab": swanlab.open_sink,
        "tensorboard": tensorboard.open_sink,
        "wandb": wandb.open_sink,
    }
)
"""The word in `monitor: sinks` → what opens it."""


class Guarded:
    """A sink whose failures are said once and never reach training."""

    def __init__(self, name: str, sink: Sink, say: Say) -> None:
        """Takes the sink and its name in messages."""
        self.name = name
        self.sink = sink
        self._say = say
        self._has_failed = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Draws one point in each curve, unless the sink failed before."""
        self._try("log", lambda: self.sink.log(values, step))

    def finish(self, end: End, error: str | None = None) -> None:
        """Writes what is left."""
        self._try("finish", lambda: self.sink.finish(str(end), error))

    def _try(self, what: str, act: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            act()
        except Exception as error:
            self._has_failed = True
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
            self._say(f"{self.name}: {what} failed ({reason}); going on without it, metrics.jsonl has everything")


def open_sinks(names: Sequence[str], setup: Setup, say: Say) -> list[Guarded]:
    """Returns the opened sinks; one that fails to open is said and left out.

    Raises InvalidConfig for a name that is no sink, and DstrainError of a sink that a person must mend (a package that
    is missing), before anything slow starts.
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
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
            say(f"{name}: did not start ({reason}); going on without it, metrics.jsonl has everything")
            continue
        if sink is not None:
            say(sink.place)
            opened.append(Guarded(name, sink, say))
    return opened
