"""Builds model inputs without data: tokens, masks, positions and images."""

from __future__ import annotations

from math import isqrt
from typing import Any

import torch
from transformers import vision_utils

from dstrain.choices import Attention
from dstrain.errors import InvalidConfig
from dstrain.facts.data.row_contents import seen_samples
from dstrain.facts.model.trace_records import Question


def make_inputs(question: Question, config: Any) -> dict[str, Any]:
    """Returns the arguments of the model's forward pass. Call it under the tracker, so that they are counted.

    A mask of ones is left out, as Transformers drops it before the first layer.
    """
    shape = (question.micro_batch, question.seq_len)
    inputs: dict[str, Any] = {
        "input_ids": _whole_numbers(shape),
        "labels": _whole_numbers(shape),
    }
    if question.is_packed:
        inputs["position_ids"] = _whole_numbers(shape)
        if question.attn in (Attention.FLASH_ATTENTION_2, Attention.SDPA):
            inputs |= _borders(question)
    elif question.has_padding:
        inputs["attention_mask"] = _whole_numbers(shape)
    if question.image_patches:
        inputs |= _images(question, config)
    return inputs


def num_image_tokens(question: Question, config: Any) -> int:
    """Returns the tokens that all images of a micro-batch take up in the language model."""
    if not question.image_patches:
        return 0
    per_token = int(_tower_config(config).spatial_merge_size ** 2)
    return _num_images(question, per_token) * question.image_patches // per_token


def _num_images(question: Question, patches_per_token: int) -> int:
    """Returns the images of a micro-batch: one for each sample, and packed rows full of them."""
    seq_len, patches = question.seq_len, question.image_patches
    return question.micro_batch * seen_samples(seq_len, patches, patches_per_token, is_packed=question.is_packed)


def _borders(question: Question) -> dict[str, Any]:
    """Returns the borders of packed samples as `train.data.collate` gives them to flash attention; one sample a row."""
    borders = torch.empty(question.micro_batch + 1, dtype=torch.int32, device="meta")
    length = question.seq_len
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": length, "max_length_k": length}


def _whole_numbers(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _images(question: Question, config: Any) -> dict[str, Any]:
    """Returns one image a sample, as Qwen's processors give them: rows of pixels, and the grid each was cut into.

    The grid stays on the CPU, because code looks into it. Positions of text and images are made inside the model on
    real data; they are three numbers a token. Those of packed rows come with the data, and are four.
    """
    tower = _tower_config(config)
    height, width = grid(question.image_patches, tower.spatial_merge_size)
    pixels = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    images = _num_images(question, tower.spatial_merge_size**2)
    return {
        "pixel_values": torch.empty((images * question.image_patches, pixels), dtype=torch.float32, device="meta"),
        "image_grid_thw": torch.tensor([[1, height, width]] * images),
        "position_ids": _whole_numbers((3 + question.is_packed, question.micro_batch, question.seq_len)),
    }


def _tower_config(config: Any) -> Any:
    """Returns the config of the vision tower.

    Raises InvalidConfig if it is missing, or is not of the kind of Qwen 3 VL's.
    """
    tower = getattr(config, "vision_config", None)
    if not hasattr(tower, "deepstack_visual_indexes"):
        raise InvalidConfig(
            f"images of {config.model_type} cannot be traced, only those of Qwen 3 VL",
            hint="Leave out the image patches: the language model alone can be traced.",
        )
    return tower


def grid(patches: int, merge: int) -> tuple[int, int]:
    """Returns the most square grid of that many patches whose sides are multiples of `merge`.

    >>> grid(1024, 2), grid(24, 2)
    ((32, 32), (4, 6))
    """
    blocks, rest = divmod(patches, merge**2)
    if rest or not blocks:
        raise InvalidConfig(f"{patches} image patches are not a multiple of the {merge**2} that become one token")
    height = next(side for side in range(isqrt(blocks), 0, -1) if blocks % side == 0)
    return height * merge, blocks // height * merge


def watch_tower(tower: Any, config: Any) -> None:
    """Has a vision tower compute what depends on the images' grids from real data, and use it without."""

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        grids = kwargs["grid_thw"] if "grid_thw" in kwargs else args[1]
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=module.num_grid_per_side,
            mode=module.interpolation_mode,
            align_corners=module.interpolation_align_corners,
            spatial_merge_size=config.spatial_merge_size,
        )
        positions = vision_utils.get_vision_position_ids(grids, config.spatial_merge_size)
        made = {"position_ids": positions, "interp_indices": indices, "interp_weights": weights}
        return args, {**kwargs, **{name: tensor.to("meta") for name, tensor in made.items()}}

    tower.register_forward_pre_hook(before, with_kwargs=True)
