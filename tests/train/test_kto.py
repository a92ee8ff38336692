"""KTO on two CPU ranks: the losses of the formula on the whole batch in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dstrain.monitor.sinks.jsonl import read_jsonl
from tests.train.engine import Engine
from tests.train.launching import EXACT, codes, lines, losses, make_run, said, short_talks, without_dropout, write_parts

STEPS, RATE, BETA, WEIGHTS = 3, 1e-3, 0.1, (1.5, 0.5)
FIGURES = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl")
Row = dict[str, Any]


@pytest.fixture(scope="module")
def rows(demo: Path) -> list[Row]:
    """A step of answers, and 5 more; an answer to another question is not desirable."""
    short = short_talks(demo)
    return [
        {"prompt": good[:-1], "completion": (bad if number % 3 else good)[-1:], "label": number % 3 == 0}
        for number, (good, bad) in enumerate(zip(short[::2], short[1::2], strict=True))
    ]


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, rows: list[Row], engine: Engine) -> Path:
    folder = root / "kto"
    folder.mkdir()
    write_parts(folder, rows)
    job: dict[str, Any] = {
        "model": str(without_dropout(demo / "model", folder / "model")),
        "data": str(folder / "train.jsonl"),
        "task": "kto",
        "kto": {"beta": BETA, "desirable_weight": WEIGHTS[0], "undesirable_weight": WEIGHTS[1]},
        "loss": "chunked",
        **EXACT,
        "micro_batch": 4,
        "grad_accum": 1,
        "max_steps": STEPS,
        "learning_rate": RATE,
    }
    evaluated = {"eval_data": str(folder / "eval.jsonl"), "preflight": True}
    engine.train(make_run(folder / "zero2", demo, **job | evaluated))
    engine.train(make_run(folder / "zero3", demo, zero={"stage": 3}, **job | {"grad_ckpt": False}))
    lora = {"method": "lora", "lora": {"rank": 4, "dropout": 0.0}, "learning_rate": 1e-2}
    engine.train(make_run(folder / "lora1", demo, zero={"stage": 1}, **job | lora))
    return folder


@pytest.fixture(scope="module")
def tokenizer(demo: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(demo / "model")


def answer_log_probs(model: Any, tokenizer: Any, prompt: Any, answer: Any) -> Any:
    """Returns the log-probability of an answer and its end of turn."""
    before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(f"{before}{answer[0]['content']}<|im_end|>")["input_ids"]])
    log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(-1, ids[0, 1:, None])[len(tokenizer(before)["input_ids"]) - 1 :].sum()


class Expected:
    """KTO's formula on all answers at once; each prompt also has the answer of the row before it."""

    def __init__(self, model: Any, tokenizer: Any, rows: Sequence[Row], reference: Any) -> None:
        answers = [row["completion"] for row in rows]
        self.log_probs = torch.stack(
            [
                torch.stack([answer_log_probs(model, tokenizer, row["prompt"], each[i]) for i, row in enumerate(rows)])
                for each in (answers, answers[-1:] + answers[:-1])
            ]
        )
        reference = self.log_probs.detach() if reference is None else reference
        ratios, others = self.log_probs - reference
        kl = others.detach().mean().clamp(min=0)
        good = torch.tensor([row["label"] for row in rows])
        values = [
            weight * (1 - torch.sigmoid(sign * BETA * (ratios[mask] - kl)))
            for weight, sign, mask in zip(WEIGHTS, (1, -1), (good, ~good), strict=True)
        ]
        self.loss = torch.cat(values).mean()
        means = [BETA * ratios[good].mean(), BETA * ratios[~good].mean()]
        means += [self.log_probs[0][good].mean(), self.log_probs[0][~good].mean(), kl]
        self.figures = {name: float(value.detach()) for name, value in zip(FIGURES, means, strict=True)}


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def test_every_loss_and_figure_is_that_of_the_formula_on_the_whole_batch(
    runs: Path, rows: list[Row], tokenizer: Any
) -> None:
    assert codes(runs / "zero2") == [[0, 0]], said(runs / "zero2")[-3000:]
    model = loaded(runs / "model").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    reference = None
    logged = lines(runs / "zero2")
    for line in logged:
        expected = Expected(model, tokenizer, rows[:8], reference)
        reference = expected.log_probs.detach() if reference is None else reference
        assert line["loss"] == pytest.approx(float(expected.loss.detach()), rel=1e-5)
        assert {name: line[name] for name in FIGURES} == pytest.approx(expected.figures, rel=1e-4, abs=1e-4)
        optimizer.zero_grad()
        expected.loss.backward()
        optimizer.step()
    assert len(logged) == STEPS
    assert logged[-1]["kl"] > 0
    assert logged[-1]["loss"] < logged[0]["loss"]


def test_an_evaluation_counts_each_answer_once(runs: Path, rows: list[Row], tokenizer: Any) -> None:
    with torch.no_grad():
        reference = Expected(loaded(runs / "model"), tokenizer, rows[8:], None).log_probs
        expected = Expected(loaded(runs / "zero2" / "final"), tokenizer, rows[8:], reference)
    (line,) = (line for line in read_jsonl(runs / "zero2" / "metrics.jsonl") if "eval_loss" in line)
    assert line["eval_samples"] == 5
    for name in FIGURES[:4]:  # the divergence is that of each micro-batch
        assert line[f"eval_{name}"] == pytest.approx(expected.figures[name], rel=1e-4, abs=1e-4)


def test_zero_3_has_the_same_losses(runs: Path) -> None:
    assert codes(runs / "zero3") == [[0, 0]], said(runs / "zero3")[-3000:]
    assert losses(runs / "zero3") == pytest.approx(losses(runs / "zero2"), rel=1e-5)


def test_the_loss_of_an_adapter_begins_at_that_of_the_reference(runs: Path) -> None:
    assert codes(runs / "lora1") == [[0, 0]], said(runs / "lora1")[-3000:]
    first, *_, last = losses(runs / "lora1").values()
    desirable = 3 / 8
    assert first == pytest.approx(0.5 * (WEIGHTS[0] * desirable + WEIGHTS[1] * (1 - desirable)), abs=1e-6)
    assert first is not None
    assert last is not None
    assert last < 0.98 * first
