"""Training on a real SLURM: submitted, cancelled and preempted."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from dstrain.rundir import RunDir, is_whole
from tests.launch.hosts import DSTRAIN, ROOT, losses, write_job
from tests.launch.slurm import KILL_WAIT_S, Slurm

LONG = "save_steps=100000"


@pytest.fixture
def place(demo: Path, tmp_path: Path) -> RunDir:
    write_job(tmp_path, demo, interface="lo")
    return RunDir(tmp_path / "output")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def submit(slurm: Slurm, place: RunDir, *words: str) -> int:
    """Submits what `dstrain script slurm` writes, and returns the number of the job."""
    folder = place.path.parent
    line = [*DSTRAIN, "script", "slurm", "job.yaml", "--nodes", "2", "--gpus", "2", "--cpus", "1", "--time", "10m"]
    line += ["--partition", "low", *words]
    subprocess.run(line, cwd=folder, check=True, capture_output=True, env=environment())
    more = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return slurm.submit(str(folder / "job.sbatch"), cwd=folder, env=more)


def said(place: RunDir) -> str:
    """Returns what the job printed."""
    return "\n".join(path.read_text() for path in place.logs.glob("slurm-*.out"))


def by_hand(place: RunDir, *words: str) -> None:
    """Runs the same job on this machine, as two ranks."""
    folder = place.path.parent
    (folder / "hostfile").write_text("localhost slots=2\n")
    line = [*DSTRAIN, "run", "--set", "hostfile=hostfile", *words]
    done = subprocess.run(line, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def wait_for_steps(place: RunDir, number: int, timeout_s: float = 90) -> None:
    until = time.monotonic() + timeout_s
    while max(losses(place), default=0) < number:
        assert time.monotonic() < until, said(place)
        time.sleep(0.1)


def test_a_submitted_job_ends_with_the_loss_of_the_run_started_by_hand(slurm: Slurm, place: RunDir) -> None:
    number = submit(slurm, place, "--set", "max_steps=5")
    assert slurm.wait(number, "COMPLETED", "FAILED", timeout_s=120) == "COMPLETED", said(place)
    hand = RunDir(place.path.parent / "hand")
    by_hand(place, "--set", "max_steps=5", "--set", "output_dir=hand")
    assert losses(place) == pytest.approx(losses(hand), rel=1e-5)
    assert len(losses(place)) == 5


def test_a_cancelled_job_leaves_a_checkpoint_to_go_on_from(slurm: Slurm, place: RunDir) -> None:
    number = submit(slurm, place, "--set", LONG)
    wait_for_steps(place, 3)
    slurm.run("scancel", str(number))
    slurm.wait(number, "CANCELLED", timeout_s=KILL_WAIT_S + 30)
    until = time.monotonic() + KILL_WAIT_S + 10
    while not place.checkpoints() and time.monotonic() < until:
        time.sleep(0.2)
    time.sleep(1)
    ((step, folder),) = place.checkpoints()
    assert is_whole(folder), said(place)
    by_hand(place, "--set", f"max_steps={step + 2}", "--set", "resume=auto")
    assert max(losses(place)) == step + 2


def test_a_preempted_job_goes_on_where_it_was(slurm: Slurm, place: RunDir) -> None:
    number = submit(slurm, place, "--set", LONG, "--set", "max_steps=150")
    wait_for_steps(place, 3)
    other = slurm.submit("--partition=high", "-N2", "--gpus-per-node=2", "--wrap=sleep 1", cwd=place.path.parent)
    slurm.wait(number, "PENDING", timeout_s=80)
    ((step, folder),) = place.checkpoints()
    assert is_whole(folder), said(place)
    slurm.wait(other, "COMPLETED", timeout_s=30)
    slurm.hurry(number)
    assert slurm.wait(number, "COMPLETED", "FAILED", timeout_s=120) == "COMPLETED", said(place)
    assert f"going on from checkpoint-{step}" in said(place)
    assert max(losses(place)) == 150
