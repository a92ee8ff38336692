"""Streaming multiprocessors of GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MULTIPROCESSORS: Mapping[str, int] = MappingProxyType(
    {
        "a100-80g": 108, "a100-40g": 108, "a100-80g-pcie": 108, "a100-40g-pcie": 108,
        "a800-80g": 108, "a800-40g": 108, "a800-80g-pcie": 108, "a30": 56,
        "h100-sxm": 132, "h800": 132, "h200": 132, "gh200": 132, "h100-pcie": 114, "h800-pcie": 114,
        "h100-nvl": 132, "h200-nvl": 132, "h20": 78, "h20-141g": 78, "b200": 148, "b300": 148,
        "a10": 72, "a10g": 80, "a40": 84, "rtx-a6000": 84, "rtx-3090": 82,
        "l4": 58, "l20": 92, "l40": 142, "l40s": 142, "rtx-6000-ada": 142, "rtx-4090": 128, "rtx-4090-d": 114,
        "rtx-5090": 170, "rtx-pro-6000": 188, "t4": 40,
        "v100-32g": 80, "v100-16g": 80, "v100-32g-pcie": 80, "v100-16g-pcie": 80,
    }
)  # fmt: skip
"""Streaming multiprocessors of each GPU. Source: the whitepapers named in `facts.cluster.gpus`."""
