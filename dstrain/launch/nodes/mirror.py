"""What ranks write on a node that has no file system in common with `run`, sent there piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from dstrain.launch.nodes.wire import Event, Wrote
from dstrain.launch.output import Tail
from dstrain.rundir import RunDir


class Mirror:
    """Files of rank 0; the logs of ranks and launcher are sent anyway. Files of earlier starts are at hand there."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._tails = [Tail(run_dir.metrics), Tail(run_dir.health)]
        for tail in self._tails:
            tail.read()

    def poll(self) -> list[Event]:
        """Returns what metrics and health have gained."""
        added = [(tail.path.name, tail.read()) for tail in self._tails]
        return [Wrote(name=name, text=text, on_screen=False) for name, text in added if text]

    def last(self) -> Iterator[Event]:
        """Yields the files that are written at the end."""
        for path in (self._run_dir.states, self._run_dir.summary):
            with suppress(OSError):
                yield Wrote(name=path.name, text=path.read_text(encoding="utf-8"), on_screen=False, is_whole=True)
