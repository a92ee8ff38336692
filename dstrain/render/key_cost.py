"""Bytes that the numbers in a configuration stand for: most of them count elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dstrain.choices import Precision
from dstrain.render.merge import lookup


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What sizes in elements are measured with."""

    element_bytes: int
    """Bytes of one element of the model in forward and backward."""
    num_params: int | None
    """Elements of the model, which most sizes cannot exceed; None where the model is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a number takes."""

    count_bytes: int
    """Bytes."""
    where: str
    """Of what, in words that follow the number: `of each GPU`."""


def scale(config: Mapping[str, Any], *, precision: Precision | None = None, num_params: int | None = None) -> Scale:
    """Returns the scale of a configuration; without a job 16 bits where bf16 or fp16 is on or "auto", else 32."""
    if precision is not None:
        return Scale(element_bytes=precision.num_bytes, num_params=num_params)
    is_short = any(lookup(config, (name, "enabled"), False) in (True, "auto") for name in ("bf16", "fp16"))
    return Scale(element_bytes=2 if is_short else 4, num_params=num_params)


def cost(path: str, value: Any, config: Mapping[str, Any], by: Scale) -> Cost | None:
    """Returns what a number of a configuration takes, or None for one that takes nothing.

    >>> cost("zero_optimization.reduce_bucket_size", 5e8, {"zero_optimization": {"stage": 3}},
    ...     Scale(element_bytes=2, num_params=None))
    Cost(count_bytes=2000000000, where='of each GPU at most, in two buffers')
    """
    row = _COSTS.get(path)
    if row is None or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return row(value, config, by)


def _zero(config: Mapping[str, Any], name: str, default: Any) -> Any:
    return lookup(config, ("zero_optimization", name), default)


def _capped(value: float, by: Scale) -> float:
    return value if by.num_params is None else min(value, by.num_params)


def _reduce(value: float, config: Mapping[str, Any], by: Scale) -> Cost | None:
    """Two buffers that take turns where communication overlaps, and one with its copy under ZeRO-3."""
    stage = _zero(config, "stage", 0)
    if stage == 0:
        return None
    is_double = stage == 3 or _zero(config, "overlap_comm", False) is True
    size = value if stage == 3 else _capped(value, by)
    words = "of each GPU at most, in two buffers" if is_double else "of each GPU"
    return Cost(count_bytes=round(size * by.element_bytes) * (2 if is_double else 1), where=words)


def _gathered(words: str, *, share: float = 1.0) -> Callable[[float, Mapping[str, Any], Scale], Cost | None]:
    def row(value: float, config: Mapping[str, Any], by: Scale) -> Cost | None:
        if _zero(config, "stage", 0) != 3 or not value:
            return None
        return Cost(count_bytes=round(_capped(share * value, by) * by.element_bytes), where=words)

    return row


def _sub_group(value: float, config: Mapping[str, Any], by: Scale) -> Cost | None:
    """At the step a sub-group's gradients become fp32 beside a copy of its weights; offloaded they are in RAM."""
    if _zero(config, "stage", 0) != 3:
        return None
    if lookup(config, ("zero_optimization", "offload_optimizer", "device"), "none") in ("cpu", "nvme"):
        return Cost(count_bytes=round(4 * _capped(value, by)), where="of host RAM at most, for its fp32 gradients")
    count = round((by.element_bytes + 4) * _capped(value, by))
    return Cost(count_bytes=count, where="of each GPU at the step, at most")


def _swap(value: float, config: Mapping[str, Any], by: Scale) -> Cost | None:
    section = ("zero_optimization", "offload_param")
    if lookup(config, (*section, "device"), "none") != "nvme":
        return None
    count = lookup(config, (*section, "buffer_count"), 5)
    if isinstance(count, bool) or not isinstance(count, int):
        return None
    return Cost(count_bytes=round(value * count * by.element_bytes), where=f"of host RAM a rank, in {count} buffers")


def _plain(value: float, config: Mapping[str, Any], by: Scale) -> Cost | None:
    return Cost(count_bytes=round(value), where="each")


_COSTS: Mapping[str, Callable[[float, Mapping[str, Any], Scale], Cost | None]] = MappingProxyType(
    {
        "zero_optimization.reduce_bucket_size": _reduce,
        "zero_optimization.stage3_prefetch_bucket_size": _gathered("of each GPU, gathered ahead"),
        "zero_optimization.stage3_param_persistence_threshold": _gathered("at most for a parameter that stays whole"),
        "zero_optimization.stage3_max_live_parameters": _gathered("of each GPU at most"),
        "zero_optimization.stage3_max_reuse_distance": _gathered("of each GPU at most, around the turn", share=0.5),
        "zero_optimization.sub_group_size": _sub_group,
        "zero_optimization.offload_param.buffer_size": _swap,
        "aio.block_size": _plain,
        "checkpoint.writer.io_buffer_size": _plain,
    }
)
