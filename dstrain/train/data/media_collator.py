"""Collates samples with images and videos into one micro-batch of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch

from dstrain.train.data.collate import Collator, without_adapter
from dstrain.train.data.media import MediaReader
from dstrain.train.data.tokenize import IGNORED

_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names under which models take the kind of each token: text, image or video."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaCollator:
    """Adds pixels to a micro-batch; one without any gets those of a blank image or video.

    Each rank runs a tower as often in every micro-batch, as ZeRO-3 needs it, which gathers each weight on all ranks at
    once: for images, and once more for videos, if the data have both. The tokens of what is blank are padding: no token
    of a sample sees them, and none of them has a label, so that the gradient of the tower is exactly that of the
    images and videos of other ranks. Packed rows get positions for each sample where the family has its own for
    images, which the model would count for the whole row from its beginning.
    """

    collator: Collator
    media_reader: MediaReader
    blanks: Mapping[str, Sequence[int]]
    """Columns of images and videos that the data have → tokens of a blank one."""
    parameters: frozenset[str]
    """Names of the parameters of the model's forward."""
    dtype: torch.dtype = torch.float32
    """Dtype of pixels, that of training: the Trainer would cast them in RAM, while the GPU waits."""

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype, **options: Any) -> MediaCollator:
        """Returns the collator of a model, with or without an adapter."""
        return cls(parameters=frozenset(signature(without_adapter(model).forward).parameters), dtype=dtype, **options)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the tensors of `Collator`, of what is seen, and the kinds of tokens, if the model asks."""
        samples = {column: [row[column] for row in rows if row.get(column)] for column in self.blanks}
        lacking = [token for column, blank in self.blanks.items() if not samples[column] for token in blank]
        batch = self._with_blank(rows, lacking) if lacking else self.collator(rows)
        for column in self.blanks:
            seen = self.media_reader.pixels(column, samples[column])
            batch |= {key: self._cast(value) for key, value in seen.items()}
        types = next((name for name in _TYPES if name in self.parameters), None)
        if types is not None:
            batch[types] = self.media_reader.types_of(batch["input_ids"])
        if self.collator.packing and self.media_reader.positions is not None:
            batch["position_ids"] = self.media_reader.positions.of(batch)
        return batch

    def _cast(self, value: Any) -> Any:
        is_cast = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.dtype) if is_cast else value

    def _with_blank(self, rows: Sequence[Mapping[str, Any]], blank: Sequence[int]) -> dict[str, Any]:
        """Returns a micro-batch with blank tokens behind its shortest row, which the attention mask hides, or with
        packing its positions: they are a sample with the padding."""
        lengths = [len(row["input_ids"]) for row in rows]
        index = int(np.argmin(lengths))
        longer = {
            **rows[index],
            "input_ids": [*rows[index]["input_ids"], *blank],
            "labels": [*rows[index]["labels"], *[IGNORED] * len(blank)],
        }
        batch = self.collator([longer if i == index else row for i, row in enumerate(rows)])
        if not self.collator.packing:
            batch["attention_mask"][index, lengths[index] :] = 0
        return batch
