"""Step times: against published runs, against hand arithmetic, and in their order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.published.pytorch.sharding import UNIT_S, UNIT_WAIT_S, with_states
from benchmarks.published.training_code import LITGPT, TORCHTUNE, TRANSFORMERS_4, TRANSFORMERS_4_45, StateDtypes
from dstrain.choices import Attention, LossKernel, Method, Offload, Optimizer, Precision
from dstrain.facts import probe
from dstrain.facts.cluster import gpus
from dstrain.facts.cluster.calibration import Calibration, Measured
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.model import families
from dstrain.facts.model.model_facts import Kind
from dstrain.facts.workload import RowContents, Workload
from dstrain.job.schema import Job
from dstrain.plan.configuration import DEFAULTS, Configuration, changed
from dstrain.plan.estimate_records import Limit, Speed
from dstrain.plan.named_parts import with_frozen
from dstrain.plan.speed.compute import FLASH_ATTENTION_3_SPEED
from dstrain.plan.speed.efficiency import LAUNCH_S, RETRY_S
from dstrain.plan.speed.step_time import (
    ATTENTION,
    CPU,
    ELEMENTWISE,
    INTER,
    LAUNCHES,
    LIMITS,
    NVME,
    OPTIMIZER,
    PCIE,
    PRODUCTS,
    delayed,
    error_ratio,
    speed,
)
from dstrain.plan.training_code import TrainingCode
from tests.cases import plan
from tests.plan.machines import cluster

QWEN3_8B = probe.read_model("qwen3-8b")
LLAMA2_7B = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096, "dtype": "float16",
}  # fmt: skip
BASE = changed(
    DEFAULTS, zero_stage=3, overlap_comm=True, grad_ckpt=True, attn=Attention.FLASH_ATTENTION_2, max_reuse_distance=0
)


def _cluster(num_gpus: int = 8, gpu: str = "h100-sxm", inter: str = "ib400") -> Cluster:
    return cluster(num_gpus, gpu, inter)


def _workload(
    machine: Cluster | None = None, model: Any = QWEN3_8B, calibration: Calibration | None = None
) -> Workload:
    return Workload(model=model, cluster=machine or _cluster(), calibration=calibration or Calibration())


def _speed(configuration: Configuration = BASE, model: Any = QWEN3_8B, **machine: Any) -> Speed:
    found = speed(_workload(_cluster(**machine), model), configuration)
    assert found is not None
    return found


def _rate(configuration: Configuration = BASE, **machine: Any) -> float:
    return _speed(configuration, **machine).tokens_per_s_per_gpu


def test_the_parts_are_the_step() -> None:
    found = _speed(changed(BASE, offload=Offload.OPTIMIZER, grad_accum=4), num_gpus=16)

    assert sum(found.parts_s.values()) == pytest.approx(found.step_s)
    assert set(found.parts_s) == set(LIMITS)


def test_a_gpu_whose_speed_is_unknown_has_no_step_time() -> None:
    laptop = replace(_cluster(), gpu=gpus.from_nvml("Laptop GPU", 16384))

    assert speed(_workload(laptop), BASE) is None
    assert speed(_workload(_cluster(gpu="v100-32g")), BASE) is None  # no bf16


@pytest.mark.parametrize("name", [name for name in gpus.GPUS if name != gpus.CPU])
def test_every_gpu_of_the_table_has_a_step_time_in_a_precision_it_has(name: str) -> None:
    gpu = gpus.gpu(name)
    precision = Precision.BF16 if gpu.has_bf16 else Precision.FP16 if gpu.fp16_flops_per_s else Precision.FP32
    found = speed(_workload(cluster(8, name, gpus_per_node=8)), changed(BASE, precision=precision))

    assert found is not None
    assert 0 < found.mfu_ratio < 1


def test_tokens_and_flops_agree_with_the_step() -> None:
    found = _speed(changed(BASE, micro_batch=2, grad_accum=3))

    assert found.tokens_per_s_per_gpu == pytest.approx(2 * 3 * 4096 / found.step_s)
    flops = 6 * (QWEN3_8B.num_params - 151936 * 4096) + 6 * 36 * 32 * 128 * 4096
    assert found.mfu_ratio == pytest.approx(flops * found.tokens_per_s_per_gpu / 989.4e12)


def test_ranks_that_share_a_sequence_or_a_weight_share_its_tokens() -> None:
    shared: list[dict[str, Any]] = [{"sp": 4}, {"tp": 4}]
    for changes in shared:
        found = _speed(changed(BASE, seq_len=16384, **changes))

        assert found.tokens_per_s_per_gpu == pytest.approx(16384 / 4 / found.step_s)


SLOWER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "checkpointing": ({"grad_ckpt": False}, {"grad_ckpt": True}),
    "ZeRO-2 with accumulation": ({"zero_stage": 1, "grad_accum": 8}, {"zero_stage": 2, "grad_accum": 8}),
    "no overlap": ({"overlap_comm": True}, {"overlap_comm": False}),
    "eager attention": ({}, {"attn": Attention.EAGER}),
    "a padding mask under sdpa": (
        {"attn": Attention.SDPA, "micro_batch": 2},
        {"attn": Attention.SDPA, "micro_batch": 2, "code": TrainingCode(masks_padding=True)},
    ),
    "Transformers' own layers": ({"liger": True}, {}),
    "a smaller micro-batch": ({"micro_batch": 4}, {"micro_batch": 2, "grad_accum": 2}),
    "an offloaded optimizer": ({}, {"offload": Offload.OPTIMIZER}),
    "more of it offloaded": (
        {"offload": Offload.OPTIMIZER, "offload_ratio": 0.5},
        {"offload": Offload.OPTIMIZER},
    ),
    "offloaded parameters in pageable memory": (
        {"offload": Offload.PARAMS},
        {"offload": Offload.PARAMS, "pin_memory": False},
    ),
    "drives": ({"offload": Offload.PARAMS}, {"offload": Offload.NVME}),
    "full training": ({"method": Method.LORA}, {}),
    "4-bit weights": ({"method": Method.LORA}, {"method": Method.QLORA}),
    "the whole loss at once on Transformers 4": ({}, {"code": TRANSFORMERS_4}),
    "plain cross entropy with many tokens": ({"micro_batch": 16, "loss": LossKernel.FUSED}, {"micro_batch": 16}),
}


@pytest.mark.parametrize("name", SLOWER)
def test_what_costs_time_is_slower(name: str) -> None:
    fast, slow = SLOWER[name]

    assert _rate(changed(BASE, **slow)) < _rate(changed(BASE, **fast))


def test_flash_attention_3_is_faster_on_hopper_and_no_faster_than_its_matrix_products() -> None:
    long, newer = changed(BASE, seq_len=65536), changed(BASE, seq_len=65536, attn=Attention.FLASH_ATTENTION_3)
    assert 1.3 < _speed(long).step_s / _speed(newer).step_s < FLASH_ATTENTION_3_SPEED
    assert _speed(newer, gpu="a100-80g").step_s == _speed(long, gpu="a100-80g").step_s
    assert _speed(long, gpu="h20").step_s / _speed(newer, gpu="h20").step_s < 0.90 / 0.70


def test_a_slower_network_is_slower_and_at_last_what_limits() -> None:
    rates = [_rate(num_gpus=16, inter=name) for name in ("ib400", "ib200", "eth100", "eth25", "eth25/8")]

    assert rates == sorted(rates, reverse=True)
    assert _speed(num_gpus=16, inter="ib400").limited_by is Limit.COMPUTE
    assert _speed(num_gpus=16, inter="eth25/8").limited_by is Limit.INTER_LINK


def test_hpz_helps_where_the_network_is_slow() -> None:
    assert _rate(changed(BASE, hpz=8), num_gpus=16, inter="eth25") > 1.2 * _rate(num_gpus=16, inter="eth25")


def test_cpu_adam_takes_as_long_as_zenflow_says() -> None:
    """DeepSpeed's ZenFlow blog: the CPU update of Llama-2-7B takes more than 4 s on a node of four A100."""
    model = families.from_config(LLAMA2_7B, name="llama-2-7b", source="meta-llama/Llama-2-7b-hf")
    found = _speed(changed(BASE, zero_stage=2, offload=Offload.OPTIMIZER), model=model, num_gpus=4, gpu="a100-80g")

    assert 4.0 < found.parts_s[CPU] < 4.6
    assert found.limited_by is Limit.CPU_OPTIMIZER


