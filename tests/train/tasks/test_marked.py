"""Answers with a label in tokens: each with its own prompt, and as the answer to another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import datasets
import torch
from transformers import PreTrainedTokenizerFast

from dstrain.choices import Task
from dstrain.errors import InvalidConfig
from dstrain.job.schema import Job
from dstrain.job.task_losses import Kto
from dstrain.train.data.collate import Collator
from dstrain.train.data.prepare import PreparedData, prepare
from dstrain.train.tasks.figures import Figures
from dstrain.train.tasks.kto import MARKED, MarkedCollator, answer_losses

ROWS = [
    {"prompt": "What is 2 + 2?", "completion": "Four.", "label": True},
    {"prompt": "Name a colour.", "completion": "A quarter past seven, of course.", "label": False},
    {"prompt": "Who?", "completion": "Me.", "label": True},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def tokenizer(made_demo: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(made_demo / "model")


def prepared(folder: Path, tokenizer: Any, *rows: Any, **options: Any) -> PreparedData:
    file = folder / "marked.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    job = Job(model="none", output_dir="none", task=Task.KTO, data=str(file), **{"seq_len": 512, **options})
    return prepare(job, tokenizer, training=True, form=MARKED)


def texts(tokenizer: Any, sequence: Any) -> tuple[str, str]:
    return tokenizer.decode(sequence["input_ids"]), tokenizer.decode([i for i in sequence["labels"] if i != -100])


def test_each_prompt_has_its_answer_and_that_of_the_row_before(tmp_path: Path, tokenizer: Any) -> None:
    data = prepared(tmp_path, tokenizer, *ROWS)
    assert len(data.dataset) == 3
    for index, row in enumerate(ROWS):
        sample = data.dataset[index]
        question = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
        for sequence, answer in zip(sample["sequences"], (row, ROWS[index - 1]), strict=True):
            end = f"{answer['completion']}<|im_end|>"
            longest = len(data.dataset[1]["sequences"][0]["input_ids"])
            whole = tokenizer(f"{prompt}{end}\n")["input_ids"][:longest]
            assert texts(tokenizer, sequence) == (tokenizer.decode(whole), end[: len(end)])
        assert sample["desirable"] == row["label"]


def test_labels_are_counted_and_an_imbalance_is_named(tmp_path: Path, tokenizer: Any) -> None:
    said = "\n".join(prepared(tmp_path, tokenizer, *ROWS).notes)
    assert "2 answers are desirable" in said
    assert "1 answer is undesirable" in said
    assert "weighted, that is 2 desirable to 1 undesirable; 1 to 1.33 is recommended" in said
    balanced = prepared(tmp_path, tokenizer, *ROWS, kto=Kto(undesirable_weight=2.0))
    assert "recommended" not in "\n".join(balanced.notes)


def test_a_row_without_a_label_is_refused_with_its_line(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(InvalidConfig, match=r'marked.jsonl:2: "label" is missing'):
        prepared(tmp_path, tokenizer, ROWS[0], {"prompt": "a", "completion": "b"})


def test_a_micro_batch_has_other_answers_apart(tmp_path: Path, tokenizer: Any) -> None:
    data = prepared(tmp_path, tokenizer, *ROWS)
    collator = MarkedCollator(collator=Collator(pad_token_id=0, packing=False))
    batch = collator([data.dataset[index] for index in range(3)])
    assert batch["input_ids"].shape[0] == batch["other_labels"].shape[0] == 3
    assert batch["desirable"].tolist() == [True, False, True]
    assert batch["reference"].shape == (6,)


def test_the_loss_of_an_answer_is_that_of_its_paper() -> None:
    ratios, kto = torch.tensor([2.0, -1.0]), Kto(beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    good, bad = answer_losses(ratios, torch.tensor(0.4), torch.tensor([True, False]), kto).tolist()
    assert good == pytest.approx(2 * (1 - 1 / (1 + 2.718281828 ** -(0.5 * 1.6))))
    assert bad == pytest.approx(3 * (1 - 1 / (1 + 2.718281828 ** -(0.5 * 1.4))))


def test_figures_of_a_part_of_the_samples_are_means_over_that_part() -> None:
    figures, chosen = Figures(), torch.tensor([True, False, True])
    values = torch.tensor([1.0, 5.0, 3.0])
    named = {"loss": values, "chosen": values, "rejected": values}
    counts = torch.tensor([True, True, False])
    figures.add(named, counts, {"chosen": chosen, "rejected": ~chosen})
    assert figures.drain(None) == ({"loss": 3.0, "chosen": 1.0, "rejected": 5.0}, 2)
    figures.add(named, torch.tensor([True, False, False]), {"chosen": chosen, "rejected": ~chosen})
    assert figures.drain(None) == ({"loss": 1.0, "chosen": 1.0}, 1)
