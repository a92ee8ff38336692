"""Reads the chat template of a model, and its special tokens, from the files of its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.choices import Hub
from dstrain.facts.model.hub_config import file_here


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFiles:
    """Facts about conversations from a tokenizer's files."""

    template: str | Mapping[str, str] | None
    """The text, or several by name; None if there is none."""
    special_tokens: Mapping[str, str]
    """Such as `bos_token`."""


def read_chat_files(source: str, hub: Hub) -> ChatFiles:
    """Returns the template and the special tokens of a model, given as a folder or by its id, as far as they are here.

    Source: transformers 5.23 tokenization_utils_base.py: _from_pretrained; the file of the template comes first.
    """
    config, tokens = (
        _read(file_here(source, hub, name)) for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
    path = file_here(source, hub, "chat_template.jinja")
    template = path.read_text(encoding="utf-8") if path is not None else config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    given = {name: value for name, value in {**tokens, **config}.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in given.items()}
    return ChatFiles(
        template=template or None,
        special_tokens={name: text for name, text in texts.items() if isinstance(text, str)},
    )


def _read(path: Path | None) -> dict[str, Any]:
    """Returns a JSON object; an empty one if a file is not here or none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
