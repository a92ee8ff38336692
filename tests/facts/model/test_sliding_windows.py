"""Layers that look back no further than a window: as many as in Transformers' own config classes."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from dstrain.facts.model import aliases
from dstrain.facts.model.families import FAMILIES, from_config, known
from dstrain.facts.model.model_facts import ModelFacts

_SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 30, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": 0,
}  # fmt: skip
_CONFIGS: dict[str, dict[str, Any]] = {
    alias: dict(entry[1].config) for alias in known() if (entry := aliases.resolve(alias))
} | {
    "qwen2 with windows": {"model_type": "qwen2", **_SIZES, "use_sliding_window": True, "max_window_layers": 20},
    "qwen3 with windows": {"model_type": "qwen3", **_SIZES, "use_sliding_window": True, "sliding_window": 64},
    "qwen2_moe with windows": {"model_type": "qwen2_moe", **_SIZES, "use_sliding_window": True},
    "qwen3_moe with windows": {"model_type": "qwen3_moe", **_SIZES, "use_sliding_window": True},
    "mistral": {"model_type": "mistral", **_SIZES},
    "mistral without": {"model_type": "mistral", **_SIZES, "sliding_window": None},
    "mixtral": {"model_type": "mixtral", **_SIZES},
    "ministral": {"model_type": "ministral", **_SIZES},
    "ministral by layer": {
        "model_type": "ministral",
        **_SIZES,
        "layer_types": ["sliding_attention", "full_attention"] * 15,
    },
    "phi3": {"model_type": "phi3", **_SIZES},
    "phi3 with windows": {"model_type": "phi3", **_SIZES, "sliding_window": 2047},
    "gemma3_text": {"model_type": "gemma3_text", **_SIZES},
    "gemma3_text, each second": {"model_type": "gemma3_text", **_SIZES, "sliding_window_pattern": 2},
    "llama": {"model_type": "llama", **_SIZES},
}


def facts(name: str) -> ModelFacts:
    """Returns what dstrain says."""
    return from_config(_CONFIGS[name], name=name, source=name)


def windowed(name: str) -> tuple[int | None, int]:
    """Returns the window and the number of layers with it that Transformers has."""
    config = CONFIG_MAPPING[_CONFIGS[name]["model_type"]].from_dict(dict(_CONFIGS[name])).get_text_config()
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    ignores_types = config.model_type in ("mistral", "mixtral", "phi3", "qwen3_moe")
    if not window or types is None or ignores_types:
        count = config.num_hidden_layers if window and ignores_types else 0
    else:
        count = types.count("sliding_attention")
    return (window, count) if count else (None, 0)


@pytest.mark.parametrize("name", _CONFIGS)
def test_windows_are_those_of_transformers(name: str) -> None:
    assert (facts(name).sliding_window, facts(name).num_windowed_layers) == windowed(name)


def test_no_other_family_knows_windows() -> None:
    """Those that have a window in their config class are all asked for above."""
    asked = {config["model_type"] for config in _CONFIGS.values()}
    for model_type in set(FAMILIES) - asked:
        text = CONFIG_MAPPING[model_type]().get_text_config()
        assert not getattr(text, "sliding_window", None) or "sliding_attention" not in getattr(text, "layer_types", [])
