"""Combinations that do not work together, each with its source."""

from __future__ import annotations

from functools import partial

from dstrain.choices import Attention, LossKernel, Offload, Precision
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.job.task_limits import LIMITS, TaskLimit
from dstrain.plan.configuration import Configuration, choices
from dstrain.plan.memory.layers.families import LAYER_CODE
from dstrain.plan.search.rule import Rule
from dstrain.plan.search.zero_rules import ZERO_RULES

_DS = "deepspeed 0.19.8 "
SHARED_EXPERTS = ("deepseek_v3", "mixtral", "qwen3_moe")
"""Families whose experts ranks may share."""


def _drops_masks(configuration: Configuration) -> bool:
    return configuration.parallel.sp > 1 and configuration.kernels.attn is not Attention.FLASH_ATTENTION_2


def _scales_by_length(model: ModelFacts, configuration: Configuration) -> bool:
    scaling = configuration.batch.rope_scaling
    return (scaling.rope_type if scaling is not None else model.rope_type) in ("dynamic", "longrope")


def _is_fused(configuration: Configuration) -> bool:
    return configuration.kernels.loss is LossKernel.FUSED


def _replaces_loss(configuration: Configuration) -> bool:
    return configuration.kernels.loss in (LossKernel.CHUNKED, LossKernel.FUSED)


def _exceeds(limit: TaskLimit, model: ModelFacts, cluster: Cluster, configuration: Configuration) -> bool:
    part, choice = choices()[limit.key]
    return configuration.batch.task in limit.tasks and getattr(getattr(configuration, part), choice) not in limit.values


