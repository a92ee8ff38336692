"""DPO on two CPU ranks: the losses of the formula on the whole batch in one process, resumed as if undisturbed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dstrain.monitor.metrics import read_jsonl
from tests.train.engine import Engine
from tests.train.launching import (
    EXACT,
    QLORA,
    codes,
    lines,
    losses,
    make_run,
    require_resumed,
    said,
    short_talks,
    without_dropout,
    write_parts,
)

pytestmark = pytest.mark.parts(6, at=5)

STEPS, RATE, BETA = 6, 1e-3, 0.1
FIGURES = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen")
Pair = dict[str, Any]


@pytest.fixture(scope="module")
def pairs(demo: Path) -> list[Pair]:
    """A step of pairs, so that each step has them all, and 5 more; a rejected answer is that to another question."""
    short = short_talks(demo)
    return [
        {"prompt": good[:-1], "chosen": good[-1]["content"], "rejected": bad[-1]["content"]}
        for good, bad in zip(short[::2], short[1::2], strict=True)
    ]


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, pairs: list[Pair], engine: Engine) -> Path:
    folder = root / "preferences"
    folder.mkdir()
    write_parts(folder, pairs)
    job: dict[str, Any] = {
        "model": str(without_dropout(demo / "model", folder / "model")),
        "data": str(folder / "train.jsonl"),
        "eval_data": str(folder / "eval.jsonl"),
        "task": "dpo",
        "dpo": {"beta": BETA},
        "loss": "chunked",
        **EXACT,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "save_steps": 2,
        "resume": "auto",
        "preflight": True,
    }
    lora = {"method": "lora", "lora": {"rank": 4}, "learning_rate": 1e-2}
    engine.train(make_run(folder / "whole", demo, **job))
    engine.train(make_run(folder / "whole3", demo, zero={"stage": 3}, **job | {"eval_data": None, "preflight": False}))
    cut = make_run(folder / "cut", demo, **job)
    engine.train(cut, kill_at=5)
    engine.train(cut)
    engine.train(make_run(folder / "lora3", demo, zero={"stage": 3}, **job | lora | {"loss": "full"}))
    further = {"method": "lora", "adapter": str(folder / "lora3" / "final"), "lora": {"rank": 4}}
    engine.train(make_run(folder / "further", demo, **job | further | {"resume": "never"}))
    if (QLORA / "bitsandbytes").is_dir():
        quantized = {"method": "qlora", "precision": "bf16", "lora": {"rank": 4, "dropout": 0.0}, "resume": "never"}
        engine.train(make_run(folder / "qlora", demo, **job | quantized | {"learning_rate": 1e-2}))
    engine.train(make_run(folder / "lost", demo, **job | {"resume": str(folder / "whole" / "checkpoint-4")}))
    return folder


def answer_log_probs(model: Any, tokenizer: Any, pair: Pair, side: str) -> Any:
    """Returns the log-probability of an answer and its end of turn, one token after the other."""
    prompt = tokenizer.apply_chat_template(pair["prompt"], add_generation_prompt=True, tokenize=False)
    before = tokenizer(prompt)["input_ids"]
    ids = torch.tensor([tokenizer(f"{prompt}{pair[side]}<|im_end|>")["input_ids"]])
    log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(-1, ids[0, 1:, None])[len(before) - 1 :].sum()


class Expected:
    """DPO's formula on all pairs at once."""

    def __init__(self, model: Any, tokenizer: Any, pairs: Sequence[Pair], reference: Any) -> None:
        self.log_probs = torch.stack([self._sides(model, tokenizer, pair) for pair in pairs])
        if reference is None:
            reference = self.log_probs.detach()
        rewards = BETA * (self.log_probs - reference)
        margins = rewards[:, 0] - rewards[:, 1]
        self.loss = -torch.nn.functional.logsigmoid(margins).mean()
        means = (*rewards.mean(0), (margins > 0).float().mean(), margins.mean(), self.log_probs[:, 0].mean())
        self.figures = {name: float(value.detach()) for name, value in zip(FIGURES, means, strict=True)}

    def _sides(self, model: Any, tokenizer: Any, pair: Pair) -> Any:
        return torch.stack([answer_log_probs(model, tokenizer, pair, side) for side in ("chosen", "rejected")])


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


