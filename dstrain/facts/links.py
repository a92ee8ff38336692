"""Links between GPUs, inside a node and between nodes, as bytes per second of one GPU in one direction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way for bytes to go from one GPU to another."""

    name: str
    """What people call it: `nvlink4`, `ib400` …"""
    bytes_per_s: float
    """Peak bytes per second of one GPU, in one direction."""
    source: str
    """Where the figure is from."""