# fmt: off
RULES: tuple[Rule, ...] = (
    *ZERO_RULES,
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
         says="sequence parallelism needs sdpa or flash attention",
         breaks=lambda m, k, c: c.parallel.sp > 1 and c.kernels.attn is Attention.EAGER,
         source=_DS + "runtime/sequence_parallel/ulysses_sp.py: register_with_transformers"),
    Rule(name="SP and latent attention", options=("sp",),
         says="sequence parallelism needs keys and values of one width, which latent attention lacks",
         breaks=lambda m, k, c: c.parallel.sp > 1 and m.head_dim != m.v_head_dim,
         source=_DS + "runtime/sequence_parallel/ulysses_sp.py: forward, key.shape == value.shape"),
    Rule(name="SP and windows", options=("sp", "seq_len", "attn"),
         says="sequence parallelism limits attention to a window with flash_attention_2 only",
         breaks=lambda m, k, c: _drops_masks(c) and m.num_windowed_layers > 0
         and m.sliding_window is not None and m.sliding_window < c.batch.seq_len,
         source=_DS + "runtime/sequence_parallel/ulysses_sp.py: uattn_wrapper drops masks"),
    Rule(name="SP and lengths", options=("sp", "rope_scaling"),
         says="positions that depend on the length of a row (dynamic, longrope) are not those of its slices",
         breaks=lambda m, k, c: c.parallel.sp > 1 and _scales_by_length(m, c),
         source="Transformers 5.23 modeling_rope_utils.py: dynamic_rope_update takes the largest position_id"),
    Rule(name="SP and images", options=("sp", "image_patches"),
         says="sequence parallelism replaces the vision tower's attention too, which has no position ids",
         breaks=lambda m, k, c: c.parallel.sp > 1 and c.batch.image_patches > 0,
         source=_DS + "runtime/sequence_parallel/ulysses_sp.py: forward, position_ids"),
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
         breaks=lambda m, k, c: c.parallel.tp > 1 and c.zero.stage == 0 and c.model.is_deepspeed,
         source="measured on CPU ranks, deepspeed 0.19.8: a norm of 3.71 in place of 4.78; ZeRO-1 to 3 have 4.78"),
    Rule(name="TP and its loss", options=("tp", "loss"),
         says="tensor-parallel ranks have a loss of their own, of a part of the vocabulary",
         breaks=lambda m, k, c: c.parallel.tp > 1 and _replaces_loss(c),
         source=_DS + "sequence/cross_entropy.py: configure_vocab_parallel_loss"),
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
    Rule(name="TP and experts", options=("tp",),
         says="AutoTP refuses the experts of Transformers 5",
         breaks=lambda m, k, c: c.parallel.tp > 1 and m.moe is not None,
         source=_DS + "module_inject/tp_plan_converter.py: convert (styles packed_colwise, moe_tp_experts)"),
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
         source="tests/train/test_space.py; deepspeed 0.19.8 module_inject/auto_ep_presets"),
    Rule(name="EP alone", options=("ep", "sp", "tp"),
         says="expert parallelism does not go together with sequence or tensor parallelism",
         breaks=lambda m, k, c: c.parallel.ep > 1 and (c.parallel.sp > 1 or c.parallel.tp > 1),
         source=_DS + "runtime/engine.py: _validate_zero3_moe_compatibility; AutoTP refuses Transformers' experts"),
    Rule(name="EP needs ZeRO", options=("ep", "zero_stage"),
         says="expert parallelism needs ZeRO-1 or more",
         breaks=lambda m, k, c: c.parallel.ep > 1 and (c.zero.stage == 0 or not c.model.is_deepspeed),
         source="not tried without ZeRO; " + _DS + "runtime/fp16/fused_optimizer.py"),
    Rule(name="EP and adapters", options=("ep", "method"),
         says="expert parallelism is for training experts, which an adapter freezes",
         breaks=lambda m, k, c: c.parallel.ep > 1 and not c.model.is_full,
         source=_DS + "module_inject/auto_ep.py: ep_parser finds the blocks by their names, which PEFT changes"),
    Rule(name="EP and hpZ", options=("ep",),
         says="expert parallelism has no second copy of parameters (hpZ)",
         breaks=lambda m, k, c: c.parallel.ep > 1 and c.zero.hpz > 1,
         source=_DS + "runtime/engine.py: _validate_zero3_moe_compatibility"),
    Rule(name="EP and offload", options=("ep", "offload", "zero_stage"),
         says="expert parallelism offloads whole states to RAM, no part of them and none to NVMe",
         breaks=lambda m, k, c: c.parallel.ep > 1 and (c.zero.offload is Offload.NVME or c.zero.offload_ratio < 1),
         source=_DS + "runtime/engine.py: AutoEP with ZeRO Stage 3 refuses NVMe; partial offload was not tried"),
    Rule(name="EP and Liger", options=("ep", "liger"),
         says="Liger's experts are others than those that expert parallelism shares",
         breaks=lambda m, k, c: c.parallel.ep > 1 and c.kernels.liger,
         source="liger-kernel 0.8.5 transformers/monkey_patch.py replaces the experts' class"),
    Rule(name="activation offload needs checkpoints", options=("activation_offload", "grad_ckpt"),
         says="activation offload needs checkpointing: it moves checkpoints",
         breaks=lambda m, k, c: c.checkpointing.offload and not c.checkpointing.enabled,
         source="Transformers 5.23 trainer.py: reads the kwargs only with activation_checkpointing"),
    Rule(name="every n-th layer needs checkpoints", options=("grad_ckpt_every_n_layers", "grad_ckpt"),
         says="--grad-ckpt-every-n-layers has no effect without checkpointing",
         breaks=lambda m, k, c: c.checkpointing.every_n_layers > 1 and not c.checkpointing.enabled,
         source="Transformers 5.23 trainer.py: reads the kwargs only with activation_checkpointing"),
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
    Rule(name="tiled MLPs are DeepSpeed's", options=("tiled_mlp", "state_dtypes"),
         says="tiled MLPs are DeepSpeed's",
         breaks=lambda m, k, c: c.checkpointing.tiled_mlp and not c.model.is_deepspeed,
         source=_DS + "runtime/sequence_parallel/ulysses_sp.py: TiledMLP (DDP and FSDP need something similar)"),
    Rule(name="accumulation dtype needs ZeRO", options=("zero_stage",),
         says="ZeRO-0 accumulates gradients in the training precision",
         breaks=lambda m, k, c: c.zero.stage == 0 and c.step.grad_accum_dtype not in (None, c.model.precision),
         source=_DS + "runtime/engine.py: _do_optimizer_sanity_check (NotImplementedError)"),
    Rule(name="PyTorch offloads parameters", options=("offload", "state_dtypes"),
         says="without DeepSpeed, parameters and optimizer leave the GPU together",
         breaks=lambda m, k, c: not c.model.is_deepspeed and c.zero.offload not in (Offload.NONE, Offload.PARAMS),
         source="torch 2.13 distributed/fsdp/api.py: CPUOffload(offload_params)"),
    Rule(name="PyTorch has no Ulysses, no hpZ, no ratio", options=("sp", "state_dtypes"),
         says="sequence parallelism, hpZ and partial offload are DeepSpeed's",
         breaks=lambda m, k, c: not c.model.is_deepspeed
         and (c.parallel.sp > 1 or c.zero.hpz > 1 or c.zero.offload_ratio < 1),
         source=_DS + "runtime/sequence_parallel/ulysses_sp.py, runtime/zero/config.py"),
    *(Rule(name=f"task and {limit.key}", options=("task", limit.key), says=limit.says,
           breaks=partial(_exceeds, limit), source="dstrain train/tasks")
      for limit in LIMITS if limit.key in choices()),
)
"""What DeepSpeed 0.19.8, with Transformers 5.23 and accelerate 1.15, does not do. The batch identity is not here: no
configuration is made that breaks it (`search_space.batches`)."""
# fmt: on


def broken(workload: Workload, configuration: Configuration) -> list[Rule]:
    """Returns the rules that a configuration breaks."""
    return [rule for rule in RULES if rule.breaks(workload.model, workload.cluster, configuration)]
