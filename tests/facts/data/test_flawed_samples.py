"""Rows that are valid JSON and no sample: refused with file and line wherever rows are read, or skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstrain.choices import DataFormat
from dstrain.errors import InvalidConfig
from dstrain.facts.data.datafile import check, parsed
from dstrain.facts.data.formats import Reading
from dstrain.facts.data.rows import Sample


def chat(answer: Any, question: str = "q", **row: Any) -> dict[str, Any]:
    turn = answer if isinstance(answer, dict) else {"content": answer}
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", **turn}], **row}


CALL = {"function": {"name": "f", "arguments": {"x": "\ud83d"}}}
GOOD = chat("<think>\nHm.\n</think>\n\nYes: `<think>` opens thoughts.")
BAD = {
    "half an emoji": (chat("ok", "hi \ud83d"), "turn 1, content: has half a character (\\ud83d) at 4"),
    "half in a call": (chat({"content": "", "tool_calls": [CALL]}), "turn 2, tool_calls: has half a character"),
    "half in a tool": (chat("a", tools=[{"type": "function", "function": {"name": "f\udc00"}}]), "tools: has half"),
    "NUL": (chat("a\0b"), "turn 2, content: has a NUL character (\\u0000) at 2"),
    "open thoughts": (chat("<think>\nHm, the"), "begins thoughts with <think> and ends without </think>"),
    "open thoughts of another name": (chat("<seed:think>Hm"), "ends without </seed:think>"),
    "open thoughts in brackets": (chat("[THINK]Hm"), "ends without [/THINK]"),
    "thoughts alone": (chat("<think>Hm.</think>\n"), "has thoughts but no answer"),
    "thoughts alone in their key": (chat({"content": "", "reasoning_content": "Hm"}), "has thoughts but no answer"),
    "open call": (chat('Let me see.\n<tool_call>\n{"name": "f"'), "ends within a <tool_call>"),
    "cut by name": (chat("a", finish_reason="length"), '"finish_reason" is "length"'),
    "cut by name in a turn": (chat({"content": "a", "stop_reason": "max_tokens"}), '"stop_reason" is "max_tokens"'),
    "cut by flag": (chat("a", truncated=True), '"truncated" is true'),
}
FINE = [
    GOOD,
    chat("a", finish_reason="stop", truncated=False),
    chat("It is <think> that opens."),
    chat({"content": "<think>Hm", "weight": 0}),
    chat('<tool_call>\n{"name": "f"}\n</tool_call>'),
    chat("back\\u0000slash, \U0001f600"),
]


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_sample_is_refused_with_its_line_or_skipped(name: str, tmp_path: Path) -> None:
    row, problem = BAD[name]
    path = written(tmp_path, GOOD, row)
    with pytest.raises(InvalidConfig) as raised:
        check(path, Reading())
    assert raised.value.problem.startswith(f"{path}:2: ")
    assert problem in raised.value.problem
    assert "on_bad_row: skip" in str(raised.value.hint)
    assert check(path, Reading(), skip=True).rows_checked == 2


@pytest.mark.parametrize("row", FINE)
def test_what_only_looks_like_it_is_taken(row: dict[str, Any], tmp_path: Path) -> None:
    assert check(written(tmp_path, row), Reading()).rows_checked == 1


def test_texts_are_whole_too() -> None:
    sample = Sample(where="f:1", row={"text": "a\ud83d"})
    with pytest.raises(InvalidConfig, match="f:1: text: has half a character"):
        parsed(sample, Reading(format=DataFormat.TEXT))


def test_rejected_answers_may_be_cut() -> None:
    pair = {"prompt": "q", "chosen": "a", "rejected": "<think>Hm"}
    parsed(Sample(where="f:1", row=pair), Reading(format=DataFormat.PREFERENCE))
    with pytest.raises(InvalidConfig, match=r"f:1: chosen: turn 2.*begins thoughts"):
        parsed(Sample(where="f:1", row={**pair, "chosen": "<think>Hm"}), Reading(format=DataFormat.PREFERENCE))
