"""Combinations that do not work together, each with its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dstrain.choices import Attention, LossKernel, Method, Offload, Optimizer, Precision
from dstrain.facts.attention_kernels import KERNELS
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.model.families import LIGER, SHARED_EXPERTS
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.model.traits import traits
from dstrain.facts.workload import Workload
from dstrain.job.limits import LIMITS, UNDROPPED, WITH_MEDIA, TaskLimit
from dstrain.plan.configuration import DEGREES, Configuration, changed, choices
from dstrain.plan.memory.layers.families import LAYER_CODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A combination that is refused, has no effect, or has another effect than its options say."""

    name: str
    """Short name."""
    says: str
    """The rule, in words."""
    options: tuple[str, ...]
    """The fields of a request that the rule concerns."""
    breaks: Callable[[ModelFacts, Cluster, Configuration], bool]
    """Whether a configuration breaks it."""
    source: str
    """Where the limit is documented or implemented."""

    needs_model: bool = True
    """Whether it depends on the model, and not only on the configuration and the machines."""
    lint: str = ""
    """The lint rule that reports it at a key of ds_config.json or of the task, in words of its own; empty: DS808."""
    cure: str | None = None
    """The settings to write in a job instead, if its plain value is not the only way."""

    @property
    def is_of_parallelism(self) -> bool:
        """Whether it limits groups of ranks, whatever the stage of ZeRO."""
        return not set(DEGREES).isdisjoint(self.options) and "zero_stage" not in self.options


def adapts_experts(configuration: Configuration) -> bool:
    """Returns whether experts have adapters, which are added to their weights."""
    return not configuration.model.is_full and bool(configuration.model.lora.target_parameters)


_TRAIN = "dstrain train/model.py"
LEAST_CAPABILITY = (7, 0)
"""Compute capability from which Triton compiles kernels. Source: torch 2.13 _inductor/scheduler.py."""
GAIN = "published runs save 14 to 21 %"
"""Time of a step, whole models compiled. Sources: torchtitan docs/performance.md (Llama 3.1 8B, 8 and 128 H100: 14 %);
axolotl docs/optimizations.qmd (Qwen3-8B LoRA: 14 to 19 %); torchtune README.md (Llama 3.2 3B, one A100: 21 %)."""


# fmt: off
COMPILE_RULES: tuple[Rule, ...] = (
    Rule(name="torch.compile and shared experts", options=("torch_compile", "ep"),
         says="torch.compile was not tried with experts that ranks share",
         breaks=lambda m, k, c: c.kernels.torch_compile and c.parallel.ep > 1, source=_TRAIN),
    Rule(name="torch.compile and Liger", options=("torch_compile", "liger"),
         says="torch.compile was not tried with Liger's kernels",
         breaks=lambda m, k, c: c.kernels.torch_compile and c.kernels.liger, source=_TRAIN),
    Rule(name="torch.compile and linear attention", options=("torch_compile",),
         says="torch.compile was not tried with the kernels of linear attention",
         breaks=lambda m, k, c: c.kernels.torch_compile and m.has_linear_layers, source=_TRAIN),
    Rule(name="torch.compile and vision towers", options=("torch_compile",),
         says="torch.compile was not tried with models that have a vision tower",
         breaks=lambda m, k, c: c.kernels.torch_compile and m.vision is not None, source=_TRAIN),
    Rule(name="torch.compile of traced code", options=("torch_compile",),
         says="torch.compile was not tried with families that dstrain has to trace",
         breaks=lambda m, k, c: c.kernels.torch_compile and m.traced is not None, source=_TRAIN),
    Rule(name="torch.compile and adapters of experts", options=("torch_compile", "lora"),
         says="torch.compile was not tried with adapters of experts, whose weights PEFT replaces in every pass",
         breaks=lambda m, k, c: c.kernels.torch_compile and adapts_experts(c),
         source="peft 0.21 tuners/lora/config.py: LoraConfig.target_parameters (re-compilation is expected)"),
    Rule(name="torch.compile and tiled MLPs", options=("torch_compile", "tiled_mlp"),
         says="torch.compile compiles tiled MLPs again in every step",
         breaks=lambda m, k, c: c.kernels.torch_compile and c.checkpointing.tiled_mlp,
         source="torch 2.13 _dynamo: guards on the closure of deepspeed 0.19.8 TiledMLP (six steps of six on a CPU)"),
    Rule(name="torch.compile needs Triton", options=("torch_compile",),
         says="torch.compile needs GPUs of compute capability 7.0 or above: older ones lack Triton",
         breaks=lambda m, k, c: c.kernels.torch_compile and (0, 0) < k.gpu.compute_capability < LEAST_CAPABILITY,
         source="torch 2.13 _inductor/scheduler.py: GPUTooOldForTriton"),
)
# fmt: on


