"""Keys of the job that nothing reads, and values that make no sense: each row of the tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrain.config import jsonc
from dstrain.config.lint.engine import check
from dstrain.config.lint.rule import Subject
from dstrain.config.lint.rules.jobs import ODD as ODD_ROWS
from dstrain.config.lint.rules.jobs import READ_WITH
from dstrain.findings import Finding
from dstrain.job.file import read_job

UNREAD = {
    "dpo": ("{beta: 0.2}", "task: dpo"),
    "loss_on": ("all", "task: sft"),
    "system": ("Be short.", "task: sft"),
    "thinking": ("off", "task: sft"),
    "eval_strategy": ("epoch", "eval_data: b.jsonl"),
    "eval_on_start": ("true", "eval_data: b.jsonl"),
    "eval_micro_batch": ("4", "val_split: 0.1"),
    "eval_steps": ("5", "eval_strategy: steps"),
    "lora": ("{rank: 4}", "method: lora"),
    "shuffle_buffer": ("5", "streaming: true"),
    "stopping_strategy": ("all_exhausted", "data: [{path: a.jsonl, weight: 1}]"),
    "muon_learning_rate": ("0.01", "optimizer: muon"),
    "torch_compile_backend": ("aot_eager", "torch_compile: true"),
    "warmup_ratio": ("0.1", "num_train_epochs: 1"),
    "early_stopping_threshold": ("0.1", "early_stopping: 2"),
}
"""Key → its value, and the line with which it is read."""
WITHOUT = {
    **dict.fromkeys(("loss_on", "system", "thinking"), "task: pretrain"),
    "eval_steps": "eval_strategy: epoch",
    "warmup_ratio": "warmup_steps: 5",
}
"""Key → the line with which it is not read, where it is read without."""
ODD = {
    "warmup_steps": ("warmup_steps: 50", "max_steps: 10", "max_steps: 100"),
    "new_tokens": ("new_tokens: [<a>, <a>]", "seed: 1", None),
    "samples.max_new_tokens": ("samples: {prompts: [a], max_new_tokens: 999999}", "seq_len: 64", "seq_len: 1000000"),
    "min_pixels": ("min_pixels: 5000", "max_pixels: 4096", "max_pixels: 5000"),
    "learning_rate": ("learning_rate: 5", "seed: 1", None),
}
"""Key → its line, a line with which it makes no sense, and one with which it does."""


def _found(folder: Path, rule: str, *lines: str) -> list[Finding]:
    (folder / "job.yaml").write_text("\n".join(("model: m", "output_dir: o", *lines)) + "\n")
    document = jsonc.read("{}", "ds_config.json")
    job = read_job(folder / "job.yaml")
    return [one for one in check(Subject(document=document, is_trainers=True, job=job)) if one.rule == rule]


def test_the_cases_are_those_of_the_tables() -> None:
    assert list(READ_WITH) == list(UNREAD)
    assert list(ODD_ROWS) == list(ODD)


@pytest.mark.parametrize("key", UNREAD)
def test_a_key_that_nothing_reads_is_told_in_its_line(tmp_path: Path, key: str) -> None:
    value, needed = UNREAD[key]
    found = _found(tmp_path, "DS907", WITHOUT.get(key, "seed: 1"), f"{key}: {value}")
    (said,) = [one for one in found if one.problem.startswith(f"{key} is ")]
    assert (said.place.line, said.severity) == (4, "warning")
    assert said.problem.endswith(READ_WITH[key][0])
    assert _found(tmp_path, "DS907", needed, f"{key}: {value}") == []


@pytest.mark.parametrize("key", ODD)
def test_a_value_that_makes_no_sense_is_told_in_its_line(tmp_path: Path, key: str) -> None:
    line, odd, plain = ODD[key]
    (said,) = _found(tmp_path, "DS912", odd, line)
    assert (said.place.line, said.severity) == (4, "warning")
    assert said.problem.startswith(f"{key} is ")
    assert _found(tmp_path, "DS912", *([plain, line] if plain else [odd])) == []
