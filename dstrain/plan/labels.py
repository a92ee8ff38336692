"""Names a configuration in words."""

from __future__ import annotations

from dstrain.choices import Offload, Optimizer, Precision
from dstrain.plan.configuration import Configuration

_OFFLOADED = {Offload.OPTIMIZER: "+opt", Offload.PARAMS: "+params", Offload.NVME: "+nvme"}


def label(configuration: Configuration) -> str:
    """Returns the title with every mechanism.

    >>> from dstrain.plan.configuration import DEFAULTS, changed
    >>> label(changed(DEFAULTS, zero_stage=3, grad_ckpt=True, sp=4, hpz=8))
    'ZeRO-3, checkpointing, micro-batch 1, SP 4, hpZ 8'
    """
    zero, words = configuration.zero, configuration.title_parts
    if zero.offload is Offload.OPTIMIZER and zero.offload_ratio != 1:
        words[0] += f" of {100 * zero.offload_ratio:.0f} %"
    words += [f"{name} {value}" for name, value in _degrees(configuration) if value > 1]
    words += ["Liger"] if configuration.kernels.liger else []
    if zero.is_offloaded and not zero.pin_memory:
        words.append("pageable memory")
    return ", ".join(words)


def short_label(configuration: Configuration) -> str:
    """Returns the title as it stands in a table: micro-batch × accumulation after the mechanisms; every mechanism that
    `label` names has its mark.

    >>> from dstrain.plan.configuration import DEFAULTS, changed
    >>> short_label(changed(DEFAULTS, zero_stage=3, offload=Offload.OPTIMIZER, grad_ckpt=True, grad_accum=4, tp=2))
    'ZeRO-3+opt ckpt 1×4 tp2'
    >>> short_label(changed(DEFAULTS, zero_stage=3, offload=Offload.OPTIMIZER, offload_ratio=0.5, pin_memory=False))
    'ZeRO-3+opt50% 1×1 pageable'
    >>> short_label(changed(DEFAULTS, grad_ckpt=True, grad_ckpt_every_n_layers=2))
    'ZeRO-0 ckpt/2 1×1'
    """
    zero, checkpointing = configuration.zero, configuration.checkpointing
    share = "" if zero.offload_ratio == 1 else f"{100 * zero.offload_ratio:.0f}%"
    words = [f"ZeRO-{zero.stage}{_OFFLOADED.get(zero.offload, '')}{share}"]
    words += ["ckpt" if checkpointing.period == 1 else f"ckpt/{checkpointing.period}"] if checkpointing.enabled else []
    words[-1] += "+ram" if checkpointing.offload else ""
    words += ["tiled"] if checkpointing.tiled_mlp else []
    words += ["compiled"] if configuration.kernels.torch_compile else []
    words.append(f"{configuration.batch.micro_batch}×{configuration.step.grad_accum}")
    words += [f"{name.lower()}{value}" for name, value in _degrees(configuration) if value > 1]
    words += ["liger"] if configuration.kernels.liger else []
    words += ["qwz"] if zero.qwz else []
    words += ["qgz"] if zero.qgz else []
    words += ["pageable"] if zero.is_offloaded and not zero.pin_memory else []
    return " ".join(words)


def _degrees(configuration: Configuration) -> tuple[tuple[str, int], ...]:
    """Returns the degrees of parallelism with their names."""
    parallel = configuration.parallel
    return ("SP", parallel.sp), ("TP", parallel.tp), ("EP", parallel.ep), ("hpZ", configuration.zero.hpz)


OPTIMIZER_WORDS = {
    Optimizer.ADAMW: "AdamW",
    Optimizer.ADAMW_FUSED: "fused AdamW",
    Optimizer.ADAMW_8BIT: "8-bit AdamW",
    Optimizer.ADAFACTOR: "Adafactor",
    Optimizer.LION: "Lion",
    Optimizer.SGD: "SGD",
    Optimizer.MUON: "Muon",
}
"""Display name of each optimizer."""


def arithmetic(precision: Precision, optimizer: Optimizer) -> str:
    """Returns the precision, and the optimizer if it is not AdamW.

    >>> arithmetic(Precision.BF16, Optimizer.ADAMW), arithmetic(Precision.BF16, Optimizer.ADAMW_8BIT)
    ('bf16', 'bf16, 8-bit AdamW')
    """
    return str(precision) if optimizer is Optimizer.ADAMW else f"{precision}, {OPTIMIZER_WORDS[optimizer]}"
