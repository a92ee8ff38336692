"""Peaks against a finer model of the same machine, which equals published GPU peaks to 0.2 %."""

from dataclasses import fields

import pytest
from cases import ask, plan

from dstrain.choices import Attention, Method, Offload, Optimizer, Precision
from dstrain.plan.configuration import DEFAULTS, changed
from dstrain.plan.estimate import assess, estimate
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.memory.deepspeed import engine
from dstrain.plan.memory.memory import BASELINE_HOST_BYTES_PER_RANK
from dstrain.plan.memory.reserved import Reserved
from dstrain.plan.memory.zero import pinned
from dstrain.plan.request import Request
from dstrain.units import GIB


def peak(
    model: str,
    gpus: int,
    stage: int,
    *,
    grad_ckpt: bool = True,
    method: Method = Method.FULL,
    precision: Precision = Precision.BF16,
    optimizer: Optimizer = Optimizer.ADAMW,
) -> Estimate:
    asked = ask(model=model, gpus=gpus, gpu="h100")
    request = Request(
        method=method,
        optimizer=optimizer,
        seq_len=4096,
        micro_batch=1,
        grad_accum=1,
        grad_ckpt=grad_ckpt,
        attn=Attention.SDPA,
        precision=precision,
    )
    auto = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero = {"stage": stage, **dict.fromkeys(auto, "auto")}
    return estimate(asked.workload, request, {"zero_optimization": zero})


@pytest.mark.parametrize(
    ("model", "gpus", "stage", "grad_ckpt", "live_gib"),
    [
        ("qwen3-8b", 8, 3, True, 25.0),
        ("qwen3-8b", 8, 2, True, 34.9),
        ("qwen3-8b", 8, 3, False, 53.5),
        ("qwen3-32b", 16, 3, True, 42.5),
    ],
)
def test_live_bytes_of_full_training(model: str, gpus: int, stage: int, grad_ckpt: bool, live_gib: float) -> None:
    found = peak(model, gpus, stage, grad_ckpt=grad_ckpt)
    assert found.memory.live_bytes_per_gpu / GIB == pytest.approx(live_gib, rel=0.03)
    assert found.memory.peak_instant == "loss backward"


def test_live_bytes_of_lora_on_one_gpu() -> None:
    found = peak("qwen3-8b", 1, 2, method=Method.LORA)
    assert found.memory.live_bytes_per_gpu / GIB == pytest.approx(24.0, rel=0.03)


def test_the_parts_sum_to_the_device_total_and_those_inside_torch_to_live() -> None:
    memory = peak("qwen3-30b-a3b", 16, 3).memory
    parts = {field.name: getattr(memory.breakdown_bytes, field.name) for field in fields(memory.breakdown_bytes)}
    assert sum(parts.values()) == memory.device_bytes_per_gpu
    outside = parts.pop("fragmentation") + parts.pop("context")
    assert sum(parts.values()) == memory.live_bytes_per_gpu == memory.device_bytes_per_gpu - outside


PROCESSES = 8 * BASELINE_HOST_BYTES_PER_RANK


def test_zero_3_moves_the_shares_of_a_node_through_ram_and_zero_2_maps_the_weights() -> None:
    whole = 2 * 8_190_735_360
    assert peak("qwen3-8b", 8, 3).memory.load.host_bytes_per_node == PROCESSES + whole
    assert peak("qwen3-8b", 16, 3).memory.load.host_bytes_per_node == PROCESSES + whole // 2
    assert peak("qwen3-8b", 8, 2).memory.load.host_bytes_per_node == PROCESSES


def test_zero_2_holds_the_weights_and_their_flat_copy_on_the_gpu_or_both_in_ram() -> None:
    small, large = peak("qwen3-8b", 16, 2).memory, peak("qwen3-32b", 16, 2).memory
    assert small.load.device_bytes_per_gpu - small.breakdown_bytes.context == 4 * 8_190_735_360
    assert large.load.host_bytes_per_node == PROCESSES + 8 * 4 * 32_762_123_264
    assert large.host_bytes_per_node == large.load.host_bytes_per_node


def test_weights_in_another_dtype_and_merged_experts_are_copied_by_every_rank() -> None:
    cast = peak("qwen3-8b", 8, 2, precision=Precision.FP32).memory.load
    experts, gate_up = 48 * 128 * 3 * 768 * 2048, 128 * 2 * 768 * 2048
    merged = peak("qwen3-30b-a3b", 8, 2, method=Method.LORA).memory.load
    assert cast.host_bytes_per_node == PROCESSES + 8 * 4 * 8_190_735_360
    assert merged.host_bytes_per_node == PROCESSES + 8 * 2 * (experts + gate_up)


def test_zero_3_of_4_bit_weights_that_no_gpu_holds_whole_does_not_fit() -> None:
    asked = ask(model="qwen2.5-72b", gpus=8, gpu="4090", host_memory=2**40)
    way = changed(DEFAULTS, method=Method.QLORA, zero_stage=3, seq_len=512, grad_ckpt=True, overlap_comm=True)
    found = assess(asked.workload, way)
    assert not found.fits_gpu
    assert found.shortage.startswith("39.6 GiB per GPU while the model is loaded")


