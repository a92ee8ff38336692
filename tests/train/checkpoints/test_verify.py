"""Files of a checkpoint that are not as they were saved, and what becomes of the checkpoint."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping
from contextlib import closing
from itertools import cycle
from pathlib import Path

import pytest

from dstrain.errors import InvalidConfig
from dstrain.heartbeat import NO_VERIFY, Sender
from dstrain.rundir import RunDir, file_sizes, mark_whole, put_aside, unusable_checkpoint
from dstrain.train.checkpoints.checkpoints import Verification, checksum, choose
from dstrain.train.rank import Rank
from tests.train.checkpoints.damage import HARMS

RUN = {"DSTRAIN_RUN_ID": "4fa0"}
FILES = (
    *("latest", "model.safetensors", "trainer_state.json", "rng_state_0.pth", "rng_state_1.pth", "scheduler.pt"),
    *(f"global_step8/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)),
    "global_step8/mp_rank_00_model_states.pt",
)


def make(run_dir: Path, step: int = 8, *, has_checksums: bool = True) -> Path:
    folder = run_dir / f"checkpoint-{step}"
    for name in FILES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(5_000))
    sums = {name: checksum(folder / name) for name in file_sizes(folder)} if has_checksums else None
    record = {"step": step, "world_size": 2, "zero_stage": 2}
    mark_whole(folder, record if sums is None else record | {"checksums": sums})
    return folder


def verification(
    run_dir: Path, index: int, environment: Mapping[str, str], *, local: int | None = None
) -> Verification:
    rank = Rank(index=index, world_size=2, local_index=index if local is None else local)
    resume = choose(RunDir(run_dir), "auto", world_size=2)
    assert resume is not None
    return Verification(resume, RunDir(run_dir), rank, environment)


def verify(run_dir: Path, environment: Mapping[str, str] = RUN) -> None:
    """Verifies as two ranks of one node do."""
    sender = Sender({}, 0)
    with closing(sender._socket):
        for index in (0, 1):
            verification(run_dir, index, {"LOCAL_SIZE": "2", **environment}).run(sender)


@pytest.mark.parametrize(("name", "harm"), [*zip(FILES, cycle(HARMS.values()), strict=False)])
def test_every_change_of_any_file_is_noticed(tmp_path: Path, name: str, harm: Callable[[Path], None]) -> None:
    folder = make(tmp_path)
    verify(tmp_path)
    harm(folder / name)
    with pytest.raises(InvalidConfig, match="has another checksum than when it was saved"):
        verify(tmp_path)
    found = unusable_checkpoint(RunDir(tmp_path))
    assert found is not None
    assert (found[0].name, name in found[1]) == ("checkpoint-8", True)


def test_the_ranks_of_a_node_read_each_file_once(tmp_path: Path) -> None:
    make(tmp_path)
    shares = [list(verification(tmp_path, index, {"LOCAL_SIZE": "2"})._own) for index in (0, 1)]
    assert sorted(shares[0] + shares[1]) == sorted(FILES)
    assert min(map(len, shares)) >= 3


def test_each_node_reads_what_its_ranks_load_and_the_weights_for_other_programs_once(tmp_path: Path) -> None:
    make(tmp_path)
    shares = [set(verification(tmp_path, index, {"LOCAL_SIZE": "1"}, local=0)._own) for index in (0, 1)]
    shard = "global_step8/bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    assert shares[0] ^ shares[1] == {shard.format(0), shard.format(1), "model.safetensors"}


def test_a_checkpoint_of_an_earlier_version_is_loaded_and_said_not_to_be_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, has_checksums=False)
    verify(tmp_path)
    assert "checkpoint-8 has no checksums" in capsys.readouterr().err


def test_no_verify_is_said_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    HARMS["bit"](make(tmp_path) / "latest")
    verify(tmp_path, {NO_VERIFY: "1"})
    assert "note: --no-verify" in capsys.readouterr().err


def test_without_dstrain_run_the_rank_puts_it_aside(tmp_path: Path) -> None:
    make(tmp_path, 4)
    HARMS["bit"](make(tmp_path) / "latest")
    with pytest.raises(InvalidConfig):
        verify(tmp_path, {})
    assert (tmp_path / "checkpoint-8.damaged").is_dir()
    assert RunDir(tmp_path).newest_checkpoint().step == 4


def test_one_that_is_put_aside_twice_does_not_replace_the_first(tmp_path: Path) -> None:
    names = [put_aside(make(tmp_path)).name for _ in range(3)]
    assert names == ["checkpoint-8.damaged", "checkpoint-8.damaged1", "checkpoint-8.damaged2"]


class DeepSpeedEngine:
    """Has the name of what reads a checkpoint."""

    def load_checkpoint(self, error: BaseException) -> None:
        raise error


@pytest.mark.parametrize(
    ("error", "has_checksums", "is_noted"),
    [
        (pickle.UnpicklingError("invalid load key"), False, True),
        (pickle.UnpicklingError("invalid load key"), True, False),  # the files are right: the job is the cause
        (MemoryError(), False, False),
    ],
)
def test_a_checkpoint_that_is_not_verified_and_fails_to_load_is_noted(
    tmp_path: Path, error: BaseException, has_checksums: bool, is_noted: bool
) -> None:
    make(tmp_path, has_checksums=has_checksums)
    verified = verification(tmp_path, 0, RUN)
    with pytest.raises(type(error)) as caught:
        DeepSpeedEngine().load_checkpoint(error)
    verified.note_failed_load(caught.value)
    assert (unusable_checkpoint(RunDir(tmp_path)) is not None) == is_noted


def test_an_error_outside_of_loading_is_not_that_of_the_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, has_checksums=False)
    with pytest.raises(KeyError) as caught:
        raise KeyError("loss")
    verification(tmp_path, 0, RUN).note_failed_load(caught.value)
    assert unusable_checkpoint(RunDir(tmp_path)) is None


@pytest.mark.parametrize(
    "text", ["", "[]", '{"checkpoint": "../../etc", "why": "x"}', '{"checkpoint": "checkpoint-8"}']
)
def test_a_strange_note_names_no_checkpoint(tmp_path: Path, text: str) -> None:
    make(tmp_path)
    RunDir(tmp_path).unusable.write_text(text)
    assert unusable_checkpoint(RunDir(tmp_path)) is None


def test_the_record_has_the_checksum_of_every_file(tmp_path: Path) -> None:
    record = json.loads((make(tmp_path) / "complete.json").read_text())
    assert record["checksums"].keys() == record["files"].keys() == set(FILES)
