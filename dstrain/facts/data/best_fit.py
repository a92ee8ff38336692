"""Packs short samples into rows, best fit first; no sample is split.

It needs NumPy alone: `dstrain script accelerate` writes it beside the script that trains on the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKind:
    """Rows that hold samples of the same lengths."""

    members: tuple[tuple[int, int], ...]
    """Length in tokens and number of samples of that length in each of these rows, longest first."""
    num_rows: int

    @property
    def num_tokens(self) -> int:
        """Tokens of one of these rows."""
        return sum(length * count for length, count in self.members)


def best_fit(counts: Mapping[int, int], capacity: int) -> list[RowKind]:
    """Returns rows of samples whose lengths add up to at most `capacity`: best-fit decreasing.

    `counts` is length → number of samples. The longest sample goes first, each into the fullest row that still has
    room for it, or into a new one. Rows that are filled alike are counted together, so time and memory grow with the
    number of lengths, not of samples. Lengths of room that rows have left are bits of an integer.

    Source: Johnson 1973, "Near-optimal bin packing algorithms": never more than 11/9 of the fewest rows, plus 4.

    >>> [(kind.members, kind.num_rows) for kind in best_fit({6: 2, 5: 1, 4: 1, 2: 2}, 10)]
    [(((6, 1), (4, 1)), 1), (((6, 1), (2, 2)), 1), (((5, 1),), 1)]
    """
    by_room: dict[int, list[RowKind]] = {}
    rooms = 0
    for length in sorted(counts, reverse=True):
        count = counts[length]
        if not 0 < length <= capacity:
            raise ValueError(f"a sample has {length} tokens, a row {capacity}")
        while count:
            if enough := rooms >> length:
                # the lowest bit: the least room that is enough
                room = length + (enough & -enough).bit_length() - 1
                kind = by_room[room].pop()
                # its bit goes with the last rows of that room
                rooms ^= (not by_room[room]) << room
            else:
                room = capacity
                kind = RowKind(members=(), num_rows=-(-count // (room // length)))
            most = room // length
            full = min(kind.num_rows, count // most)
            count -= full * most
            # at most one of these rows takes fewer samples than the others
            partly = int(full < kind.num_rows and count > 0)
            for samples, num_rows in ((most, full), (count, partly), (0, kind.num_rows - full - partly)):
                if num_rows:
                    members = (*kind.members, (length, samples)) if samples else kind.members
                    left = room - length * samples
                    by_room.setdefault(left, []).append(RowKind(members=members, num_rows=num_rows))
                    rooms |= 1 << left
            count -= count * partly
    return [kind for room in sorted(by_room) for kind in by_room[room]]


def packed_rows(lengths: Any, capacity: int, *, seed: int | Sequence[int]) -> tuple[Any, Any]:
    """Returns the samples of each row, row after row, and the place of each row's first one, with their number.

    `lengths`: tokens of each sample, (samples,); rows have at most `capacity` tokens. Samples of equal length, the rows
    and the samples within a row are in random order, the same for the same seed.
    """
    import numpy as np  # here: a plan counts rows without it

    rng = np.random.default_rng(seed)
    sizes, counts = np.unique(lengths, return_counts=True)
    kinds = best_fit(dict(zip(sizes.tolist(), counts.tolist(), strict=True)), capacity)
    index = np.int32 if len(lengths) < 2**31 else np.int64
    drawn = np.arange(len(lengths), dtype=index)
    rng.shuffle(drawn)
    by_length = drawn[np.argsort(lengths[drawn], kind="stable")]
    taken = dict(zip(sizes.tolist(), (np.cumsum(counts) - counts).tolist(), strict=True))
    members = np.empty(len(lengths), index)
    widths = np.empty(sum(kind.num_rows for kind in kinds), np.int64)
    done = row = 0
    for kind in kinds:
        columns = []
        for length, count in kind.members:
            end = taken[length] + count * kind.num_rows
            columns.append(by_length[taken[length] : end].reshape(kind.num_rows, count))
            taken[length] = end
        block = rng.permuted(np.concatenate(columns, axis=1), axis=1)
        members[done : done + block.size] = block.reshape(-1)
        widths[row : row + kind.num_rows] = block.shape[1]
        done, row = done + block.size, row + kind.num_rows
    order = rng.permutation(len(widths))
    starts = np.concatenate([[0], np.cumsum(widths[order])])
    shift = (np.cumsum(widths) - widths)[order] - starts[:-1]
    places = np.repeat(shift.astype(index), widths[order])
    places += np.arange(len(members), dtype=index)
    return members[places], starts
