"""Disks that not all ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.rundir import RunDir, is_whole
from dstrain.train.checkpoints.checkpoints import Disk, Written, choose, complete_part, number_of, shared

WRITTEN = Written(step=4, world_size=2, zero_stage=2, micro_batch=1, grad_accum=1, sp=1, tp=1, ep=1, data="")
ENVIRONMENT = {"DSTRAIN_RUN_ID": "0f3c-1"}


def checkpoint(folder: Path, *ranks: int) -> Path:
    made = folder / "checkpoint-4"
    (made / "global_step4").mkdir(parents=True)
    for rank in ranks:
        (made / "global_step4" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    return made


def test_only_a_copy_for_this_start_is_a_disk_apart(tmp_path: Path) -> None:
    place = RunDir(tmp_path)
    assert number_of(place, ENVIRONMENT) is None
    place.synced.write_text("0f3c 1")
    assert number_of(place, ENVIRONMENT) == 1
    assert number_of(place, {}) is None
    place.synced.write_text("77aa 1")
    assert number_of(place, ENVIRONMENT) is None


def test_one_rank_may_be_apart_too(tmp_path: Path) -> None:
    place = RunDir(tmp_path)
    assert shared(place, ENVIRONMENT, None) == Disk(ranks=(0,), start="0f3c")
    place.synced.write_text("0f3c 0")
    assert shared(place, ENVIRONMENT, None) == Disk(ranks=(0,), is_apart=True, start="0f3c")


def test_a_part_is_not_a_whole_checkpoint(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, 1)
    complete_part(made, WRITTEN, of_ranks=1, start="0f3c")
    assert not is_whole(made)
    with pytest.raises(InvalidConfig, match="not written to its end"):
        choose(RunDir(tmp_path), str(made), world_size=2)
    chosen = choose(RunDir(tmp_path), str(made), world_size=2, is_apart=True)
    assert chosen is not None
    assert chosen.step == 4


def test_a_part_without_its_shards_is_not_marked(tmp_path: Path) -> None:
    made = checkpoint(tmp_path)
    with pytest.raises(EnvironmentProblem, match="shards of only 0 of 1 ranks"):
        complete_part(made, WRITTEN, of_ranks=1, start="0f3c")
    assert not (made / "part.json").exists()
