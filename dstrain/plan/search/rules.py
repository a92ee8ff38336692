"""Combinations that do not work together, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from dstrain.choices import Attention, LossKernel, Optimizer, Precision
from dstrain.facts.attention_kernels import KERNELS, SINKS
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.job.task_limits import LIMITS, TaskLimit
from dstrain.plan.configuration import Configuration, changed, choices
from dstrain.plan.memory.layers.families import LAYER_CODE
from dstrain.plan.memory.layers.kernels import LIGER
from dstrain.plan.search.compile_rules import COMPILE_RULES
from dstrain.plan.search.parallel_rules import PARALLEL_RULES
from dstrain.plan.search.rule import Rule, adapts_experts
from dstrain.plan.search.zero_rules import ZERO_RULES

_DS = "deepspeed 0.19.8 "
MOST_HEAD_DIM = (256, 128)
"""Widest heads of FlashAttention 2 and 3, and of 4."""


def _is_fused(configuration: Configuration) -> bool:
    return configuration.kernels.loss is LossKernel.FUSED


def _replaces_loss(configuration: Configuration) -> bool:
    return configuration.kernels.loss in (LossKernel.CHUNKED, LossKernel.FUSED)


def _is_too_wide(model: ModelFacts, attn: Attention) -> bool:
    """Whether heads are wider than a kernel takes; FlashAttention-4 has its narrowest limit on Blackwell."""
    limit = MOST_HEAD_DIM[attn is Attention.FLASH_ATTENTION_4]
    return attn.is_flash and max(model.head_dim, model.v_head_dim) > limit


def _exceeds(limit: TaskLimit, model: ModelFacts, cluster: Cluster, configuration: Configuration) -> bool:
    part, choice = choices()[limit.key]
    return configuration.batch.task is limit.task and getattr(getattr(configuration, part), choice) not in limit.values


# fmt: off
RULES: tuple[Rule, ...] = (
    *ZERO_RULES,
    Rule(name="Muon and matrices", options=("optimizer",),
         says="Muon is DeepSpeed's, for whole matrices: not for experts in one tensor, and not tried under AutoTP",
         breaks=lambda m, k, c: c.step.optimizer is Optimizer.MUON
         and (m.moe is not None or c.parallel.tp > 1),
         source=_DS + "__init__.py: set_optimizer_flags; runtime/zero/muon/original_muon.py: muon_update"),
    *PARALLEL_RULES,
    Rule(name="sdpa and sinks", options=("attn",),
         says="Transformers computes this family's attention by eager or flash attention, not by sdpa",
         breaks=lambda m, k, c: c.kernels.attn is Attention.SDPA and not m.has_sdpa,
         source="Transformers 5.23 models/gpt_oss/modeling_gpt_oss.py: _supports_sdpa"),
    Rule(name="FlashAttention and the family", options=("attn",),
         says="Transformers has no FlashAttention for this family",
         breaks=lambda m, k, c: c.kernels.attn.is_flash and not m.has_flash,
         source="Transformers 5.23 modeling_utils.py: _flash_attn_can_dispatch"),
    Rule(name="FlashAttention and sinks", options=("attn",),
         says="FlashAttention has no gradients for this family's sinks: adapters alone train with it",
         breaks=lambda m, k, c: c.kernels.attn.is_flash and c.model.is_full and m.model_type in SINKS,
         source="kernels-community vllm-flash-attn3 flash_attn_interface.py: FlashAttnVarlenFunc.backward"),
    Rule(name="FlashAttention and wide heads", options=("attn",),
         says="FlashAttention takes heads of up to 256 elements, its version 4 of up to 128",
         breaks=lambda m, k, c: _is_too_wide(m, c.kernels.attn),
         source="flash-attention 2.8 csrc/flash_attn/flash_api.cpp: mha_fwd; hopper/flash_api.cpp;"
         " flash_attn/cute/interface.py: _validate_head_dims"),
    Rule(name="FlashAttention and fp32", options=("attn", "precision"),
         says="FlashAttention needs bf16 or fp16",
         breaks=lambda m, k, c: c.kernels.attn.is_flash and c.model.precision is Precision.FP32,
         source="flash-attention 2.8 csrc/flash_attn/flash_api.cpp: mha_fwd"),
    Rule(name="Liger and families", options=("liger",),
         says=f"Liger's kernels are planned and run for {', '.join(LIGER)}",
         breaks=lambda m, k, c: c.kernels.liger and m.model_type not in LIGER,
         source="liger-kernel 0.8.5 transformers/monkey_patch.py: MODEL_TYPE_TO_APPLY_LIGER_FN"),
    Rule(name="Liger and dense layers", options=("liger",),
         says="Liger takes every layer of a Qwen3 MoE for one with experts, and some of this model have none",
         breaks=lambda m, k, c: c.kernels.liger and m.model_type == "qwen3_moe"
         and m.moe is not None and m.moe.num_moe_layers < m.num_hidden_layers,
         source="liger-kernel 0.8.5 transformers/monkey_patch.py: apply_liger_kernel_to_qwen3_moe, mlp.experts"),
    Rule(name="fused loss and fp16", options=("loss", "precision"),
         says="the fused loss makes gradients of sums over the tokens, which exceed the range of fp16",
         breaks=lambda m, k, c: _is_fused(c) and c.model.precision is Precision.FP16,
         source="dstrain train/loss.py: _Fused"),
    Rule(name="fused loss and logits", options=("loss",),
         says="the fused loss needs a head whose product is the logits, which this family scales",
         breaks=lambda m, k, c: _is_fused(c) and m.model_type in LAYER_CODE and LAYER_CODE[m.model_type].scales_logits,
         source="Transformers 5.23 models/granite/modeling_granite.py: logits_scaling"),
    Rule(name="fused loss and adapters", options=("loss", "lora"),
         says="the fused loss needs a head without an adapter",
         breaks=lambda m, k, c: _is_fused(c) and not c.model.is_full and "lm_head" in c.model.lora.targets,
         source="dstrain train/loss.py: replace_loss"),
    Rule(name="loss of traced code", options=("loss",),
         says="the model's own code was traced with another loss",
         breaks=lambda m, k, c: m.traced is not None and c.kernels.loss is not m.traced.profile.loss,
         source="dstrain train/tracing/building.py: with_loss"),
    Rule(name="activation offload needs checkpoints", options=("activation_offload", "grad_ckpt"),
         says="activation offload needs checkpointing: it moves checkpoints",
         breaks=lambda m, k, c: c.checkpointing.offload and not c.checkpointing.enabled,
         source="Transformers 5.23 trainer.py: reads the kwargs only with activation_checkpointing"),
    Rule(name="every n-th layer needs checkpoints", options=("grad_ckpt_every_n_layers", "grad_ckpt"),
         says="--grad-ckpt-every-n-layers has no effect without checkpointing",
         breaks=lambda m, k, c: c.checkpointing.every_n_layers > 1 and not c.checkpointing.enabled,
         source="Transformers 5.23 trainer.py: reads the kwargs only with activation_checkpointing"),
    Rule(name="every n-th layer of n or more", options=("grad_ckpt_every_n_layers",),
         says="the model has fewer layers than that, so that one alone would be recomputed",
         breaks=lambda m, k, c: c.checkpointing.enabled and c.checkpointing.every_n_layers > m.num_hidden_layers,
         source="Transformers 5.23 modeling_utils.py: _set_gradient_checkpointing"),
    Rule(name="layers are counted in the decoder", options=("grad_ckpt_every_n_layers", "grad_ckpt"),
         says="one layer of every n is recomputed only if the model has no vision tower, whose layers count too, and"
              " its layer code is known",
         breaks=lambda m, k, c: c.checkpointing.every_n_layers > 1 and (m.vision is not None or m.traced is not None),
         source="Transformers 5.23 modeling_utils.py: _set_gradient_checkpointing counts the tower's layers too"),
    Rule(name="tiles are of dense MLPs", options=("tiled_mlp",),
         says="an MLP is computed tile by tile in dense models whose layer code is known",
         breaks=lambda m, k, c: c.checkpointing.tiled_mlp and (m.moe is not None or m.traced is not None),
         source="dstrain train/tiled_mlp.py"),
    Rule(name="tiled MLPs and AutoTP", options=("tiled_mlp", "tp"),
         says="MLPs that tensor-parallel ranks share were not tried tile by tile",
         breaks=lambda m, k, c: c.checkpointing.tiled_mlp and c.parallel.tp > 1,
         source=_DS + "module_inject/layers.py: its linears reduce in forward and backward"),
    Rule(name="tiled MLPs and dropout", options=("tiled_mlp", "lora"),
         says="a tile that is computed again has another dropout mask; tiled MLPs need adapters without dropout",
         breaks=lambda m, k, c: c.checkpointing.tiled_mlp and not c.model.is_full and c.model.lora.dropout > 0,
         source=_DS + "runtime/sequence_parallel/ulysses_sp.py: TiledMLP keeps no random state"),
    Rule(name="adapters of experts and dropout", options=("lora",),
         says="the adapters of experts are added to weights, so that no input can be dropped",
         breaks=lambda m, k, c: adapts_experts(c) and c.model.lora.dropout > 0,
         source="peft 0.21 tuners/lora/layer.py: ParamWrapper.update_layer"),
    Rule(name="adapters of experts and Liger", options=("liger", "lora"),
         says="Liger's experts were not tried with adapters",
         breaks=lambda m, k, c: adapts_experts(c) and c.kernels.liger,
         source="liger-kernel 0.8.5 ops/fused_moe.py: LigerFusedMoEFunction"),
    *COMPILE_RULES,
    Rule(name="accumulation dtype needs ZeRO", options=("zero_stage",),
         says="ZeRO-0 accumulates gradients in the training precision",
         breaks=lambda m, k, c: c.zero.stage == 0 and c.step.grad_accum_dtype not in (None, c.model.precision),
         source=_DS + "runtime/engine.py: _do_optimizer_sanity_check (NotImplementedError)"),
    *(Rule(name=f"task and {limit.key}", options=("task", limit.key), says=limit.says,
           breaks=partial(_exceeds, limit), source="dstrain train/preferences")
      for limit in LIMITS if limit.key in choices()),
)
"""What DeepSpeed 0.19.8, with Transformers 5.23 and accelerate 1.15, does not do. The batch identity is not here: no
configuration is made that breaks it (`search_space.batches`)."""
# fmt: on
_BREAKS = tuple(rule.breaks for rule in RULES)


def broken(workload: Workload, configuration: Configuration) -> list[Rule]:
    """Returns the rules that a configuration breaks."""
    return [rule for rule in RULES if rule.breaks(workload.model, workload.cluster, configuration)]


def keeps_rules(workload: Workload, configuration: Configuration) -> bool:
    """Returns whether a configuration breaks no rule; a search asks that of thousands."""
    model, cluster = workload.model, workload.cluster
    for breaks in _BREAKS:  # noqa: SIM110 (a generator takes twice as long)
        if breaks(model, cluster, configuration):
            return False
    return True


def unsuitable(workload: Workload, configuration: Configuration) -> Mapping[Attention, str]:
    """Returns the versions of FlashAttention that a configuration cannot have, and why.

    Families whose attention PyTorch's kernel does not compute keep eager: kernels differ in what they leave out.
    """
    if not workload.model.has_sdpa:
        return {kernel.attn: "this family's attention has sinks or caps its scores" for kernel in KERNELS}
    broken_by = {kernel.attn: broken(workload, changed(configuration, attn=kernel.attn)) for kernel in KERNELS}
    return {attn: rule.says for attn, rules in broken_by.items() for rule in rules[::-1] if "attn" in rule.options}
