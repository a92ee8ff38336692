"""Images on two CPU ranks: the losses of Transformers' plain forward, with batches without images among the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from dstrain.facts.model.traits import Part, part_of
from dstrain.job.schema import Job
from dstrain.train.data.media import MediaReader, load_media_reader
from dstrain.train.tokenizer import load_tokenizer
from tests.train.engine import Engine
from tests.train.launching import (
    EXACT,
    codes,
    evaluations,
    lines,
    make_run,
    require_losses,
    require_packed_as_alone,
    said,
    tensors,
)
from tests.train.vision import labelled, loss_and_count, make_images, make_mixture, make_model, row, rows, write

pytestmark = pytest.mark.parts(6, at=3)

STEPS, RATE = 4, 1e-3
ALL = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}
TRAINED = {
    "zero2": {Part.LANGUAGE_MODEL},
    "packed": set(Part),
    "aligner": {Part.ALIGNER},
    "experts": {Part.LANGUAGE_MODEL},
}
"""Run → the parts that train."""
MODELS = {"experts": "mixture"}
"""Run → its model, if not `model`."""


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, engine: Engine) -> Path:
    folder = root / "images"
    make_images(folder / "images")
    make_model(folder / "model")
    write(folder / "train.jsonl", rows())
    write(folder / "eval.jsonl", [*rows()[3:6], row("What is this?", "white", "images/white.png")])
    job: dict[str, Any] = {
        "model": str(folder / "model"),
        "data": str(folder / "train.jsonl"),
        "eval_data": str(folder / "eval.jsonl"),
        **EXACT,
        "max_steps": STEPS,
        "learning_rate": RATE,
    }
    engine.train(make_run(folder / "zero2", demo, preflight=True, **job))
    single = {"micro_batch": 1, "grad_accum": 4}
    four_rows = {"micro_batch": 1, "packing": True, "seq_len": 96, "preflight": True}  # one of them without images
    engine.train(make_run(folder / "packed", demo, zero={"stage": 3}, **job | four_rows | ALL))
    aligner = {"freeze_multi_modal_projector": False, "freeze_language_model": True}
    (folder / "stream.jsonl").write_text("".join(json.dumps(each).ljust(1023) + "\n" for each in rows()))
    stream = {"streaming": True, "data": str(folder / "stream.jsonl"), "dataloader_num_workers": 1}  # a step is a pass
    engine.train(make_run(folder / "aligner", demo, zero={"stage": 3}, **job | single | aligner | stream))
    experts = {"ep": 2, "model": str(make_mixture(folder / "mixture", folder / "model")), "eval_data": None}
    shared = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
    engine.train(make_run(folder / "experts", demo, zero={"stage": 3}, engine=shared, **job | single | experts))
    answers = [each["messages"][1]["content"] for each in rows()]
    pairs = [
        {"prompt": each["messages"][:1], "chosen": good, "rejected": bad, "images": each.get("images")}
        for each, good, bad in zip(rows(), answers, answers[1:] + answers[:1], strict=True)
    ]
    write(folder / "pairs.jsonl", pairs)
    dpo = {"task": "dpo", "data": str(folder / "pairs.jsonl"), "eval_data": None, "preflight": True}
    engine.train(make_run(folder / "dpo", demo, zero={"stage": 3}, **job | single | dpo))
    lora = {"method": "lora", "lora": {"rank": 4}}
    engine.train(make_run(folder / "lora", demo, zero={"stage": 3}, **job | single | lora))
    return folder


@pytest.fixture(scope="module")
def processor(runs: Path) -> Any:
    job = Job(model=str(runs / "model"), output_dir="o")
    media_reader = load_media_reader(job, job.model, load_tokenizer(job, job.model))
    assert isinstance(media_reader, MediaReader)
    return media_reader.processor


SAMPLES: dict[str, tuple[str, str, list[str]]] = {
    "red": ("@What is this? red", "red", ["red"]),
    "green": ("@What is the color?", "green", ["green"]),
    "blue": ("This?@", "blue", ["blue"]),
    "white": ("@What is this? white", "white", ["white"]),
    "both": ("Two: @ and @?", "red, white", ["red", "white"]),
    **{word: (f"What is the color of {word}?", f"It is {word}", []) for word in ("none", "two", "images")},
    "unmarked": ("@What is this?", "white", ["white"]),
}
"""The rows as text, with @ for an image, and the names of the images."""
EVALUATED = ("white", "both", "none", "unmarked")


def loss_of(model: Any, processor: Any, folder: Path, name: str, other: str | None = None) -> tuple[Any, int]:
    """Returns the loss of a sample as Transformers computes it, and the number of its targets; `other` has an answer
    in place of its own."""
    question, answer, images = SAMPLES[name]
    answer = answer if other is None else SAMPLES[other][1]
    question = question.replace("@", "<|vision_start|><|image_pad|><|vision_end|>")
    opened = [Image.open(folder / "images" / f"{image}.png") for image in images]
    return loss_and_count(model, labelled(processor, question, answer, **({"images": [opened]} if opened else {})))


def mean_loss(model: Any, processor: Any, folder: Path, names: Any) -> Any:
    losses = [loss_of(model, processor, folder, name) for name in names]
    return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)


def loaded(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


@pytest.mark.parametrize("name", TRAINED)
def test_every_loss_is_that_of_transformers_on_the_whole_batch(runs: Path, processor: Any, name: str) -> None:
    assert codes(runs / name) == [[0, 0]], said(runs / name)[-3000:]
    source = runs / MODELS.get(name, "model")
    model = loaded(source).train()
    for parameter, value in model.named_parameters():
        value.requires_grad_(part_of(parameter) in TRAINED[name])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0)
    logged = lines(runs / name)
    require_losses(logged, optimizer, lambda: [loss_of(model, processor, runs, sample) for sample in list(SAMPLES)[:8]])
    assert len(logged) == STEPS
    final, base = tensors(runs / name / "final"), tensors(source)
    changed = {part_of(key) for key in base if not final[key].equal(base[key])}
    assert changed == TRAINED[name]


def test_a_stream_of_images_is_counted(runs: Path) -> None:
    text = said(runs / "aligner")
    assert "stream.jsonl: streamed in 8 parts" in text
    assert f"stream: read {8 * STEPS} samples" in text


def test_every_loss_of_pairs_with_images_is_that_of_the_formula(runs: Path, processor: Any) -> None:
    assert codes(runs / "dpo") == [[0, 0]], said(runs / "dpo")[-3000:]
    model = loaded(runs / "model").train()
    for parameter, value in model.named_parameters():
        value.requires_grad_(part_of(parameter) is Part.LANGUAGE_MODEL)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0)
    names = list(SAMPLES)[:8]

    def log_probs() -> Any:
        sides = [
            [loss_of(model, processor, runs, name, answer) for answer in (name, other)]
            for name, other in zip(names, names[1:] + names[:1], strict=True)
        ]
        return torch.stack([torch.stack([-loss * count for loss, count in pair]) for pair in sides])

    logged, reference = lines(runs / "dpo"), None
    for line in logged:
        found = log_probs()
        reference = found.detach() if reference is None else reference
        chosen, rejected = (0.1 * (found - reference)).unbind(1)
        loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
        assert line["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
        assert line["logps/chosen"] == pytest.approx(float(found[:, 0].mean().detach()), rel=1e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert len(logged) == STEPS
    assert logged[-1]["loss"] < logged[0]["loss"]


def test_an_evaluation_sees_each_image_once(runs: Path, processor: Any) -> None:
    for name in ("zero2", "packed"):
        with torch.no_grad():
            expected = mean_loss(loaded(runs / name / "final").eval(), processor, runs, EVALUATED)
        assert [*evaluations(runs / name).values()] == [pytest.approx(float(expected), rel=1e-4)]


def test_a_packed_row_of_images_is_compared_with_its_samples_before_the_first_step(runs: Path) -> None:
    text = said(runs / "packed")
    assert "packed into 4 rows of 96 tokens" in text
    require_packed_as_alone(runs / "packed")


def test_adapters_train_on_images_without_touching_the_tower(runs: Path, processor: Any) -> None:
    assert codes(runs / "lora") == [[0, 0]], said(runs / "lora")[-3000:]
    with torch.no_grad():
        expected = mean_loss(loaded(runs / "model"), processor, runs, list(SAMPLES)[:8])
    logged = lines(runs / "lora")
    assert logged[0]["loss"] == pytest.approx(float(expected), rel=1e-4)
    assert logged[-1]["loss"] < logged[0]["loss"]
    assert not [key for key in tensors(runs / "lora" / "final") if ".visual." in key]


def test_trained_and_exported_models_have_the_files_of_their_processor(runs: Path, engine: Engine) -> None:
    assert engine.export(runs / "lora", runs / "merged") == 0
    for folder in (runs / "zero2" / "final", runs / "lora" / "final", runs / "merged"):
        saved = folder / "preprocessor_config.json"
        assert saved.read_bytes() == (runs / "model" / "preprocessor_config.json").read_bytes()
