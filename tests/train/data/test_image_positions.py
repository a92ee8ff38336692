"""Tiny random models of the families that pack images, and videos: a packed row has the loss and the gradients of its
samples."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dstrain.facts.model.traits import TRAITS, traits
from dstrain.train.data.collate import Collator, joins_rows, row_of, taken_by
from dstrain.train.data.isolation import attend_by_sample
from dstrain.train.data.media import positions_of
from dstrain.train.data.rendering import IGNORED
from tests.train.data.test_packing_families import of_each_sample, of_one_row
from tests.train.tiny import experts, sizes

IMAGE, VIDEO, WIDTH = 5, 6, 3 * 2 * 4 * 4
"""Tokens of an image and a video, and numbers of a patch: channels, frames, height and width."""
TEXT = sizes(kv_heads=1, vocab_size=64, pad_token_id=0, max_position_embeddings=256)
EXPERTS = experts(4, decoder_sparse_step=1, shared_expert_intermediate_size=16)
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "num_position_embeddings": 64,
    "image_size": 32,
    "window_size": 16,
    "fullatt_block_indexes": [0],
}
TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
    "image_start_token_id": 7,
    "image_end_token_id": 8,
    "video_start_token_id": 9,
    "video_end_token_id": 10,
}
Grid = tuple[int, int, int]
ROWS: tuple[tuple[tuple[Grid, ...], ...], ...] = (
    (((1, 4, 6),), (), ((1, 4, 4), (2, 4, 6), (1, 8, 4))),
    (((1, 6, 4),), ((3, 4, 4), (2, 6, 4))),
    ((), ()),
)
"""Row → sample → image, or video of several frames → its frames, and rows and columns of patches."""


def make(family: str) -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    text: dict[str, Any] = {**TEXT, "rope_parameters": rope, **(EXPERTS if "moe" in family else {})}
    tower: dict[str, Any] = {**TOWER, **({"deepstack_visual_indexes": [0]} if "vl" in family else {})}
    if family.startswith("qwen3_5"):
        text |= LINEAR | {"rope_parameters": rope | {"partial_rotary_factor": 1.0}}
    kind: Any = CONFIG_MAPPING[family]
    config = kind(text_config=text, vision_config=tower, **TOKENS)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)  # so that positions matter
    return model


def tokens_of(grids: Sequence[Grid], random: np.random.Generator) -> list[int]:
    ids: list[int] = random.integers(11, 64, 5).tolist()
    for frames, height, width in grids:
        kind = IMAGE if frames == 1 else VIDEO
        for _ in range(frames):  # with a time before each of a video's
            ids += [*random.integers(11, 64, 4).tolist(), 7, *[kind] * (height * width // 4), 8]
    return [*ids, *random.integers(11, 64, 4).tolist()]


def seen_by(family: str, grids: Sequence[Grid]) -> list[Grid]:
    """Returns the images, and the videos of a family that trains on them."""
    return [grid for grid in grids if grid[0] == 1 or traits(family).trains_videos]


def inputs_of(ids: Any, pixels: Sequence[Any], grids: Sequence[Grid]) -> dict[str, Any]:
    given: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).long() + 2 * (ids == VIDEO).long()}
    for name, suffix, is_video in (("image", "", False), ("video", "_videos", True)):
        chosen = [index for index, grid in enumerate(grids) if (grid[0] > 1) is is_video]
        if chosen:
            given[f"pixel_values{suffix}"] = torch.cat([pixels[index] for index in chosen])
            given[f"{name}_grid_thw"] = torch.tensor([grids[index] for index in chosen])
    return given


def backward(model: Any, inputs: dict[str, Any], labels: Any, count: int) -> float:
    """Returns the loss over `count` targets, and adds its gradients."""
    logits = model(**inputs).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    (loss / count).backward()
    return float(loss.detach()) / count


def taken_gradients(model: Any) -> dict[str, Any]:
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("family", [name for name, row in TRAITS.items() if row.packs_images])
def test_packed_rows_with_images_have_the_loss_and_the_gradients_of_their_samples(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, random = make(family), np.random.default_rng(0)
    rows = [[seen_by(family, grids) for grids in row] for row in ROWS]
    samples = [[(tokens_of(grids, random), grids) for grids in row] for row in rows]
    pixels = {grid: torch.randn(math.prod(grid), WIDTH) for row in rows for grids in row for grid in grids}
    count = sum(len(ids) - 1 for row in samples for ids, _ in row)
    alone = 0.0
    for ids, grids in (sample for row in samples for sample in row):
        tensor = torch.tensor([ids])
        alone += backward(model, inputs_of(tensor, [pixels[grid] for grid in grids], grids), tensor, count)
    expected = taken_gradients(model)
    if family.startswith("qwen3_5"):
        code = sys.modules[type(model).__module__]
        for function, stand_in in (("torch_chunk_gated_delta_rule", of_one_row), ("causal_conv1d_fn", of_each_sample)):
            monkeypatch.setattr(code, function, stand_in(getattr(code, function)))
    collate = Collator(pad_token_id=0, packing=True, takes=taken_by(model), joins_rows=joins_rows(model))
    batch = collate(
        [row_of(np.concatenate(all_ids), np.concatenate(all_ids), np.array([len(ids) for ids in all_ids]))
         for all_ids in ([ids for ids, _ in row] for row in samples)]
    )  # fmt: skip
    labels = batch.pop("labels")
    every = [grid for row in rows for grids in row for grid in grids]
    batch |= inputs_of(batch["input_ids"], [pixels[grid] for grid in every], every)
    assert attend_by_sample(model)
    of_text = {**batch, "position_ids": batch["position_ids"].expand(4, -1, -1)}
    assert backward(model, of_text, labels, count) != pytest.approx(alone, rel=1e-4)
    model.zero_grad()
    positions = positions_of(model.config)
    assert positions is not None
    batch["position_ids"] = positions.of(batch)
    assert backward(model, batch, labels, count) == pytest.approx(alone, rel=1e-5)
    gradients = taken_gradients(model)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5 * scale, msg=name)


def test_a_family_that_looks_ahead_in_images_has_no_positions_for_packed_rows() -> None:
    assert positions_of(CONFIG_MAPPING["gemma3"]()) is None
