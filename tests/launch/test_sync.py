"""Training over real hosts without a file system in common: `run --sync`."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dstrain.rundir import is_whole
from tests.launch.hosts import ROOT, Job
from tests.launch.network import Network

pytestmark = pytest.mark.cluster


def job_of(network: Network, demo: Path, folder: Path, *, stage: int) -> Job:
    """Returns a job whose model and data lie in its own folder."""
    shutil.copytree(demo, folder / "demo")
    job = Job(network, folder / "demo", folder)
    config = json.loads((folder / "ds_config.json").read_text())
    config["zero_optimization"] |= {"stage": stage, "stage3_gather_16bit_weights_on_model_save": stage == 3}
    (folder / "ds_config.json").write_text(json.dumps(config))
    return job


@contextmanager
def apart(job: Job, *numbers: int, with_data: bool = True) -> Iterator[None]:
    """Gives hosts disks of their own for a job, with model and data as a user copies them, and without the checkout."""
    network = job.network
    with ExitStack() as stack:
        for number in numbers:
            for folder in (job.folder, ROOT / "dstrain"):
                subprocess.run(network.on(number, "mount", "-t", "tmpfs", "tmpfs", str(folder)), check=True, cwd="/")
                umount = network.on(number, "umount", "-l", str(folder))
                stack.callback(subprocess.run, umount, check=True, cwd="/")
            if with_data:
                pack = subprocess.run(["tar", "c", "demo"], cwd=job.folder, check=True, capture_output=True).stdout
                unpack = network.on(number, "tar", "x", "-C", str(job.folder))
                subprocess.run(unpack, check=True, cwd="/", input=pack)
        yield
    assert job.left_over(within_s=5) == []


def names(folder: Path) -> set[str]:
    """Returns the files of a checkpoint, but for the number of its step."""
    step = folder.name.rpartition("-")[2]
    return {
        str(path.relative_to(folder)).replace(f"step{step}", "stepN") for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.parts(6, at=4)
def test_a_run_is_killed_and_goes_on_with_another_host_in_place_of_one(usual: Job, demo: Path, tmp_path: Path) -> None:
    job = job_of(usual.network, demo, tmp_path / "job", stage=2)
    with apart(job, 1, 2):
        process = job.start("--sync")
        step = job.wait_for_checkpoint(process)
        job.kill(1, " -u -m dstrain.train")
        ended = job.end_of(process)
        assert ended.code == 1
        assert "copied the run directory and dstrain to node1" in ended.said
        assert "rank 1 on node1 failed first" in ended.said
        last = [at for at, folder in job.place.checkpoints() if is_whole(folder)][-1]
        (job.folder / "hostfile").write_text("node0 slots=1\nnode2 slots=1\n")
        again = job.call("run", "--sync", "--set", "resume=auto", "--set", f"max_steps={last + 4}")
    assert again.code == 0, again.said
    assert f"resuming from checkpoint-{last}" in again.said
    assert last >= step
    assert max(job.losses()) == last + 4
    expected = usual.losses()
    assert job.losses() == pytest.approx({at: expected[at] for at in job.losses()}, rel=1e-5)
    assert names(job.place.path / f"checkpoint-{last + 4}") == names(usual.place.path / "checkpoint-32")
    assert len(list(job.place.logs.glob("*_rank1.log"))) == 2


@pytest.mark.parts(6, at=5)
def test_zero_3_from_a_machine_without_ranks_brings_everything_there(usual: Job, demo: Path, tmp_path: Path) -> None:
    job = job_of(usual.network, demo, tmp_path / "job", stage=3)
    with apart(job, 0, 1):
        done = job.call("run", "--sync", "--set", "max_steps=6", head=2)
        assert done.code == 0, done.said
        again = job.call("run", "--sync", "--set", "max_steps=8", "--set", "resume=auto", head=2)
        assert again.code == 0, again.said
    assert "resuming from checkpoint-6" in again.said
    expected = usual.losses()
    assert job.losses() == pytest.approx({at: expected[at] for at in range(1, 9)}, rel=1e-4)
    assert is_whole(job.place.path / "checkpoint-8")
    assert len(list((job.place.path / "checkpoint-8").glob("global_step8/*_states.pt"))) == 4
    assert names(job.place.final) >= {"model.safetensors", "config.json", "tokenizer.json"}
    assert json.loads(job.place.summary.read_text())["steps"] == 8
    assert {path.name.split("_")[1] for path in job.place.logs.glob("*_rank?.log")} == {"rank0.log", "rank1.log"}


def test_data_that_is_not_there_is_told_before_anything_starts(network: Network, demo: Path, tmp_path: Path) -> None:
    job = job_of(network, demo, tmp_path / "job", stage=2)
    with apart(job, 1, with_data=False):
        refused = job.call("run", "--sync")
    assert refused.code == 5
    assert f"node1: {job.folder}/demo/train.jsonl cannot be read" in refused.said
    assert "to the same paths" in refused.said
