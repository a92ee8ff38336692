"""A real SLURM on this machine: what an allocation looks like, and how the script of `dstrain script slurm` behaves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.slurm import KILL_WAIT_S, Slurm

pytestmark = [pytest.mark.cluster, pytest.mark.parts(2)]

ROOT = Path(__file__).parents[2]
TRAINING = """\
#!/bin/bash
# Stands for `python -m dstrain.cli run`: it is told to save and leaves with 75, and when it is started again it ends.
echo "$SLURM_JOB_ID ${SLURM_ARRAY_TASK_ID:--} ${SLURM_RESTART_COUNT:-0} $SRUN_CPUS_PER_TASK $*" >>{folder}/starts
[ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || exit 0
leave() { sleep 1; kill "$agents" 2>/dev/null; exit 75; }
trap leave USR1 TERM
srun --ntasks-per-node=1 bash -c 'trap "exit 75" TERM; touch {folder}/up; while :; do sleep 0.1; done' &
agents=$!
wait "$agents"
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job file, and a program in place of Python."""
    (tmp_path / "job.yaml").write_text("model: a/b\ndata: a/c\noutput_dir: out\n")
    program = tmp_path / "python"
    program.write_text(TRAINING.replace("{folder}", str(tmp_path)))
    program.chmod(0o755)
    return tmp_path / "job.yaml"


def script(job: Path, *words: str) -> Path:
    """Returns the script that `dstrain script slurm` writes for two nodes of this cluster."""
    line = [sys.executable, "-m", "dstrain.cli", "script", "slurm", str(job), "--nodes", "2", "--gpus", "4"]
    more = ["--cpus", "2", "--time", "10m", "--partition", "low", "--python", str(job.parent / "python")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*line, *more, *words], check=True, capture_output=True, env=environment)
    return job.with_suffix(".sbatch")


def starts(job: Path) -> list[list[str]]:
    """Returns the words of each start: job, task, restarts, cores, and what was typed."""
    file = job.parent / "starts"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_start(job: Path) -> None:
    """Waits until the program of a job runs on its nodes."""
    end = time.monotonic() + 20
    while not (job.parent / "up").exists():
        assert time.monotonic() < end, starts(job)
        time.sleep(0.1)


def test_srun_reaches_both_nodes(slurm: Slurm) -> None:
    done = slurm.run("srun", "-N2", "bash", "-c", "echo $SLURMD_NODENAME $SLURM_PROCID $(getent hosts n1)")
    assert sorted(done.stdout.splitlines()) == ["n0 0 127.0.0.1 n1", "n1 1 127.0.0.1 n1"], done.stderr


def test_an_allocation_is_a_hostfile(slurm: Slurm, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "dstrain.cli", "hostfile", "write", "--from", "slurm"]
    environment = {"PYTHONPATH": str(ROOT)}
    done = slurm.run("salloc", "-N2", "--gpus-per-node=2", *line, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hostfile").read_text() == "n0 slots=2\nn1 slots=2\n"


def test_unequal_nodes_have_the_slots_that_slurm_gives_them(slurm: Slurm, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "dstrain.cli", "hostfile", "write", "--from", "slurm"]
    done = slurm.run("salloc", "-N2", "--gpus=3", *line, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    slots = [line.split("=")[1] for line in (tmp_path / "hostfile").read_text().splitlines()]
    assert sorted(slots) == ["1", "2"]


def test_the_script_is_one_that_slurm_takes(slurm: Slurm, job: Path) -> None:
    done = slurm.run("sbatch", "--test-only", str(script(job)))
    assert done.returncode == 0, done.stderr
    assert "n[0-1]" in done.stderr


def test_a_job_that_is_told_to_save_is_queued_again_and_goes_on(slurm: Slurm, job: Path) -> None:
    number = slurm.submit(str(script(job, "--set", "learning_rate=1e-3")))
    wait_for_start(job)
    slurm.run("scancel", "--signal=USR1", "--batch", str(number))  # as --signal=B:USR1 does near the end of the time
    slurm.wait(number, "PENDING", timeout_s=30)
    slurm.hurry(number)
    slurm.wait(number, "COMPLETED", timeout_s=30)
    first, second = starts(job)
    assert slurm.field(number, "Restarts") == "1"
    assert first[3:] == second[3:]
    assert first[3] == "2"
    typed = " ".join(first[4:])
    assert typed == (
        f"-P -m dstrain.cli run {job} --master-port {20000 + number} --save-on-term"
        f" --set learning_rate=1e-3 --set resume=auto --set output_dir={job.parent}/out"
    )
    assert (job.parent / "out" / "logs" / f"slurm-{number}.out").is_file()


def test_a_preempted_job_saves_within_its_grace_and_is_queued_again(slurm: Slurm, job: Path) -> None:
    number = slurm.submit(str(script(job)))
    wait_for_start(job)
    other = slurm.submit("--partition=high", "-N2", "--gpus-per-node=2", "--wrap=sleep 1", cwd=job.parent)
    slurm.wait(number, "PENDING", timeout_s=40)
    assert slurm.field(number, "Restarts") == "1"
    slurm.wait(other, "COMPLETED", timeout_s=30)
    slurm.hurry(number)
    slurm.wait(number, "COMPLETED", timeout_s=30)
    assert len(starts(job)) == 2


@pytest.mark.usefixtures("slurm")  # where there can be one, there can be another
def test_a_site_that_sends_the_users_signal_has_the_same(tmp_path_factory: pytest.TempPathFactory, job: Path) -> None:
    slurm = Slurm(tmp_path_factory.mktemp("slurm"), grace_s=60, user_signal=True)
    try:
        slurm.up()
        number = slurm.submit(str(script(job)))
        wait_for_start(job)
        slurm.submit("--partition=high", "-N2", "--gpus-per-node=2", "--wrap=sleep 1", cwd=job.parent)
        slurm.wait(number, "PENDING", timeout_s=40)
        assert slurm.field(number, "Restarts") == "1"
    finally:
        slurm.down()


def test_a_job_whose_time_runs_out_saves_before_and_is_queued_again(slurm: Slurm, job: Path) -> None:
    number = slurm.submit("--time=1", "--signal=B:USR1@50", str(script(job)))  # a minute is the least that Slurm gives
    wait_for_start(job)
    slurm.wait(number, "PENDING", timeout_s=60)
    assert slurm.field(number, "Restarts") == "1"
    slurm.hurry(number)
    slurm.wait(number, "COMPLETED", timeout_s=30)


def test_a_cancelled_job_is_not_queued_again(slurm: Slurm, job: Path) -> None:
    number = slurm.submit(str(script(job)))
    wait_for_start(job)
    slurm.run("scancel", str(number))
    slurm.wait(number, "CANCELLED", timeout_s=KILL_WAIT_S + 20)
    assert slurm.field(number, "Restarts") == "0"
    assert len(starts(job)) == 1


def test_tasks_of_an_array_share_nothing_and_are_queued_again_one_by_one(slurm: Slurm, job: Path) -> None:
    array = slurm.submit("--array=0-1", "--nodes=1", str(script(job)))
    wait_for_start(job)
    tasks = [f"{array}_{task}" for task in (0, 1)]
    for task in tasks:
        slurm.wait(task, "RUNNING", timeout_s=20)
    while len(starts(job)) < 2:
        time.sleep(0.1)
    last = next(task for task in tasks if slurm.field(task, "JobId") == str(array))
    other = next(task for task in tasks if task != last)
    time.sleep(1)
    slurm.run("scancel", "--signal=USR1", "--batch", last)
    slurm.wait(last, "PENDING", timeout_s=30)
    assert (slurm.field(other, "JobState"), slurm.field(other, "Restarts")) == ("RUNNING", "0")
    slurm.run("scancel", other)
    slurm.hurry(last)
    slurm.wait(last, "COMPLETED", timeout_s=30)
    folders = {start[1]: start[-1] for start in starts(job)}
    assert folders == {str(task): f"output_dir={job.parent}/out/task-{task}" for task in (0, 1)}
    assert len({start[start.index("--master-port") + 1] for start in starts(job)}) == 2
