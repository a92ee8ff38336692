"""Reads from a config.json how rotary positions are scaled, and how long that makes a model."""

from __future__ import annotations

from collections.abc import Mapping

from dstrain.facts.model.config_fields import Fields

_MOST = 1024
"""Largest plausible factor."""


def rope_type(text: Fields) -> str:
    """Returns how positions are scaled (`llama3`, `yarn`, …), or `default`; Transformers 4 calls it `type` too."""
    rope = _rope(text)
    return str(rope.get("rope_type") or rope.get("type") or "default")


def positions(text: Fields) -> int:
    """Returns the length that a model supports; model cards add scaling to config.json and leave this number as it is.

    Linear scaling is counted in it already by those who publish it, such as Gemma 3.
    """
    own, rope, kind = text.size("max_position_embeddings"), _rope(text), rope_type(text)
    original = rope.get("original_max_position_embeddings") if kind == "yarn" else None
    factor = rope.get("factor") if kind in ("yarn", "dynamic") else None
    if not isinstance(factor, int | float) or not 1 <= factor <= _MOST:
        return own
    return max(own, int(factor * (original if isinstance(original, int) else own)))


def _rope(text: Fields) -> Mapping[str, object]:
    """Returns the rotary parameters under their name in Transformers 5 or 4; with types for layers (Gemma 3), of
    full attention."""
    rope = text.values.get("rope_parameters") or text.values.get("rope_scaling")
    rope = rope.get("full_attention", rope) if isinstance(rope, Mapping) else {}
    return rope if isinstance(rope, Mapping) else {}
