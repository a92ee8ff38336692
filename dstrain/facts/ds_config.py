"""Reads the settings of a DeepSpeed configuration, whether or not it is valid."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

ZERO = "zero_optimization"
"""Key of the section on ZeRO."""
OLD_OFFLOADS = MappingProxyType({"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"})
"""Section → the switch that did the same before it."""


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns the object under a key; an empty one if it is missing or not an object."""
    section = config.get(key)
    return section if isinstance(section, Mapping) else {}


def zero_stage(config: Mapping[str, Any]) -> int:
    """Returns the ZeRO stage that the engine runs: 0 by default and for an illegal value.

    It reads "3" and 3.0 as 3, and `true` in place of the section, the form that predates stages, as 1.
    Source: deepspeed 0.19.8 runtime/zero/config.py: read_zero_config_deprecated, DeepSpeedZeroConfig.

    >>> [zero_stage({ZERO: zero}) for zero in ({"stage": 3}, {"stage": "3"}, {"stage": 3.0}, True, {"stage": 4}, {})]
    [3, 3, 3, 1, 0, 0]
    """
    if config.get(ZERO) is True:
        return 1
    stage = section(config, ZERO).get("stage", 0)
    text = f"{stage:g}" if isinstance(stage, float) else str(stage).strip()
    return int(text) if text in ("1", "2", "3") else 0


def written_device(config: Mapping[str, Any], name: str) -> str:
    """Returns the device of `offload_optimizer` or `offload_param` as the file has it: `cpu`, `nvme` or `none`."""
    zero = section(config, ZERO)
    before = "cpu" if zero.get(OLD_OFFLOADS[name]) is True else "none"
    device = section(zero, name).get("device", before)
    return device if device in ("cpu", "nvme") else "none"


def offload_device(config: Mapping[str, Any], name: str) -> str:
    """Returns where the engine keeps what `offload_optimizer` or `offload_param` names: `cpu`, `nvme` or `none`.

    Parameters stay on the GPU below stage 3, all states do at stage 0, and NVMe means host RAM below stage 3.

    >>> below = {ZERO: {"stage": 2, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "cpu"}}}
    >>> [offload_device(below, name) for name in OLD_OFFLOADS]
    ['cpu', 'none']
    """
    stage, device = zero_stage(config), written_device(config, name)
    if stage == 3 or device == "none":
        return device
    return "cpu" if name == "offload_optimizer" and stage > 0 else "none"


def nvme_path(config: Mapping[str, Any]) -> str | None:
    """Returns the NVMe folder of offloaded states; None if nothing is offloaded to NVMe."""
    offloads = [section(section(config, ZERO), name) for name in OLD_OFFLOADS]
    paths = (offload.get("nvme_path") for offload in offloads if offload.get("device") == "nvme")
    return next((path for path in paths if isinstance(path, str)), None)
