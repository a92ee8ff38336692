"""Renders HTML pages: one file each that needs nothing else, in English and Chinese, light and dark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# fmt: off
CHINESE: Mapping[str, str] = {
    "parameters": "参数", "gradients": "梯度", "optimizer": "优化器", "engine buffers": "引擎缓冲区",
    "whole layers": "聚集的整层", "activations": "激活", "logits": "logits", "CUDA, fragments": "CUDA 与碎片",
    "compute": "计算", "GPU memory": "显存带宽", "launches": "内核启动", "GPU links": "GPU 间链路", "network": "网络",
    "CPU step": "CPU 优化器", "PCIe": "PCIe", "NVMe": "NVMe", "allocator": "分配器", "-": "-",
    "given": "给定", "measured": "本机实测", "assumed": "假设",
}
"""The planner's names → the same in Chinese."""
# fmt: on


def signature(kind: str) -> str:
    """Returns the beginning of a page of a kind, `plan` or `report`; only a file that begins so is replaced."""
    return f"<!doctype html>\n<!-- dstrain {kind} -->\n"


def render(kind: str, data: Mapping[str, Any]) -> str:
    """Returns the page that the template of a kind makes from its data."""
    from dstrain.config.templates import render_page  # Jinja is needed only where a page is written

    return render_page(Path(__file__).with_name(f"page.{kind}.html.j2"), {"data": data, "kind": kind})
