"""Samples or packed rows to one micro-batch of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dstrain.choices import Attention
from dstrain.train.tokenize import IGNORED


@dataclass(frozen=True, slots=True, kw_only=True)
class Collator:
    """Pads the rows of a micro-batch to the longest of them.

    Samples get an attention mask. Packed rows must not: Transformers builds the mask that keeps samples apart from
    `position_ids` only where there is neither an attention mask nor a cache (transformers 5.23 masking_utils.py:
    _preprocess_mask_arguments), so a mask of ones would let samples see each other without a word. FlashAttention reads
    `position_ids` only in batches of one row, and is told the borders instead (transformers 5.23
    modeling_flash_attention_utils.py: _is_packed_sequence, FlashAttentionKwargs).
    """

    pad_token_id: int
    """Fills rows at their end."""
    packing: bool
    """Whether rows hold several samples, with `position_ids`."""
    attn: Attention
    """The attention implementation."""
    pad_to_multiple_of: int = 8
    """Row length is a multiple of it: tensor cores want 8."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the tensors that the model is called with."""
        longest = max(len(row["input_ids"]) for row in rows)
        width = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        batch: dict[str, Any] = {
            "input_ids": torch.full((len(rows), width), self.pad_token_id),
            "labels": torch.full((len(rows), width), IGNORED),
        }
        for index, row in enumerate(rows):
            for key in ("input_ids", "labels"):
                batch[key][index, : len(row[key])] = torch.as_tensor(row[key])
        if self.packing:
            batch["position_ids"] = torch.stack([_positions(row["position_ids"], width) for row in rows])
            batch["use_cache"] = False
            if self.attn is Attention.FLASH_ATTENTION_2:
                batch |= _borders(batch["position_ids"])
        else:
            lengths = torch.tensor([[len(row["input_ids"])] for row in rows])
            batch["attention_mask"] = (torch.arange(width) < lengths).long()
        return batch


def _positions(positions: Sequence[int], width: int) -> torch.Tensor:
    """Returns the positions of a row; the padding at its end counts as one more sample."""
    return torch.cat([torch.as_tensor(positions), torch.arange(width - len(positions))])


def _borders(position_ids: torch.Tensor) -> dict[str, Any]:
    """Returns FlashAttentionKwargs: where samples begin and end when the rows stand one behind the other."""
    flat = position_ids.reshape(-1)
    starts = (flat == 0).nonzero().reshape(-1)
    borders = torch.cat([starts, torch.tensor([flat.numel()])]).to(torch.int32)
    longest = int(borders.diff().max())
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest}
