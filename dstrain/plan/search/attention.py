"""Which FlashAttention a configuration may have in place of its own attention, and what it would bring."""

from __future__ import annotations

from collections.abc import Mapping

from dstrain.choices import Attention
from dstrain.facts.attention_kernels import KERNELS, runs_on
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration, changed
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.search.reasons import percent
from dstrain.plan.search.rules import broken
from dstrain.plan.speed.step_time import speed

WORTH_SAYING = 0.03
"""Share of a step's time from which a plan names a faster kernel."""


def unsuitable(workload: Workload, configuration: Configuration) -> Mapping[Attention, str]:
    """Returns the versions of FlashAttention that a configuration cannot have, and why.

    Families whose attention PyTorch's kernel does not compute keep eager: kernels differ in what they leave out.
    """
    if not workload.model.has_sdpa:
        return {kernel.attn: "this family's attention has sinks or caps its scores" for kernel in KERNELS}
    broken_by = {kernel.attn: broken(workload, changed(configuration, attn=kernel.attn)) for kernel in KERNELS}
    return {attn: rule.says for attn, rules in broken_by.items() for rule in rules[::-1] if "attn" in rule.options}


def notes(workload: Workload, chosen: Estimate) -> list[str]:
    """Returns what the best FlashAttention of the GPU would bring, if it is not planned and worth saying."""
    configuration, gpu = chosen.configuration, workload.cluster.gpu
    if chosen.speed is None or gpu.is_cpu or configuration.kernels.attn is not Attention.SDPA:
        return []
    wrong = unsuitable(workload, configuration)
    best = next((k.attn for k in KERNELS if k.attn not in wrong and runs_on(gpu, k.attn)), None)
    faster = speed(workload, changed(configuration, attn=best)) if best is not None else None
    saved = 1 - faster.step_s / chosen.speed.step_s if faster is not None else 0.0
    if saved <= WORTH_SAYING:
        return []
    return [f"planned with sdpa, which all machines have; a step with {best} takes {percent(saved)} less time"]
