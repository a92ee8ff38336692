"""Videos on two CPU ranks: the losses of Transformers' plain forward, with batches without videos among the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.video_utils import VideoMetadata

from tests.train.engine import Engine
from tests.train.launching import EXACT, codes, lines, make_run, require_losses, require_packed_as_alone, said
from tests.train.vision import (
    FRAMES,
    labelled,
    loss_and_count,
    make_images,
    make_model,
    make_videos,
    need_videos,
    sampled,
    video_rows,
    write,
)

pytestmark = pytest.mark.parts(6, at=4)

STEPS, RATE = 3, 1e-3
ALL = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}
RUNS = ("zero2", "zero3")


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, engine: Engine, need: Callable[[object, str], None]) -> Path:
    need_videos(need)
    folder = root / "videos"
    make_images(folder / "images")
    make_videos(folder / "videos")
    make_model(folder / "model")
    write(folder / "train.jsonl", video_rows())
    job: dict[str, Any] = {
        "model": str(folder / "model"),
        "data": str(folder / "train.jsonl"),
        **EXACT,
        **ALL,
        "video_fps": 4.0,
        "micro_batch": 1,
        "grad_accum": 4,
        "max_steps": STEPS,
        "learning_rate": RATE,
    }
    packed = {"packing": True, "seq_len": 400, "grad_accum": 1, "preflight": True}
    engine.train(make_run(folder / "zero2", demo, **job | packed))
    (folder / "stream.jsonl").write_text("".join(json.dumps(each).ljust(1023) + "\n" for each in video_rows()))
    stream = {"streaming": True, "data": str(folder / "stream.jsonl")}  # each row is a part, so each step is a pass
    engine.train(make_run(folder / "zero3", demo, zero={"stage": 3}, **job | stream))
    return folder


@pytest.fixture(scope="module")
def processor(runs: Path) -> Any:
    return AutoProcessor.from_pretrained(runs / "model")


SAMPLES: tuple[tuple[str, str, str, str | None], ...] = (
    ("#What is this?", "red", "clip.mp4", None),
    ("#This?", "white", "frames", None),
    ("Two: # and @", "red, white", "short.webm", "red"),
    ("@What is the color?", "green", "", "green"),
    ("#What is it of?", "blue", "short.webm", None),
    *((f"What is the color of {word}?", f"It is {word}", "", None) for word in ("none", "two", "images")),
)
"""The rows as text, with # for a video and @ for an image, and the names of these."""


def media_of(processor: Any, folder: Path, video: str, image: str | None) -> dict[str, Any]:
    """Returns what Transformers' processor takes, read by Transformers' decoder."""
    given: dict[str, Any] = {} if image is None else {"images": [Image.open(folder / "images" / f"{image}.png")]}
    if not video:
        return given
    if video == "frames":
        frames = np.stack([np.asarray(Image.open(folder / frame)) for frame in FRAMES])
        metadata = VideoMetadata(total_num_frames=3, fps=4.0, frames_indices=[0, 1, 2])
    elif video == "short.webm":  # 5 frames in half a second, which its header does not say
        frames, _ = sampled(folder / "videos" / video, lambda **_: [0, 4])
        metadata = VideoMetadata(total_num_frames=5, fps=10.0, frames_indices=[0, 4])
    else:
        choose = partial(processor.video_processor.sample_frames, fps=4.0)
        frames, metadata = sampled(folder / "videos" / video, choose)
    return {**given, "videos": [frames], "video_metadata": [metadata], "do_sample_frames": False}


def loss_of(model: Any, processor: Any, folder: Path, sample: Any) -> tuple[Any, int]:
    """Returns the loss of a sample as Transformers computes it, and the number of its targets."""
    question, answer, video, image = sample
    for mark, name in (("#", "video"), ("@", "image")):
        question = question.replace(mark, f"<|vision_start|><|{name}_pad|><|vision_end|>")
    return loss_and_count(model, labelled(processor, question, answer, **media_of(processor, folder, video, image)))


@pytest.mark.parametrize("name", RUNS)
def test_every_loss_is_that_of_transformers_on_the_whole_batch(runs: Path, processor: Any, name: str) -> None:
    assert codes(runs / name) == [[0, 0]], said(runs / name)[-3000:]
    model = AutoModelForImageTextToText.from_pretrained(runs / "model", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    logged = lines(runs / name)
    require_losses(logged, optimizer, lambda: [loss_of(model, processor, runs, sample) for sample in SAMPLES])
    assert len(logged) == STEPS


def test_a_packed_row_of_videos_is_compared_with_its_samples_before_the_first_step(runs: Path) -> None:
    assert "packed into 2 rows of 400 tokens" in said(runs / "zero2")
    require_packed_as_alone(runs / "zero2")
