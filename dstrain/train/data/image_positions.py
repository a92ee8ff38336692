"""Positions of packed samples with images and videos, as the family of the model counts them in each sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from dstrain.facts.model.vision_towers import PACKS_IMAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePositions:
    """Counts in time, height and width, with the code of a model that has no weights here."""

    model: Any
    """The family's model below its head, without parameters: loaders of data may hold and copy it."""

    @property
    def token_side(self) -> int:
        """Side of the square that becomes one token, in pixels."""
        tower = self.model.config.vision_config
        return int(tower.patch_size * tower.spatial_merge_size)

    def of(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the positions of text, by which attention keeps samples apart, and three for the rotation.

        Of a micro-batch it takes `input_ids`, `position_ids`, which count from 0 in each sample, and
        `mm_token_type_ids` (0 text, 1 image, 2 video): (batch, seq); and what it has of `image_grid_thw` and
        `video_grid_thw`, the frames, rows and columns of patches of each image: (images, 3), and video: (videos, 3).
        Result: (4, batch, seq). The model is asked once for all samples, padded to the longest.
        Source: transformers 5.23 models/qwen3_vl/modeling_qwen3_vl.py: get_rope_index, Qwen3VLTextModel.forward.
        """
        positions = batch["position_ids"]
        flat = positions.reshape(-1)
        sample = (flat == 0).cumsum(0) - 1
        shape = (int(sample[-1]) + 1, int(flat.max()) + 1)

        def apart(values: torch.Tensor) -> torch.Tensor:
            padded = torch.zeros(shape, dtype=torch.long)
            padded[sample, flat] = values.reshape(-1).long()
            return padded

        rotated, _ = self.model.get_rope_index(
            apart(batch["input_ids"]),
            mm_token_type_ids=apart(batch["mm_token_type_ids"]),
            image_grid_thw=batch.get("image_grid_thw"),
            video_grid_thw=batch.get("video_grid_thw"),
            attention_mask=apart(torch.ones_like(flat)),
        )
        return torch.cat([positions[None], rotated[:, sample, flat].reshape(3, *positions.shape)])


def positions_of(config: Any) -> ImagePositions | None:
    """Returns the positions of a model; None if they are not known of its family."""
    if config.model_type not in PACKS_IMAGES:
        return None
    family: Any = MODEL_MAPPING[type(config)]
    model = family.__new__(family)
    torch.nn.Module.__init__(model)
    model.config = config
    return ImagePositions(model=model)
