"""Data that are streamed, on two CPU ranks with a LoRA under ZeRO-3: killed, and resumed to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.engine import Engine
from tests.train.launching import lines, losses, make_run, require_resumed, said

pytestmark = pytest.mark.parts(6, at=0)


@pytest.fixture(scope="module")
def streams(root: Path, demo: Path, engine: Engine) -> Path:
    """A run that nothing disturbs, and one that is killed and goes on."""
    folder = root / "streams"
    job: dict[str, Any] = {
        "zero": {"stage": 3},
        "method": "lora",
        "streaming": True,
        "shuffle_buffer": 20,
        "max_steps": 4,
        "save_steps": 2,
        "resume": "auto",
        "val_split": 5,
        "packing": True,
        "grad_accum": 2,
        "dataloader_num_workers": 2,
    }
    engine.train(make_run(folder / "whole", demo, **job, preflight=True))
    cut = make_run(folder / "cut", demo, **job)
    engine.train(cut, kill_at=3)
    engine.train(cut)
    return folder


def test_a_run_that_was_killed_ends_as_the_undisturbed_one(streams: Path) -> None:
    require_resumed(streams / "cut", streams / "whole")
    whole = losses(streams / "whole")
    assert list(whole) == list(range(1, 5))
    assert len(set(whole.values())) == 4


def test_the_log_counts_what_was_read_over_a_resume(streams: Path) -> None:
    last = [said(streams / name).rpartition("\nstream: ")[2].splitlines()[0] for name in ("whole", "cut")]
    assert last[0] == last[1]
    assert "longer than seq_len 64, which were truncated" in said(streams / "cut")


def test_ranks_read_samples_of_their_own(streams: Path) -> None:
    states = [json.loads(path.read_text()) for path in sorted(streams.glob("whole/checkpoint-4/stream-*.json"))]
    assert [state["readers"] for state in states] == [4, 4]
    parts = [place["rows"][0][0] % 4 for state in states for place in state["places"].values()]
    assert parts == [0, 1, 2, 3]


def test_the_heaviest_micro_batch_has_the_longest_possible_rows(streams: Path) -> None:
    checks = json.loads((streams / "whole" / "preflight.json").read_text())["checks"]
    heaviest = next(check for check in checks if check["name"] == "worst batch")
    assert heaviest["text"].startswith("2 × 64 tokens")


def test_the_epoch_goes_on_after_a_resume(streams: Path) -> None:
    assert lines(streams / "cut")[-1]["epoch"] == lines(streams / "whole")[-1]["epoch"] == 1.0
