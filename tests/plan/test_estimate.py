"""Estimates of configurations that anybody wrote, and what a calibration changes in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import ask

from dstrain.choices import Offload, Optimizer, Precision
from dstrain.facts.cluster.calibration import SCHEMA, Calibration, Measured
from dstrain.plan.configuration import BF16_STATES, DEFAULTS, Configuration, changed
from dstrain.plan.estimate import OPTIMIZER_TYPES, assess, effective, unplanned_optimizer
from dstrain.plan.request import Request
from dstrain.units import GIB

ASKED = ask(model="qwen3-8b", gpus=8, gpu="h100")


def read(request: Request | None = None, **ds_config: Any) -> Configuration:
    return effective(ASKED.workload.model, request or Request(), ds_config)


def test_an_empty_configuration_is_deepspeeds_defaults() -> None:
    assert read() == DEFAULTS


def test_expert_parallelism_is_read_where_it_is_on() -> None:
    assert read(expert_parallel={"enabled": True, "autoep_size": 4}).parallel.ep == 4
    assert read(expert_parallel={"enabled": False, "autoep_size": 4}).parallel.ep == 1


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-8b"])
def test_more_expert_parallel_ranks_than_gpus_have_an_estimate_too(model: str, zero_stage: int) -> None:
    asked = ask(model=model, gpus=8, gpu="h100")
    wrong = assess(asked.workload, changed(DEFAULTS, zero_stage=zero_stage, ep=32))
    assert wrong.memory.device_bytes_per_gpu > 0


def test_what_a_configuration_says_of_zero_is_read() -> None:
    zero = {
        "stage": 3,
        "zero_hpz_partition_size": 8,
        "zero_quantized_weights": True,
        "offload_optimizer": {"device": "cpu", "ratio": 0.4, "pin_memory": False},
        "reduce_bucket_size": "auto",
        "stage3_max_reuse_distance": 1e8,
    }
    found = read(zero_optimization=zero)
    assert (found.zero.stage, found.zero.hpz, found.zero.offload, found.zero.offload_ratio) == (
        3,
        8,
        Offload.OPTIMIZER,
        0.4,
    )
    assert found.zero.qwz
    assert (found.zero.pin_memory, found.zero.reduce_bucket_size) == (False, ASKED.workload.model.hidden_size**2)
    assert found.zero.max_reuse_distance == 100_000_000


def test_what_only_stage_3_knows_means_nothing_below() -> None:
    zero = {
        "stage": 2,
        "zero_hpz_partition_size": 8,
        "zero_quantized_weights": True,
        "offload_optimizer": {"device": "cpu", "ratio": 0.4},
    }
    found = read(zero_optimization=zero)
    assert (found.zero.hpz, found.zero.offload_ratio, found.zero.qwz) == (1, 1.0, False)


def test_tensor_parallelism_and_the_dtype_of_sums_are_read() -> None:
    found = read(tensor_parallel={"autotp_size": 2}, data_types={"grad_accum_dtype": "fp32"})
    assert (found.parallel.tp, found.step.grad_accum_dtype) == (2, Precision.FP32)


@pytest.mark.parametrize(
    ("keys", "stage", "others", "expected"),
    [
        (BF16_STATES, 1, {}, Optimizer.ADAMW_BF16),
        (BF16_STATES, 0, {}, Optimizer.ADAMW),
        (BF16_STATES[:1], 2, {}, Optimizer.ADAMW),
        (BF16_STATES, 1, {"data_types": {"grad_accum_dtype": "fp32"}}, Optimizer.ADAMW),
        (BF16_STATES, 2, {"data_types": {"grad_accum_dtype": "fp32"}}, Optimizer.ADAMW_BF16),
    ],
)
def test_states_are_in_bf16_where_the_engine_keeps_them_so(
    keys: tuple[str, ...], stage: int, others: dict[str, Any], expected: Optimizer
) -> None:
    zero = {"stage": stage}
    assert read(bf16=dict.fromkeys(keys, True), zero_optimization=zero, **others).step.optimizer is expected
    asked = replace(ASKED.request, optimizer=Optimizer.ADAMW_BF16)
    assert read(asked, zero_optimization={"stage": 2}).step.optimizer is Optimizer.ADAMW_BF16
    assert read(asked, bf16={keys[0]: False}, zero_optimization={"stage": 2}).step.optimizer is Optimizer.ADAMW
    eight_bit = read(Request(optimizer=Optimizer.ADAMW_8BIT), bf16=dict.fromkeys(keys, True), zero_optimization=zero)
    assert eight_bit.step.optimizer is Optimizer.ADAMW_8BIT


@pytest.mark.parametrize(
    ("name", "planned"),
    [
        ("Adam", Optimizer.ADAMW),
        ("muon", Optimizer.MUON),
        ("Lion", Optimizer.LION),
        ("SGD", Optimizer.SGD),
        ("Lamb", Optimizer.ADAMW),
    ],
)
def test_an_optimizer_of_the_configuration_is_planned_and_one_without_a_plan_is_said(
    name: str, planned: Optimizer
) -> None:
    config = {"optimizer": {"type": name, "params": {"lr": "auto"}}}
    assert read(Request(optimizer=Optimizer.ADAMW_8BIT), **config).step.optimizer is planned
    assert (unplanned_optimizer(config) is not None) == (name == "Lamb")
    assert set(Optimizer) - set(OPTIMIZER_TYPES.values()) == {
        Optimizer.ADAMW_8BIT,
        Optimizer.ADAMW_BF16,  # keys of bf16
    }


def test_the_rest_is_the_requests() -> None:
    asked = Request(optimizer=Optimizer.LION, micro_batch=3, sp=2)
    found = read(asked)
    assert (found.step.optimizer, found.batch.micro_batch, found.parallel.sp) == (Optimizer.LION, 3, 2)


def test_what_was_measured_takes_the_place_of_constants() -> None:
    measured = Measured(context_bytes=2 * GIB, nccl_bytes=GIB, reserved_ratio=1.25)
    calibration = Calibration(schema=SCHEMA, gpus={"h100-sxm": measured})
    configuration = changed(DEFAULTS, zero_stage=2, micro_batch=1, grad_ckpt=True)
    needs = assess(replace(ASKED.workload, calibration=calibration), configuration).memory
    assert needs.breakdown_bytes.context == 3 * GIB
    assert needs.reserved_bytes_per_gpu == pytest.approx(1.25 * needs.live_bytes_per_gpu, abs=1)
    assert needs.device_bytes_per_gpu == needs.reserved_bytes_per_gpu + 3 * GIB


def test_other_names_and_old_forms_are_read_as_the_engine_reads_them() -> None:
    zero = {"stage": 3, "overlap_comm": None, "prefetch_bucket_size": 7, "cpu_offload": True}
    found = read(zero_optimization=zero)
    assert found.zero.overlap_comm is True
    assert found.zero.prefetch_bucket_size == 7
    assert found.zero.offload is Offload.OPTIMIZER
