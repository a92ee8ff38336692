"""The check of saving where a whole checkpoint is not written, or does not fit; the rest is in test_preflight.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dstrain.choices import Interval
from dstrain.errors import EnvironmentProblem
from dstrain.job.schema import Job
from dstrain.monitor.outcomes import Check, CheckName, Preflight
from dstrain.records import load_json
from dstrain.rundir import RunDir
from dstrain.train.checkpoints.checkpoints import Disk
from dstrain.train.preflight.checks import no_room, try_saving
from dstrain.train.rank import Rank
from dstrain.units import GIB, TIB
from tests.cli.test_doctor import Need
from tests.train.engine import Engine
from tests.train.launching import lines, make_run


def trainer(folder: Path, steps: int, **job: Any) -> Any:
    """Returns what the check asks of the Trainer of one rank, which trains one matrix without ZeRO."""
    model = torch.nn.Linear(64, 64)
    made = SimpleNamespace(
        job=Job(model="m", data="d", output_dir=str(folder), **job),
        run_dir=RunDir(folder),
        rank=Rank(index=0, world_size=1, local_index=0),
        disk=Disk(ranks=(0,)),
        group=None,
        wait=lambda: None,
        is_adapter=False,
        state=SimpleNamespace(max_steps=steps, save_steps=10, num_train_epochs=3),
        model_wrapped=SimpleNamespace(optimizer=torch.optim.SGD(model.parameters()), parameters=model.parameters),
    )
    made.write_parts = lambda name: torch.save(model.state_dict(), Path(name) / "weights.pt")
    return made


def found(folder: Path, steps: int = 100, *, planned: int | None = None, left_s: float = 60.0, **job: Any) -> Check:
    made = try_saving(trainer(folder, steps, **job), planned_bytes=planned, left_s=left_s, step_s=1e-4)
    assert list(folder.iterdir()) == []
    return made


def test_a_checkpoint_that_takes_too_long_is_told_by_the_measured_speed(tmp_path: Path) -> None:
    made = found(tmp_path, planned=1 * GIB, left_s=0.01, save_total_limit=1)
    assert made.text.startswith("1 rank wrote ")
    assert "a checkpoint of 1.00 GiB takes at least" in made.text
    assert "which is too long to try" in made.text
    rate, save_s = made.figures["bytes_per_s"], made.figures["save_s"]
    assert isinstance(rate, float)
    assert save_s == pytest.approx(GIB / rate)
    assert made.figures["written_bytes"] == 0


def most_of_the_disk(folder: Path) -> int:
    """Returns bytes of which a checkpoint fits on the disk, and two do not."""
    return shutil.disk_usage(folder).free * 2 // 3


def test_later_checkpoints_that_do_not_fit_are_told_and_the_run_goes_on(tmp_path: Path) -> None:
    made = found(tmp_path, planned=most_of_the_disk(tmp_path), save_total_limit=2)
    assert (made.passed, no_room(trainer(tmp_path, 100), made)) == (False, None)
    assert re.search(
        "; but 3 checkpoints that exist at once take .*, and .* are free on the disk of rank 0: lower save_total",
        made.text,
    )


def test_a_run_with_fewer_checkpoints_needs_room_for_these(tmp_path: Path) -> None:
    planned = most_of_the_disk(tmp_path)
    assert "; but 10 checkpoints" in found(tmp_path, planned=planned, save_total_limit=None).text
    assert "; but 2 checkpoints" in found(tmp_path, 11, planned=planned).text
    assert found(tmp_path, 10, planned=planned).passed
    by_epoch = found(tmp_path, 10, planned=planned, save_total_limit=9, save_strategy=Interval.EPOCH)
    assert "; but 3 checkpoints" in by_epoch.text


def test_the_first_checkpoint_without_room_is_an_error_that_names_both_sizes(tmp_path: Path) -> None:
    made = found(tmp_path, 10, planned=500 * TIB)
    assert not made.passed
    error = no_room(trainer(tmp_path, 10), made)
    assert error is not None
    assert made.text in error.problem
    assert made.text.startswith("one checkpoint takes 500.0 TiB, and ")
    assert "save_only_model: true" in (error.hint or "")
    weights_only = no_room(trainer(tmp_path, 10, save_only_model=True), made)
    assert weights_only is not None
    assert "save_only_model" not in (weights_only.hint or "")


@pytest.fixture
def small_disk(need: Need, tmp_path: Path) -> Iterator[Path]:
    """A file system with room for the files of a start, and not for a checkpoint of the demo's model."""
    need(os.geteuid() == 0, "a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    need(done.returncode == 0, "a small disk needs the right to mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_two_ranks_that_cannot_save_end_before_the_first_step(small_disk: Path, demo: Path, engine: Engine) -> None:
    run = make_run(small_disk / "run", demo, preflight=True, save_steps=1)
    codes = engine.run("dstrain.train", run, log=small_disk.parent / "log")
    log = (small_disk.parent / "log.0").read_text()
    assert codes == [EnvironmentProblem.exit_code] * 2, log[-3000:]
    assert f"no checkpoint can be written to {run}: one checkpoint takes " in log
    assert "Traceback" not in log
    assert not lines(run)
    (saving,) = [one for one in load_json(Preflight, run / "preflight.json").checks if one.name is CheckName.SAVING]
    assert saving.passed is False
    assert saving.text.startswith("one checkpoint takes ")


def test_a_small_checkpoint_is_written_and_its_share_of_the_run_told(tmp_path: Path) -> None:
    made = found(tmp_path)
    assert made.passed
    assert made.text.startswith("a checkpoint of ")
    assert "was written and removed in" in made.text
    assert "; all 10 take " in made.text  # of 10 ms of steps
    written = made.figures["written_bytes"]
    assert isinstance(written, float)
    assert written > 4 * 64 * 64


def test_a_folder_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="no checkpoint can be written: rank 0: "):
        try_saving(trainer(tmp_path / "file", 10), planned_bytes=None, left_s=60.0, step_s=None)