def test_smaller_states_step_faster_on_the_cpu() -> None:
    offloaded = changed(BASE, offload=Offload.OPTIMIZER)

    adam, sgd = _speed(offloaded), _speed(changed(offloaded, optimizer=Optimizer.SGD))

    assert sgd.parts_s[CPU] == pytest.approx(adam.parts_s[CPU] * 12 / 28)


def test_moments_of_8_bits_take_the_arithmetic_of_their_blocks() -> None:
    """An H200 steps 2^29 parameters in 14.7 ms with bitsandbytes, in 4.8 ms with fused AdamW."""
    way = changed(BASE, zero_stage=0, method=Method.FULL)
    adam, counted = (
        _speed(changed(way, optimizer=optimizer), num_gpus=1, gpu="h200").parts_s[OPTIMIZER]
        for optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_8BIT)
    )
    assert counted - adam == pytest.approx(QWEN3_8B.num_params * (14.7e-3 / 2**29 - 28 / (0.85 * 4.8e12)), rel=0.01)


def test_ranks_share_what_muon_orthogonalises_unless_each_needs_all_of_it() -> None:
    taken = {}
    for stage, num_gpus in ((0, 1), (0, 8), (2, 8)):
        way = changed(BASE, zero_stage=stage, optimizer=Optimizer.MUON)
        muon, adamw = (
            _speed(changed(way, optimizer=optimizer), num_gpus=num_gpus).parts_s[OPTIMIZER]
            for optimizer in (Optimizer.MUON, Optimizer.ADAMW)
        )
        taken[stage, num_gpus] = muon - adamw
    assert taken[0, 8] == pytest.approx(taken[0, 1])
    assert taken[2, 8] == pytest.approx(taken[0, 1] / 8, rel=0.02)


