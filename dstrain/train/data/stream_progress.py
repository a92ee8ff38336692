"""What the ranks have read of a stream: into a checkpoint, and from it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dstrain import units
from dstrain.choices import OnLongSample
from dstrain.errors import EnvironmentProblem
from dstrain.facts.data.row_values import unusable
from dstrain.job.schema import Job
from dstrain.paths import write_atomic
from dstrain.train.data.counts import counted
from dstrain.train.data.stream import STREAM, Failure, Place, Stream
from dstrain.train.data.streamed_samples import RowPlace
from dstrain.train.rank import of_all_ranks

_FILE = "stream-*.json"
_SHOWN_PROBLEMS = 5


class StreamProgress:
    """What one rank has read; its readers go on from there after a resume."""

    def __init__(self, stream: Stream, digest: str, *, rank: int, num_ranks: int, workers: int) -> None:
        """`digest` changes with the rows and their order; `workers` are the processes of this rank's data loader."""
        self._stream = stream
        self._digest = digest
        self._rank = rank
        self._per_rank = max(1, workers)
        stream.num_readers = num_ranks * self._per_rank
        stream.places = {reader: stream.start(reader) for reader in self._own}
        self._next = 0  # index of the reader that makes the next micro-batch
        self.counts: Counter[str] = Counter()
        """Of all rows read: see `Tick`."""
        self.problems: list[str] = []
        """The first ones of skipped rows."""

    @property
    def places(self) -> Mapping[int, Place]:
        """Where each reader of this rank is."""
        return self._stream.places

    @property
    def _own(self) -> range:
        return range(self._rank * self._per_rank, (self._rank + 1) * self._per_rank)

    def noted(self, batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields micro-batches without their places, which it notes. Raises the error of an unusable row."""
        for batch in batches:
            tick = batch.pop(STREAM)
            if isinstance(tick, Failure):
                raise tick.kind(tick.problem, hint=tick.hint)
            self._stream.places[tick.reader] = tick.place
            self._next = (self._next + 1) % self._per_rank
            self.counts.update(tick.counts)
            self.problems += tick.problems[: _SHOWN_PROBLEMS - len(self.problems)]
            yield batch

    def save(self, checkpoint: Path) -> None:
        """Writes where the readers of this rank are; all micro-batches that were noted have been trained on."""
        places = {reader: asdict(place) for reader, place in self._stream.places.items()}
        state = {
            "digest": self._digest,
            "readers": self._stream.num_readers,
            "per_rank": self._per_rank,
            "next": self._next,
            "places": places,
            "counts": self.counts,
            "problems": self.problems,
        }
        write_atomic(checkpoint / _FILE.replace("*", f"{self._rank:05}"), json.dumps(state) + "\n")

    def report(self, group: Any, job: Job) -> list[str]:
        """Returns lines for the log about what all ranks have read; collective over `group`."""
        return said(of_all_ranks((self.counts, self.problems), group), job)

    def restore(self, checkpoint: Path) -> str | None:
        """Goes on where a checkpoint's readers were, and returns a note if their number differs.

        Then no sample is read twice in a pass, but some not at all: readers begin with the parts after those that any
        reader had begun. A checkpoint of other rows, or of a run that did not stream, changes nothing.
        """
        states = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(checkpoint.glob(_FILE))]
        states = [state for state in states if state["digest"] == self._digest]
        if not states:
            return None
        places = {int(reader): _place(place) for state in states for reader, place in state["places"].items()}
        if self._rank == 0:
            self.counts = sum((Counter(state["counts"]) for state in states), Counter())
        self.problems = states[0]["problems"] if self._rank == 0 else []
        was, now = states[0]["readers"], self._stream.num_readers
        if was != now:
            part = 1 + max(place.reached for place in places.values())
            self._stream.places = {reader: self._stream.start(reader, part) for reader in self._own}
            return f"{was} processes have read the stream, and {now} go on with the parts that none has begun"
        if missing := [reader for reader in self._own if reader not in places]:
            raise EnvironmentProblem(
                f"{checkpoint} does not say where reader {missing[0]} of the stream was",
                hint="Copy its files stream-*.json from the other nodes.",
            )
        if states[0]["per_rank"] == self._per_rank:
            self._next = next(state["next"] for state in states if str(self._own[0]) in state["places"])
        order = [self._own[(self._next + index) % self._per_rank] for index in range(self._per_rank)]
        self._stream.places = {reader: places[reader] for reader in order}
        return None


def _place(place: Mapping[str, Any]) -> Place:
    return Place(**{**place, "rows": tuple(RowPlace(*at) for at in place["rows"])})


def said(of_ranks: Sequence[tuple[Counter[str], list[str]]], job: Job) -> list[str]:
    """Returns lines for the log about what all ranks have read, given the counts and problems of each."""
    counts = sum((counts for counts, _ in of_ranks), Counter[str]())
    problems = [problem for _, problems in of_ranks for problem in problems][:_SHOWN_PROBLEMS]
    samples, tokens = counts["samples"], counts["tokens"]
    read = f"{units.counted(samples, 'sample')}, {units.counted(tokens, 'token')}"
    parts = [f"read {read} ({tokens / max(1, samples):.0f} on average)"]
    parts.append(f"{counts['learned']:,} ({counts['learned'] / max(1, tokens):.1%}) with loss")
    if counts["long"]:
        done = "dropped (on_long_sample)" if job.on_long_sample is OnLongSample.DROP else "truncated"
        parts.append(f"{counts['long']:,} longer than seq_len {job.seq_len:,}, which were {done}")
    if counts["untaught"]:
        parts.append(f"{counts['untaught']:,} without a token to learn, which were dropped")
    lines = [", ".join(parts), *counted(counts, job)]
    if counts["skipped"]:
        lines.append(f"{unusable(counts['skipped'])} skipped (on_bad_row: skip); the first:")
    return [f"stream: {line}" for line in lines] + [f"  {problem}" for problem in problems]
