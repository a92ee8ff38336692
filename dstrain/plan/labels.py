"""Names a configuration in words."""

from __future__ import annotations

from dstrain.choices import Offload, Optimizer
from dstrain.plan.configuration import Configuration

_OFFLOADED = {Offload.OPTIMIZER: "+opt", Offload.PARAMS: "+params", Offload.NVME: "+nvme"}


def label(configuration: Configuration) -> str:
    """Returns the title with every mechanism.

    >>> from dataclasses import replace
    >>> from dstrain.plan.configuration import DEFAULTS
    >>> label(replace(DEFAULTS, zero_stage=3, grad_ckpt=True, sp=4, hpz=8))
    'ZeRO-3, checkpointing, micro-batch 1, SP 4, hpZ 8'
    """
    each = configuration
    words = each.title_parts
    if each.offload is Offload.OPTIMIZER and each.offload_ratio != 1:
        words[0] += f" of {100 * each.offload_ratio:.0f} %"
    words += [f"{name} {value}" for name, value in (("SP", each.sp), ("TP", each.tp), ("hpZ", each.hpz)) if value > 1]
    if each.offload is not Offload.NONE and not each.pin_memory:
        words.append("pageable memory")
    return ", ".join(words)


def short_label(configuration: Configuration) -> str:
    """Returns the title as it stands in a table: micro-batch × accumulation after the mechanisms; every mechanism that
    `label` names has its mark.

    >>> from dataclasses import replace
    >>> from dstrain.plan.configuration import DEFAULTS
    >>> short_label(replace(DEFAULTS, zero_stage=3, offload=Offload.OPTIMIZER, grad_ckpt=True, grad_accum=4, tp=2))
    'ZeRO-3+opt ckpt 1×4 tp2'
    >>> short_label(replace(DEFAULTS, zero_stage=3, offload=Offload.OPTIMIZER, offload_ratio=0.5, pin_memory=False))
    'ZeRO-3+opt50% 1×1 pageable'
    """
    each = configuration
    share = "" if each.offload_ratio == 1 else f"{100 * each.offload_ratio:.0f}%"
    words = [f"ZeRO-{each.zero_stage}{_OFFLOADED.get(each.offload, '')}{share}"]
    words += ["ckpt"] if each.grad_ckpt else []
    words.append(f"{each.micro_batch}×{each.grad_accum}")
    words += [f"{name}{value}" for name, value in (("sp", each.sp), ("tp", each.tp), ("hpz", each.hpz)) if value > 1]
    words += ["pageable"] if each.offload is not Offload.NONE and not each.pin_memory else []
    return " ".join(words)


OPTIMIZER_WORDS = {
    Optimizer.ADAMW: "AdamW",
    Optimizer.ADAMW_FUSED: "fused AdamW",
    Optimizer.ADAMW_8BIT: "8-bit AdamW",
    Optimizer.ADAFACTOR: "Adafactor",
    Optimizer.LION: "Lion",
    Optimizer.SGD: "SGD",
}
"""How each optimizer is spoken of."""
