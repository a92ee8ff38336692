"""Which checkpoints are whole, and which go."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.rundir import RunDir, is_whole, rotate
from dstrain.train.checkpoints.checkpoints import Written, begin, choose, complete, reads_universal
from dstrain.train.checkpoints.export import export


def written(step: int, *, ranks: int = 2, zero_stage: int = 2) -> Written:
    return Written(
        step=step, world_size=ranks, zero_stage=zero_stage, micro_batch=1, grad_accum=4, sp=1, tp=1, ep=1, data=""
    )


def make(folder: Path, step: int, *, whole: bool = True, ranks: int = 2, zero_stage: int = 2) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    shards = checkpoint / f"global_step{step}"
    shards.mkdir(parents=True)
    for rank in range(ranks):
        (shards / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"state")
    if whole:
        complete(checkpoint, written(step, ranks=ranks, zero_stage=zero_stage))
    return checkpoint


def test_auto_takes_the_newest_whole_one(tmp_path: Path) -> None:
    make(tmp_path, 9)
    make(tmp_path, 10)
    make(tmp_path, 11, whole=False)
    chosen = choose(RunDir(tmp_path), "auto", world_size=2)
    assert chosen is not None
    assert (chosen.checkpoint.name, chosen.step) == ("checkpoint-10", 10)
    assert RunDir(tmp_path).newest_checkpoint().skipped == (
        "checkpoint-11 was not written to its end (no complete.json)",
    )


def _truncate(checkpoint: Path) -> None:
    os.truncate(_shard(checkpoint), 3)


def _remove(checkpoint: Path) -> None:
    _shard(checkpoint).unlink()


def _empty_record(checkpoint: Path) -> None:
    (checkpoint / "complete.json").write_text("")


def _strange_record(checkpoint: Path) -> None:
    (checkpoint / "complete.json").write_text('{"step": "one"}')


def _shard(checkpoint: Path) -> Path:
    return checkpoint / f"global_step{checkpoint.name[11:]}" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize("harm", [_truncate, _remove, _empty_record, _strange_record])
def test_a_damaged_checkpoint_is_passed_over_and_refused_if_it_is_named(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    before, damaged = make(tmp_path, 9), make(tmp_path, 10)
    harm(damaged)
    chosen = choose(RunDir(tmp_path), "auto", world_size=2)
    assert chosen is not None
    assert chosen.checkpoint == before
    (skipped,) = RunDir(tmp_path).newest_checkpoint().skipped
    assert skipped.startswith("checkpoint-10 is damaged (")
    with pytest.raises(InvalidConfig, match=r"checkpoint-10 is damaged \("):
        choose(RunDir(tmp_path), str(damaged), world_size=2)


def test_a_run_begins_where_none_is_whole_and_with_never_in_any_case(tmp_path: Path) -> None:
    half = make(tmp_path, 1, whole=False)
    assert choose(RunDir(tmp_path), "auto", world_size=2) is None
    with pytest.raises(InvalidConfig, match="not written to its end"):
        choose(RunDir(tmp_path), str(half), world_size=2)
    make(tmp_path, 2)
    assert choose(RunDir(tmp_path), "never", world_size=2) is None


def test_another_number_of_ranks_is_refused_before_deepspeed_fails(tmp_path: Path) -> None:
    checkpoint = make(tmp_path, 1)
    with pytest.raises(InvalidConfig, match="written by 2 ranks and must be converted for 4") as caught:
        choose(RunDir(tmp_path), "auto", world_size=4)
    assert f"python -m dstrain.train.checkpoints.universal_checkpoint {checkpoint}" in str(caught.value.hint)


def test_another_number_of_ranks_goes_on_from_the_universal_copy(tmp_path: Path) -> None:
    checkpoint = make(tmp_path, 1)
    (checkpoint / "latest_universal").write_text("global_step1_universal")
    chosen = choose(RunDir(tmp_path), "auto", world_size=4)
    assert chosen is not None
    assert chosen.checkpoint == checkpoint
    assert reads_universal(checkpoint, world_size=4)
    assert not reads_universal(checkpoint, world_size=2)


def test_without_zero_any_number_of_ranks_goes_on(tmp_path: Path) -> None:
    checkpoint = make(tmp_path, 1, zero_stage=0)
    assert choose(RunDir(tmp_path), "auto", world_size=4) is not None
    assert not reads_universal(checkpoint, world_size=4)


def test_a_checkpoint_from_before_the_batch_was_written_down_still_loads(tmp_path: Path) -> None:
    checkpoint = make(tmp_path, 1)
    (checkpoint / "complete.json").write_text('{"step": 1, "world_size": 2, "zero_stage": 2}')
    assert choose(RunDir(tmp_path), "auto", world_size=2) is not None


def test_a_record_that_is_not_as_it_was_written_is_damaged(tmp_path: Path) -> None:
    record = make(tmp_path, 7) / "complete.json"
    text = record.read_text()
    for old, new in (('"grad_accum": 4', '"grad_accum": 5'), ('"world_size": 2', '"world_size": 3')):
        record.write_text(text.replace(old, new))
        assert RunDir(tmp_path).newest_checkpoint().skipped[0].startswith("checkpoint-7 is damaged (complete.json: it")


def test_a_missing_shard_leaves_a_checkpoint_unmarked(tmp_path: Path) -> None:
    checkpoint = make(tmp_path, 1, whole=False, ranks=1)
    with pytest.raises(EnvironmentProblem, match="shards of only 1 of 2 ranks"):
        complete(checkpoint, written(1))
    assert not is_whole(checkpoint)


def test_writing_over_an_old_checkpoint_unmarks_it_first(tmp_path: Path) -> None:
    checkpoint = make(tmp_path, 1)
    begin(checkpoint)
    assert not checkpoint.exists()


def test_a_universal_copy_goes_with_its_checkpoint(tmp_path: Path) -> None:
    copy = make(tmp_path, 1) / "global_step1_universal" / "zero"
    copy.mkdir(parents=True)
    make(tmp_path, 2)
    rotate(RunDir(tmp_path), 1)
    assert not copy.exists()


@pytest.mark.parametrize(
    ("steps", "not_whole", "limit", "left"),
    [
        ((1, 2, 3), "3", 1, [2, 3]),  # the newest whole one stays whatever the limit
        ((1, 2, 3), "3 truncated", 1, [2, 3]),  # a damaged one never pushes a whole one out
        ((1, 2, 3, 4), "4", 2, [2, 3, 4]),  # nor counts
        ((1, 2, 3), "1", 2, [2, 3]),  # a half-written one behind the newest whole one goes
        ((0, 1, 2, 3), "", None, [0, 1, 2, 3]),
    ],
)
def test_as_many_whole_ones_stay_as_may(
    tmp_path: Path, steps: tuple[int, ...], not_whole: str, limit: int | None, left: list[int]
) -> None:
    for step in steps:
        made = make(tmp_path, step, whole=not_whole != str(step))
        if not_whole == f"{step} truncated":
            _truncate(made)
    rotate(RunDir(tmp_path), limit)
    assert [step for step, _ in RunDir(tmp_path).checkpoints()] == left


def test_parts_of_weights_that_were_not_gathered_are_not_exported(tmp_path: Path) -> None:
    folder = make(tmp_path, 1)
    record = json.loads((folder / "complete.json").read_text())
    del record["crc32"]
    (folder / "complete.json").write_text(json.dumps(record | {"tp": 2}))
    with pytest.raises(InvalidConfig, match="only the parts of its weights") as caught:
        export(folder, tmp_path / "out")
    assert "stage3_gather_16bit_weights_on_model_save" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()
