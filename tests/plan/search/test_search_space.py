"""What may be combined: every rule by itself, batches, and what contradicts itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import ask

from dstrain.choices import Attention, LossKernel, Method, Offload, Optimizer, Precision, RopeType, Task
from dstrain.errors import InvalidConfig
from dstrain.facts.model.traces import ActivationProfile, Traced
from dstrain.facts.workload import Workload
from dstrain.job.model_changes import Lora, RopeScaling
from dstrain.plan.configuration import DEFAULTS, changed, flat
from dstrain.plan.request import Request
from dstrain.plan.search.decide import choice
from dstrain.plan.search.rules import RULES, broken
from dstrain.plan.search.search_space import batches, global_batch, space, ways

ADAPTED = Lora(dropout=0.0, target_parameters=("experts",))
EXPERTS: dict[str, Any] = {"method": Method.LORA, "lora": ADAPTED}
OFFLOADED = {"zero_stage": 3, "offload": Offload.OPTIMIZER}

BROKEN: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("offload needs ZeRO", "qwen3-8b", {"offload": Offload.OPTIMIZER}),
    ("parameter offload needs ZeRO-3", "qwen3-8b", {"zero_stage": 2, "offload": Offload.PARAMS}),
    ("NVMe needs a folder", "qwen3-8b", {"zero_stage": 3, "offload": Offload.NVME}),
    ("ratio needs ZeRO-3", "qwen3-8b", {**OFFLOADED, "zero_stage": 2, "offload_ratio": 0.5}),
    ("ratio needs an optimizer in RAM", "qwen3-8b", {"zero_stage": 3, "offload_ratio": 0.5}),
    ("CPU optimizer is Adam", "qwen3-8b", {**OFFLOADED, "optimizer": Optimizer.LION}),
    ("hpZ needs ZeRO-3", "qwen3-8b", {"zero_stage": 2, "hpz": 8}),
    ("hpZ divides the GPUs", "qwen3-8b", {"zero_stage": 3, "hpz": 3}),
    ("hpZ keeps its copy on the GPU", "qwen3-8b", {"zero_stage": 3, "offload": Offload.PARAMS, "hpz": 8}),
    ("hpZ and AutoTP", "qwen3-8b", {"zero_stage": 3, "hpz": 8, "tp": 2}),
    ("adapters of experts and dropout", "qwen3-30b-a3b", {**EXPERTS, "lora": replace(ADAPTED, dropout=0.1)}),
    ("adapters of experts and Liger", "qwen3-30b-a3b", {**EXPERTS, "liger": True}),
    ("torch.compile and adapters of experts", "qwen3-30b-a3b", {**EXPERTS, "torch_compile": True}),
    ("SP and AutoTP", "qwen3-8b", {"sp": 2, "tp": 2, "zero_stage": 2}),
    ("SP divides the GPUs", "qwen3-8b", {"sp": 32}),
    ("SP divides the heads", "qwen2.5-7b", {"sp": 8}),
    ("SP and key-value heads", "phi-4", {"sp": 4}),
    ("SP divides the sequence", "qwen3-8b", {"sp": 8, "seq_len": 4100}),
    ("SP needs a kernel without mask", "qwen3-8b", {"sp": 2, "attn": Attention.EAGER}),
    ("SP and latent attention", "deepseek-v2-lite", {"sp": 2}),
    ("SP and linear attention", "qwen3-8b", {"sp": 2}),
    ("TP and linear attention", "qwen3-8b", {"tp": 2, "zero_stage": 2}),
    ("sdpa and sinks", "qwen3-8b", {}),
    ("SP and FlashAttention-4", "qwen3-8b", {"sp": 2, "attn": Attention.FLASH_ATTENTION_4}),
    ("FlashAttention and the family", "qwen3-8b", {"attn": Attention.FLASH_ATTENTION_2}),
    ("FlashAttention and sinks", "qwen3-8b", {"attn": Attention.FLASH_ATTENTION_3}),
    ("FlashAttention and wide heads", "deepseek-v2-lite", {"attn": Attention.FLASH_ATTENTION_4}),
    ("FlashAttention and fp32", "qwen3-8b", {"attn": Attention.FLASH_ATTENTION_2, "precision": Precision.FP32}),
    ("bf16 states need ZeRO", "qwen3-8b", {"zero_stage": 0, "optimizer": Optimizer.ADAMW_BF16}),
    (
        "bf16 states of bf16 weights",
        "qwen3-8b",
        {"zero_stage": 3, "precision": Precision.FP16, "optimizer": Optimizer.ADAMW_BF16},
    ),
    ("Muon and matrices", "qwen3-30b-a3b", {"optimizer": Optimizer.MUON}),
    ("qwZ needs ZeRO-3", "qwen3-8b", {"zero_stage": 2, "qwz": True}),
    ("qwZ and QLoRA", "qwen3-8b", {"zero_stage": 3, "qwz": True, "method": Method.QLORA}),
    ("qwZ and shares of eight", "gemma-3-27b", {"zero_stage": 3, "qwz": True}),
    ("SP and windows", "gemma-3-27b", {"sp": 2, "seq_len": 8192}),
    ("SP and lengths", "qwen3-8b", {"sp": 2, "rope_scaling": RopeScaling(rope_type=RopeType.DYNAMIC, factor=2.0)}),
    ("SP and images", "qwen3-vl-8b", {"sp": 2, "image_patches": 1024}),
    ("TP and images", "qwen3-vl-8b", {"tp": 2, "zero_stage": 2, "image_patches": 1024}),
    ("TP inside a node", "gemma-3-27b", {"tp": 16, "zero_stage": 2}),
    ("TP divides the key-value heads", "qwen2.5-7b", {"tp": 8, "zero_stage": 2}),
    ("TP needs ZeRO", "qwen3-8b", {"tp": 2, "zero_stage": 0}),
    ("TP and its loss", "qwen3-8b", {"tp": 2, "zero_stage": 2, "loss": LossKernel.CHUNKED}),
    ("fused loss and fp16", "qwen3-8b", {"loss": LossKernel.FUSED, "precision": Precision.FP16}),
    ("fused loss and logits", "qwen3-8b", {"loss": LossKernel.FUSED}),
    (
        "fused loss and adapters",
        "qwen3-8b",
        {"loss": LossKernel.FUSED, "method": Method.LORA, "lora": Lora(targets=("lm_head", "q_proj"))},
    ),
    ("loss of traced code", "qwen3-8b", {"loss": LossKernel.CHUNKED}),
    ("TP and experts", "qwen3-30b-a3b", {"tp": 2, "zero_stage": 2}),
    ("TP and adapters", "qwen3-8b", {"tp": 2, "method": Method.LORA, "zero_stage": 2}),
    ("EP divides the GPUs", "qwen3-30b-a3b", {"ep": 32, "zero_stage": 2}),
    ("EP divides the experts", "mixtral-8x7b", {"ep": 16, "zero_stage": 2}),
    ("EP and families", "deepseek-v2-lite", {"ep": 2, "zero_stage": 2}),
    ("EP alone", "qwen3-30b-a3b", {"ep": 2, "sp": 2, "zero_stage": 2}),
    ("EP needs ZeRO", "qwen3-30b-a3b", {"ep": 2, "zero_stage": 0}),
    ("EP and adapters", "qwen3-30b-a3b", {"ep": 2, "method": Method.LORA, "zero_stage": 2}),
    ("EP and hpZ", "qwen3-30b-a3b", {"ep": 2, "hpz": 8, "zero_stage": 3}),
    ("EP and offload", "qwen3-30b-a3b", {"ep": 2, **OFFLOADED, "zero_stage": 3, "offload_ratio": 0.5}),
    ("EP and Liger", "qwen3-30b-a3b", {"ep": 2, "zero_stage": 2, "liger": True}),
    ("Liger and families", "qwen3-vl-8b", {"liger": True}),
    ("Liger and dense layers", "qwen3-30b-a3b", {"liger": True}),
    ("torch.compile and shared experts", "qwen3-30b-a3b", {"torch_compile": True, "ep": 2, "zero_stage": 2}),
    ("torch.compile and Liger", "qwen3-8b", {"torch_compile": True, "liger": True}),
    ("torch.compile and linear attention", "qwen3-8b", {"torch_compile": True}),
    ("torch.compile and vision towers", "qwen3-vl-8b", {"torch_compile": True}),
    ("torch.compile of traced code", "qwen3-8b", {"torch_compile": True}),
    ("torch.compile and tiled MLPs", "qwen3-8b", {"torch_compile": True, "tiled_mlp": True}),
    ("torch.compile needs Triton", "qwen3-8b", {"torch_compile": True}),
    ("activation offload needs checkpoints", "qwen3-8b", {"activation_offload": True}),
    ("every n-th layer needs checkpoints", "qwen3-8b", {"grad_ckpt_every_n_layers": 2}),
    ("every n-th layer of n or more", "qwen3-8b", {"grad_ckpt": True, "grad_ckpt_every_n_layers": 50}),
    ("layers are counted in the decoder", "qwen3-vl-8b", {"grad_ckpt": True, "grad_ckpt_every_n_layers": 2}),
    ("tiles are of dense MLPs", "qwen3-30b-a3b", {"tiled_mlp": True}),
    ("tiled MLPs and AutoTP", "qwen3-8b", {"tiled_mlp": True, "tp": 2, "zero_stage": 2}),
    ("tiled MLPs and dropout", "qwen3-8b", {"tiled_mlp": True, "method": Method.LORA, "lora": Lora(dropout=0.05)}),
    ("accumulation dtype needs ZeRO", "qwen3-8b", {"grad_accum_dtype": Precision.FP32}),
    ("task and loss", "qwen3-8b", {"task": Task.DPO, "loss": LossKernel.FUSED}),
    ("task and packing", "qwen3-8b", {"task": Task.DPO, "packing": True}),
    ("task and sp", "qwen3-8b", {"task": Task.DPO, "sp": 2}),
    ("task and tp", "qwen3-8b", {"task": Task.DPO, "tp": 2, "zero_stage": 2}),
    ("task and ep", "qwen3-30b-a3b", {"task": Task.DPO, "ep": 2, "zero_stage": 2}),
)
"""A rule, a model and what breaks it."""
_PROFILE = ActivationProfile(num_layers=2, is_for_any_depth=True, kept=(), recomputed=())
FACTS: dict[str, dict[str, Any]] = {
    "fused loss and logits": {"model_type": "granite"},
    "sdpa and sinks": {"has_sdpa": False},
    "FlashAttention and the family": {"has_flash": False},
    "FlashAttention and sinks": {"model_type": "gpt_oss"},
    "SP and linear attention": {"num_scored_layers": 9},
    "TP and linear attention": {"num_scored_layers": 9},
    "Liger and dense layers": {"num_hidden_layers": 49},
    "torch.compile and linear attention": {"num_scored_layers": 9},
    "torch.compile of traced code": {"traced": Traced(note="traced", profile=_PROFILE)},
    "loss of traced code": {"traced": Traced(note="traced", profile=_PROFILE)},
}
"""Facts of the model that a rule needs."""
CAPABILITIES = {"torch.compile needs Triton": (6, 0)}
"""Compute capability of the GPUs, where it is not that of an A100."""


def workload_of(name: str, model: str) -> Workload:
    """Returns the workload of a row."""
    workload: Workload = ask(model=model, gpus=16).workload
    gpu = workload.cluster.gpu
    gpu = replace(gpu, compute_capability=CAPABILITIES.get(name, gpu.compute_capability))
    model_facts, cluster = replace(workload.model, **FACTS.get(name, {})), replace(workload.cluster, gpu=gpu)
    return replace(workload, model=model_facts, cluster=cluster)


@pytest.mark.parametrize(("name", "model", "changes"), BROKEN, ids=[name for name, _, _ in BROKEN])
def test_a_rule_alone_forbids_what_breaks_it(name: str, model: str, changes: dict[str, Any]) -> None:
    found = broken(workload_of(name, model), changed(DEFAULTS, **changes))
    assert [rule.name for rule in found] == [name]


def test_every_rule_is_tried() -> None:
    assert {rule.name for rule in RULES} == {name for name, _, _ in BROKEN}


def test_every_rule_says_who_says_so() -> None:
    assert all(rule.source and rule.says for rule in RULES)


def test_what_is_plain_breaks_no_rule() -> None:
    asked = ask(model="qwen3-8b", gpus=16)
    assert broken(asked.workload, changed(DEFAULTS, zero_stage=1)) == []


def test_no_candidate_breaks_a_rule() -> None:
    asked = ask(model="qwen3-8b", gpus=16, nvme="/nvme")
    request = replace(asked.request, sp=None, tp=None)
    found = ways(asked.workload, request).allowed
    assert all(not broken(asked.workload, way) for way in found)
    assert {way.zero.offload for way in found} == set(Offload)
    assert {way.zero.stage for way in found} == {0, 1, 2, 3}
    assert {way.parallel.sp for way in found} == {1, 2, 4, 8, 16}
    assert {way.parallel.tp for way in found} == {1, 2, 4, 8}
    assert {way.zero.hpz for way in found} == {1, 8}
    assert {way.zero.offload_ratio for way in found} == {1.0, 0.75, 0.5, 0.25}


@pytest.mark.parametrize("given", [{"hpz": 1}, {"hpz": 8}, {"offload_ratio": 1.0}, {"offload_ratio": 0.5}])
def test_what_zero_3_adds_can_be_asked_for_and_forbidden(given: dict[str, Any]) -> None:
    asked = ask(model="qwen3-8b", gpus=16)
    found = ways(asked.workload, replace(asked.request, **given)).allowed
    assert found
    assert {flat(way)[name] for way in found for name in given} == set(given.values())


def test_a_share_of_the_optimizer_that_was_asked_for_stays() -> None:
    asked = ask(model="qwen3-32b", gpus=8, gpu="a100-80gb", zero_stage=3, offload="optimizer", sp=1)
    free, whole = (choice(asked.workload, replace(asked.request, offload_ratio=ratio)) for ratio in (None, 1.0))
    assert free.configuration.zero.offload_ratio < whole.configuration.zero.offload_ratio == 1


def test_experts_are_shared_inside_a_node() -> None:
    asked = ask(model="qwen3-30b-a3b", gpus=16)
    found = [way for way in ways(asked.workload, asked.request).allowed if way.parallel.ep > 1]
    assert {way.parallel.ep for way in found} == {2, 4, 8}
    assert {way.zero.stage for way in found} == {1, 2, 3}


def test_mlps_are_tiled_where_rows_have_many_tiles() -> None:
    for seq_len, found in ((8192, {False}), (32768, {False, True})):  # hidden states are 4,096 wide
        asked = ask(model="qwen3-8b", gpus=8, seq_len=seq_len, sp=1)
        offered = ways(asked.workload, asked.request).allowed
        assert {way.checkpointing.tiled_mlp for way in offered} == found
        assert all(way.checkpointing.enabled for way in offered if way.checkpointing.tiled_mlp)
    shared = ask(model="qwen3-8b", gpus=8, seq_len=32768, sp=4)
    assert not any(way.checkpointing.tiled_mlp for way in ways(shared.workload, shared.request).allowed)


def test_all_that_the_trainer_runs_is_offered() -> None:
    asked = ask(model="qwen3-8b", gpus=16)
    found = ways(asked.workload, asked.request).allowed
    assert {(way.zero.stage, way.zero.offload) for way in found} == {
        (0, Offload.NONE), (1, Offload.NONE), (2, Offload.NONE), (3, Offload.NONE),
        (1, Offload.OPTIMIZER), (2, Offload.OPTIMIZER), (3, Offload.OPTIMIZER), (3, Offload.PARAMS),
    }  # fmt: skip
    assert {(way.parallel.sp, way.parallel.tp) for way in found} == {(1, 1), (2, 1), (4, 1), (8, 1), (16, 1)}
    assert {way.zero.hpz for way in found} == {1, 8}


def test_the_loss_is_the_one_of_least_memory_that_a_model_can_do() -> None:
    workload = ask(model="qwen3-8b", gpus=16).workload
    granite = replace(workload, model=replace(workload.model, model_type="granite"))
    for asked, request, loss in (
        (workload, Request(), LossKernel.FUSED),
        (workload, Request(precision=Precision.FP16), LossKernel.CHUNKED),
        (granite, Request(), LossKernel.CHUNKED),
        (workload, Request(tp=2), LossKernel.FULL),
        (workload, Request(loss=LossKernel.FULL), LossKernel.FULL),
    ):
        assert {way.kernels.loss for way in ways(asked, request).allowed} == {loss}


def test_every_candidate_keeps_the_global_batch() -> None:
    asked = ask(model="qwen3-8b", gpus=16, global_batch=96)
    request = replace(asked.request, sp=None, tp=None)
    found = space(asked.workload, request)
    assert {global_batch(asked.workload.cluster, each.configuration(asked.workload.model)) for each in found} == {96}


def test_micro_batches_are_the_divisors_of_a_ranks_share() -> None:
    assert [size for size, _ in batches(Request(global_batch=96), 8)] == [1, 2, 3, 4, 6, 12]


def test_without_a_global_batch_no_step_exceeds_the_default_while_it_can() -> None:
    for ranks in range(1, 129):
        for micro_batch, accum in batches(Request(), ranks):
            assert ranks * micro_batch * accum <= 64 or (micro_batch, accum) == (1, 1)


def test_a_batch_that_is_given_whole_is_kept() -> None:
    assert batches(Request(micro_batch=3, grad_accum=7), 16) == [(3, 7)]


def test_a_global_batch_that_gpus_do_not_divide_can_be_kept_with_sequence_parallelism() -> None:
    asked = ask(model="qwen3-8b", gpus=8, global_batch=4)
    request = replace(asked.request, sp=None, tp=1)
    assert {each.way.parallel.sp for each in space(asked.workload, request)} == {2, 4, 8}


def test_every_choice_given_is_one_configuration() -> None:
    asked = ask(model="qwen3-8b", gpus=8)
    request = Request(
        zero_stage=2,
        offload=Offload.NONE,
        micro_batch=2,
        grad_accum=3,
        grad_ckpt=True,
        sp=None,
        tp=None,
    )
    (only,) = space(asked.workload, request)
    configuration = only.configuration(asked.workload.model)
    assert (configuration.parallel.sp, configuration.parallel.tp, configuration.zero.hpz) == (1, 1, 1)
    assert configuration.zero.reduce_bucket_size == asked.workload.model.hidden_size**2  # as Transformers fills "auto"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zero_stage": 2, "offload": Offload.PARAMS}, "--zero-stage 2 and --offload params; an optimizer"),
        ({"sp": 2, "tp": 2}, "--sp 2 and --tp 2; sequence and tensor parallelism exclude each other"),
        ({"sp": 3}, "--sp 3; SP must divide the GPUs"),
        ({"tp": 3}, "--tp 3; TP must divide the GPUs of a node"),
        ({"activation_offload": True, "grad_ckpt": False}, "--activation-offload and --no-grad-ckpt"),
        ({"global_batch": 16, "micro_batch": 3, "sp": 1, "tp": 1}, "not a multiple of 8 GPUs × micro-batch 3"),
        ({"global_batch": 50, "sp": 1, "tp": 1}, "--global-batch 50 cannot be shared by 8 GPUs"),
        (
            {"global_batch": 64, "micro_batch": 2, "grad_accum": 2, "sp": 1, "tp": 1},
            "--global-batch 64 is not 8 GPUs × micro-batch 2 × 2 accumulated",
        ),
        ({"global_batch": 3, "sp": 2, "tp": 1}, "--global-batch 3 cannot be shared by 4 groups of 8 GPUs"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other_are_named(options: dict[str, Any], said: str) -> None:
    asked = ask(model="qwen3-8b", gpus=8)
    with pytest.raises(InvalidConfig) as caught:
        space(asked.workload, Request(**{"sp": None, "tp": None, **options}))
    assert said in caught.value.problem