def compiled(workload: Workload, configuration: Configuration) -> Configuration | None:
    """Returns a configuration with compiled layers; None if they are compiled already, or cannot be."""
    other = replace(configuration, kernels=replace(configuration.kernels, torch_compile=True))
    is_refused = any(rule.breaks(workload.model, workload.cluster, other) for rule in COMPILE_RULES)
    return None if other == configuration or is_refused else other


def compiling_note(workload: Workload, configuration: Configuration) -> str | None:
    """Returns a note on the gain of torch.compile, or on uncounted effects if it is chosen; None if it cannot run."""
    if configuration.kernels.torch_compile:
        leaf = "; ZeRO-3 then gathers a layer at a time, for which memory is not counted"
        more = leaf if configuration.zero.stage == 3 else ""
        return f"torch.compile: {GAIN} of a step, which is not counted; the first one takes minutes{more}"
    if workload.cluster.gpu.is_cpu or compiled(workload, configuration) is None:
        return None
    return f"torch.compile: {GAIN}; dstrain tune measures it"


_IN_RAM = (Offload.OPTIMIZER, Offload.PARAMS)
_DS = "deepspeed 0.19.8 "

# fmt: off
ZERO_RULES: tuple[Rule, ...] = (
    Rule(name="offload needs ZeRO", options=("zero_stage", "offload"), lint="DS201",
         says="ZeRO-0 offloads nothing",
         breaks=lambda m, k, c: c.zero.stage == 0 and c.zero.is_offloaded,
         source=_DS + "runtime/engine.py: _configure_zero_optimizer alone reads offload_optimizer"),
    Rule(name="parameter offload needs ZeRO-3", options=("zero_stage", "offload"), lint="DS201",
         says="an optimizer is offloaded under ZeRO-1 to 3, parameters and NVMe under ZeRO-3 only",
         breaks=lambda m, k, c: c.zero.stage < 3 and c.zero.offloads_params,
         source=_DS + "runtime/zero/stage_1_and_2.py: offload_param is never read, an nvme device becomes the CPU"),
    Rule(name="NVMe needs a folder", options=("offload",), lint="DS311",
         says="NVMe offload needs a folder on a drive (--nvme)",
         breaks=lambda m, k, c: c.zero.offload is Offload.NVME and k.nvme_path is None,
         source=_DS + "runtime/zero/stage3.py: os.path.join(nvme_path, …) is a TypeError where it is None"),
    Rule(name="ratio needs ZeRO-3", options=("offload_ratio", "zero_stage", "offload"), lint="DS204",
         says="a part of the optimizer is offloaded under ZeRO-3 only",
         breaks=lambda m, k, c: c.zero.offload_ratio < 1 and c.zero.stage < 3,
         source=_DS + "runtime/zero/stage3.py: subgroup_to_device; stage_1_and_2.py never reads ratio"),
    Rule(name="ratio needs an optimizer in RAM", options=("offload_ratio", "offload"),
         says="a part of the optimizer stays on the GPU only if the rest is in host RAM",
         breaks=lambda m, k, c: c.zero.offload_ratio < 1 and c.zero.offload not in _IN_RAM,
         source=_DS + "runtime/zero/stage3.py: partial_offload with DeepSpeedCPUAdam"),
    Rule(name="CPU optimizer is Adam", options=("optimizer", "offload"), lint="DS225",
         says="an offloaded optimizer must be AdamW, the only one on the CPU",
         breaks=lambda m, k, c: c.zero.is_offloaded and c.step.optimizer is not Optimizer.ADAMW,
         source="accelerate 1.15 utils/deepspeed.py: map_pytorch_optim_to_deepspeed makes CPUAdam of all, or raises"),
    Rule(name="bf16 states need ZeRO", options=("optimizer", "zero_stage"), lint="DS225",
         says="states of AdamW are in bf16 under ZeRO-1 to 3 only",
         breaks=lambda m, k, c: c.step.optimizer is Optimizer.ADAMW_BF16 and c.zero.stage == 0,
         source=_DS + "runtime/config.py: _do_error_check"),
    Rule(name="bf16 states of bf16 weights", options=("optimizer", "precision"),
         says="adamw_bf16 needs precision bf16: DeepSpeed keeps bf16 master weights of bf16 weights only",
         cure="precision: bf16, or optimizer: adamw",
         breaks=lambda m, k, c: c.step.optimizer is Optimizer.ADAMW_BF16 and c.model.precision is not Precision.BF16,
         source=_DS + "runtime/base_optimizer.py: _configure_master_weights"),
    Rule(name="hpZ needs ZeRO-3", options=("hpz", "zero_stage"), lint="DS203",
         says="a second copy of the parameters inside each node (hpZ) exists under ZeRO-3 only",
         breaks=lambda m, k, c: c.zero.hpz > 1 and c.zero.stage < 3,
         source=_DS + "runtime/zero/partition_parameters.py alone reads zero_hpz_partition_size"),
    Rule(name="hpZ divides the GPUs", options=("hpz",), lint="DS801",
         says="hpZ must divide the GPUs of a node",
         breaks=lambda m, k, c: k.gpus_per_node % c.zero.hpz != 0,
         source=_DS + "utils/groups.py: _create_zero_param_parallel_group, _ensure_divisibility"),
    Rule(name="hpZ keeps its copy on the GPU", options=("hpz", "offload"),
         says="hpZ's second copy follows offloaded parameters to the CPU, where it saves nothing",
         breaks=lambda m, k, c: c.zero.hpz > 1 and c.zero.offloads_params,
         source=_DS + "runtime/zero/partition_parameters.py: _partition_param_sec (device=self.remote_device)"),
    Rule(name="hpZ and AutoTP", options=("hpz", "tp"), lint="DS224",
         says="hpZ groups consecutive ranks, and AutoTP's groups cross them",
         breaks=lambda m, k, c: c.zero.hpz > 1 and c.parallel.tp > 1,
         source=_DS + "utils/groups.py: _create_zero_param_parallel_group takes consecutive ranks of the world"),
    Rule(name="qwZ needs ZeRO-3", options=("qwz", "zero_stage"), lint="DS203",
         says="parameters are gathered in 8 bits (qwZ) under ZeRO-3 only",
         breaks=lambda m, k, c: c.zero.qwz and c.zero.stage < 3,
         source=_DS + "runtime/zero/partition_parameters.py alone reads zero_quantized_weights"),
    Rule(name="qwZ and QLoRA", options=("qwz", "method"), lint="DS813",
         says="qwZ would round weights that are in 4 bits already",
         breaks=lambda m, k, c: c.zero.qwz and c.model.method is Method.QLORA,
         source=_DS + "runtime/zero/partition_parameters.py: CUDAQuantizer.quantize casts what it gets to fp16"),
    Rule(name="qwZ and shares of eight", options=("qwz",), lint="DS813",
         says="the kernel of qwZ takes eight elements at a time, and shares of some parameters are no multiple",
         breaks=lambda m, k, c: c.zero.qwz and any(-(-tensor.numel // k.num_gpus) % 8 for tensor in m.tensors),
         source=_DS + "runtime/zero/partition_parameters.py: CUDAQuantizer.quantize, also of norms, gathered alone"),
)
"""Of one another and of the method, the optimizer and the degrees of parallelism."""
# fmt: on


def _scales_by_length(model: ModelFacts, configuration: Configuration) -> bool:
    scaling = configuration.batch.rope_scaling
    return (scaling.rope_type if scaling is not None else model.rope_type) in ("dynamic", "longrope")


def _exceeds_with_images(limit: TaskLimit, model: ModelFacts, cluster: Cluster, configuration: Configuration) -> bool:
    return configuration.batch.image_patches > 0 and choices()[limit.key].of(configuration) not in limit.values


# fmt: off
PARALLEL_RULES: tuple[Rule, ...] = (
    Rule(name="SP and AutoTP", options=("sp", "tp"),
         says="sequence and tensor parallelism exclude each other",
         breaks=lambda m, k, c: c.parallel.sp > 1 and c.parallel.tp > 1,
         source=_DS + "runtime/engine.py: _configure_tensor_parallel_states replaces the mpu that SP comes with"),
    Rule(name="SP divides the GPUs", options=("sp",), needs_model=False,
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
         breaks=lambda m, k, c: c.parallel.sp > 1 and not c.kernels.attn.is_flash and m.num_windowed_layers > 0
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
    *(Rule(name=f"{limit.key.upper()} and images", options=(limit.key, "image_patches"), says=limit.why,
           breaks=partial(_exceeds_with_images, limit),
           source=_DS + "runtime/sequence_parallel/ulysses_sp.py: forward, position_ids; not tried with AutoTP")
      for limit in WITH_MEDIA if limit.key in DEGREES),
    Rule(name="TP inside a node", options=("tp",), needs_model=False,
         says="TP must divide the GPUs of a node",
         breaks=lambda m, k, c: k.gpus_per_node % c.parallel.tp != 0,
         source="Megatron-LM (arXiv 2104.04473), takeaway 1: up to the GPUs of a server (from memory)"),
    Rule(name="TP divides the key-value heads", options=("tp",),
         says="TP must divide the key-value heads: AutoTP splits attention no further",
         breaks=lambda m, k, c: bool(m.num_key_value_heads % c.parallel.tp or m.num_attention_heads % c.parallel.tp),
         source=_DS + "runtime/engine.py: _apply_autotp_partitioning"),
    Rule(name="TP needs ZeRO", options=("tp", "zero_stage"), lint="DS224",
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
    Rule(name="EP divides the GPUs", options=("ep",), needs_model=False,
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
    Rule(name="EP needs ZeRO", options=("ep", "zero_stage"), lint="DS224",
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
"""Limits of DeepSpeed 0.19.8 for ranks of a group."""
# fmt: on

MOST_HEAD_DIM = (256, 128)
"""Widest heads of FlashAttention 2 and 3, and of 4."""


def _is_fused(configuration: Configuration) -> bool:
    return configuration.kernels.loss is LossKernel.FUSED


def _is_too_wide(model: ModelFacts, attn: Attention) -> bool:
    """Whether heads are wider than a kernel takes; FlashAttention-4 has its narrowest limit on Blackwell."""
    limit = MOST_HEAD_DIM[attn is Attention.FLASH_ATTENTION_4]
    return attn.is_flash and max(model.head_dim, model.v_head_dim) > limit


def _exceeds(limit: TaskLimit, model: ModelFacts, cluster: Cluster, configuration: Configuration) -> bool:
    value = choices()[limit.key].of(configuration)
    return configuration.batch.task is limit.task and value not in limit.values


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
         breaks=lambda m, k, c: c.kernels.attn.is_flash and c.model.is_full and traits(m.model_type).has_sinks,
         source="kernels-community vllm-flash-attn3 flash_attn_interface.py: FlashAttnVarlenFunc.backward"),
    Rule(name="FlashAttention and wide heads", options=("attn",),
         says="FlashAttention takes heads of up to 256 elements, its version 4 of up to 128",
         breaks=lambda m, k, c: _is_too_wide(m, c.kernels.attn),
         source="flash-attention 2.8 csrc/flash_attn/flash_api.cpp: mha_fwd; hopper/flash_api.cpp;"
         " flash_attn/cute/interface.py: _validate_head_dims"),
    Rule(name="FlashAttention and fp32", options=("attn", "precision"), needs_model=False,
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
         source="dstrain train/model.py"),
    Rule(name="tiled MLPs and AutoTP", options=("tiled_mlp", "tp"),
         says="MLPs that tensor-parallel ranks share were not tried tile by tile",
         breaks=lambda m, k, c: c.checkpointing.tiled_mlp and c.parallel.tp > 1,
         source=_DS + "module_inject/layers.py: its linears reduce in forward and backward"),
    Rule(name="tiled MLPs and dropout", options=("tiled_mlp", "lora"),
         says="a tile that is computed again has another dropout mask; tiled MLPs need adapters without dropout",
         breaks=lambda m, k, c: c.checkpointing.tiled_mlp and not c.model.is_full and c.model.lora.dropout > 0,
         source=_DS + "runtime/sequence_parallel/ulysses_sp.py: TiledMLP keeps no random state"),
    Rule(name="adapters of experts and dropout", options=("lora",), lint="DS226",
         says=UNDROPPED.why, breaks=lambda m, k, c: adapts_experts(c) and c.model.lora.dropout > 0,
         source="peft 0.21 tuners/lora/layer.py: ParamWrapper.update_layer"),
    Rule(name="adapters of experts and Liger", options=("liger", "lora"),
         says="Liger's experts were not tried with adapters",
         breaks=lambda m, k, c: adapts_experts(c) and c.kernels.liger,
         source="liger-kernel 0.8.5 ops/fused_moe.py: LigerFusedMoEFunction"),
    *COMPILE_RULES,
    Rule(name="accumulation dtype needs ZeRO", options=("zero_stage",), lint="DS325",
         says="ZeRO-0 accumulates gradients in the training precision",
         breaks=lambda m, k, c: c.zero.stage == 0 and c.step.grad_accum_dtype not in (None, c.model.precision),
         source=_DS + "runtime/engine.py: _do_optimizer_sanity_check (NotImplementedError)"),
    *(Rule(name=f"task and {limit.key}", options=("task", limit.key), lint="DS226", says=limit.says,
           breaks=partial(_exceeds, limit), source="dstrain train/preferences")
      for limit in LIMITS if limit.key in choices()),
)
"""Limits of DeepSpeed 0.19.8 with Transformers 5.23 and accelerate 1.15. The batch identity is not here: no
configuration is made that breaks it (`search_space.batches`)."""
# fmt: on
_BREAKS = tuple(rule.breaks for rule in RULES)


def broken(workload: Workload, configuration: Configuration) -> list[Rule]:
    """Returns the rules that a configuration breaks."""
    return [rule for rule in RULES if rule.breaks(workload.model, workload.cluster, configuration)]


def broken_by_any(cluster: Cluster, configuration: Configuration) -> list[Rule]:
    """Returns the rules that a configuration breaks with any model, for one whose facts are unknown."""
    model: Any = None
    return [rule for rule in RULES if not rule.needs_model and rule.breaks(model, cluster, configuration)]


def keeps_rules(workload: Workload, configuration: Configuration) -> bool:
    """Returns whether a configuration breaks no rule; a search asks it for thousands of them."""
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
