"""Which layers of a decoder use sliding-window attention: the rules of each family in Transformers 5.23."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from dstrain.facts.model.config_fields import Fields

_DEFAULT = 4096
"""The window of most families' config classes where config.json does not say one."""
_PATTERN = 6
"""Gemma 3: every so manieth layer has no window. Source: configuration_gemma3.py."""
_FIRST_WINDOWED = 28
"""Qwen: the first layer with a window, where it is switched on. Source: configuration_qwen2.py: max_window_layers."""


def windows(text: Fields, model_type: str) -> tuple[int | None, int]:
    """Returns how many tokens a layer with a window looks back, None where there are none, and how many have one.

    >>> mistral = Fields(name="", values={"num_hidden_layers": 32, "sliding_window": 4096}, defaults={})
    >>> windows(mistral, "mistral"), windows(mistral, "llama")
    ((4096, 32), (None, 0))
    """
    rule = _RULES.get(model_type)
    if rule is None:
        return None, 0
    window, count = rule(text)
    return (window, count) if window and count else (None, 0)


def _window(text: Fields, default: int | None) -> int | None:
    if "sliding_window" not in text.values:
        return default
    return text.optional_size("sliding_window")


def _listed(text: Fields) -> int | None:
    """Returns how many layers `layer_types` gives a window, or None where the file has no such list."""
    types = text.values.get("layer_types")
    if not isinstance(types, (list, tuple)):
        return None
    return sum(1 for each in types[: text.size("num_hidden_layers")] if each == "sliding_attention")


def _every(default: int | None) -> Callable[[Fields], tuple[int | None, int]]:
    return lambda text: (_window(text, default), text.size("num_hidden_layers"))


def _ministral(text: Fields) -> tuple[int | None, int]:
    listed = _listed(text)
    return _window(text, _DEFAULT), text.size("num_hidden_layers") if listed is None else listed


def _gemma3(text: Fields) -> tuple[int | None, int]:
    layers, listed = text.size("num_hidden_layers"), _listed(text)
    pattern = text.optional_size("sliding_window_pattern") or _PATTERN
    return _window(text, _DEFAULT), layers - layers // pattern if listed is None else listed


def _qwen(text: Fields) -> tuple[int | None, int]:
    """Returns the upper layers, where windows are switched on."""
    if not text.flag("use_sliding_window"):
        return None, 0
    first, listed = text.optional_size("max_window_layers") or _FIRST_WINDOWED, _listed(text)
    return _window(text, _DEFAULT), max(0, text.size("num_hidden_layers") - first) if listed is None else listed


def _qwen2_moe(text: Fields) -> tuple[int | None, int]:
    """Returns each second of the lower layers, where windows are switched on."""
    if not text.flag("use_sliding_window"):
        return None, 0
    first, listed = text.optional_size("max_window_layers") or _FIRST_WINDOWED, _listed(text)
    lower = (min(first, text.size("num_hidden_layers")) + 1) // 2
    return _window(text, _DEFAULT), lower if listed is None else listed


def _qwen3_moe(text: Fields) -> tuple[int | None, int]:
    return (_window(text, _DEFAULT), text.size("num_hidden_layers")) if text.flag("use_sliding_window") else (None, 0)


def _smollm3(text: Fields) -> tuple[int | None, int]:
    return _window(text, None), (_listed(text) or 0) if text.flag("use_sliding_window") else 0


_RULES: Mapping[str, Callable[[Fields], tuple[int | None, int]]] = MappingProxyType(
    {
        "gemma3": _gemma3,
        "gemma3_text": _gemma3,
        "ministral": _ministral,
        "mistral": _every(_DEFAULT),
        "mixtral": _every(None),
        "phi3": _every(None),
        "qwen2": _qwen,
        "qwen2_moe": _qwen2_moe,
        "qwen3": _qwen,
        "qwen3_moe": _qwen3_moe,
        "smollm3": _smollm3,
    }
)
"""Families that know windows.
Source: configuration_….py and modeling_….py of each, from layer_types to create_sliding_window_causal_mask."""
