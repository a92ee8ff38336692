"""What the lengths of the data decide, and the time of a run."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from cases import ask

from dstrain.choices import Interval, Method, Offload, Task
from dstrain.errors import InvalidConfig
from dstrain.facts import probe
from dstrain.facts.data.lengths import Lengths
from dstrain.job.schema import Job
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.request import Request
from dstrain.plan.run_time import LEAST_STEPS, RunTime, run_time, with_lengths
from dstrain.plan.search.decide import choice

SHORT = tuple(sorted(random.Random(0).choices((90, 200, 350, 900, 3900), (8, 8, 8, 3, 1), k=1000)))
LONG = tuple(sorted(random.Random(0).choices((3000, 4000, 9000), k=1000)))
MODEL = ask(model="qwen3-8b", gpus=8, gpu="a100-80g").workload


def lengths(tokens: tuple[int, ...], num_samples: int = 200_000) -> Lengths:
    return Lengths(tokens=tokens, num_samples=num_samples)


def job(**values: Any) -> Job:
    return Job(model="", output_dir="", **values)  # type: ignore[arg-type]


def decided(data: Lengths, **wishes: Any) -> tuple[bool | None, int | None]:
    request = with_lengths(Request(**wishes), MODEL.model, data, epochs=3)
    return request.packing, request.seq_len


def test_short_samples_share_rows_where_enough_steps_are_left() -> None:
    assert decided(lengths(SHORT)) == (True, None)
    assert decided(lengths(SHORT), seq_len=8192) == (True, 8192)
    assert decided(lengths(SHORT, 10_000)) == (False, 4096)  # fewer than LEAST_STEPS
    assert decided(lengths(SHORT, 10_000), global_batch=8) == (True, None)
    assert decided(lengths(LONG)) == (False, 4096)
    assert decided(lengths(SHORT), task=Task.DPO) == (False, 4096)


def test_what_is_asked_for_stays() -> None:
    assert decided(lengths(SHORT), packing=False) == (False, 4096)
    assert decided(lengths(LONG), packing=True) == (True, None)
    assert decided(lengths((60, 80, 700)), packing=False) == (False, 1024)
    assert decided(lengths((60, 80, 700)), packing=False, seq_len=2048) == (False, 2048)
    assert decided(lengths((60, 80)), packing=False) == (False, 512)


def test_a_family_that_nobody_has_checked_shares_no_rows() -> None:
    other = replace(MODEL.model, model_type="other")
    assert with_lengths(Request(), other, lengths(SHORT), epochs=3).packing is False


def test_rows_with_images_are_shared_where_the_family_has_their_positions() -> None:
    data = replace(lengths(SHORT), has_media=True)
    kept = {
        name: with_lengths(Request(), probe.read_model(name), data, epochs=3).packing
        for name in ("qwen3-vl-8b", "gemma-3-4b")
    }
    assert kept == {"qwen3-vl-8b": True, "gemma-3-4b": False}
    assert with_lengths(Request(), probe.read_model("gemma-3-4b"), lengths(SHORT), epochs=3).packing


def test_data_with_media_leave_open_what_a_run_of_them_takes() -> None:
    model, data = probe.read_model("qwen3-vl-8b"), replace(lengths(SHORT), has_media=True)
    request = with_lengths(Request(), model, data, epochs=3)
    assert {key for key in ("sp", "tp", "ep") if getattr(request, key) == 1} == {"sp", "tp"}
    for request in (Request(sp=2), Request(tp=2)):
        with pytest.raises(InvalidConfig, match=r"which data with images or videos do not support"):
            with_lengths(request, model, data, epochs=3)


@cache
def trained(data: Lengths, **wishes: Any) -> RunTime:
    wishes = {"zero_stage": 2, "offload": Offload.NONE, "grad_ckpt": True, **wishes}  # a short search
    request = with_lengths(Request(method=Method.LORA, **wishes), MODEL.model, data, epochs=3)
    return run_time(MODEL, choice(MODEL, request), data, job())


def test_rows_and_steps_are_those_of_the_samples() -> None:
    alone = trained(lengths(SHORT), packing=False)
    assert alone.rows_per_epoch == 200_000
    assert alone.steps == 3 * 200_000 // 64
    packed = trained(lengths(SHORT), packing=True)
    tokens = sum(SHORT) * 200
    assert alone.tokens_per_epoch == packed.tokens_per_epoch == tokens
    assert 1 <= packed.rows_per_epoch * 4096 / tokens < 1.02
    assert packed.steps == pytest.approx(3 * packed.rows_per_epoch / 64, abs=3)
    assert packed.steps >= LEAST_STEPS
    assert trained(lengths(SHORT, 300), packing=False).steps == 3 * 5  # the last step of an epoch is filled up


def test_a_shared_row_wastes_nothing_and_one_of_its_own_waits_for_the_longest_of_all_ranks() -> None:
    alone, packed = (trained(lengths(SHORT), packing=packing) for packing in (False, True))
    assert packed.idle_share < 0.02
    assert alone.idle_share > 0.5
    assert alone.seconds is not None and packed.seconds is not None
    wasted = (1 - packed.idle_share) / (1 - alone.idle_share)
    assert alone.seconds / packed.seconds == pytest.approx(wasted, rel=0.25)


def test_what_packing_saves_is_the_padding_of_rows_of_one_sample_each() -> None:
    alone, packed = (trained(lengths(SHORT), packing=packing, micro_batch=2) for packing in (False, True))
    assert packed.padded_ratio == pytest.approx((1 - packed.idle_share) / (1 - alone.idle_share), rel=0.02)
    assert alone.padded_ratio == pytest.approx(1)
    assert alone.packed_ratio == pytest.approx(packed.padded_ratio, rel=0.02)
    assert (alone.packed_steps, packed.packed_ratio) == (packed.steps, 1.0)


EQUAL = lengths((4096,) * 50, 64_000)


@cache
def chosen_for_equal() -> Estimate:
    return choice(MODEL, with_lengths(Request(packing=False, zero_stage=2), MODEL.model, EQUAL, epochs=1))


def test_equal_samples_take_the_step_of_the_plan() -> None:
    chosen = chosen_for_equal()
    run = run_time(MODEL, chosen, EQUAL, job(num_train_epochs=1.0))
    assert chosen.speed is not None
    assert run.seconds == pytest.approx(1000 * chosen.speed.step_s + run.checkpoint_s)
    assert (run.idle_share, run.cut_share) == (0, 0)


def test_evaluations_and_checkpoints_take_their_time() -> None:
    data, chosen = EQUAL, chosen_for_equal()
    plain = job(num_train_epochs=1.0, save_steps=5000)
    alone = run_time(MODEL, chosen, data, plain)
    assert (alone.evaluations, alone.checkpoints) == (0, 1)  # of the last step
    both = replace(plain, save_steps=400, eval_steps=0.25, eval_on_start=True)
    run = run_time(MODEL, chosen, data, both, eval_samples=6_400)
    assert (run.checkpoints, run.evaluations) == (3, 5)  # steps 400, 800 and the last one
    assert run.checkpoint_s == 3 * chosen.memory.checkpoint_bytes / 1e9
    assert alone.seconds is not None and run.seconds is not None
    steps_s = alone.seconds - alone.checkpoint_s
    assert run.seconds == pytest.approx(steps_s + run.checkpoint_s + run.evaluation_s)
    # a forward pass is a quarter to a half of a step, and an evaluation has a tenth of an epoch's samples
    assert 0.25 < run.evaluation_s / (5 * steps_s / 10) < 0.5
    once = run_time(MODEL, chosen, data, plain, eval_samples=6_400)
    assert once.evaluation_s == pytest.approx(run.evaluation_s / 5)
    by_epoch = replace(plain, num_train_epochs=3.0, save_strategy=Interval.EPOCH, save_only_model=True)
    saved = run_time(MODEL, chosen, data, by_epoch)
    assert saved.checkpoints == 3
    assert saved.checkpoint_bytes == chosen.saved_bytes(only_model=True) < run.checkpoint_bytes / 4


def test_cut_samples_are_counted() -> None:
    assert trained(lengths((100, 5000)), packing=False).cut_share == 0.5


def test_without_a_speed_there_is_no_time() -> None:
    workload = ask(model="qwen3-0.6b", gpus=1, gpu="cpu").workload
    data = lengths((100, 500), 640)
    chosen = choice(workload, with_lengths(Request(), workload.model, data, epochs=1))
    assert run_time(workload, chosen, data, job(), eval_samples=10).seconds is None
