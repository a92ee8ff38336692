"""What a run does that goes on from a checkpoint, by the numbers of GPUs, the batch, and the ZeRO stage."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from dstrain.choices import Optimizer
from dstrain.config.lint.rule import JobContext
from dstrain.errors import EnvironmentProblem, InvalidConfig, Place
from dstrain.job.file import JobFile
from dstrain.job.schema import Job
from dstrain.launch.prepare.resume import Resize, Resuming, check_resume, convert, decide, find, resuming
from dstrain.records import from_data

RECORD = {"step": 4, "world_size": 2, "zero_stage": 2, "micro_batch": 2, "grad_accum": 4}
TWO = {"zero_optimization": {"stage": 2}}


def checkpoint(folder: Path, step: int = 4, **record: Any) -> Path:
    made = folder / f"checkpoint-{step}"
    made.mkdir(parents=True)
    (made / "complete.json").write_text(json.dumps({**RECORD, "step": step, **record}))
    return made


def job(folder: Path, **changes: Any) -> Job:
    given = {"micro_batch": 2, "grad_accum": 4, "resume": "auto", **changes}
    return Job(model="m", output_dir=str(folder), **given)


def batch(found: Resuming) -> tuple[int, int]:
    return found.job.micro_batch, found.job.grad_accum


# The checkpoint


def test_a_run_that_begins_or_does_not_resume_is_left_as_it_is(tmp_path: Path) -> None:
    wanted = job(tmp_path)
    assert resuming(wanted, num_ranks=1) == Resuming(job=wanted)
    assert decide(None, TWO, num_ranks=1) is None
    checkpoint(tmp_path)
    wanted = job(tmp_path, resume="never")
    assert resuming(wanted, num_ranks=1) == Resuming(job=wanted)


def test_auto_is_the_newest_whole_one(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4)
    newest = checkpoint(tmp_path, 10)
    (checkpoint(tmp_path, 12) / "complete.json").unlink()
    found = resuming(job(tmp_path), num_ranks=2).saved
    assert found is not None
    assert found.folder == newest


def test_a_folder_of_another_run_is_taken(tmp_path: Path) -> None:
    other = checkpoint(tmp_path / "other", world_size=4)
    found = resuming(job(tmp_path / "mine", resume=str(other)), num_ranks=2)
    assert found.saved is not None
    assert found.saved.folder == other
    assert batch(found) == (2, 8)


def test_one_that_does_not_say_its_batch_had_that_of_the_job(tmp_path: Path) -> None:
    made = checkpoint(tmp_path)
    (made / "complete.json").write_text('{"step": 4, "world_size": 2, "zero_stage": 2}')
    assert batch(resuming(job(tmp_path, grad_accum=3), num_ranks=1)) == (2, 6)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"world_size": null, "zero_stage": 2}'])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    made = checkpoint(tmp_path)
    (made / "complete.json").write_text(text)
    with pytest.raises(InvalidConfig, match=r"checkpoint-4 is damaged \(complete\.json: "):
        check_resume(JobFile(job=job(tmp_path, resume=str(made)), locate=lambda keys: Place(file="x")), JobContext())
    anew = resuming(job(tmp_path), num_ranks=2)
    assert anew.saved is None
    assert anew.notes[0].startswith("warning: checkpoint-4 is damaged (complete.json: ")
    assert anew.notes[0].endswith("): training starts over")


def test_a_damaged_checkpoint_is_said_before_the_launch(tmp_path: Path) -> None:
    older = checkpoint(tmp_path, 4)
    checkpoint(tmp_path, 10, files={"latest": 13})
    found = resuming(job(tmp_path), num_ranks=2)
    assert found.saved is not None
    assert found.saved.folder == older
    assert found.notes == (
        "warning: checkpoint-10 is damaged (latest: No such file or directory): resuming from checkpoint-4",
    )


# The global batch


@pytest.mark.parametrize(
    ("saved", "micro_batch", "num_ranks", "kept"),
    [
        *((2, 2, ranks, kept) for ranks, kept in ((1, (2, 8)), (2, (2, 4)), (4, (2, 2)), (8, (2, 1)), (16, (1, 1)))),
        (3, 5, 2, (4, 3)),  # 24 samples a step, which 5 does not divide
        (8, 1, 2, (1, 32)),  # a micro-batch never grows
        (2, 1, 2, (1, 8)),
    ],
)
def test_the_global_batch_is_kept_on_any_number_of_ranks(
    tmp_path: Path, saved: int, micro_batch: int, num_ranks: int, kept: tuple[int, int]
) -> None:
    checkpoint(tmp_path, world_size=saved)
    assert batch(resuming(job(tmp_path, micro_batch=micro_batch), num_ranks=num_ranks)) == kept


def test_a_batch_that_the_ranks_cannot_share_names_the_numbers_that_can(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    with pytest.raises(InvalidConfig, match="global batch of 16; 3 GPUs cannot share it") as caught:
        resuming(job(tmp_path), num_ranks=3)
    assert caught.value.hint == "Numbers of GPUs that can: 1, 2, 4."


def test_ranks_that_share_rows_count_once(tmp_path: Path) -> None:
    checkpoint(tmp_path)  # 16 samples a step
    assert batch(resuming(job(tmp_path, sp=2), num_ranks=4)) == (2, 4)
    with pytest.raises(InvalidConfig) as caught:
        resuming(job(tmp_path, sp=2), num_ranks=6)
    assert caught.value.hint == "Numbers of GPUs that can: 2, 4, 8."


@pytest.mark.parametrize(
    ("record", "micro_batch", "num_ranks", "kept", "notes"),
    [
        ({}, 2, 2, (2, 4), ()),
        ({}, 2, 1, (2, 8), (" of 2 ranks on 1: global batch 16 kept by grad_accum 4 → 8",)),
        ({}, 2, 16, (1, 1), (" of 2 ranks on 16: global batch 16 kept by micro_batch 2 → 1, grad_accum 4 → 1",)),
        ({}, 4, 1, (4, 4), (" of 2 ranks on 1: global batch 16 kept",)),  # the job gives the same batch itself
        ({"world_size": 1, "grad_accum": 8}, 2, 1, (2, 8), (": global batch 16 kept by grad_accum 4 → 8",)),
    ],
)
def test_what_was_changed_is_said(
    tmp_path: Path, record: dict[str, Any], micro_batch: int, num_ranks: int, kept: tuple[int, int], notes: tuple[str]
) -> None:
    checkpoint(tmp_path, **record)
    found = resuming(job(tmp_path, micro_batch=micro_batch), num_ranks=num_ranks)
    assert (batch(found), found.notes) == (kept, tuple(f"resuming checkpoint-4{note}" for note in notes))
    error = found.explained(InvalidConfig("grad_accum is 8", hint="Write auto."))
    assert all(f"{note}\nWrite auto." in str(error) for note in notes)


# The shards


def saved(folder: Path, **record: Any) -> Any:
    checkpoint(folder, **record)
    return resuming(job(folder), num_ranks=2).saved


@pytest.mark.parametrize(("stage", "written"), [(2, 2), (1, 2), (2, 1), (3, 3), (0, 0)])
def test_another_number_of_ranks_needs_a_conversion_if_states_are_sharded(
    tmp_path: Path, stage: int, written: int
) -> None:
    found, config = saved(tmp_path, zero_stage=written), {"zero_optimization": {"stage": stage}}
    assert decide(found, config, num_ranks=2) is None
    resize = Resize(checkpoint=tmp_path / "checkpoint-4", from_ranks=2, to_ranks=1)
    assert decide(found, config, num_ranks=1) == (resize if stage else None)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(("was", "now"), [(YARN, None), (None, YARN), (YARN, YARN | {"factor": 8.0})])
def test_positions_stay_as_they_were_stretched(tmp_path: Path, was: Any, now: Any) -> None:
    checkpoint(tmp_path, rope_scaling=was)

    def resumed(scaling: Any) -> Resuming:
        data = {"model": "m", "output_dir": str(tmp_path), "resume": "auto", "rope_scaling": scaling}
        return resuming(from_data(Job, data, locate=str), num_ranks=2)

    assert resumed(was).saved is not None
    with pytest.raises(InvalidConfig, match="was trained with rope_scaling") as caught:
        resumed(now)
    hint = str(caught.value.hint)
    assert hint.startswith(f"Write rope_scaling: {json.dumps(was)}")
    assert ("start from its weights" in hint) == (was is None)  # which have no positions of their own yet


@pytest.mark.parametrize(("was", "now"), [("adamw_8bit", "adamw"), (None, "adamw_8bit")])
def test_states_are_not_those_of_another_optimizer(tmp_path: Path, was: str | None, now: str) -> None:
    record: dict[str, Any] = {"optimizer": was} if was else {}
    checkpoint(tmp_path, **record)
    with pytest.raises(InvalidConfig, match="was trained with optimizer") as caught:
        resuming(job(tmp_path, optimizer=Optimizer(now)), num_ranks=2)
    assert str(caught.value.hint).startswith(f"Write optimizer: {was or 'adamw'}, or start from its weights")


def test_8_bit_states_resume_where_they_are_whole_or_on_as_many_ranks(tmp_path: Path) -> None:
    wanted = job(tmp_path, optimizer=Optimizer.ADAMW_8BIT)
    checkpoint(tmp_path, optimizer="adamw_8bit")
    assert resuming(wanted, num_ranks=2).saved is not None
    with pytest.raises(InvalidConfig, match="8-bit states of 2 ranks") as caught:
        resuming(wanted, num_ranks=1)
    assert str(caught.value.hint).startswith("Run on 2 GPUs, or start from its weights")
    checkpoint(tmp_path, 5, optimizer="adamw_8bit", zero_stage=0)
    assert resuming(wanted, num_ranks=1).saved is not None


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("stage", "written"), [(3, 2), (2, 3), (0, 2), (1, 0), (3, 1)])
def test_another_zero_stage_is_refused_with_a_way_out(tmp_path: Path, stage: int, written: int, num_ranks: int) -> None:
    found = saved(tmp_path, zero_stage=written)
    problem = f"written under ZeRO-{written}; ZeRO-{stage} cannot load its shards"
    with pytest.raises(InvalidConfig, match=problem) as caught:
        decide(found, {"zero_optimization": {"stage": stage}}, num_ranks=num_ranks)
    assert f"Set stage back to {written}, or start from its weights: dstrain export" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer": {"type": "Lion"}}, 'optimizer.type "Lion"'),
        ({"zero_optimization": {"stage": 2, "round_robin_gradients": True}}, "round_robin_gradients true"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            'offload_optimizer.device "nvme"',
        ),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow"),
    ],
)
def test_what_deepspeed_cannot_convert_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    found = saved(tmp_path)
    with pytest.raises(InvalidConfig) as caught:
        decide(found, {**TWO, **change}, num_ranks=1)
    assert "cannot convert it for 1 with" in caught.value.problem
    assert caught.value.problem.endswith(said)
    assert decide(found, {**TWO, **change}, num_ranks=2) is None


def test_a_section_that_is_off_shares_no_experts(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    experts = {"autoep_size": 2}
    assert decide(find(job(tmp_path)), {**TWO, "expert_parallel": {"enabled": False, **experts}}, num_ranks=2) is None
    with pytest.raises(InvalidConfig, match="was written with ep 1, and the job has ep 2"):
        decide(find(job(tmp_path)), {**TWO, "expert_parallel": {"enabled": True, **experts}}, num_ranks=2)


def test_ranks_that_share_weights_are_not_converted_and_keep_their_number(tmp_path: Path) -> None:
    checkpoint(tmp_path, tp=2)
    shared = {**TWO, "tensor_parallel": {"autotp_size": 2}}
    assert decide(find(job(tmp_path)), shared, num_ranks=2) is None
    with pytest.raises(InvalidConfig, match=r"cannot convert it for 4 with tensor_parallel\.autotp_size 2"):
        decide(find(job(tmp_path)), shared, num_ranks=4)
    with pytest.raises(InvalidConfig, match="was written with tp 2, and the job has tp 1") as caught:
        decide(find(job(tmp_path)), TWO, num_ranks=2)
    assert str(caught.value.hint).startswith("Write tp: 2, or start from its weights: dstrain export")


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": {"type": "AdamW"}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "round_robin_gradients": False}},
        {"tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 1},
    ],
)
def test_what_it_can_convert_is_not(tmp_path: Path, change: dict[str, Any]) -> None:
    assert decide(saved(tmp_path), {**TWO, **change}, num_ranks=1) is not None


# The conversion


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_shared_rows_are_converted_under_zero_3_alone(tmp_path: Path, stage: int) -> None:
    checkpoint(tmp_path, zero_stage=stage, sp=2)
    saved, config = find(job(tmp_path)), {"zero_optimization": {"stage": stage}}
    if stage == 3:
        assert decide(saved, config, num_ranks=4) is not None
        return
    with pytest.raises(InvalidConfig, match=f"with sp 2 under ZeRO-{stage}"):
        decide(saved, config, num_ranks=4)


def test_a_copy_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    made = checkpoint(tmp_path)
    (made / "latest_universal").write_text("global_step4_universal")
    told: list[str] = []
    convert(Resize(checkpoint=made, from_ranks=2, to_ranks=1), {}, told.append)
    assert told == []


def test_a_disk_that_is_too_small_is_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = checkpoint(tmp_path)
    shard = made / "global_step4" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shard.parent.mkdir()
    shard.write_bytes(bytes(2**20))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(2**30, 2**30, 2**20))
    with pytest.raises(EnvironmentProblem, match=r"converting .* takes 2\.00 MiB, and 1\.00 MiB are free in "):
        convert(Resize(checkpoint=made, from_ranks=2, to_ranks=1), {}, lambda text: None)
