"""Names a configuration in words."""

from __future__ import annotations

from dstrain.choices import Offload, Optimizer, Precision
from dstrain.plan.configuration import Configuration
from dstrain.units import counted

_OFFLOADED = {Offload.OPTIMIZER: "+opt", Offload.PARAMS: "+params", Offload.NVME: "+nvme"}


def label(configuration: Configuration) -> str:
    """Returns the title with every mechanism.

    >>> from dstrain.plan.configuration import DEFAULTS, changed
    >>> label(changed(DEFAULTS, zero_stage=3, grad_ckpt=True, sp=4, hpz=8))
    'ZeRO-3, checkpointing, micro-batch 1, SP 4, hpZ 8'
    """
    zero, words = configuration.zero, configuration.title_parts
    if zero.is_offloaded and zero.offload_ratio != 1:
        words[0] += f" of {100 * zero.offload_ratio:.0f} %"
    words += [f"{name} {value}" for name, value in _degrees(configuration) if value > 1]
    words += ["qwZ"] if zero.qwz else []
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
    words += ["pageable"] if zero.is_offloaded and not zero.pin_memory else []
    return " ".join(words)


def _degrees(configuration: Configuration) -> tuple[tuple[str, int], ...]:
    """Returns the degrees of parallelism with their names."""
    parallel = configuration.parallel
    return ("SP", parallel.sp), ("TP", parallel.tp), ("EP", parallel.ep), ("hpZ", configuration.zero.hpz)


OPTIMIZER_WORDS = {
    Optimizer.ADAMW: "AdamW",
    Optimizer.ADAMW_8BIT: "8-bit AdamW",
    Optimizer.ADAMW_BF16: "AdamW with bf16 states",
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


def bf16_losses(learning_rate: float | None, beta2: float | None) -> str:
    """Describes the updates that AdamW loses in bf16 weights, and in second moments if `beta2` is theirs.

    Numbers of 8 significant bits are 2⁻⁸ to 2⁻⁷ of their size apart, and rounding to the nearest drops a change of less
    than half of that: a step of Adam is about the learning rate, and an old second moment falls by 1 - beta2 at most.
    Source: Zamirai et al. (arXiv 2010.06192), 3.1; Kingma and Ba (arXiv 1412.6980), 2.1.

    >>> bf16_losses(1e-5, 0.999)
    'a change below 1/512 of a weight is lost: at learning rate 1e-05, weights above 0.0051 stay as they are; with \
adam_beta2 0.999 second moments never fall (0.995 or less lets them)'
    """
    weights = "a change below 1/512 of a weight is lost"
    if learning_rate is not None:
        weights += f": at learning rate {learning_rate:g}, weights above {512 * learning_rate:.2g} stay as they are"
    if beta2 is None or 1 - beta2 >= 1 / 256:
        return weights
    return f"{weights}; with adam_beta2 {beta2:g} second moments never fall (0.995 or less lets them)"


def batch_label(count: int, *, packing: bool, row_samples: float | None = 1.0) -> str:
    """Returns the contents of a step: samples, or packed rows, whose mean number of samples may be known.

    >>> batch_label(64, packing=False), batch_label(64, packing=True, row_samples=None)
    ('64 samples', '64 rows')
    >>> batch_label(64, packing=True, row_samples=62.5)
    '64 rows (about 4,000 samples)'
    """
    if not packing:
        return counted(count, "sample")
    known = f" (about {float(f'{count * row_samples:.2g}'):,.0f} samples)" if row_samples is not None else ""
    return counted(count, "row") + known
