"""accelerate's configuration: where training runs and how it is sharded, not what is trained.

Source: accelerate 1.15 commands/config/config_args.py and commands/launch.py.
"""

from __future__ import annotations

from typing import Any

from dstrain.config.imports import converters as convert
from dstrain.config.imports.converters import ds_config, fully_sharded, offload, offload_params, sharding
from dstrain.config.imports.source import (
    ABSENT,
    READ,
    Convert,
    Converted,
    OtherTraining,
    Source,
    Tool,
    Unmatched,
)
from dstrain.config.imports.tables import rows_of

_KINDS = {"DEEPSPEED", "FSDP", "MULTI_GPU", "MULTI_CPU", "NO"}


def _kind(value: Any, source: Source) -> Any:
    if str(value).upper() not in _KINDS:
        raise OtherTraining(f"`{value}`: dstrain trains on NVIDIA GPUs and on CPUs")
    kind = str(value).upper()
    return "cpu" if kind == "MULTI_CPU" else _strategy(kind, source)


_STAGE = 2
"""ZeRO's stage without a key. Source: accelerate 1.15 utils/dataclasses.py: DeepSpeedPlugin."""
_STRATEGIES = {
    "FSDP": ("fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward"),
    "DEEPSPEED": ("deepspeed_config.zero_stage", "deepspeed_config.deepspeed_config_file", "deepspeed"),
}
"""Kinds of training → keys of which one says how states are sharded."""


def _strategy(kind: str, source: Source) -> Converted:
    """Returns how a kind of training shards states, unless it has a key for that."""
    keys = _STRATEGIES.get(kind)
    if keys is None or any(source.given(key) is not ABSENT for key in keys):
        return READ
    return fully_sharded(source) if kind == "FSDP" else Converted(values={"plan.zero_stage": _STAGE})


def _switch(kind: str) -> Convert:
    """Returns the converter of an option of `accelerate launch` that chooses a kind of training."""
    return lambda value, source: _strategy(kind, source) if convert.flag(value, source) else ABSENT


_use_deepspeed = _switch("DEEPSPEED")
_use_fsdp = _switch("FSDP")


def _fsdp_offload(value: Any, source: Source) -> Any:
    """Returns nothing: the key is read with FSDP's other keys."""
    is_fsdp = source.value("use_fsdp") is True or str(source.value("distributed_type")).upper() == "FSDP"
    is_read = is_fsdp or any(source.given(key) is not ABSENT for key in _STRATEGIES["FSDP"])
    return READ if convert.flag(value, source) and is_read else ABSENT


def _of(kind: str, converter: Convert) -> Convert:
    """Returns a converter of a key that accelerate reads for one kind of training only."""

    def converted(value: Any, source: Source) -> Any:
        given = source.given("distributed_type")
        return converter(value, source) if given is ABSENT or str(given).upper() == kind else ABSENT

    return converted


_deepspeed_file = _of("DEEPSPEED", ds_config)
_deepspeed_number = _of("DEEPSPEED", convert.number_unless_auto)
_deepspeed_offload = _of("DEEPSPEED", offload)
_deepspeed_offload_params = _of("DEEPSPEED", offload_params)
_fsdp_flag = _of("FSDP", convert.flag)
_fsdp_sharding = _of("FSDP", sharding)


def _compiled(value: Any, _: Source) -> Any:
    """Returns that the layers are compiled. Raises Unmatched for other compilers than inductor."""
    name = str(value).lower()
    if name in ("inductor", "no"):
        return True if name == "inductor" else ABSENT
    raise Unmatched(f"`{value}`: torch_compile: true compiles with inductor")


def _precision(value: Any, _: Source) -> Any:
    if value in ("bf16", "fp16"):
        return value
    if str(value).lower() in ("no", "false"):
        return "fp32"
    raise OtherTraining(f"`{value}`: dstrain trains in bf16, fp16 and fp32")


def _stage(value: Any, source: Source) -> Any:
    if source.value("deepspeed_config.deepspeed_config_file") is not None:
        return ABSENT
    return int(convert.number(value, source))


_deepspeed_stage = _of("DEEPSPEED", _stage)

ROWS = rows_of("accelerate", globals())
"""The keys of its file; its options on a command line have the same names."""

SECTIONS = ("deepspeed_config", "fsdp_config", "parallelism_config", "dynamo_config")
TOOL = Tool(name="accelerate", title="accelerate", rows=ROWS, sections=SECTIONS)


def flat(key: str) -> str:
    """Returns the row of an option on the command line of `accelerate launch`.

    >>> flat("zero_stage"), flat("num_processes")
    ('deepspeed_config.zero_stage', 'num_processes')
    """
    return next((f"{section}.{key}" for section in SECTIONS if f"{section}.{key}" in ROWS), key)
