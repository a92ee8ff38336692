"""Early stopping, the best checkpoint and generated texts, on two CPU ranks whose evaluation loss rises."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerControl,
    TrainerState,
)

from dstrain.choices import Interval, Method, Task
from dstrain.job.schema import Job, Samples
from dstrain.monitor.metrics import read_jsonl
from dstrain.monitor.outcomes import BestModel, best_model
from dstrain.rundir import RunDir
from dstrain.train.arguments import training_arguments
from dstrain.train.checkpoints.export import locate
from dstrain.train.generate import prompts_of
from dstrain.train.parts.saving import BestModelCallback
from dstrain.train.preflight.samples import try_generation
from tests.train.engine import Engine
from tests.train.launching import change_job, codes, evaluations, lines, losses, make_run, said, tensors

pytestmark = pytest.mark.parts(6, at=0)

PROMPTS = ("Who are you?", "Name a color.")
NEW_TOKENS = 4
FILES = {
    "full3": {"model.safetensors", "config.json", "generation_config.json"},
    "adapter2": {"adapter_model.safetensors", "adapter_config.json", "README.md"},
}
"""Run → files of its final model, beside those of the tokenizer."""
OF_TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, engine: Engine) -> Path:
    """Runs with a learning rate so large that their evaluation loss rises and their texts differ after some steps.

    Those under ZeRO-3 train the same: one is undisturbed, one generates texts and is resumed after a first evaluation
    without improvement.
    """
    folder = root / "best"
    base: dict[str, Any] = {
        "data": str(demo / "few.jsonl"),
        "eval_data": str(demo / "eval.jsonl"),
        "precision": "fp32",
        "learning_rate": 0.05,
        "warmup_ratio": 0.0,
        "lr_scheduler_type": "constant",
        "max_steps": 12,
        "eval_steps": 1,
        "save_steps": 1,
        "save_total_limit": 1,
        "early_stopping": 2,
    }
    texts: dict[str, Any] = {"prompts": PROMPTS, "max_new_tokens": NEW_TOKENS}
    adapter = {
        "method": Method.LORA,
        "lora": {"rank": 4},
        "learning_rate": 0.1,
        "early_stopping": 1,
        "save_only_model": True,
    }
    make_run(folder / "plain3", demo, zero={"stage": 3}, **base, packing=True)
    full = {**base, "packing": True, "samples": {**texts, "eval_prompts": 1}, "max_steps": 2, "preflight": True}
    make_run(folder / "full3", demo, zero={"stage": 3}, **full)
    make_run(folder / "adapter2", demo, **{**base, **adapter, "samples": {**texts, "generate_every": 3}})
    for name in ("plain3", "full3", "adapter2"):
        engine.train(folder / name)
    assert recorded(folder / "full3").stopped_at is None
    change_job(folder / "full3", max_steps=12, resume="auto")
    engine.train(folder / "full3")
    return folder


def recorded(folder: Path) -> BestModel:
    best = best_model(json.loads((folder / "summary.json").read_text()))
    assert best is not None
    return best


def generated(folder: Path) -> list[tuple[int, str, str]]:
    """Returns step, prompt and text of each line of a run's samples."""
    return [(line["step"], line["prompt"], line["text"]) for line in read_jsonl(folder / "samples.jsonl")]


# Early stopping and the best checkpoint


@pytest.mark.parametrize(("name", "patience"), [("plain3", 2), ("full3", 2), ("adapter2", 1)])
def test_a_run_stops_once_its_evaluations_do_not_improve(runs: Path, name: str, patience: int) -> None:
    assert set(map(tuple, codes(runs / name))) == {(0, 0)}, said(runs / name)[-3000:]
    measured = evaluations(runs / name)
    best = min(measured, key=lambda step: measured[step])
    expected = BestModel(step=best, loss=measured[best], stopped_at=best + patience, evaluations=patience)
    assert recorded(runs / name) == expected
    assert max(measured) == best + patience < 12
    assert said(runs / name).count(f"{expected.text}; the final model is that of checkpoint-{best}\n") == 1


def test_patience_continues_after_a_resume(runs: Path) -> None:
    assert len(codes(runs / "full3")) == 2
    assert recorded(runs / "full3") == recorded(runs / "plain3")


@pytest.mark.parametrize("name", FILES)
def test_the_final_model_is_that_of_the_best_checkpoint_which_stays(runs: Path, name: str) -> None:
    best = recorded(runs / name)
    checkpoints = [path for _, path in RunDir(runs / name).whole_checkpoints()]
    assert [path.name for path in checkpoints] == [f"checkpoint-{best.step}", f"checkpoint-{best.stopped_at}"]
    final, kept, last = (tensors(path) for path in (runs / name / "final", *checkpoints))
    assert {path.name for path in (runs / name / "final").iterdir()} == FILES[name] | OF_TOKENIZER
    assert final.keys() == kept.keys()
    assert all(torch.equal(final[key], kept[key]) for key in final)
    assert not all(torch.equal(final[key], last[key]) for key in final)
    assert locate(runs / name) == checkpoints[0]


