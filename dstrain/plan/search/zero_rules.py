"""Combinations with ZeRO, its offloading and ZeRO++ that do not work together, each with its source."""

from __future__ import annotations

from dstrain.choices import Method, Offload, Optimizer, Precision
from dstrain.plan.search.rule import Rule

_IN_RAM = (Offload.OPTIMIZER, Offload.PARAMS)
_DS = "deepspeed 0.19.8 "

# fmt: off
ZERO_RULES: tuple[Rule, ...] = (
    Rule(name="offload needs ZeRO", options=("zero_stage", "offload"),
         says="ZeRO-0 offloads nothing",
         breaks=lambda m, k, c: c.zero.stage == 0 and c.zero.is_offloaded,
         source=_DS + "runtime/engine.py: _configure_zero_optimizer alone reads offload_optimizer"),
    Rule(name="parameter offload needs ZeRO-3", options=("zero_stage", "offload"),
         says="an optimizer is offloaded under ZeRO-1 to 3, parameters and NVMe under ZeRO-3 only",
         breaks=lambda m, k, c: c.zero.stage < 3 and c.zero.offloads_params,
         source=_DS + "runtime/zero/stage_1_and_2.py: offload_param is never read, an nvme device becomes the CPU"),
    Rule(name="NVMe needs a folder", options=("offload",),
         says="NVMe offload needs a folder on a drive (--nvme)",
         breaks=lambda m, k, c: c.zero.offload is Offload.NVME and k.nvme_path is None,
         source=_DS + "runtime/zero/stage3.py: os.path.join(nvme_path, …) is a TypeError where it is None"),
    Rule(name="ratio needs ZeRO-3", options=("offload_ratio", "zero_stage", "offload"),
         says="a part of the optimizer is offloaded under ZeRO-3 only",
         breaks=lambda m, k, c: c.zero.offload_ratio < 1 and c.zero.stage < 3,
         source=_DS + "runtime/zero/stage3.py: subgroup_to_device; stage_1_and_2.py never reads ratio"),
    Rule(name="ratio needs an optimizer in RAM", options=("offload_ratio", "offload"),
         says="a part of the optimizer stays on the GPU only if the rest is in host RAM",
         breaks=lambda m, k, c: c.zero.offload_ratio < 1 and c.zero.offload not in _IN_RAM,
         source=_DS + "runtime/zero/stage3.py: partial_offload with DeepSpeedCPUAdam"),
    Rule(name="CPU optimizer is Adam", options=("optimizer", "offload"),
         says="an offloaded optimizer must be AdamW, the only one on the CPU",
         breaks=lambda m, k, c: c.zero.is_offloaded and c.step.optimizer is not Optimizer.ADAMW,
         source="accelerate 1.15 utils/deepspeed.py: map_pytorch_optim_to_deepspeed makes CPUAdam of all, or raises"),
    Rule(name="bf16 states need ZeRO", options=("optimizer", "zero_stage"),
         says="states of AdamW are in bf16 under ZeRO-1 to 3 only",
         breaks=lambda m, k, c: c.step.optimizer is Optimizer.ADAMW_BF16 and c.zero.stage == 0,
         source=_DS + "runtime/config.py: _do_error_check"),
    Rule(name="bf16 states of bf16 weights", options=("optimizer", "precision"),
         says="adamw_bf16 needs precision bf16: DeepSpeed keeps bf16 master weights of bf16 weights only",
         cure="precision: bf16, or optimizer: adamw",
         breaks=lambda m, k, c: c.step.optimizer is Optimizer.ADAMW_BF16 and c.model.precision is not Precision.BF16,
         source=_DS + "runtime/base_optimizer.py: _configure_master_weights"),
    Rule(name="hpZ needs ZeRO-3", options=("hpz", "zero_stage"),
         says="a second copy of the parameters inside each node (hpZ) exists under ZeRO-3 only",
         breaks=lambda m, k, c: c.zero.hpz > 1 and c.zero.stage < 3,
         source=_DS + "runtime/zero/partition_parameters.py alone reads zero_hpz_partition_size"),
    Rule(name="hpZ divides the GPUs", options=("hpz",),
         says="hpZ must divide the GPUs of a node",
         breaks=lambda m, k, c: k.gpus_per_node % c.zero.hpz != 0,
         source=_DS + "utils/groups.py: _create_zero_param_parallel_group, _ensure_divisibility"),
    Rule(name="hpZ keeps its copy on the GPU", options=("hpz", "offload"),
         says="hpZ's second copy follows offloaded parameters to the CPU, where it saves nothing",
         breaks=lambda m, k, c: c.zero.hpz > 1 and c.zero.offloads_params,
         source=_DS + "runtime/zero/partition_parameters.py: _partition_param_sec (device=self.remote_device)"),
    Rule(name="hpZ and AutoTP", options=("hpz", "tp"),
         says="hpZ groups consecutive ranks, and AutoTP's groups cross them",
         breaks=lambda m, k, c: c.zero.hpz > 1 and c.parallel.tp > 1,
         source=_DS + "utils/groups.py: _create_zero_param_parallel_group takes consecutive ranks of the world"),
    Rule(name="qwZ needs ZeRO-3", options=("qwz", "zero_stage"),
         says="parameters are gathered in 8 bits (qwZ) under ZeRO-3 only",
         breaks=lambda m, k, c: c.zero.qwz and c.zero.stage < 3,
         source=_DS + "runtime/zero/partition_parameters.py alone reads zero_quantized_weights"),
    Rule(name="qwZ and QLoRA", options=("qwz", "method"),
         says="qwZ would round weights that are in 4 bits already",
         breaks=lambda m, k, c: c.zero.qwz and c.model.method is Method.QLORA,
         source=_DS + "runtime/zero/partition_parameters.py: CUDAQuantizer.quantize casts what it gets to fp16"),
    Rule(name="qwZ and shares of eight", options=("qwz",),
         says="the kernel of qwZ takes eight elements at a time, so the GPUs must divide the hidden size",
         breaks=lambda m, k, c: c.zero.qwz and m.hidden_size % k.num_gpus != 0,
         source=_DS + "runtime/zero/partition_parameters.py: CUDAQuantizer.quantize"),
)
"""Of one another and of the method, the optimizer and the degrees of parallelism."""
# fmt: on
