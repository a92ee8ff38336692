"""Names a configuration in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dstrain.choices import Offload, Optimizer, Precision
from dstrain.plan.configuration import Configuration
from dstrain.units import counted


@dataclass(frozen=True, slots=True)
class Words:
    """The words for one mechanism of a configuration."""

    long: str
    """In a sentence: `checkpointing of every 2 layers`."""
    short: str
    """In a table: `ckpt/2`."""
    is_title: bool = False
    """Whether even the title names it."""


def _checkpointing(c: Configuration) -> str:
    chosen = c.checkpointing
    every = "" if chosen.every_n_layers == 1 else f" of every {chosen.every_n_layers} layers"
    where = " with inputs in RAM" if chosen.offload else ""
    words = f"checkpointing{every}{where}" if chosen.enabled else "no checkpointing"
    return f"{words}, tiled MLPs" if chosen.tiled_mlp else words


CHOICE_WORDS: Mapping[str, Callable[[Configuration], str]] = MappingProxyType(
    {
        "micro_batch": lambda c: f"micro-batch {c.batch.micro_batch}",
        **dict.fromkeys(("grad_ckpt", "grad_ckpt_every_n_layers", "activation_offload", "tiled_mlp"), _checkpointing),
        "loss": lambda c: f"{c.kernels.loss} loss",
        "zero_stage": lambda c: f"ZeRO-{c.zero.stage}",
        "offload": lambda c: c.zero.offload.words,
        "hpz": lambda c: f"hpZ {c.zero.hpz}" if c.zero.hpz > 1 else "no hpZ",
        "seq_len": lambda c: f"{c.batch.seq_len} tokens",
    }
)
"""Choices that plans compare → the words for one, in a configuration."""
_OFFLOADED = {Offload.OPTIMIZER: "+opt", Offload.PARAMS: "+params", Offload.NVME: "+nvme"}


def mechanisms_in(c: Configuration) -> Iterator[Words]:
    """Yields the words for each mechanism of a configuration, and its micro-batch."""
    zero, recomputed, parallel = c.zero, c.checkpointing, c.parallel
    share = "" if zero.offload_ratio == 1 or not zero.is_offloaded else f"{100 * zero.offload_ratio:.0f}"
    offload = f" + {zero.offload.words}{f' of {share} %' if share else ''}" if zero.is_offloaded else ""
    marks = f"{_OFFLOADED.get(zero.offload, '')}{f'{share}%' if share else ''}"
    yield Words(f"ZeRO-{zero.stage}{offload}", f"ZeRO-{zero.stage}{marks}", is_title=True)
    if recomputed.enabled or recomputed.tiled_mlp:
        layers = "ckpt" if recomputed.period == 1 else f"ckpt/{recomputed.period}"
        short = [f"{layers}{'+ram' if recomputed.offload else ''}"] if recomputed.enabled else []
        short += ["tiled"] if recomputed.tiled_mlp else []
        yield Words(_checkpointing(c), " ".join(short), is_title=True)
    if c.kernels.torch_compile:
        yield Words("torch.compile", "compiled", is_title=True)
    yield Words(CHOICE_WORDS["micro_batch"](c), f"{c.batch.micro_batch}×{c.step.grad_accum}", is_title=True)
    for name, degree in (("SP", parallel.sp), ("TP", parallel.tp), ("EP", parallel.ep), ("hpZ", zero.hpz)):
        if degree > 1:
            yield Words(f"{name} {degree}", f"{name.lower()}{degree}")
    if zero.qwz:
        yield Words("qwZ", "qwz")
    if c.kernels.liger:
        yield Words("Liger", "liger")
    if zero.is_offloaded and not zero.pin_memory:
        yield Words("pageable memory", "pageable")


def title_parts(configuration: Configuration) -> list[str]:
    """Returns the parts of the title: ZeRO and offload, checkpointing, torch.compile, micro-batch."""
    return [words.long for words in mechanisms_in(configuration) if words.is_title]


def title(configuration: Configuration) -> str:
    """Returns a configuration in a few words, such as `ZeRO-3 + optimizer offload, checkpointing, micro-batch 1`."""
    return ", ".join(title_parts(configuration))


def label(configuration: Configuration) -> str:
    """Returns the title with every mechanism.

    >>> from dstrain.plan.configuration import DEFAULTS, changed
    >>> label(changed(DEFAULTS, zero_stage=3, grad_ckpt=True, sp=4, hpz=8))
    'ZeRO-3, checkpointing, micro-batch 1, SP 4, hpZ 8'
    """
    return ", ".join(words.long for words in mechanisms_in(configuration))


def short_label(configuration: Configuration) -> str:
    """Returns the label as it stands in a table, with micro-batch × accumulation.

    >>> from dstrain.plan.configuration import DEFAULTS, changed
    >>> short_label(changed(DEFAULTS, zero_stage=3, offload=Offload.OPTIMIZER, grad_ckpt=True, grad_accum=4, tp=2))
    'ZeRO-3+opt ckpt 1×4 tp2'
    >>> short_label(changed(DEFAULTS, zero_stage=3, offload=Offload.OPTIMIZER, offload_ratio=0.5, pin_memory=False))
    'ZeRO-3+opt50% 1×1 pageable'
    >>> short_label(changed(DEFAULTS, grad_ckpt=True, grad_ckpt_every_n_layers=2))
    'ZeRO-0 ckpt/2 1×1'
    """
    return " ".join(words.short for words in mechanisms_in(configuration))


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