def test_drives_read_16_and_write_14_bytes_of_each_parameter() -> None:
    found = _speed(changed(BASE, offload=Offload.NVME))

    state = QWEN3_8B.num_params * (16 / 3.5e9 + 14 / 3.0e9)
    parameters = 2 * 2 * QWEN3_8B.num_params / 3.5e9
    assert found.parts_s[NVME] == pytest.approx(state + parameters)
    assert found.limited_by is Limit.NVME


def test_fused_adamw_on_one_gpu_takes_its_bytes() -> None:
    """AdamW on an fp32 master copy moves 28 B of each parameter, DeepSpeed's step 28 more, its buckets 8."""
    found = _speed(changed(BASE, zero_stage=2, overlap_comm=False), num_gpus=1)

    expected = QWEN3_8B.num_params * (28 + 28 + 8) / (0.85 * 3.35e12)
    assert found.parts_s[OPTIMIZER] == pytest.approx(expected)


def test_short_sequences_wait_for_the_cpu_and_most_of_all_under_zero3() -> None:
    short = changed(BASE, seq_len=256)

    assert _speed(short).limited_by is Limit.LAUNCHES
    assert _speed(changed(short, zero_stage=1)).parts_s[LAUNCHES] < 0.5 * _speed(short).parts_s[LAUNCHES]


def test_a_loop_over_experts_waits_for_the_cpu() -> None:
    model = probe.read_model("qwen3-30b-a3b")
    grouped, looped = BASE, changed(BASE, code=TRANSFORMERS_4)

    assert _speed(looped, model=model, num_gpus=16).limited_by is Limit.LAUNCHES
    assert _rate(grouped, model=model, num_gpus=16) > 5 * _rate(looped, model=model, num_gpus=16)


