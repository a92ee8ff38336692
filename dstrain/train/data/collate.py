"""Collates samples or packed rows into one micro-batch of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dstrain.train.data.tokenize import IGNORED


@dataclass(frozen=True, slots=True, kw_only=True)
class Collator:
    """Pads the rows of a micro-batch to the longest of them.

    Samples get an attention mask. Packed rows must not: Transformers builds the mask that keeps samples apart from
    `position_ids` only where there is neither an attention mask nor a cache (transformers 5.23 masking_utils.py:
    _preprocess_mask_arguments), so a mask of ones would let samples see each other without a word. What FlashAttention
    and the kernels of linear attention, convolutions and state spaces keep samples apart by goes with it.
    """

    pad_token_id: int
    """Fills rows at their end."""
    packing: bool
    """Whether rows hold several samples, with `position_ids`."""
    takes: frozenset[str] | None = None
    """Names of what the model takes; None: anything."""
    pad_to_multiple_of: int = 8
    """Row length is a multiple of it: tensor cores want 8."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the tensors that the model is called with."""
        longest = max(len(row["input_ids"]) for row in rows)
        width = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        columns = {
            "input_ids": np.full((len(rows), width), self.pad_token_id),
            "labels": np.full((len(rows), width), IGNORED),
        }
        if self.packing:
            lengths = np.array([[len(row["input_ids"])] for row in rows])
            columns["position_ids"] = np.arange(width) - lengths  # the padding counts as one more sample
        for name, column in columns.items():
            for index, row in enumerate(rows):
                column[index, : len(row[name])] = row[name]
        batch: dict[str, Any] = {name: torch.from_numpy(column) for name, column in columns.items()}
        if self.packing:
            borders = {"use_cache": False, **_borders(batch["position_ids"])}
            return batch | {name: value for name, value in borders.items() if self.takes is None or name in self.takes}
        lengths = np.array([[len(row["input_ids"])] for row in rows])
        batch["attention_mask"] = torch.from_numpy((np.arange(width) < lengths).astype(np.int64))
        return batch


def taken_by(model: Any) -> frozenset[str] | None:
    """Returns the names of what a model's forward takes, or None where it takes any."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    parameters = inspect.signature(base.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def _borders(position_ids: torch.Tensor) -> dict[str, Any]:
    """Returns where samples begin and end: the number of each token's sample, and offsets in rows one behind the other.

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
