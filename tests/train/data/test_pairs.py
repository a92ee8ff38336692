"""Pairs in tokens: only the last answer counts, prompts stay equal, and what is dropped is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from dstrain.choices import OnBadRow, Task
from dstrain.errors import InvalidConfig
from dstrain.job.schema import Job
from dstrain.train.data.pairs import PAIRS
from dstrain.train.data.prepare import PreparedData, prepare
from dstrain.train.demo import make_tokenizer

TALK = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And 3 + 3?"},
]
PAIR = {"prompt": TALK, "chosen": "Six, of course.", "rejected": "Seven."}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(["What is 2 + 2? And 3 + 3? Four. Six, of course. Seven."])


def prepared(folder: Path, tokenizer: Any, *rows: Any, seq_len: int = 512, **options: Any) -> PreparedData:
    file = folder / "pairs.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    job = Job(model="none", output_dir="none", task=Task.DPO, data=str(file), seq_len=seq_len, **options)
    return prepare(job, tokenizer, training=True, form=PAIRS)


def learned(sequence: Any) -> list[int]:
    return [label for label in sequence["labels"] if label != -100]


def test_only_the_last_answer_counts_and_the_prompt_is_that_of_the_template(tmp_path: Path, tokenizer: Any) -> None:
    (sample,) = prepared(tmp_path, tokenizer, PAIR).dataset
    prompt = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False)
    for side, answer in zip(sample["sequences"], (PAIR["chosen"], PAIR["rejected"]), strict=True):
        assert tokenizer.decode(learned(side)) == f"{answer}<|im_end|>"
        assert tokenizer.decode(side["input_ids"]) == f"{prompt}{answer}<|im_end|>\n"


def test_both_sides_are_cut_at_their_end(tmp_path: Path, tokenizer: Any) -> None:
    (whole,) = prepared(tmp_path, tokenizer, PAIR).dataset
    before = len(whole["sequences"][0]["labels"]) - len(learned(whole["sequences"][0])) - 1
    data = prepared(tmp_path, tokenizer, PAIR, seq_len=before + 2)
    (cut,) = data.dataset
    assert [len(side["input_ids"]) for side in cut["sequences"]] == [before + 2] * 2
    assert [len(learned(side)) for side in cut["sequences"]] == [2, 2]
    assert cut["sequences"][0]["input_ids"][:before] == cut["sequences"][1]["input_ids"][:before]
    assert data.notes[1].endswith(f"longer than seq_len {before + 2} and truncated: 1 sample (100.0%)")


def test_pairs_without_anything_to_learn_are_dropped_and_said(tmp_path: Path, tokenizer: Any) -> None:
    rows = [PAIR, PAIR | {"rejected": PAIR["chosen"]}, PAIR | {"rejected": ""}, PAIR | {"prompt": "Why? " * 200}]
    data = prepared(tmp_path, tokenizer, *rows, seq_len=128)
    assert len(data.dataset) == 2
    said = "\n".join(data.notes)
    assert "1 pair has equal answers, of which nothing can be learned" in said
    assert "1 answer of a pair is empty" in said
    assert "without a token to learn and dropped: 2 samples" in said


def test_a_pair_is_refused_whole_with_its_line(tmp_path: Path, tokenizer: Any) -> None:
    wrong = PAIR | {"rejected": 7}
    with pytest.raises(InvalidConfig, match=r"pairs.jsonl:2: rejected: is 7, not a text"):
        prepared(tmp_path, tokenizer, PAIR, wrong)
    data = prepared(tmp_path, tokenizer, PAIR, wrong, on_bad_row=OnBadRow.SKIP)
    assert len(data.dataset) == 1
    assert "1 unusable row was skipped" in "\n".join(data.notes)


def test_a_side_that_the_template_refuses_takes_the_other_one_along(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = "{% if 'Seven' in messages[-1].content %}{{ raise_exception('No sevens.') }}{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", refusing + tokenizer.chat_template)
    data = prepared(tmp_path, tokenizer, PAIR, PAIR | {"rejected": "Eight."}, on_bad_row=OnBadRow.SKIP)
    (sample,) = data.dataset
    assert tokenizer.decode(learned(sample["sequences"][1])) == "Eight.<|im_end|>"
    assert "No sevens." in "\n".join(data.notes)


def test_the_digest_changes_with_an_answer(tmp_path: Path, tokenizer: Any) -> None:
    assert prepared(tmp_path, tokenizer, PAIR).digest != prepared(tmp_path, tokenizer, PAIR | {"rejected": "8."}).digest
