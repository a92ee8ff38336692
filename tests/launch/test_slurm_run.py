"""Training on a real SLURM: submitted, cancelled and preempted."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from dstrain.rundir import RunDir, is_whole
from tests.launch.hosts import DSTRAIN, PATIENCE_S, ROOT, Job, losses, write_job
from tests.launch.slurm import KILL_WAIT_S, Slurm

pytestmark = [pytest.mark.cluster, pytest.mark.parts(6, at=2)]

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


def wait_for_steps(place: RunDir, number: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while max(losses(place), default=0) < number:
        assert time.monotonic() < until, said(place)
        time.sleep(0.1)


def test_a_job_goes_on_where_it_was_preempted_and_cancelled_and_ends_with_the_losses_of_the_run_by_hand(
    slurm: Slurm, place: RunDir, usual: Job
) -> None:
    number = submit(slurm, place, "--set", LONG)
    wait_for_steps(place, 3)
    other = slurm.submit("--partition=high", "-N2", "--gpus-per-node=2", "--wrap=sleep 1", cwd=place.path.parent)
    slurm.wait(number, "PENDING", timeout_s=PATIENCE_S)
    ((step, folder),) = place.checkpoints()
    assert is_whole(folder), said(place)
    slurm.wait(other, "COMPLETED", timeout_s=PATIENCE_S)
    slurm.hurry(number)
    wait_for_steps(place, step + 3)
    assert f"resuming from checkpoint-{step}" in said(place)
    slurm.run("scancel", str(number))
    slurm.wait(number, "CANCELLED", timeout_s=KILL_WAIT_S + 30)
    until = time.monotonic() + KILL_WAIT_S + 10
    while len(place.checkpoints()) < 2 and time.monotonic() < until:
        time.sleep(0.2)
    time.sleep(1)
    _, (last, folder) = place.checkpoints()
    assert is_whole(folder), said(place)
    again = submit(slurm, place, "--force", "--set", f"max_steps={last + 2}")
    assert slurm.wait(again, "COMPLETED", "FAILED", timeout_s=PATIENCE_S) == "COMPLETED", said(place)
    assert f"resuming from checkpoint-{last}" in said(place)
    assert sorted(losses(place)) == list(range(1, last + 3))
    expected = usual.losses()
    alike = [at for at in losses(place) if at in expected]
    assert len(alike) > 3
    assert {at: losses(place)[at] for at in alike} == pytest.approx({at: expected[at] for at in alike}, rel=1e-5)
