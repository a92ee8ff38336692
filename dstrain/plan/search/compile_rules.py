"""Limits of torch.compile, each with its source, and what it is worth."""

from __future__ import annotations

from dataclasses import replace

from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration
from dstrain.plan.search.rule import Rule, adapts_experts

_TRAIN = "dstrain train/compiled_layers.py"
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


def note(workload: Workload, configuration: Configuration) -> str | None:
    """Returns what torch.compile would bring, or does not count where it is asked for; None if it cannot run."""
    if configuration.kernels.torch_compile:
        leaf = "; ZeRO-3 then gathers a layer at a time, for which memory is not counted"
        more = leaf if configuration.zero.stage == 3 else ""
        return f"torch.compile: {GAIN} of a step, which is not counted; the first one takes minutes{more}"
    if workload.cluster.gpu.is_cpu or compiled(workload, configuration) is None:
        return None
    return f"torch.compile: {GAIN}; dstrain tune measures it"