def test_experts_wait_for_the_cpu_where_pytorch_has_no_grouped_product() -> None:
    model = probe.read_model("qwen3-30b-a3b")
    halves = changed(BASE, precision=Precision.FP16, attn=Attention.SDPA, zero_stage=1)
    of_experts = model.num_hidden_layers * 128 * (2 + 2 + 4) * LAUNCH_S

    def launches_s(gpu: str) -> float:
        return _speed(halves, model=model, gpu=gpu).parts_s[LAUNCHES]

    assert launches_s("v100-32g") > of_experts > 0.5
    assert launches_s("v100-32g") > launches_s("a100-80g") + of_experts


def test_the_units_of_an_adapter_wait_for_the_cpu_under_pytorchs_sharding() -> None:
    sharded = changed(BASE, code=with_states(BASE.code, StateDtypes.PURE_BF16), method=Method.LORA, seq_len=512)

    one, two = _speed(changed(sharded, zero_stage=0), num_gpus=1), _speed(sharded, num_gpus=2)

    units = 36 + 1 + 2 * 7 * 36
    waited = units * (2 * UNIT_S[0] + UNIT_S[1])
    assert two.parts_s[LAUNCHES] - one.parts_s[LAUNCHES] == pytest.approx(waited, rel=0.1)


def test_the_gpu_waits_for_the_units_of_an_adapter_however_long_it_computes() -> None:
    sharded = changed(BASE, code=with_states(BASE.code, StateDtypes.PURE_BF16), method=Method.LORA, seq_len=16384)

    assert _speed(sharded, num_gpus=2).parts_s[LAUNCHES] == pytest.approx(3 * 2 * 7 * 36 * UNIT_WAIT_S)


def test_giving_memory_back_delays_a_step() -> None:
    known = _speed()
    slower = delayed(known, 2)

    assert slower.step_s == pytest.approx(known.step_s + 2 * RETRY_S) == sum(slower.parts_s.values())
    assert slower.tokens_per_s_per_gpu * slower.step_s == pytest.approx(known.tokens_per_s_per_gpu * known.step_s)
    assert delayed(known, 0) is known


def test_a_large_cache_serves_what_the_kernel_before_has_written() -> None:
    """An RTX 4090 caches 72 MiB: 1k tokens of 4096 fp32 elements, read and written, are 32, 8k tokens are 256."""
    short, long = (_speed(changed(BASE, seq_len=tokens), gpu="rtx-4090", num_gpus=1) for tokens in (1024, 8192))

    assert short.parts_s[ELEMENTWISE] / 1024 < 0.7 * long.parts_s[ELEMENTWISE] / 8192


def test_ulysses_copies_what_it_sends_before_and_after() -> None:
    """Of each token queries, keys, values and outputs, 2.5 times the width: twice 4 bytes, in three passes."""
    whole, shared = (
        _speed(changed(BASE, sp=sp, seq_len=8192), model=probe.read_model("llama-3.1-8b")) for sp in (1, 2)
    )

    copied = 3 * 8 * 8192 / 2 * 2.5 * 4096 * 32 / (0.85 * 3.35e12)
    assert shared.parts_s[ELEMENTWISE] - whole.parts_s[ELEMENTWISE] / 2 == pytest.approx(copied, rel=0.02)


@pytest.mark.parametrize("loss", LossKernel)
@pytest.mark.parametrize("code", [TrainingCode(), TRANSFORMERS_4, TRANSFORMERS_4_45, TORCHTUNE, LITGPT])
@pytest.mark.parametrize("optimizer", Optimizer)
def test_every_choice_has_a_step_time(loss: LossKernel, code: TrainingCode, optimizer: Optimizer) -> None:
    assert _speed(changed(BASE, loss=loss, code=code, optimizer=optimizer)).step_s > 0


PACKED = changed(DEFAULTS, packing=True, micro_batch=8, loss=LossKernel.FUSED)
SHORT = RowContents(sample_tokens=58.9, attended_tokens=68.2, target_share=0.379)


def _filled(c: Configuration, contents: RowContents | None, gpu: str = "h200", model: Any = QWEN3_8B) -> Speed:
    found = speed(replace(_workload(_cluster(1, gpu), model), contents=contents), c)
    assert found is not None
    return found


