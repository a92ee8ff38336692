"""Sends logs piece by piece from nodes that share no file system with `run`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress

from dstrain.launch.failure.logs import Tail
from dstrain.launch.nodes.protocol import Event, Wrote
from dstrain.rundir import PART, RunDir

_LOOK_S = 2.0
"""Seconds between two looks for checkpoints."""


class Mirror:
    """Files of rank 0; the logs of ranks and launcher are sent anyway. Files of earlier starts are already there."""

    def __init__(self, run_dir: RunDir, start: str, *, has_first: bool) -> None:
        """`start` is the mark of this start on this node, `has_first` whether rank 0 writes here."""
        self._run_dir = run_dir
        self._start = start.partition("-")[0]
        self._has_first = has_first
        self._marked: set[str] = set()
        self._next_look = 0.0
        self._tails = [Tail(run_dir.metrics), Tail(run_dir.health)]
        for tail in self._tails:
            while tail.read():
                pass

    def poll(self) -> list[Event]:
        """Returns what metrics and health have gained, and the marks of checkpoints that every rank has written."""
        added = [(tail.path.name, tail.read()) for tail in self._tails]
        events: list[Event] = [Wrote(name=name, text=text, on_screen=False) for name, text in added if text]
        now = time.monotonic()
        if self._has_first and now >= self._next_look:
            self._next_look = now + _LOOK_S
            events += self._new_marks()
        return events

    def _new_marks(self) -> Iterator[Event]:
        for path in self._run_dir.path.glob(f"checkpoint-*/{PART}"):
            name = str(path.relative_to(self._run_dir.path))
            with suppress(OSError, ValueError, AttributeError):
                text = path.read_text(encoding="utf-8")
                if name not in self._marked and json.loads(text).get("start") == self._start:
                    self._marked.add(name)
                    yield Wrote(name=name, text=text, on_screen=False, is_whole=True)

    def last(self) -> Iterator[Event]:
        """Yields the files that are written at the end."""
        if self._has_first:
            yield from self._new_marks()
        for path in (self._run_dir.states, self._run_dir.summary, self._run_dir.oom, self._run_dir.unusable):
            with suppress(OSError):
                yield Wrote(name=path.name, text=path.read_text(encoding="utf-8"), on_screen=False, is_whole=True)