def test_the_last_step_is_evaluated_before_its_checkpoint() -> None:
    for strategy, is_due in ((Interval.STEPS, True), (Interval.EPOCH, False)):  # an epoch has its own evaluation
        job = Job(model="m", output_dir="o", eval_data="e", eval_steps=5, eval_strategy=strategy, load_best=True)
        arguments = training_arguments(job, {}, num_ranks=1, on_gpu=False)
        for step in (6, 7):
            control = TrainerControl()
            BestModelCallback(job).on_step_end(arguments, TrainerState(global_step=step, max_steps=7), control)
            assert control.should_evaluate is (is_due and step == 7)


def test_early_stopping_or_load_best_keep_a_best_checkpoint() -> None:
    assert not Job(model="m", output_dir="o").keeps_best
    assert Job(model="m", output_dir="o", early_stopping=1).keeps_best


# Generated texts


def expected(folder: Path, base: Path | None) -> list[str]:
    """Returns what Transformers alone makes of the prompts with a final model, or with the adapter of a base."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    model = AutoModelForCausalLM.from_pretrained(base or folder / "final", dtype=torch.float32)
    if base is not None:
        model.load_adapter(str(folder / "final"))
    texts: list[Any] = []
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        options: dict[str, Any] = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        inputs: Any = tokenizer.apply_chat_template(chat, **options)
        output = model.eval().generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        texts.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


@pytest.mark.parametrize("name", FILES)
def test_texts_are_those_that_the_model_generates_by_itself(runs: Path, demo: Path, name: str) -> None:
    step = recorded(runs / name).step  # whose model is the final one
    found = [(prompt, text) for at, prompt, text in generated(runs / name) if at == step]
    texts = expected(runs / name, demo / "model" if name == "adapter2" else None)
    assert found[: len(PROMPTS)] == list(zip(PROMPTS, texts, strict=True))


def test_training_with_texts_is_the_same_to_the_last_bit(runs: Path) -> None:
    assert losses(runs / "full3") == losses(runs / "plain3")
    assert evaluations(runs / "full3") == evaluations(runs / "plain3")
    assert len(set(losses(runs / "full3").values())) == 3


def test_texts_are_generated_at_each_evaluation_or_every_so_many_steps(runs: Path) -> None:
    assert [step for step, _, _ in generated(runs / "full3")] == [step for step in (1, 2, 3) for _ in range(3)]
    assert [step for step, _, _ in generated(runs / "adapter2")] == [3, 3]
    assert said(runs / "full3").count("generated 3 texts in ") == 3


def test_generation_is_tried_before_the_first_step(runs: Path) -> None:
    found = [line for line in said(runs / "full3").splitlines() if "✓ generation: " in line]
    assert re.search(r"4 tokens after the longest prompt of \d+ tokens \([\d.]+ s\)", found[0])
    assert len(found) == 2  # again after the resume


def test_a_model_that_cannot_generate_ends_the_run_before_its_first_step() -> None:
    sizes: dict[str, Any] = {"vocab_size": 8, "n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 1}
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, pad_token_id=0, bos_token_id=0, eos_token_id=0))
    prompt = torch.ones(1, 9, dtype=torch.long)  # beyond the last position
    broken: Any = SimpleNamespace(rehearse=lambda count: model.generate(prompt, max_new_tokens=count))
    trainer: Any = SimpleNamespace(model_wrapped=model)
    found = try_generation(trainer, broken, group=None)
    assert not found.passed
    assert found.text.startswith("samples: the model cannot generate: IndexError: index out of range")


def test_the_time_of_texts_is_not_that_of_steps(runs: Path) -> None:
    of_first = [line["seconds"] for line in read_jsonl(runs / "full3" / "samples.jsonl") if line["step"] == 1]
    assert lines(runs / "full3")[1]["aside_s"] > sum(of_first) / 2  # two ranks share them


def test_a_prompt_of_the_evaluation_data_ends_before_the_answer(runs: Path) -> None:
    prompt = generated(runs / "full3")[2][1]
    assert prompt.startswith("user\n")
    assert prompt.endswith("assistant\n")


def test_without_a_chat_template_a_prompt_is_the_beginning_of_a_text(demo: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo / "model")
    samples = Samples(prompts=("Once upon",))
    (text,) = prompts_of(Job(model="m", output_dir="o", task=Task.PRETRAIN, samples=samples), tokenizer, None)
    assert tokenizer.decode(list(text.tokens)) == "Once upon"
    (chat,) = prompts_of(Job(model="m", output_dir="o", samples=samples, system="Be brief."), tokenizer, None)
    assert "Be brief." in str(tokenizer.decode(list(chat.tokens)))
