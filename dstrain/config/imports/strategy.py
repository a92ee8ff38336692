"""How other tools say who keeps which states: a DeepSpeed configuration, a preset of one, or FSDP."""

from __future__ import annotations

from typing import Any

from dstrain.config.imports import converters as convert
from dstrain.config.imports.source import ABSENT, READ, Converted, OtherTraining, Source

PRESETS = {
    "zero0": (0, "none"),
    "zero1": (1, "none"),
    "zero2": (2, "none"),
    "zero3": (3, "none"),
    "zero2_offload": (2, "optimizer"),
    "zero3_offload": (3, "params"),
}
"""ms-swift's names of its own configurations → ZeRO stage and offload. Source: ms-swift 4.4 swift/config/."""
HYBRID = "nodes"
"""In place of `plan.hpz`: a copy of the parameters on each node."""
_HYBRID = ("hybrid_shard", "4", "_hybrid_shard_zero2", "5")
_SHARDING = {
    **dict.fromkeys(("full_shard", "hybrid_shard", "1", "4", "true"), 3),
    **dict.fromkeys(("shard_grad_op", "_hybrid_shard_zero2", "2", "5", "false"), 2),
    **dict.fromkeys(("no_shard", "3"), 0),
}
"""FSDP's strategies, by the names and numbers of PyTorch and by FSDP2's `reshard_after_forward` → ZeRO stage."""


def ds_config(value: Any, source: Source) -> Any:
    """Returns the file that a value names; or the strategy of a preset, which gets dstrain's configuration."""
    if value in (None, False, ""):
        return ABSENT
    if isinstance(value, dict):
        return value
    if isinstance(value, str) and value in PRESETS:
        stage, offload = PRESETS[value]
        note = f"dstrain's own configuration of ZeRO-{stage} is written, with the buffers of its plan"
        return Converted(values={"plan.zero_stage": stage, "plan.offload": offload}, note=note)
    return str(source.find(str(value)))


def fsdp(value: Any, _: Source) -> Any:
    """Returns the strategy of Transformers' option `fsdp`: words such as `full_shard auto_wrap offload`."""
    words = str(value).lower() if not isinstance(value, list) else " ".join(map(str, value)).lower()
    strategies = [word for word in words.replace(",", " ").split() if word in _SHARDING]
    if not words.strip() or (not strategies and "fsdp" not in words):
        return ABSENT
    return _zero(strategies[0] if strategies else "full_shard", offloads="offload" in words.split())


def sharding(value: Any, source: Source) -> Any:
    """Returns the strategy of accelerate's `fsdp_config`. Raises OtherTraining for one that does not exist."""
    if str(value).lower() not in _SHARDING:
        raise OtherTraining(f"`{value}` is not a strategy of FSDP")
    offloads = any(source.value(f"fsdp_config.{key}") is True for key in ("fsdp_offload_params", "offload_params"))
    return _zero(str(value).lower(), offloads=offloads)


def fully_sharded(source: Source) -> Converted:
    """Returns ZeRO's counterpart of FSDP without a strategy: parameters are sharded after the forward pass, too.

    Source: accelerate 1.15 utils/dataclasses.py: FullyShardedDataParallelPlugin.
    """
    return _zero("full_shard", offloads=source.value("fsdp_config.fsdp_offload_params") is True)


def _zero(strategy: str, *, offloads: bool) -> Converted:
    """Returns ZeRO's counterpart of a strategy of FSDP. Parameters leave the GPU in stage 3 only.

    A hybrid one shards inside a node and copies between nodes, as MiCS did until DeepSpeed 0.19; what is left of it is
    hpZ's copy of the parameters. Source: torch 2.13 distributed/fsdp/api.py: ShardingStrategy.
    """
    stage = _SHARDING[strategy]
    values: dict[str, Any] = {"plan.zero_stage": stage}
    if offloads and stage:
        values["plan.offload"] = "params" if stage == 3 else "optimizer"
    if strategy not in _HYBRID:
        return Converted(values=values, note=f"ZeRO-{stage} shards the same states")
    note = f"ZeRO-{stage} shards the same states over the GPUs of all nodes, not of each node: less memory, same losses"
    if stage == 3 and not offloads:
        values["plan.hpz"] = HYBRID
        note += "; of several nodes each keeps a copy of the parameters (hpZ), which the backward pass gathers from it"
    return Converted(values=values, note=note)


_OFFLOADS = {("none", "none"): "none", ("cpu", "none"): "optimizer", ("cpu", "cpu"): "params", ("nvme", "nvme"): "nvme"}


def offload(value: Any, source: Source) -> Any:
    """Returns what accelerate's `deepspeed_config` lets leave the GPU."""
    params = str(source.value("deepspeed_config.offload_param_device", "none")).lower()
    stage = convert.number(source.value("deepspeed_config.zero_stage", 2), source)
    pair = str(value).lower(), params if stage == 3 else "none"
    if pair not in _OFFLOADS:
        note = "dstrain offloads parameters with the optimizer; `params` is written"
        return Converted(values={"plan.offload": "params"}, note=note)
    return _OFFLOADS[pair]


def offload_params(value: Any, source: Source) -> Any:
    """Returns what leaves the GPU if only parameters are to."""
    if source.given("deepspeed_config.offload_optimizer_device") is not ABSENT:
        return READ
    return ABSENT if str(value).lower() == "none" else offload("none", source)


def runs_deepspeed(source: Source) -> bool:
    """Returns whether the tool trains with DeepSpeed by this file, not with DDP or FSDP."""
    if source.tool.name == "deepspeed" or source.value("deepspeed"):
        return True
    kind = source.value("distributed_type")
    if kind is not None:
        return str(kind).upper() == "DEEPSPEED"
    return source.value("use_deepspeed") is True or any(key.startswith("deepspeed_config.") for key in source.settings)