def test_packed_rows_attend_to_samples_and_make_logits_of_labels_alone() -> None:
    whole, short = _filled(PACKED, None), _filled(PACKED, SHORT)
    assert short.parts_s[ATTENTION] < 0.3 * whole.parts_s[ATTENTION]
    head = QWEN3_8B.num_params_of(Kind.HEAD) / (QWEN3_8B.num_params - QWEN3_8B.num_params_of(Kind.EMBEDDING))
    saved = 1 - short.parts_s[PRODUCTS] / whole.parts_s[PRODUCTS]
    assert saved == pytest.approx((1 - SHORT.target_share) * head, rel=0.05)
    rows = RowContents(sample_tokens=4096.0, attended_tokens=4096.0, target_share=1.0)
    assert _filled(PACKED, rows).step_s == whole.step_s
    assert _filled(PACKED, replace(SHORT, target_share=0.0)).step_s < short.step_s  # nothing to learn in this window
    plain = changed(PACKED, packing=False, loss=LossKernel.CHUNKED)
    assert _filled(plain, SHORT).step_s == _filled(plain, None).step_s


def test_packed_conversations_take_what_they_took_on_an_h200() -> None:
    model = probe.read_model("qwen3-1.7b")  # measured: 1.00 s and 34 % with samples of 59 tokens at once, 2.11 s apart
    found = _filled(PACKED, SHORT, model=model)
    assert found.step_s == pytest.approx(1.00, rel=0.1)
    assert found.mfu_ratio == pytest.approx(0.34, rel=0.1)
    apart = changed(PACKED, code=TrainingCode(attends_at_once=False))
    assert _filled(apart, SHORT, model=model).step_s == pytest.approx(2.11, rel=0.2)


def test_a_gpu_without_the_kernel_for_all_samples_waits_for_the_call_of_each() -> None:
    half = changed(PACKED, precision=Precision.FP16, micro_batch=1)
    small = probe.read_model("qwen3-0.6b")
    sizes = [replace(SHORT, sample_tokens=size) for size in (64.0, 16.0)]
    times = [_filled(half, size, "v100", small).step_s for size in sizes]
    assert times[1] > 2 * times[0]
    flash = changed(half, attn=Attention.FLASH_ATTENTION_2)
    assert len({_filled(flash, size, "a100", small).step_s for size in sizes}) == 1


def test_a_window_bounds_what_flash_attention_reads_and_gives_sdpa_a_mask() -> None:
    model = probe.read_model("gemma-3-27b-it")
    wide = replace(model, sliding_window=None, num_windowed_layers=0)

    def attention(model: Any, attn: Attention, seq_len: int = 32768) -> float:
        return _filled(changed(DEFAULTS, attn=attn, seq_len=seq_len), None, model=model).parts_s[ATTENTION]

    share = model.num_windowed_layers / model.num_attention_layers
    flash = attention(model, Attention.FLASH_ATTENTION_2) / attention(wide, Attention.FLASH_ATTENTION_2)
    assert 1 - share < flash < 1 - share + 0.1
    assert attention(model, Attention.SDPA) > 3 * attention(wide, Attention.SDPA)
    assert attention(model, Attention.SDPA, 512) == attention(wide, Attention.SDPA, 512)


@pytest.mark.parametrize("name", ["qwen3-vl-8b", "gemma-3-4b"])  # the latter's products of a block are alike
def test_images_cost_their_patches(name: str) -> None:
    model = probe.read_model(name)
    with_images = _speed(changed(BASE, image_patches=256), model=model)  # so few that attention costs little

    tower = 2 * 27 * (4 * 1152**2 + 2 * 1152 * 4304) * 256 / (gpus.gpu("h100-sxm").gemm_ratio * 989.4e12)
    merged = with_images.parts_s[PRODUCTS] - _speed(model=model).parts_s[PRODUCTS]
    assert tower < merged < 1.3 * tower


