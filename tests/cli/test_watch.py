"""`dstrain status --watch`: a run that goes on meanwhile, on a terminal and piped, and runs that ended badly."""

from __future__ import annotations

import json
import os
import pty
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dstrain.launch.nodes.process_tree import look
from tests.cli.conftest import ROOT, Type
from tests.report.runs import collectives, gpu_run, judged, night

WATCH = (sys.executable, "-P", "-m", "dstrain.cli", "status", "--watch", "output", "--every", "0.1")


class Training:
    """The recorded run, as if this process trained it: its lines come one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = night(folder)
        (folder / "summary.json").unlink()
        self.lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("")
        (folder / "restarts.jsonl").unlink()
        own = look(os.getpid())
        assert own is not None
        self.state = json.loads((folder / "state.json").read_text()) | {"host": socket.gethostname(), "began": 0}
        self.state |= {"pid": os.getpid(), "start_ticks": own.start, "exit_code": None}
        self.write(stage="running")

    def write(self, **state: Any) -> None:
        whole = self.folder / "state.part"
        whole.write_text(json.dumps(self.state | state))
        whole.rename(self.folder / "state.json")

    def log(self, lines: list[str]) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.writelines(lines)

    def warn(self, message: str) -> None:
        at = json.loads(self.lines[9])["time_s"] + 0.001
        told = {"rule": "loss_spike", "step": 10, "severity": "warning", "message": message, "time_s": at}
        (self.folder / "health.jsonl").write_text(json.dumps(told) + "\n")


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "output")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}


def test_piped_each_step_and_warning_is_a_line_until_the_run_ends(training: Training, tmp_path: Path) -> None:
    training.log(training.lines[:9])
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment(), "text": True}
    with subprocess.Popen(WATCH, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as watch:
        assert watch.stdout is not None
        first = watch.stdout.readline()
        assert first.startswith("output: running, 9 of 60 steps, for ")
        assert watch.stdout.readline().startswith("step 9/60, loss 7.")
        training.log([training.lines[9], training.lines[10][:30]])  # the second one is still being written
        training.warn("step 10: look")
        assert watch.stdout.readline().startswith("step 10/60, loss 6.")
        assert watch.stdout.readline() == "WARNING: step 10: look\n"
        training.log([training.lines[10][30:], *training.lines[11:16]])
        rest = [watch.stdout.readline() for _ in range(6)]
        assert [line.split(",")[0] for line in rest] == [*(f"step {step}/60" for step in range(11, 16)), "step 15/60"]
        assert re.search(r"tokens/s, 0\.\d\d s a step", rest[0])
        assert rest[4].endswith(" left\n")
        assert rest[-1].startswith("step 15/60, evaluation loss 6.")
        training.write(stage="failed", exit_code=1)
        out, err = watch.communicate(timeout=30)
    assert (watch.returncode, err) == (1, "")
    assert re.fullmatch(r"output: failed, 15 of 60 steps, after .*, exit code 1\n", out)


def test_on_a_terminal_the_view_is_drawn_again_until_the_run_ends(training: Training, tmp_path: Path) -> None:
    training.log(training.lines[:12])
    ours, theirs = pty.openpty()
    watch = subprocess.Popen(WATCH, stdout=theirs, stderr=theirs, cwd=tmp_path, env=environment())
    os.close(theirs)
    seen = _read_until(ours, "12 of 60 steps")
    training.warn("step 10: look")
    seen += _read_until(ours, "loss_spike: step 10: look")
    training.log(training.lines[12:])
    training.write(stage="ended", exit_code=0)
    seen += _read_until(ours, "ended, 60 of 60 steps")
    assert watch.wait(timeout=30) == 0
    os.close(ours)
    assert "\x1b[" in seen
    assert "no rule was broken" in seen
    assert re.search(r"loss +[▁▂▃▄▅▆▇█]{12} \d\.\d{4}", seen)
    assert "20 %" in seen
    assert "of RAM in the fullest rank" in seen


def _read_until(terminal: int, text: str) -> str:
    """Returns the output of a terminal up to a text, which must appear within 30 seconds."""
    seen, deadline = "", time.monotonic() + 30
    while text not in seen:
        assert time.monotonic() < deadline, seen
        seen += os.read(terminal, 65536).decode(errors="replace")
    return seen


def test_memory_and_speed_stand_beside_the_plan(dstrain: Type, tmp_path: Path) -> None:
    gpu_run(tmp_path / "output", slower=2)
    done = dstrain("status", "--watch")
    assert (done.returncode, done.stderr) == (0, "")
    _, step, _ = done.stdout.splitlines()
    assert "(-50 % of the plan)" in step
    assert "peak 62.2 GiB" in step


def test_the_checks_the_first_steps_and_collectives_are_shown(dstrain: Type, tmp_path: Path) -> None:
    judged(gpu_run(tmp_path / "output", slower=1.5, waits=1 / 3, more=collectives(least=2.0)))
    (tmp_path / "output" / "summary.json").write_text(json.dumps({"steps": 40}))
    done = dstrain("status", "--watch", "output")
    assert "first steps: after step 20: waiting for data" in done.stdout
    assert "% in collectives (" in done.stdout


def test_a_run_that_was_killed_is_told_and_is_a_failure(dstrain: Type, tmp_path: Path) -> None:
    folder = night(tmp_path / "output")
    state = json.loads((folder / "state.json").read_text())
    gone = state | {"stage": "running", "host": socket.gethostname(), "start_ticks": 1, "exit_code": None}
    (folder / "state.json").write_text(json.dumps(gone))
    done = dstrain("status", "--watch")
    assert done.returncode == 1
    assert "gone: `dstrain run` was killed" in done.stdout
