"""A step whose gradients are not finite: which rank, pass and micro-batch did it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.monitor.metrics import read_jsonl
from dstrain.train.parts.step_watch import Evidence
from tests.train.engine import Engine
from tests.train.launching import codes, lines, make_run, said

pytestmark = pytest.mark.parts(6, at=1)


class Words:
    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def message(*losses: float, masked: int = 0) -> str:
    evidence, labels = Evidence(), torch.ones(2, 3, dtype=torch.long)
    labels[:masked] = -100
    for number, loss in enumerate(losses):
        evidence.note(torch.tensor(loss), torch.full((2, 3), number), labels)
    (finding,) = evidence.findings(7, Words(), None)
    return finding.message


def test_the_first_loss_that_is_not_finite_names_its_micro_batch_and_rows() -> None:
    text = message(1.0, float("nan"), float("inf"), masked=1)
    assert text.startswith("step 7: gradients stopped being finite in the forward pass of micro-batch 2 of 3 on rank 0")
    assert "2 rows, 1 of them without labels): '1 1 1', '1 1 1'" in text


def test_finite_losses_leave_the_backward_pass_and_the_largest_loss_is_the_suspect() -> None:
    text = message(1.0, 3e4, 2.0)
    assert "in a backward pass" in text
    assert "micro-batch 2 of 3 on rank 0 (loss 3e+04" in text


def test_a_step_without_micro_batches_says_nothing() -> None:
    assert Evidence().findings(1, Words(), None) == []


@pytest.fixture(scope="module")
def poisoned(root: Path, demo: Path, engine: Engine) -> Path:
    """A run of which rank 1 has a bad batch in step 2."""
    run = make_run(root / "poisoned", demo, max_steps=4, grad_accum=2, save_steps=3)
    settings = {"cause": "NaN in a batch", "onset": 2, "size": 0.0, "on_rank": 1}
    (run / "injection.json").write_text(json.dumps(settings))
    found = engine.run("benchmarks.health_exam.rank", run, log=Path(f"{run}.log"))
    Path(f"{run}.codes").write_text(f"{found}\n")
    return run


def told(run: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = read_jsonl(run / "health.jsonl")
    return [line for line in lines if line["rule"] == "nonfinite_step"]


def test_two_ranks_name_the_one_whose_forward_pass_broke_once(poisoned: Path) -> None:
    assert codes(poisoned) == [[0, 0]]
    (step,) = told(poisoned)
    assert (step["step"], step["rank"]) == (2, 1)
    assert "in the forward pass of micro-batch 1 of 2 on rank 1" in step["message"]
    assert f"WARNING: {step['message']}" in said(poisoned)


def test_the_loss_is_finite_again_after_the_step_that_was_skipped(poisoned: Path) -> None:
    assert [window["loss"] is None for window in lines(poisoned)] == [False, True, False, False]


def test_the_time_of_the_search_and_of_a_checkpoint_is_in_no_step(poisoned: Path) -> None:
    assert ["aside_s" in window for window in lines(poisoned)] == [False, False, True, True]  # after steps 2 and 3


def test_windows_have_the_forward_time_of_each_rank_and_that_of_a_checkpoint(poisoned: Path) -> None:
    windows = lines(poisoned)
    assert all(len(window["forward_s_per_token_by_rank"]) == 2 for window in windows)
    assert all(0 < seconds < 1 for window in windows for seconds in window["forward_s_per_token_by_rank"])
    assert [window["step"] for window in windows if window.get("checkpoint_s", 0) > 0] == [4]
    assert 0 < windows[-1]["checkpoint_share"] < 1