def test_packed_rows_cost_the_images_of_their_samples_or_of_as_many_as_fit() -> None:
    model, way = probe.read_model("qwen3-vl-8b"), changed(BASE, seq_len=4096, image_patches=1024)
    contents = RowContents(sample_tokens=512, attended_tokens=512, target_share=1.0)

    def tower(c: Configuration, held: RowContents | None) -> float:
        seeing, blind = (
            _filled(each, held, model=model).parts_s[PRODUCTS] for each in (c, changed(c, image_patches=0))
        )
        return seeing - blind

    one = tower(way, None)
    packed = changed(way, packing=True)
    assert tower(packed, contents) == pytest.approx(8 * one, rel=0.01)
    assert tower(packed, None) == pytest.approx(16 * one, rel=0.01)
    assert tower(packed, replace(contents, sample_tokens=100)) == pytest.approx(16 * one, rel=0.01)


def test_a_trained_tower_has_two_products_more_for_each_of_its_own_and_a_frozen_language_model_one_less() -> None:
    frozen = probe.read_model("qwen3-vl-8b")
    way = changed(BASE, image_patches=8192, grad_ckpt=False)
    base = Job(model="", output_dir="", freeze_multi_modal_projector=False)
    jobs = (replace(base, freeze_vision_tower=False), replace(base, freeze_language_model=True))
    trained, alone = (_speed(way, model=with_frozen(frozen, job)).parts_s[PRODUCTS] for job in jobs)
    plain = _speed(way, model=frozen).parts_s[PRODUCTS]

    forward = plain - _speed(changed(way, image_patches=0), model=frozen).parts_s[PRODUCTS]
    assert 2 * forward < trained - plain < 2.5 * forward
    assert alone < 0.75 * plain


def test_a_calibration_replaces_the_prior_and_narrows_the_range() -> None:
    calibration = Calibration(gpus={"h100-sxm": Measured(gemm_ratio=0.28)})

    prior, measured = _speed(), speed(_workload(calibration=calibration), BASE)

    assert measured is not None
    assert measured.parts_s[PRODUCTS] == pytest.approx(2 * prior.parts_s[PRODUCTS], rel=0.05)
    assert measured.uncertainty_ratio < prior.uncertainty_ratio


def test_a_calibration_of_another_gpu_changes_nothing() -> None:
    calibration = Calibration(gpus={"a100-80g": Measured(gemm_ratio=0.28)})

    assert speed(_workload(calibration=calibration), BASE) == _speed()


def test_the_range_is_wider_where_less_was_compared() -> None:
    dense = _speed().uncertainty_ratio

    assert dense == pytest.approx(error_ratio(_cluster(), is_full=True))
    assert dense < _speed(num_gpus=16).uncertainty_ratio < _speed(num_gpus=16, inter="eth25").uncertainty_ratio
    assert dense < _speed(changed(BASE, offload=Offload.OPTIMIZER)).uncertainty_ratio
    assert dense < _speed(model=probe.read_model("qwen3-30b-a3b")).uncertainty_ratio
    assert dense < _speed(gpu="rtx-4090").uncertainty_ratio


def test_the_range_is_wide_where_the_cpu_that_launches_kernels_is_waited_for() -> None:
    small = changed(BASE, seq_len=256, grad_ckpt=False)
    found = _speed(small, model=probe.read_model("qwen3-0.6b"), num_gpus=1)
    assert found.parts_s[LAUNCHES] > 0.5 * found.step_s
    assert found.uncertainty_ratio > 0.3


def test_what_does_not_happen_takes_no_time() -> None:
    found = _speed(changed(BASE, zero_stage=2), num_gpus=1)

    assert [found.parts_s[part] for part in (INTER, CPU, PCIE, NVME)] == [0, 0, 0, 0]


def test_what_is_planned_for_a_cpu_says_that_its_speed_is_not_known() -> None:
    found = plan(model="qwen3-0.6b", gpus=2, gpu="cpu", seq_len=512, host_memory=2**38)
    assert found.chosen.speed is None
    assert "the speed of cpu is unknown, so no time is given" in found.notes
    assert not any("a step takes" in reason.text or "faster" in reason.text for reason in found.reasons)