@pytest.fixture(scope="module")
def tokenizer(demo: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(demo / "model")


@pytest.mark.parametrize("name", ["whole", "whole3"])
def test_every_loss_and_figure_is_that_of_the_formula_on_the_whole_batch(
    runs: Path, pairs: list[Pair], tokenizer: Any, name: str
) -> None:
    assert codes(runs / name) == [[0, 0]], said(runs / name)[-3000:]
    model = loaded(runs / "model").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    reference = None
    logged = lines(runs / name)
    for line in logged:
        expected = Expected(model, tokenizer, pairs[:8], reference)
        reference = expected.log_probs.detach() if reference is None else reference
        assert line["loss"] == pytest.approx(float(expected.loss.detach()), rel=1e-5)
        assert {name: line[name] for name in FIGURES} == pytest.approx(expected.figures, rel=1e-4, abs=1e-5)
        optimizer.zero_grad()
        expected.loss.backward()
        optimizer.step()
    assert len(logged) == STEPS
    assert logged[-1]["loss"] < 0.5 * logged[0]["loss"]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("name", ["whole", "lora3"])
def test_an_evaluation_counts_each_pair_once_against_the_model_before_training(
    runs: Path, pairs: list[Pair], tokenizer: Any, name: str
) -> None:
    from peft import PeftModel

    assert codes(runs / name) == [[0, 0]], said(runs / name)[-3000:]
    with torch.no_grad():
        reference = Expected(loaded(runs / "model"), tokenizer, pairs[8:], None).log_probs
        final = runs / name / "final"
        trained = PeftModel.from_pretrained(loaded(runs / "model"), final) if name == "lora3" else loaded(final)
        expected = Expected(trained, tokenizer, pairs[8:], reference)
    (line,) = (line for line in read_jsonl(runs / name / "metrics.jsonl") if "eval_loss" in line)
    assert line["eval_samples"] == 5
    assert line["eval_loss"] == pytest.approx(float(expected.loss), rel=1e-5)
    assert {name: line[f"eval_{name}"] for name in FIGURES} == pytest.approx(expected.figures, rel=1e-4, abs=1e-5)


def test_the_loss_of_an_adapter_begins_at_that_of_no_preference(runs: Path) -> None:
    first, *_, last = losses(runs / "lora3").values()
    assert first == pytest.approx(0.6931472, abs=1e-6)
    assert last is not None
    assert last < 0.9 * 0.6931472


def test_the_reference_of_a_run_that_goes_on_from_an_adapter_is_the_model_with_it(runs: Path) -> None:
    assert codes(runs / "further") == [[0, 0]], said(runs / "further")[-3000:]
    first, *_ = losses(runs / "further").values()
    assert first == pytest.approx(0.6931472, abs=1e-6)
    line, *_ = lines(runs / "further")
    *_, last = lines(runs / "lora3")
    assert line["logps/chosen"] == pytest.approx(last["logps/chosen"], rel=0.05)  # a step further than its last one
    assert line["rewards/chosen"] == pytest.approx(0, abs=1e-5)


def test_qlora_learns_preferences(runs: Path, need: Callable[[bool, str], None]) -> None:
    need((QLORA / "bitsandbytes").is_dir(), "bitsandbytes is not installed: make qlora")
    assert codes(runs / "qlora") == [[0, 0]], said(runs / "qlora")[-3000:]
    first, *_, last = losses(runs / "qlora").values()
    assert first == pytest.approx(0.6931472, abs=0.02)  # in bf16
    assert last is not None
    assert last < 0.9 * 0.6931472


def test_a_killed_run_goes_on_with_the_reference_of_its_beginning(runs: Path) -> None:
    require_resumed(runs / "cut", runs / "whole")
    text = said(runs / "cut")
    assert text.count("computing reference log-probabilities of the training data") == 1
    assert text.count("reference log-probabilities of the training data: reference-") == 1


def test_a_checkpoint_without_its_reference_is_refused(runs: Path) -> None:
    assert codes(runs / "lost") == [[3, 3]]
    assert "was trained against a reference whose log-probabilities are not in" in said(runs / "lost")
    assert "Traceback" not in said(runs / "lost") + said(runs / "lost", rank=1)
