"""Reward models on two CPU ranks: under each ZeRO stage the losses of the formula on the whole batch in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from dstrain.errors import InvalidConfig
from dstrain.facts.model.families import FAMILIES
from dstrain.facts.model.model_facts import WITHOUT_SCORE
from dstrain.monitor.sinks.jsonl import read_jsonl
from dstrain.train import scoring
from tests.train.engine import Engine
from tests.train.launching import EXACT, codes, lines, losses, make_run, said, short_talks, without_dropout, write_parts

STEPS, RATE, CENTER = 3, 1e-3, 0.01
FIGURES = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
Pair = dict[str, Any]


@pytest.fixture(scope="module")
def pairs(demo: Path) -> list[Pair]:
    """A step of pairs of different lengths, and 5 more; a rejected answer is that to another question."""
    short = short_talks(demo)
    return [
        {"chosen": good, "rejected": [*good[:-1], bad[-1]]} for good, bad in zip(short[::2], short[::-2], strict=True)
    ]


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, pairs: list[Pair], engine: Engine) -> Path:
    folder = root / "rewards"
    folder.mkdir()
    write_parts(folder, pairs)
    job: dict[str, Any] = {
        "model": str(without_dropout(demo / "model", folder / "model")),
        "data": str(folder / "train.jsonl"),
        "task": "reward",
        "reward": {"center_rewards_coefficient": CENTER},
        **EXACT,
        "max_steps": STEPS,
        "learning_rate": RATE,
    }
    evaluated = {"eval_data": str(folder / "eval.jsonl"), "preflight": True}
    engine.train(make_run(folder / "zero2", demo, **job | evaluated))
    engine.train(make_run(folder / "zero3", demo, zero={"stage": 3}, **job))
    lora = {"method": "lora", "lora": {"rank": 4, "dropout": 0.0}, "learning_rate": 1e-2}
    engine.train(make_run(folder / "lora3", demo, zero={"stage": 3}, **job | evaluated | lora))
    engine.train(make_run(folder / "sft", demo, model=str(folder / "zero2" / "final")))
    return folder


@pytest.fixture(scope="module")
def tokenizer(demo: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(demo / "model")


def scored(folder: Path) -> Any:
    """Returns the reward model of a saved language model, before training."""
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    model = AutoModelForSequenceClassification.from_pretrained(folder, config=config, dtype=torch.float32)
    scoring.draw_score(model, seed=42)
    return model


def score(model: Any, tokenizer: Any, messages: Any) -> Any:
    """Returns the score at the last token of a conversation without padding, from hidden states and head."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    hidden = model.model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state
    return model.score(hidden)[0, -1, 0]


class Expected:
    """The formula on all pairs at once."""

    def __init__(self, model: Any, tokenizer: Any, pairs: Sequence[Pair]) -> None:
        chosen, rejected = (
            torch.stack([score(model, tokenizer, pair[side]) for pair in pairs]) for side in ("chosen", "rejected")
        )
        right = torch.sigmoid(chosen - rejected)
        self.loss = (-right.log() + CENTER * (chosen + rejected) ** 2).mean()
        margins = chosen - rejected
        means = (chosen.mean(), rejected.mean(), (margins > 0).float().mean(), margins.mean())
        self.figures = {name: float(value.detach()) for name, value in zip(FIGURES, means, strict=True)}


def test_every_loss_and_figure_is_that_of_the_formula_on_the_whole_batch(
    runs: Path, pairs: list[Pair], tokenizer: Any
) -> None:
    assert codes(runs / "zero2") == [[0, 0]], said(runs / "zero2")[-3000:]
    model = scored(runs / "model").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    logged = lines(runs / "zero2")
    for line in logged:
        expected = Expected(model, tokenizer, pairs[:8])
        assert line["loss"] == pytest.approx(float(expected.loss.detach()), rel=1e-5)
        assert {name: line[name] for name in FIGURES} == pytest.approx(expected.figures, rel=1e-4, abs=1e-5)
        optimizer.zero_grad()
        expected.loss.backward()
        optimizer.step()
    assert len(logged) == STEPS
    assert logged[-1]["loss"] < 0.9 * logged[0]["loss"]


def test_zero_3_has_the_same_losses(runs: Path) -> None:
    assert codes(runs / "zero3") == [[0, 0]], said(runs / "zero3")[-3000:]
    assert losses(runs / "zero3") == pytest.approx(losses(runs / "zero2"), rel=1e-5)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("name", ["zero2", "lora3"])
def test_the_saved_model_scores_as_the_evaluation_did(
    runs: Path, pairs: list[Pair], tokenizer: Any, name: str, engine: Engine
) -> None:
    assert codes(runs / name) == [[0, 0]], said(runs / name)[-3000:]
    final = runs / name / "final"
    if name == "lora3":
        assert engine.export(final, runs / "merged") == 0, Path(f"{runs / 'merged'}.log.0").read_text()[-3000:]
        final = runs / "merged"
    model = AutoModelForSequenceClassification.from_pretrained(final, dtype=torch.float32)
    assert (model.config.num_labels, model.config.pad_token_id) == (1, tokenizer.pad_token_id)
    with torch.no_grad():
        expected = Expected(model, tokenizer, pairs[8:])
        batch = tokenizer(
            [tokenizer.apply_chat_template(pair["chosen"], tokenize=False) for pair in pairs[8:]], padding=True
        )
        padded = model(**{key: torch.tensor(batch[key]) for key in ("input_ids", "attention_mask")}).logits
    (line,) = (line for line in read_jsonl(runs / name / "metrics.jsonl") if "eval_loss" in line)
    assert line["eval_samples"] == 5
    assert line["eval_loss"] == pytest.approx(float(expected.loss), rel=1e-4)
    assert float(padded.mean()) == pytest.approx(line["eval_rewards/chosen"], rel=1e-4)


def test_families_without_a_score_are_those_of_transformers() -> None:
    missing = {family for family in FAMILIES if family not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES}
    assert {family for family in missing if not family.startswith("qwen3_vl")} == WITHOUT_SCORE
    with pytest.raises(InvalidConfig, match="which it cannot for granite"):
        scoring.with_score(AutoConfig.for_model("granite"))


def test_a_reward_model_is_no_language_model(runs: Path) -> None:
    assert codes(runs / "sft") == [[3, 3]]
    assert "is a reward model, without logits of the vocabulary, but task is sft" in said(runs / "sft")
