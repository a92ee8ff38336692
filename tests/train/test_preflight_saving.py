"""The check of saving where a whole checkpoint is not written, or does not fit; the rest is in test_preflight.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dstrain.choices import Interval
from dstrain.errors import EnvironmentProblem
from dstrain.job.schema import Job
from dstrain.rundir import RunDir
from dstrain.train.checkpoints.node_storage import Disk
from dstrain.train.preflight.found import Found
from dstrain.train.preflight.saving import try_saving
from dstrain.train.rank import Rank
from dstrain.units import GIB, TIB


def trainer(folder: Path, steps: int, **job: Any) -> Any:
    """Returns what the check asks of the Trainer of one rank, which trains one matrix without ZeRO."""
    model = torch.nn.Linear(64, 64)
    made = SimpleNamespace(
        _job=Job(model="m", data="d", output_dir=str(folder), **job),
        _run_dir=RunDir(folder),
        _rank=Rank(index=0, world_size=1, local_index=0),
        _disk=Disk(ranks=(0,)),
        _group=None,
        _wait=lambda: None,
        _is_adapter=lambda: False,
        state=SimpleNamespace(max_steps=steps, save_steps=10, num_train_epochs=3),
        model_wrapped=SimpleNamespace(optimizer=torch.optim.SGD(model.parameters()), parameters=model.parameters),
    )
    made.write_parts = lambda name: torch.save(model.state_dict(), Path(name) / "weights.pt")
    return made


def found(folder: Path, steps: int = 100, *, planned: int | None = None, left_s: float = 60.0, **job: Any) -> Found:
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


def test_checkpoints_that_do_not_fit_together_are_told(tmp_path: Path) -> None:
    made = found(tmp_path, planned=500 * TIB, save_total_limit=2)
    assert not made.passed
    assert "the 3 checkpoints that exist at once need 1500 TiB: lower save_total_limit" in made.text


def test_a_run_with_fewer_checkpoints_needs_room_for_these(tmp_path: Path) -> None:
    assert "the 10 checkpoints" in found(tmp_path, planned=500 * TIB, save_total_limit=None).text
    assert "the 2 checkpoints" in found(tmp_path, 11, planned=500 * TIB).text
    assert "; but " in (text := found(tmp_path, 10, planned=500 * TIB).text)
    assert "are free, and it needs 500" in text
    by_epoch = found(tmp_path, 10, planned=500 * TIB, save_total_limit=9, save_strategy=Interval.EPOCH)
    assert "the 3 checkpoints" in by_epoch.text


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
