"""Patches of images by their sizes alone are those of the model's own processor."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from dstrain.choices import Hub
from dstrain.facts.data.lengths import eye_of, smart_resize
from dstrain.facts.data.turns import Conversation

SIZES = [(random.Random(seed).randint(8, 3000), random.Random(-seed).randint(8, 3000)) for seed in range(1, 60)]


def folder(path: Path, **settings: object) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    return path


def test_sides_are_those_of_transformers() -> None:
    pytest.importorskip("torch")
    from transformers.models.qwen2_vl import image_processing_qwen2_vl as theirs

    for width, height in SIZES:
        limits = {"factor": 32, "min_pixels": 65_536, "max_pixels": 1_000_000}
        high, wide = theirs.smart_resize(height, width, **limits)
        assert smart_resize(width, height, factor=32, least=65_536, most=1_000_000) == (wide, high)


def test_images_of_a_sample_are_summed_and_limits_of_the_job_hold(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (640, 480)).save(tmp_path / "a.png")
    size = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
    model = str(folder(tmp_path, patch_size=16, merge_size=2, size=size))
    chat = Conversation(messages=[], images=(str(tmp_path / "a.png"),) * 2)
    plain, small = (eye_of(model, Hub.HF, max_pixels=limit) for limit in (None, 320 * 240))
    assert plain is not None
    assert small is not None
    assert (plain.patches_of(chat), small.patches_of(chat)) == (2 * 1200, 2 * 20 * 16)
    assert plain.patches_of(Conversation(messages=[], images=("absent.png",))) is None
    assert plain.patches_of(Conversation(messages=[], videos=(("a.mp4",),))) is None


def test_other_families_are_not_guessed(tmp_path: Path) -> None:
    folder(tmp_path, patch_size=14)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "idefics3"}))
    assert eye_of(str(tmp_path), Hub.HF) is None
