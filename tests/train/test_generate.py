"""Texts generated in training, on two CPU ranks, and their prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dstrain.choices import Task
from dstrain.job.monitor import Samples
from dstrain.job.schema import Job
from dstrain.monitor.sinks.jsonl import read_jsonl
from dstrain.train.generate import prompts_of
from tests.train.engine import Engine
from tests.train.launching import codes, lines, losses, make_run, said

PROMPTS = ["Who are you?", "Name a color.", "Count to three."]
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, engine: Engine) -> Path:
    """Runs whose learning rate is so large that texts differ after one step that changes the model."""
    folder = root / "generate"
    base: dict[str, Any] = {"precision": "fp32", "learning_rate": 0.05, "max_steps": 2}
    evaluated = base | {"eval_data": str(demo / "eval.jsonl"), "eval_steps": 1, "packing": True}
    texts: dict[str, Any] = {"prompts": PROMPTS, "max_new_tokens": NEW_TOKENS}
    adapter = {"method": "lora", "lora": {"rank": 4}}
    for name, stage, job in (
        ("plain3", 3, evaluated),
        ("zero3", 3, {**evaluated, "samples": {**texts, "eval_prompts": 2}}),
        ("zero2", 2, {**base, "samples": {**texts, "generate_every": 2}}),
        ("adapter3", 3, {**base, **adapter, "samples": {**texts, "generate_every": 2}}),
    ):
        engine.train(make_run(folder / name, demo, zero={"stage": stage}, **job))
    return folder


def generated(folder: Path) -> list[tuple[int, str, str]]:
    """Returns step, prompt and text of each line of a run's samples."""
    return [(line["step"], line["prompt"], line["text"]) for line in read_jsonl(folder / "samples.jsonl")]


def expected(folder: Path, base: Path) -> list[Any]:
    """Returns what Transformers alone makes of the prompts with a final model."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    model = AutoModelForCausalLM.from_pretrained(folder / "final" if base == folder else base, dtype=torch.float32)
    if base != folder:
        model.load_adapter(str(folder / "final"))
    texts: list[Any] = []
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        inputs: Any = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        output = model.eval().generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        texts.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


@pytest.mark.parametrize("name", ["zero2", "zero3", "adapter3"])
def test_texts_are_those_that_the_model_generates_by_itself(runs: Path, demo: Path, name: str) -> None:
    folder = runs / name
    assert codes(folder) == [[0, 0]], said(folder)[-3000:]
    last = [(prompt, text) for step, prompt, text in generated(folder) if step == 2]
    texts = expected(folder, demo / "model" if name == "adapter3" else folder)
    assert last[: len(PROMPTS)] == list(zip(PROMPTS, texts, strict=True))


def test_training_with_samples_is_the_same_to_the_last_bit(runs: Path) -> None:
    assert losses(runs / "zero3") == losses(runs / "plain3")
    assert len(losses(runs / "plain3")) == 2


def test_texts_are_generated_at_each_evaluation_or_every_so_many_steps(runs: Path) -> None:
    assert [step for step, _, _ in generated(runs / "zero3")] == [1] * 5 + [2] * 5
    assert [step for step, _, _ in generated(runs / "zero2")] == [2] * 3
    assert said(runs / "zero3").count("generated 5 texts in ") == 2


def test_the_time_of_texts_is_not_that_of_steps(runs: Path) -> None:
    generating_s = sum(line["seconds"] for line in read_jsonl(runs / "zero3" / "samples.jsonl")[:5]) / 2
    assert lines(runs / "zero3")[1]["aside_s"] > generating_s


def test_a_prompt_of_the_evaluation_data_ends_before_the_answer(runs: Path) -> None:
    prompt = generated(runs / "zero3")[3][1]
    assert prompt.startswith("user\n")
    assert prompt.endswith("assistant\n")


def test_without_a_chat_template_a_prompt_is_the_beginning_of_a_text(demo: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo / "model")
    texts = Samples(prompts=("Once upon",))
    (prompt,) = prompts_of(Job(model="m", output_dir="o", task=Task.PRETRAIN, samples=texts), tokenizer, None)
    assert tokenizer.decode(list(prompt.tokens)) == "Once upon"
    (chat,) = prompts_of(Job(model="m", output_dir="o", samples=texts, system="Be brief."), tokenizer, None)
    assert "Be brief." in tokenizer.decode(list(chat.tokens))
