"""Formatting shared by explanations of a key and of a file."""

from __future__ import annotations

from dstrain.config.key_bytes import Cost
from dstrain.units import format_bytes


def said_bytes(took: Cost | None) -> str:
    """Returns what a number takes, in brackets, or nothing."""
    return f" ({format_bytes(took.count_bytes)} {took.where})" if took else ""


def unknown_model(name: str) -> str:
    """Returns why there are no numbers for a model, and where to ask."""
    return f"nothing is known of the model {name}; dstrain plan --model {name} says why"
