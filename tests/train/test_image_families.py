"""Families that see: tokens and labels of samples, and losses on two ranks of which one has no image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig

from dstrain.choices import Method
from dstrain.errors import InvalidConfig
from dstrain.facts.model.traits import Part, part_of
from dstrain.job.schema import Job
from dstrain.train.checkpoints.saved_model import family_of
from dstrain.train.data.media import image_text
from dstrain.train.data.show import pieces
from dstrain.train.model import load_model
from tests.train.engine import Engine
from tests.train.family_images import RATE, SAMPLES, STEPS, conversation, encoder, micro_batches
from tests.train.vision import labelled, loss_and_count
from tests.train.vision_families import FAMILIES, make_model

pytestmark = [
    pytest.mark.parts(6, at=2),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
IMAGES = {"wide": (64, 32), "tall": (24, 48)}
"""Name → width and height in pixels; some processors cut them into crops."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for (name, size), color in zip(IMAGES.items(), ("red", "blue"), strict=True):
        image = Image.new("RGB", size, color)
        image.paste("white", (4, 4, 16, 20))
        image.save(folder / f"{name}.png")
    for name, family in FAMILIES.items():
        make_model(name, family, folder / name)
    return folder


@pytest.fixture(scope="module")
def losses(models: Path, engine: Engine) -> list[dict[str, list[float]]]:
    """Rank → family → the losses of its steps."""
    log = models / "ranks"
    codes = engine.run("tests.train.family_images", models, log=log)
    assert codes == [0, 0], Path(f"{log}.0").read_text()[-3000:]
    return [json.loads((models / f"losses.{rank}.json").read_text()) for rank in range(2)]


def by_hand(folder: Path, family: str, processor: Any, name: str) -> dict[str, Any]:
    """Returns what the family's processor makes of a sample, with labels of the answer's tokens."""
    question, answer, names = SAMPLES[name]
    media = {"images": [[Image.open(folder / f"{image}.png") for image in names]]} if names else {}
    return labelled(processor, question.replace("<image>", FAMILIES[family].mark), answer, **media)


def media_token(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    return int(next(config[key] for key in TOKEN_KEYS if key in config))


TOKEN_KEYS = ("image_token_id", "image_token_index")


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_processor_and_only_answers_carry_loss(models: Path, family: str) -> None:
    encodes = encoder(models, family)
    assert encodes.media_reader is not None
    for name in SAMPLES:
        (sample,) = encodes.encode([(name, conversation(models, name))])
        expected = by_hand(models, family, encodes.media_reader.processor, name)
        assert sample.input_ids == expected["input_ids"][0].tolist()
        assert sample.labels == expected["labels"][0].tolist()
        pixels = {index for index, token in enumerate(sample.input_ids) if token == media_token(models / family)}
        assert pixels <= {index for index, image in enumerate(sample.media_of) if image is not None}
        assert bool(pixels) == bool(sample.images)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("family", ["idefics3", "internvl"])
def test_adapters_are_those_of_the_language_model_and_a_tower_has_no_backward_pass(models: Path, family: str) -> None:
    job = Job(model=str(models / family), output_dir="o", method=Method.LORA, grad_ckpt=True)
    model = load_model(job, job.model, {})
    assert {part_of(name) for name, value in model.named_parameters() if value.requires_grad} == {Part.LANGUAGE_MODEL}
    differentiated = set()

    def note(name: str, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            differentiated.add(part_of(f"{name}.weight"))

    for name, module in model.named_modules():
        module.register_forward_hook(lambda _module, _inputs, output, name=name: note(name, output))
    assert model(**micro_batches(models, family, model, 0)[0]).loss.requires_grad
    assert differentiated == {Part.LANGUAGE_MODEL}


def test_an_image_with_text_around_its_tokens_is_shown_as_one(models: Path) -> None:
    encodes = encoder(models, "gemma3")
    (sample,) = encodes.encode([("here", conversation(models, "wide"))])
    shown = pieces(
        encodes.tokenizer, sample.input_ids, sample.labels, [*map(image_text, sample.images)], sample.media_of
    )
    assert [piece.text for piece in shown if "pixels" in piece.text] == ["[wide.png: 64 × 32 pixels, 10 tokens]"]


@pytest.mark.parametrize("family", ["idefics3", "internvl"])
def test_a_blank_image_is_not_cut_into_crops(models: Path, family: str) -> None:
    media_reader = encoder(models, family).media_reader
    assert media_reader is not None
    sides = media_reader.pixels("images", [])["pixel_values"].shape
    tokenizer = media_reader.processor.tokenizer
    assert (sides.numel(), media_reader.blank_tokens(tokenizer).count(media_token(models / family))) == (
        3 * 32 * 32,
        4,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_of_ranks_with_and_without_images_are_those_of_transformers(
    models: Path, losses: list[dict[str, list[float]]], family: str
) -> None:
    encodes = encoder(models, family)
    assert encodes.media_reader is not None
    whole = encodes.media_reader.processor
    model: Any = family_of(AutoConfig.from_pretrained(models / family))
    model = model.from_pretrained(models / family, dtype=torch.float32).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    for step, names_of in enumerate(STEPS):
        optimizer.zero_grad()
        for rank, names in enumerate(names_of):
            each = [loss_and_count(model, by_hand(models, family, whole, name)) for name in names]
            loss = sum(loss * count for loss, count in each) / sum(count for _, count in each)
            assert losses[rank][family][step] == pytest.approx(float(loss.detach()), rel=1e-4)
            (loss / 2).backward()
        optimizer.step()
    trained = {part_of(name) for name, value in model.named_parameters() if not value.equal(start[name])}
    assert trained == set(Part)


def test_a_model_of_sound_is_refused_by_its_family() -> None:
    with pytest.raises(InvalidConfig, match="qwen2_audio is a family of models that hear"):
        family_of(AutoConfig.for_model("qwen2_audio"))
