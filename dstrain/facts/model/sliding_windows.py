"""Which layers of a decoder use sliding-window attention: the rules of Transformers 5.23.

Source: configuration_….py and modeling_….py of each family, from layer_types to create_sliding_window_causal_mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dstrain.facts.model.config_fields import Fields

_PATTERN = 6
"""Gemma 3: every sixth layer has no window. Source: configuration_gemma3.py."""
_FIRST_WINDOWED = 28
"""Qwen: the first layer with a window, if windows are on. Source: configuration_qwen2.py: max_window_layers."""


def all_layers(text: Fields) -> int:
    """Returns the number of decoder layers."""
    return text.size("num_hidden_layers")


def but_every_sixth(text: Fields) -> int:
    """Returns the layers with a window in Gemma 3, whose pattern config.json may change."""
    return all_layers(text) - all_layers(text) // (text.optional_size("sliding_window_pattern") or _PATTERN)


def upper_layers(text: Fields) -> int:
    """Returns the layers from `max_window_layers` on (Qwen 2 and 3)."""
    return max(0, all_layers(text) - (text.optional_size("max_window_layers") or _FIRST_WINDOWED))


def every_second_lower_layer(text: Fields) -> int:
    """Returns every second layer below `max_window_layers` (Qwen 2 MoE)."""
    return (min(text.optional_size("max_window_layers") or _FIRST_WINDOWED, all_layers(text)) + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRule:
    """How a family decides which layers have a window."""

    default: int | None = 4096
    """The window if config.json has no `sliding_window`."""
    count: Callable[[Fields], int] = all_layers
    """Returns the number of layers with a window."""
    reads_layer_types: bool = True
    """Whether the list `layer_types` of config.json overrides that number."""
    is_switched: bool = False
    """Whether windows are off without `use_sliding_window`."""


def windows(text: Fields, rule: WindowRule | None) -> tuple[int | None, int]:
    """Returns the window in tokens and the number of layers that have it; (None, 0) without windows.

    >>> mistral = Fields(name="", values={"num_hidden_layers": 32, "sliding_window": 4096}, defaults={})
    >>> windows(mistral, WindowRule()), windows(mistral, None)
    ((4096, 32), (None, 0))
    """
    if rule is None or (rule.is_switched and not text.flag("use_sliding_window")):
        return None, 0
    window = text.optional_size("sliding_window") if "sliding_window" in text.values else rule.default
    count = rule.count(text)
    layer_types = text.values.get("layer_types")
    if rule.reads_layer_types and isinstance(layer_types, (list, tuple)):
        count = sum(kind == "sliding_attention" for kind in layer_types[: all_layers(text)])
    return (window, count) if window and count else (None, 0)