def test_a_checkpoint_holds_states_and_the_gathered_model() -> None:
    num_params = 8_190_735_360
    assert peak("qwen3-8b", 8, 2).memory.checkpoint_bytes == 16 * num_params
    assert peak("qwen3-8b", 8, 3).memory.checkpoint_bytes == 14 * num_params  # whose shards are the master copy alone
    assert peak("qwen3-8b", 8, 2, precision=Precision.FP32).memory.checkpoint_bytes == 18 * num_params  # saved in bf16


@pytest.mark.parametrize(("optimizer", "stepped"), [(Optimizer.ADAMW_8BIT, 6.03125), (Optimizer.ADAMW_BF16, 6)])
def test_a_checkpoint_has_the_states_of_its_optimizer(optimizer: Optimizer, stepped: float) -> None:
    found = peak("qwen3-8b", 8, 2, optimizer=optimizer)
    assert found.memory.checkpoint_bytes == round((4 + stepped) * 8_190_735_360)
    assert found.saved_bytes(only_model=True) == 2 * 8_190_735_360


def test_a_checkpoint_of_the_weights_alone_is_the_saved_model() -> None:
    assert peak("qwen3-8b", 8, 3).saved_bytes(only_model=True) == 2 * 8_190_735_360
    adapter = peak("qwen3-8b", 8, 3, method=Method.LORA)
    assert adapter.saved_bytes(only_model=True) == 2 * adapter.num_trainable_params


@pytest.mark.parametrize("offload", Offload)
def test_the_states_on_the_gpu_are_those_of_the_peak(offload: Offload) -> None:
    workload = ask(model="qwen3-0.6b", gpus=2, gpu="h100").workload
    memory = assess(workload, changed(DEFAULTS, zero_stage=3, offload=offload)).memory
    held, parts = memory.states, memory.breakdown_bytes
    assert (held.params, held.optimizer) == pytest.approx((parts.params, parts.optimizer), rel=1e-3)
    assert (held.params > 0) is (offload in (Offload.NONE, Offload.OPTIMIZER))


def test_a_cpu_rank_has_no_cuda_context() -> None:
    found = plan(model="qwen3-0.6b", gpus=2, gpu="cpu", seq_len=512, host_memory=2**38).chosen.memory
    assert found.breakdown_bytes.context == found.breakdown_bytes.workspace == found.breakdown_bytes.fragmentation == 0


def test_gpus_without_a_kernel_for_packed_rows_keep_what_each_sample_attends_and_its_copy() -> None:
    way = changed(DEFAULTS, packing=True, precision=Precision.FP16, micro_batch=2, seq_len=1024, attn=Attention.SDPA)
    live = {}
    for gpu in ("v100-32g", "a100-80g", "mi300x"):
        workload = ask(model="qwen3-0.6b", gpus=1, gpu=gpu).workload
        live[gpu] = assess(workload, way).memory.live_bytes_per_gpu
    outputs = 2 * 2 * 1024 * 16 * 128 * 28
    assert live["v100-32g"] - live["a100-80g"] == pytest.approx(outputs, rel=0.05)
    assert live["mi300x"] == live["v100-32g"]


def test_pinned_rounding_of_offloaded_parameters_is_of_the_partition() -> None:
    model = ask(model="qwen3-8b", gpus=8, gpu="h100").workload.model
    way = changed(DEFAULTS, zero_stage=3, offload=Offload.PARAMS, sub_group_size=2**28)
    host = engine.host_of(model, way, 8)
    # the flat gradient and the parameters, 2 B x 1.02e9 each, go up to 2 GiB; sub-groups are near a power of two
    flat = [size for size in host.pinned if size == pytest.approx(2 * model.num_params / 8, rel=1e-3)]
    assert [pinned(size) for size in flat] == [2**31] * 2
    assert host.taken - host.asked == sum(pinned(size) - size for size in host.pinned)


@pytest.mark.parametrize(("stage", "grad_accum", "retries"), [(3, 1, 1), (3, 8, 8), (2, 1, 1), (2, 8, 4)])
def test_retries_of_the_micro_batches_played_stand_for_those_of_the_step(
    stage: int, grad_accum: int, retries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO-3 plays one micro-batch of a step, ZeRO-2 up to two."""
    held = Reserved(reserved_bytes=20 * GIB, settled_bytes=20 * GIB, retries=1, settled_retries=1, out_of_memory=False)
    monkeypatch.setattr("dstrain.plan.memory.reserved.reserved", lambda *_, **__: held)
    configuration = changed(DEFAULTS, zero_stage=stage, grad_accum=grad_accum, seq_len=1024)
    found = assess(ask(model="qwen3-0.6b", gpus=8, gpu="h100").workload, configuration)
    assert found.memory.retries_per_step == retries
