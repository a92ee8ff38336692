"""Rules about buffers that take memory without making the run faster."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.config.key_bytes import cost, scale
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule
from dstrain.config.lint.subject import Subject, shown
from dstrain.units import format_bytes, format_count

LARGE_BUCKET = 500_000_000
"""DeepSpeed's default, in elements: 1 GB in bf16, far more than a collective needs to reach its link's bandwidth."""
LARGE_SUB_GROUP = 2_000_000_000
"""Twice DeepSpeed's default, in elements."""


def _bytes(subject: Subject, key: str, value: float) -> int:
    """Returns the bytes that a size takes, as `dstrain explain` counts them."""
    job = subject.asked
    by = scale(subject.config, job, subject.model, num_ranks=subject.num_ranks)
    memory = cost(f"zero_optimization.{key}", value, subject.config, by)
    return memory.count_bytes if memory is not None else 0


def _buckets(subject: Subject) -> Iterator[Fault]:
    size = subject.number("zero_optimization.reduce_bucket_size", 0)
    params = subject.model.num_params if subject.model is not None else None
    if subject.stage == 0 or (size <= LARGE_BUCKET and (params is None or size <= params)):
        return
    needed = _bytes(subject, "reduce_bucket_size", size)
    larger = f", more than the {format_count(params)} parameters of the model" if params and size > params else ""
    least = min(200_000_000, params) if params else 200_000_000
    saved = needed - _bytes(subject, "reduce_bucket_size", least)
    yield Fault(
        pointer=("zero_optimization", "reduce_bucket_size"),
        problem=f"reduce_bucket_size is {shown(subject.at('zero_optimization.reduce_bucket_size'))}{larger}",
        effect=f"its buffers take up to {format_bytes(needed)} of each GPU without being faster than smaller ones",
        fix=f"write {least}, which takes {format_bytes(saved)} less",
    )


def _live(subject: Subject) -> Iterator[Fault]:
    """Reports a prefetch bucket beyond max_live_parameters, which bounds prefetching."""
    prefetch = subject.number("zero_optimization.stage3_prefetch_bucket_size", 50_000_000)
    live = subject.number("zero_optimization.stage3_max_live_parameters", 1_000_000_000)
    is_written = isinstance(subject.at("zero_optimization.stage3_prefetch_bucket_size", None), int | float)
    if subject.stage == 3 and is_written and prefetch > live:
        yield Fault(
            pointer=("zero_optimization", "stage3_prefetch_bucket_size"),
            problem=f"stage3_prefetch_bucket_size ({prefetch:g}) is more than stage3_max_live_parameters ({live:g})",
            effect="prefetching stops at stage3_max_live_parameters",
            fix="raise stage3_max_live_parameters, or lower this value",
        )


def _sub_groups(subject: Subject) -> Iterator[Fault]:
    size = subject.number("zero_optimization.sub_group_size", 0)
    if subject.stage != 3 or subject.offloads_optimizer or size <= LARGE_SUB_GROUP:
        return
    share = None
    if subject.model is not None and subject.num_ranks:
        share = subject.model.num_params // subject.num_ranks
        if share <= LARGE_SUB_GROUP:
            return
    needed = format_bytes(_bytes(subject, "sub_group_size", size))
    extra = f"{needed} of each GPU" if share else f"up to {needed} of each GPU"
    yield Fault(
        pointer=("zero_optimization", "sub_group_size"),
        problem=f"sub_group_size is {shown(subject.at('zero_optimization.sub_group_size'))}",
        effect=f"the optimizer updates that many elements at once, which takes {extra} on top of the states",
        fix="write 1000000000, DeepSpeed's default, which is as fast",
    )


# fmt: off
RULES = (
    Rule(id="DS701", severity=Severity.WARNING, title="reduce bucket larger than useful", find=_buckets,
         source="deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: setup_buckets, stage3.py: __init__"),
    Rule(id="DS702", severity=Severity.INFO, title="prefetch bucket larger than the live parameters", find=_live,
         source="deepspeed 0.19.8 runtime/zero/partitioned_param_coordinator.py: fetch_sub_module"),
    Rule(id="DS703", severity=Severity.WARNING, title="sub-group larger than useful", find=_sub_groups,
         source="deepspeed 0.19.8 runtime/zero/stage3.py: _prepare_sub_group"),
)
"""Rules about buffers."""
# fmt: on
