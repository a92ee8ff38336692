"""Explain and lint have one judgement of what a ZeRO stage reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dstrain.config.explain import sections
from dstrain.config.jsonc import Pointer, json_pointer
from dstrain.config.key_bytes import scale
from dstrain.config.keys import ROWS, Kind
from dstrain.config.lint import engine
from dstrain.config.lint.rule import Subject
from dstrain.facts.ds_config import ZERO

VALUES: dict[Kind, Any] = {Kind.BOOL: True, Kind.INT: 8, Kind.NUMBER: 0.5, Kind.TEXT: "cpu", Kind.OBJECT: {}}
WITHOUT_WORD = {"stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save", "zenflow"}
"""Keys that lint leaves alone below their stage: the Trainer's own, and zenflow, which has rules of its own."""
ROWS_OF_ZERO = [
    row
    for row in ROWS
    if row.path.startswith(f"{ZERO}.") and row.removed is None and row.path != f"{ZERO}.stage" and "*" not in row.path
]


def config_of(path: str, value: Any, stage: int) -> dict[str, Any]:
    config: dict[str, Any] = {ZERO: {"stage": stage}}
    *outer, name = path.split(".")
    section = config
    for part in outer:
        section = section.setdefault(part, {"device": "cpu"} if part.startswith("offload_") else {})
    section[name] = value
    return config


def idle(config: dict[str, Any], pointer: Pointer) -> bool:
    found = sections(config, filled={}, by=scale(config, None, None, num_ranks=None), estimate=None)
    return next(entry.is_idle for section in found for entry in section.entries if entry.pointer == pointer)


@pytest.mark.parametrize("stage", range(4))
def test_lint_reports_each_key_that_explain_calls_unread(stage: int) -> None:
    silent = []
    for row in ROWS_OF_ZERO:
        value = next((word for word in row.words if word not in ("none", "auto")), VALUES.get(row.kind, []))
        config, pointer = config_of(row.path, value, stage), tuple(row.path.split("."))
        if pointer[1] in WITHOUT_WORD or not idle(config, pointer):
            continue
        document, _ = engine.read(json.dumps(config), "ds_config.json")
        assert document is not None
        places = {finding.pointer for finding in engine.check(Subject(document=document, is_trainers=True))}
        above = {json_pointer(pointer[:end]) for end in range(2, len(pointer) + 1)}
        if not places & above:
            silent.append(row.path)
    assert silent == []
