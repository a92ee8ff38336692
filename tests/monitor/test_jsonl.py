"""JSON lines that survive any end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dstrain.monitor.metrics import JsonlFile, current_steps, read_jsonl


def test_every_line_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "m.jsonl")
    file.append({"step": 1})
    file.append({"step": 2, "loss": float("nan")})
    lines = (tmp_path / "m.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1}, {"step": 2, "loss": None, "loss_nonfinite": "nan"}]


def test_a_line_that_a_kill_cut_short_stays_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    JsonlFile(path).append({"step": 2})
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    assert read_jsonl(tmp_path / "none") == []


def test_steps_that_a_resume_went_back_behind_are_superseded() -> None:
    records: list[dict[str, Any]] = [
        {"step": 1, "loss": 1},
        {"step": 2, "loss": 2},
        {"step": 3, "loss": 3},
        {"event": "resume", "from_step": 1},
        {"step": 2, "loss": 20},
        {"event": "resume", "from_step": 2},
    ]
    assert current_steps(records) == [{"step": 1, "loss": 1}, {"step": 2, "loss": 20}]
