"""Packs samples into rows, collates rows into one micro-batch of tensors, and cuts it along the sequence."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dstrain.facts.data.best_fit import packed_rows
from dstrain.facts.data.columns import MEDIA
from dstrain.facts.model.traits import FLA, kernel_packages
from dstrain.train.data.rendering import IGNORED


@dataclass(frozen=True, slots=True, kw_only=True)
class Collator:
    """Pads the rows of a micro-batch to the longest of them.

    Samples get an attention mask. Packed rows must not have one: Transformers separates samples by `position_ids` only
    without an attention mask and a cache (transformers 5.23 masking_utils.py: _preprocess_mask_arguments), so a mask of
    ones would silently mix them. Packed rows also get the borders of samples for FlashAttention and for the kernels of
    linear attention, convolutions and state spaces; the kernels of linear attention take one row only.
    """

    pad_token_id: int
    packing: bool
    """Whether rows hold several samples, with `position_ids`."""
    takes: frozenset[str] | None = None
    """Arguments of the model's forward; None: any."""
    joins_rows: bool = False
    """Whether packed rows become one, as the kernels of linear attention want it."""
    slices: int = 1
    """Equal slices into which rows are cut afterwards, see `Slice`."""
    pad_to_multiple_of: int = 8
    """Tensor cores need row lengths that are multiples of 8."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns `input_ids`, `labels` and `position_ids` or `attention_mask`, each (batch, seq).

        Rows that are to be cut have both.
        """
        longest = max(len(row["input_ids"]) for row in rows)
        multiple = math.lcm(self.pad_to_multiple_of, self.slices)
        width = -(-longest // multiple) * multiple
        columns = {
            "input_ids": np.full((len(rows), width), self.pad_token_id),
            "labels": np.full((len(rows), width), IGNORED),
        }
        if self.packing:
            lengths = np.array([[len(row["position_ids"])] for row in rows])
            columns["position_ids"] = np.arange(width) - lengths  # what follows the samples counts as one more
        for name, column in columns.items():
            for index, row in enumerate(rows):
                column[index, : len(row[name])] = row[name]
        if self.packing and self.joins_rows:
            columns = {name: column.reshape(1, -1) for name, column in columns.items()}
        batch: dict[str, Any] = {name: torch.from_numpy(column) for name, column in columns.items()}
        if self.packing:
            borders = {"use_cache": False, **_borders(batch["position_ids"])}
            return batch | {name: value for name, value in borders.items() if self.takes is None or name in self.takes}
        if self.slices > 1:
            batch["position_ids"] = torch.arange(width).repeat(len(rows), 1)
        lengths = np.array([[len(row["input_ids"])] for row in rows])
        batch["attention_mask"] = torch.from_numpy((np.arange(width) < lengths).astype(np.int64))
        return batch


def taken_by(model: Any) -> frozenset[str] | None:
    """Returns the arguments of a model's forward, or None if it takes any."""
    base = without_adapter(model)
    parameters = inspect.signature(base.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def text_positions(position_ids: torch.Tensor) -> torch.Tensor:
    """Returns the positions that keep samples apart, (batch, seq), also of those with images: (4, batch, seq)."""
    return position_ids[0] if position_ids.dim() == 3 else position_ids


def joins_rows(model: Any) -> bool:
    """Returns whether a model calls kernels that take the samples of one row. Source: flash-linear-attention,
    ops/gated_delta_rule/chunk.py: chunk_gated_delta_rule."""
    return FLA in kernel_packages(str(without_adapter(model).config.get_text_config().model_type))


def _borders(position_ids: torch.Tensor) -> dict[str, Any]:
    """Returns the borders of samples: `seq_idx` (batch, seq), the sample of each token; `cu_seq_lens` (samples + 1,).

    Source: transformers 5.23 utils/generic.py: TransformersKwargs.
    """
    begins = position_ids == 0
    flat = begins.reshape(-1)
    offsets = torch.cat([flat.nonzero().reshape(-1), torch.tensor([flat.numel()])]).to(torch.int32)
    longest = int(offsets.diff().max())
    return {
        "seq_idx": (begins.cumsum(dim=1) - 1).to(torch.int32),
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def without_adapter(model: Any) -> Any:
    """Returns the model that an adapter wraps, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The part of every row that a rank trains on."""

    index: int
    """Rank in its sequence-parallel group, from 0."""
    count: int
    """Ranks of the group."""

    def cut(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns this rank's slice of a micro-batch: (batch, seq) becomes (batch, seq / count).

        The labels are shifted first, since the next token of a slice's last one is on another rank; Transformers takes
        them as `shift_labels`. Borders of packed samples still count in whole rows, which attention sees again.
        """
        shifted = shift(batch["labels"])
        whole = {**batch, "labels": shifted, "shift_labels": shifted}
        whole.pop("attention_mask", None)  # Ulysses drops masks; attention is causal, and padding is at the end
        width = shifted.shape[1] // self.count
        part = slice(self.index * width, (self.index + 1) * width)
        return {
            name: value[:, part].contiguous() if isinstance(value, torch.Tensor) and value.dim() == 2 else value
            for name, value in whole.items()
        }


def shift(labels: torch.Tensor) -> torch.Tensor:
    """Returns the target of each token: label i + 1 for token i, and none for the last. Both: (batch, seq)."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


Row = dict[str, Any]
"""`input_ids`, `labels` and `position_ids` of a packed row, each (tokens,), and the files of its media."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Which samples share a row."""

    members: Any
    """Indices of samples, row after row: (samples,) int32 or int64."""
    starts: Any
    """Index in `members` at which each row begins, and their number: (rows + 1,) int64."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Packing:
        """Returns the packing with these indices of samples in each row."""
        widths = np.array([len(row) for row in rows], np.int64)
        return cls(members=np.concatenate(rows), starts=np.concatenate([[0], np.cumsum(widths)]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Any:
        """Returns the indices of the samples of a row. Raises IndexError beyond the last."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.members[self.starts[index] : self.starts[index + 1]]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def sums(self, values: Any) -> Any:
        """Returns the sum of the values of each row's samples, (rows,), given one for each sample."""
        return np.add.reduceat(values[self.members], self.starts[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Rows of whole samples, concatenated on access; a sequence like a data set."""

    samples: Any
    """A data set with `input_ids`, `labels` and perhaps columns of media in Arrow's format, for NumPy arrays
    without copies."""
    rows: Packing

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        """Returns the tokens of a row, and the files of its images and videos in the order of their tokens."""
        members = self.samples[self.rows[index].tolist()]
        input_ids, labels = (members.column(name).combine_chunks() for name in ("input_ids", "labels"))
        lengths = input_ids.value_lengths().to_numpy(zero_copy_only=False)
        row = row_of(input_ids.flatten().to_numpy(), labels.flatten().to_numpy(), lengths)
        for name in {*MEDIA}.intersection(members.column_names):
            row[name] = members.column(name).combine_chunks().flatten().to_pylist()
        return row


def row_of(input_ids: Any, labels: Any, lengths: Any) -> Row:
    """Returns concatenated samples; positions restart at 0 in each sample, whose first token is no target."""
    starts = np.cumsum(lengths) - lengths
    targets = labels.copy()
    targets[starts] = IGNORED
    positions = np.arange(len(targets)) - np.repeat(starts, lengths)
    return {"input_ids": input_ids, "labels": targets, "position_ids": positions}


def packed(lengths: Any, capacity: int, *, seed: int | Sequence[int]) -> Packing:
    """Returns rows of at most `capacity` tokens of samples of these lengths, (samples,).

    Samples of equal length, the rows and the samples within a row are in random order, the same for the same seed.

    >>> sorted(sorted(row.tolist()) for row in packed(np.array([6, 5, 4, 3, 2]), 10, seed=0))
    [[0, 2], [1, 3, 4]]
    """
    members, starts = packed_rows(lengths, capacity, seed=seed)
    return Packing(members=members, starts=starts)
