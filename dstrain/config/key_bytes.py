"""Converts the element counts in a configuration to bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dstrain.choices import Offload, Precision
from dstrain.config.jsonc import lookup
from dstrain.facts.ds_config import zero_stage
from dstrain.plan.configuration import Configuration, TrainedModel, Zero
from dstrain.plan.memory.params import trained
from dstrain.plan.memory.zero import bucket_bytes, num_buckets, prefetch_bytes, sub_group_bytes

if TYPE_CHECKING:
    from dstrain.facts.model.model_facts import ModelFacts
    from dstrain.job.schema import Job
    from dstrain.plan.request import Request

_LARGEST = 2**62
"""Larger numbers are not sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The facts that convert elements to bytes; unknown ones are None."""

    precision: Precision
    """Dtype of the model in forward and backward."""
    num_params: int | None = None
    """Elements of the model, which most sizes cannot exceed."""
    num_trainable: int | None = None
    """Elements with gradients."""
    num_ranks: int | None = None
    """Ranks that share them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The memory that a number takes."""

    count_bytes: int
    where: str
    """Words that follow the size: `of each GPU`."""


def scale(
    config: Mapping[str, Any], job: Job | Request | None, model: ModelFacts | None, *, num_ranks: int | None = None
) -> Scale:
    """Returns the scale of a configuration; without a job, 16 bits if bf16 or fp16 is on or "auto", otherwise 32."""
    is_short = any(lookup(config, (name, "enabled"), False) in (True, "auto") for name in ("bf16", "fp16"))
    precision = (job.precision if job is not None else None) or (Precision.BF16 if is_short else Precision.FP32)
    trainable = trained(model, job.method, job.lora).trainable if job is not None and model is not None else None
    params = model.num_params if model is not None else None
    return Scale(precision=precision, num_params=params, num_trainable=trainable, num_ranks=num_ranks)


def cost(path: str, value: Any, config: Mapping[str, Any], by: Scale) -> Cost | None:
    """Returns the memory that a number of a configuration takes, or None.

    >>> config = {"zero_optimization": {"stage": 3}}
    >>> cost("zero_optimization.reduce_bucket_size", 5e8, config, Scale(precision=Precision.BF16))
    Cost(count_bytes=2000000000, where='of each GPU at most: the bucket and the copy that is reduced')
    """
    row = _COSTS.get(path)
    if row is None or isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
        return None
    return row(value, config, by)


def _zero(config: Mapping[str, Any], name: str, default: Any) -> Any:
    return lookup(config, ("zero_optimization", name), default)


def _way(config: Mapping[str, Any], by: Scale, **sizes: Any) -> Configuration:
    """Returns the parts of a configuration that buffer sizes depend on."""
    is_offloaded = lookup(config, ("zero_optimization", "offload_optimizer", "device"), "none") in ("cpu", "nvme")
    zero = Zero(
        stage=zero_stage(config),
        overlap_comm=_zero(config, "overlap_comm", False) is True,
        offload=Offload.OPTIMIZER if is_offloaded else Offload.NONE,
        max_live_parameters=_LARGEST,
    )
    return Configuration(model=TrainedModel(precision=by.precision), zero=replace(zero, **sizes))


def _capped(value: float, by: Scale) -> int:
    return round(value if by.num_params is None else min(value, by.num_params))


def _reduce(value: float, config: Mapping[str, Any], by: Scale) -> Cost | None:
    way = _way(config, by, reduce_bucket_size=round(value))
    if way.zero.stage == 0:
        return None
    buckets = "two buckets" if num_buckets(way.zero) == 2 else "the bucket"
    where = f"of each GPU at most: {buckets} and the copy that is reduced"
    return Cost(count_bytes=bucket_bytes(way, by.num_trainable or by.num_params), where=where)


def _prefetch(value: float, config: Mapping[str, Any], by: Scale) -> Cost | None:
    way = _way(config, by, prefetch_bucket_size=_capped(value, by))
    if way.zero.stage != 3 or not value:
        return None
    return Cost(count_bytes=prefetch_bytes(way), where="of each GPU at most: gathered ahead, then copied")


def _gathered(words: str, *, share: float = 1.0) -> Callable[[float, Mapping[str, Any], Scale], Cost | None]:
    def row(value: float, config: Mapping[str, Any], by: Scale) -> Cost | None:
        if _way(config, by).zero.stage != 3 or not value:
            return None
        return Cost(count_bytes=_capped(share * value, by) * by.precision.num_bytes, where=words)

    return row


def _sub_group(value: float, config: Mapping[str, Any], by: Scale) -> Cost | None:
    way = _way(config, by, sub_group_size=round(value))
    if way.zero.stage != 3:
        return None
    elements = by.num_trainable or by.num_params
    partition = elements / (by.num_ranks or 1) if elements is not None else None
    where = "of each GPU at the step, at most"
    if way.zero.is_offloaded:
        where = "of host RAM at most: the fp32 gradients of one sub-group; every sub-group has them"
    return Cost(count_bytes=sub_group_bytes(way, partition), where=where)


def _swap(value: float, config: Mapping[str, Any], by: Scale) -> Cost | None:
    section = ("zero_optimization", "offload_param")
    if lookup(config, (*section, "device"), "none") != "nvme":
        return None
    count = lookup(config, (*section, "buffer_count"), 5)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= _LARGEST:
        return None
    size = round(value * count * by.precision.num_bytes)
    return Cost(count_bytes=size, where=f"of host RAM per rank, in {count} buffers")


def _plain(value: float, config: Mapping[str, Any], by: Scale) -> Cost | None:
    return Cost(count_bytes=round(value), where="each")


_COSTS: Mapping[str, Callable[[float, Mapping[str, Any], Scale], Cost | None]] = MappingProxyType(
    {
        "zero_optimization.reduce_bucket_size": _reduce,
        "zero_optimization.stage3_prefetch_bucket_size": _prefetch,
        "zero_optimization.stage3_param_persistence_threshold": _gathered("at most for a parameter that stays whole"),
        "zero_optimization.stage3_max_live_parameters": _gathered("of each GPU at most"),
        "zero_optimization.stage3_max_reuse_distance": _gathered(
            "of each GPU at most, between the forward and backward passes", share=0.5
        ),
        "zero_optimization.sub_group_size": _sub_group,
        "zero_optimization.offload_param.buffer_size": _swap,
        "aio.block_size": _plain,
        "checkpoint.writer.io_buffer_size": _plain,
    }
)
