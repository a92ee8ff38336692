"""Audios on two CPU ranks: the losses of Transformers' plain forward, with batches without audios among the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration

from dstrain.facts.model.parts import Part, part_of
from tests.sounds import RATE, read_wav, tone, write_wav
from tests.train.audio_families import FAMILIES, make_family
from tests.train.engine import Engine
from tests.train.launching import EXACT, codes, lines, make_run, require_losses, require_packed_as_alone, said, tensors

STEPS, LEARNING_RATE = 3, 1e-3
ALL = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}
TRAINED = {"zero2": set(Part), "zero3": {Part.LANGUAGE_MODEL}}
"""Run → the parts that train."""
SOUNDS = {"low": (200, 0.5), "high": (3000, 0.8), "short": (900, 0.1), "long": (500, 2.6)}
"""Name → frequency in Hz and seconds, of which the model hears two."""
SAMPLES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("@What is this?", "red", ("low",)),
    ("This?@", "blue", ("high",)),
    ("Two: @ and @?", "red, white", ("low", "long")),
    ("@What is the color?", "green", ("short",)),
    ("@What is it of?", "none", ("long",)),
    *((f"What is the color of {word}?", f"It is {word}", ()) for word in ("none", "two", "images")),
)
"""The rows as text, with @ for an audio, and the names of the audios."""


def rows(folder: Path) -> list[dict[str, Any]]:
    """Returns the samples as rows, in several forms."""
    found: list[dict[str, Any]] = []
    for question, answer, names in SAMPLES:
        turns: list[dict[str, Any]] = [{"role": "user", "content": question.replace("@", "<audio>")}]
        found.append({"messages": [*turns, {"role": "assistant", "content": answer}]})
        found[-1] |= {"audios": [f"sounds/{name}.wav" for name in names]} if names else {}
    numbers = read_wav(folder / "sounds" / "high.wav").astype(float).tolist()
    found[1]["audios"] = [{"array": numbers, "sampling_rate": RATE}]
    found[3]["messages"][0]["content"] = "What is the color?"  # no mark
    parts = [{"type": "audio", "audio": "sounds/long.wav"}, {"type": "text", "text": "What is it of?"}]
    found[4] = {"messages": [{"role": "user", "content": parts}, found[4]["messages"][1]]}
    return found


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, engine: Engine, need: Callable[[object, str], None]) -> Path:
    need(find_spec("av"), "av is not installed: make videos")
    folder = root / "audios"
    for name, (hertz, seconds) in SOUNDS.items():
        write_wav(folder / "sounds" / f"{name}.wav", tone(hertz, seconds))
    make_family("qwen2_audio", folder / "model")
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows(folder)))
    job: dict[str, Any] = {
        "model": str(folder / "model"),
        "data": str(folder / "train.jsonl"),
        **EXACT,
        "micro_batch": 1,
        "grad_accum": 4,
        "max_steps": STEPS,
        "learning_rate": LEARNING_RATE,
    }
    packed = {"packing": True, "seq_len": 256, "grad_accum": 1, "preflight": True}
    engine.train(make_run(folder / "zero2", demo, **job | packed | ALL))
    engine.train(make_run(folder / "zero3", demo, zero={"stage": 3}, **job))
    return folder


def loss_of(model: Any, processor: Any, folder: Path, sample: Any) -> tuple[Any, int]:
    """Returns the loss of a sample as Transformers computes it, and the number of its targets."""
    question, answer, names = sample
    question = question.replace("@", FAMILIES["qwen2_audio"].mark)
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    audio = [read_wav(folder / "sounds" / f"{name}.wav") for name in names] or None
    inputs, before = (
        processor(text=[text], audio=audio, sampling_rate=RATE, return_tensors="pt")
        for text in (f"{prompt}{answer}<|im_end|>", prompt)
    )
    labels = inputs["input_ids"].clone()
    labels[:, : before["input_ids"].shape[1]] = -100
    return model(**inputs, labels=labels).loss, int((labels[:, 1:] != -100).sum())


@pytest.mark.parametrize("name", TRAINED)
def test_every_loss_is_that_of_transformers_on_the_whole_batch(runs: Path, name: str) -> None:
    assert codes(runs / name) == [[0, 0]], said(runs / name)[-3000:]
    processor: Any = AutoProcessor.from_pretrained(runs / "model")
    model: Any = Qwen2AudioForConditionalGeneration.from_pretrained(runs / "model", dtype=torch.float32).train()
    for parameter, value in model.named_parameters():
        value.requires_grad_(value.requires_grad and part_of(parameter) in TRAINED[name])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, weight_decay=0)
    logged = lines(runs / name)
    require_losses(logged, optimizer, lambda: [loss_of(model, processor, runs, sample) for sample in SAMPLES])
    assert len(logged) == STEPS
    final, base = tensors(runs / name / "final"), tensors(runs / "model")
    assert {part_of(key) for key in base if not final[key].equal(base[key])} == TRAINED[name]
    saved = runs / name / "final" / "preprocessor_config.json"
    assert saved.read_bytes() == (runs / "model" / "preprocessor_config.json").read_bytes()


def test_packed_audios_are_compared_with_their_samples_and_cut_ones_are_counted(runs: Path) -> None:
    text = said(runs / "zero2")
    assert "packed into 2 rows of 256 tokens" in text
    assert "2 audios are cut at audio_max_seconds" in text
    require_packed_as_alone(runs / "zero2")
