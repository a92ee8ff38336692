"""Limits of sequence, tensor and expert parallelism, each with its source."""

from __future__ import annotations

from dstrain.choices import Attention, LossKernel, Offload
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.plan.configuration import Configuration
from dstrain.plan.search.rule import Rule

_DS = "deepspeed 0.19.8 "
SHARED_EXPERTS = ("deepseek_v3", "mixtral", "qwen3_moe", "qwen3_vl_moe")
"""Families whose experts ranks may share."""


def _drops_masks(configuration: Configuration) -> bool:
    return configuration.parallel.sp > 1 and not configuration.kernels.attn.is_flash


def _scales_by_length(model: ModelFacts, configuration: Configuration) -> bool:
    scaling = configuration.batch.rope_scaling
    return (scaling.rope_type if scaling is not None else model.rope_type) in ("dynamic", "longrope")


# fmt: off
PARALLEL_RULES: tuple[Rule, ...] = (
    Rule(name="SP and AutoTP", options=("sp", "tp"),
         says="sequence and tensor parallelism exclude each other",
         breaks=lambda m, k, c: c.parallel.sp > 1 and c.parallel.tp > 1,
         source=_DS + "runtime/engine.py: _configure_tensor_parallel_states replaces the mpu that SP comes with"),
    Rule(name="SP divides the GPUs", options=("sp",),
         says="SP must divide the GPUs",
         breaks=lambda m, k, c: k.num_gpus % c.parallel.sp != 0,
         source=_DS + "runtime/sequence_parallel/parallel_state_sp.py: initialize_sequence_parallel"),
    Rule(name="SP divides the heads", options=("sp",),
         says="SP must divide the attention heads",
         breaks=lambda m, k, c: m.num_attention_heads % c.parallel.sp != 0,
         source=_DS + "runtime/sequence_parallel/ulysses_sp.py: UlyssesSPAttentionHF.__init__"),
    Rule(name="SP and key-value heads", options=("sp",),
         says="SP must divide the key-value heads or be a multiple of them",
         breaks=lambda m, k, c: bool(m.num_key_value_heads % c.parallel.sp and c.parallel.sp % m.num_key_value_heads),
         source=_DS + "runtime/sequence_parallel/ulysses_sp.py: UlyssesSPAttentionHF.__init__"),
    Rule(name="SP divides the sequence", options=("sp", "seq_len"),
         says="SP must divide the sequence length",
         breaks=lambda m, k, c: c.batch.seq_len % c.parallel.sp != 0,
         source=_DS + "runtime/sequence_parallel/ulysses_sp.py: local_seq_length"),
    Rule(name="SP needs a kernel without mask", options=("sp", "attn"),
         says="sequence parallelism needs sdpa or flash attention, without sinks",
         breaks=lambda m, k, c: c.parallel.sp > 1 and (c.kernels.attn is Attention.EAGER or not m.has_sdpa),
         source=_DS + "runtime/sequence_parallel/ulysses_sp.py: register_with_transformers"),
    Rule(name="SP and FlashAttention-4", options=("sp", "attn"),
         says="sequence parallelism takes sdpa and FlashAttention 2 and 3",
         breaks=lambda m, k, c: c.parallel.sp > 1 and c.kernels.attn is Attention.FLASH_ATTENTION_4,
         source="accelerate 1.15 utils/dataclasses.py: DeepSpeedSequenceParallelConfig, _builtin_sp_attn"),
    Rule(name="SP and latent attention", options=("sp",),
         says="sequence parallelism needs keys and values of one width, which latent attention lacks",
         breaks=lambda m, k, c: c.parallel.sp > 1 and m.head_dim != m.v_head_dim,
         source=_DS + "runtime/sequence_parallel/ulysses_sp.py: forward, key.shape == value.shape"),
    Rule(name="SP and windows", options=("sp", "seq_len", "attn"),
         says="sequence parallelism limits attention to a window with FlashAttention only",
         breaks=lambda m, k, c: _drops_masks(c) and m.num_windowed_layers > 0
         and m.sliding_window is not None and m.sliding_window < c.batch.seq_len,
         source=_DS + "runtime/sequence_parallel/ulysses_sp.py: uattn_wrapper drops masks"),
    Rule(name="SP and linear attention", options=("sp",),
         says="sequence parallelism cuts the states that linear attention carries along the sequence",
         breaks=lambda m, k, c: c.parallel.sp > 1 and m.has_linear_layers,
         source=_DS + "runtime/sequence_parallel/ulysses_sp.py: replaces the attention function alone"),
    Rule(name="SP and lengths", options=("sp", "rope_scaling"),
         says="positions that depend on the length of a row (dynamic, longrope) are not those of its slices",
         breaks=lambda m, k, c: c.parallel.sp > 1 and _scales_by_length(m, c),
         source="Transformers 5.23 modeling_rope_utils.py: dynamic_rope_update takes the largest position_id"),
    Rule(name="SP and images", options=("sp", "image_patches"),
         says="sequence parallelism replaces the vision tower's attention too, which has no position ids",
         breaks=lambda m, k, c: c.parallel.sp > 1 and c.batch.image_patches > 0,
         source=_DS + "runtime/sequence_parallel/ulysses_sp.py: forward, position_ids"),
    Rule(name="TP and images", options=("tp", "image_patches"),
         says="tensor parallelism was not tried with images",
         breaks=lambda m, k, c: c.parallel.tp > 1 and c.batch.image_patches > 0,
         source="dstrain job/task_limits.py: WITH_MEDIA, as which a run refuses it"),
    Rule(name="TP inside a node", options=("tp",),
         says="TP must divide the GPUs of a node",
         breaks=lambda m, k, c: k.gpus_per_node % c.parallel.tp != 0,
         source="Megatron-LM (arXiv 2104.04473), takeaway 1: up to the GPUs of a server (from memory)"),
    Rule(name="TP divides the key-value heads", options=("tp",),
         says="TP must divide the key-value heads: AutoTP splits attention no further",
         breaks=lambda m, k, c: bool(m.num_key_value_heads % c.parallel.tp or m.num_attention_heads % c.parallel.tp),
         source=_DS + "runtime/engine.py: _apply_autotp_partitioning"),
    Rule(name="TP needs ZeRO", options=("tp", "zero_stage"),
         says="tensor parallelism needs ZeRO-1 or more: without ZeRO, bf16 gradients are clipped by a wrong norm",
         breaks=lambda m, k, c: c.parallel.tp > 1 and c.zero.stage == 0,
         source="measured on CPU ranks, deepspeed 0.19.8: a norm of 3.71 in place of 4.78; ZeRO-1 to 3 have 4.78"),
    Rule(name="TP and its loss", options=("tp", "loss"),
         says="tensor-parallel ranks have a loss of their own, of a part of the vocabulary",
         breaks=lambda m, k, c: c.parallel.tp > 1 and c.kernels.loss in (LossKernel.CHUNKED, LossKernel.FUSED),
         source=_DS + "sequence/cross_entropy.py: configure_vocab_parallel_loss"),
    Rule(name="TP and experts", options=("tp",),
         says="AutoTP refuses the experts of Transformers 5",
         breaks=lambda m, k, c: c.parallel.tp > 1 and m.moe is not None,
         source=_DS + "module_inject/tp_plan_converter.py: convert (styles packed_colwise, moe_tp_experts)"),
    Rule(name="TP and linear attention", options=("tp",),
         says="linear attention was not tried under AutoTP, which gathers each of its projections again",
         breaks=lambda m, k, c: c.parallel.tp > 1 and m.has_linear_layers,
         source="Transformers 5.23 models/qwen3_5/configuration_qwen3_5.py: colwise_gather_output"),
    Rule(name="TP and adapters", options=("tp", "method"),
         says="AutoTP does not find linears that an adapter has wrapped",
         breaks=lambda m, k, c: c.parallel.tp > 1 and not c.model.is_full,
         source=_DS + "module_inject/tp_plan_converter.py: convert ends a pattern at q_proj.weight; "
                      "peft's is q_proj.base_layer.weight"),
    Rule(name="EP divides the GPUs", options=("ep",),
         says="EP must divide the GPUs",
         breaks=lambda m, k, c: k.num_gpus % c.parallel.ep != 0,
         source=_DS + "module_inject/auto_ep_folding.py: build_folding_spec"),
    Rule(name="EP divides the experts", options=("ep",),
         says="expert parallelism needs a mixture of experts whose experts EP divides",
         breaks=lambda m, k, c: c.parallel.ep > 1 and (m.moe is None or m.moe.num_experts % c.parallel.ep != 0),
         source=_DS + "module_inject/auto_ep_config.py: validate_autoep_post_detection"),
    Rule(name="EP and families", options=("ep",),
         says=f"expert parallelism was tried with {', '.join(SHARED_EXPERTS)} only",
         breaks=lambda m, k, c: c.parallel.ep > 1 and m.moe is not None and m.model_type not in SHARED_EXPERTS,
         source="tests/train/test_space.py, test_images.py; deepspeed 0.19.8 module_inject/auto_ep_presets"),
    Rule(name="EP alone", options=("ep", "sp", "tp"),
         says="expert parallelism does not go together with sequence or tensor parallelism",
         breaks=lambda m, k, c: c.parallel.ep > 1 and (c.parallel.sp > 1 or c.parallel.tp > 1),
         source=_DS + "runtime/engine.py: _validate_zero3_moe_compatibility; AutoTP refuses Transformers' experts"),
    Rule(name="EP needs ZeRO", options=("ep", "zero_stage"),
         says="expert parallelism needs ZeRO-1 or more",
         breaks=lambda m, k, c: c.parallel.ep > 1 and c.zero.stage == 0,
         source="not tried without ZeRO; " + _DS + "runtime/fp16/fused_optimizer.py"),
    Rule(name="EP and adapters", options=("ep", "method"),
         says="expert parallelism is for training experts, which an adapter freezes",
         breaks=lambda m, k, c: c.parallel.ep > 1 and not c.model.is_full,
         source=_DS + "module_inject/auto_ep.py: ep_parser finds the blocks by their names, which PEFT changes"),
    Rule(name="EP and hpZ", options=("ep", "hpz"),
         says="expert parallelism has no second copy of parameters (hpZ)",
         breaks=lambda m, k, c: c.parallel.ep > 1 and c.zero.hpz > 1,
         source=_DS + "runtime/engine.py: _validate_zero3_moe_compatibility"),
    Rule(name="EP and offload", options=("ep", "offload", "offload_ratio", "zero_stage"),
         says="expert parallelism offloads whole states to RAM, no part of them and none to NVMe",
         breaks=lambda m, k, c: c.parallel.ep > 1 and (c.zero.offload is Offload.NVME or c.zero.offload_ratio < 1),
         source=_DS + "runtime/engine.py: AutoEP with ZeRO Stage 3 refuses NVMe; partial offload was not tried"),
    Rule(name="EP and Liger", options=("ep", "liger"),
         says="Liger's experts are others than those that expert parallelism shares",
         breaks=lambda m, k, c: c.parallel.ep > 1 and c.kernels.liger,
         source="liger-kernel 0.8.5 transformers/monkey_patch.py replaces the experts' class"),
)
"""What DeepSpeed 0.19.8 does not do with the ranks of a group."""
# fmt: on
