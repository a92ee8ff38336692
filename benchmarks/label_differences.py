"""Names differences in what carries loss, and makes tables of them, for `benchmarks/labels.py`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations
from typing import Any

DECIDED: Mapping[str, tuple[str, str | Callable[[re.Match[str]], str]]] = {
    "prompt": (r"^(<｜Assistant｜>|<｜tool▁outputs▁end｜>|<\|start\|>assistant|<think>\n)+", ""),
    "channel": (
        r"<\|channel\|>(?:analysis<\|message\|>(.*?)<\|end\|><\|start\|>assistant|final<\|message\|>)",
        lambda match: "" if match[1] is None else f"<think>{match[1]}</think>",
    ),
    "empty thoughts": (r"(<think>|^)\s*</think>\n*", ""),
    "line break": (r"^\n+|\n+\Z", ""),
    "end": (r"(\n?<\|(user|observation|endoftext|end|return|call)\|>)+\Z", ""),
    "white space": (r"\s+", ""),
}
"""A kind of difference that docs/labels.md decides → what it replaces in the text of both sides, in this order."""
THOUGHTS = re.compile(r"(<think>|^).*?</think>\n*", re.DOTALL)
CALL = "form of a call"
KINDS = (*DECIDED, CALL, "thoughts")
"""All kinds, those that say more first; `thoughts`: one side lacks them."""

HEADS = {
    "en": (
        "family",
        "tokens equal",
        "labels equal",
        "labels equal but for decided differences",
        "refused",
        "differences",
    ),
    "zh": ("家族", "token 相同", "标签相同", "除已决定的不同外，标签相同", "拒绝", "不同"),
}
WORDS = {
    "channel": ("channel of thoughts", "思考的频道"),
    "end": ("token that ends", "结束 token"),
    "prompt": ("part of the prompt", "提示的一部分"),
    "empty thoughts": ("empty thoughts", "空思考块"),
    "thoughts": ("thoughts", "思考内容"),
    "line break": ("line breaks", "换行"),
    "white space": ("white space", "空白"),
    "form of a call": ("form of a call", "调用的格式"),
    "both refuse": ("both refuse", "两边都拒绝"),
    "we refuse": ("we refuse", "我们拒绝"),
    "it refuses": ("it refuses", "它拒绝"),
}
"""A kind of difference → in English and in Chinese."""


def decided(ours: Sequence[str], theirs: Sequence[str], calls: Collection[int]) -> tuple[str, ...] | None:
    """Returns the fewest kinds in which the learned texts of two tools differ; None if they differ in others too.

    `calls`: the indices of the texts that are tool calls, of which the form is compared only if nothing less explains
    the difference.
    """
    if len(ours) != len(theirs):
        return None
    pairs = list(zip(ours, theirs, strict=True))
    choices = (kinds for count in range(len(KINDS) + 1) for kinds in combinations(KINDS, count))
    for kinds in sorted(choices, key=lambda kinds: CALL in kinds):
        if all(_equal(pair, kinds, is_call=index in calls) for index, pair in enumerate(pairs)):
            return kinds
    return None


def _equal(pair: tuple[str, str], kinds: Sequence[str], *, is_call: bool) -> bool:
    """Returns whether two texts are equal but for some kinds of differences."""
    if is_call and CALL in kinds:
        return True
    here, there = pair
    for kind, (pattern, text) in DECIDED.items():
        if kind in kinds:
            here, there = (re.sub(pattern, text, side, flags=re.DOTALL) for side in (here, there))
    if "thoughts" in kinds and ("</think>" in here) != ("</think>" in there):
        here, there = (THOUGHTS.sub("", side) for side in (here, there))
    return here == there


def table(rows: Mapping[str, Any], language: str) -> str:
    """Returns a table with a row for each family: of how many conversations each column is true."""
    place = ("en", "zh").index(language)
    lines = ["| " + " | ".join(HEADS[language]) + " |", "|---" * len(HEADS[language]) + "|"]
    for family, row in rows.items():
        kinds = [f"{WORDS[kind][place]} {count}" for kind, count in row["kinds"].items()]
        kinds += row["undecided"]
        cells = [row["tokens"], row["labels"], row["decided"], row["refused"] or "–", ", ".join(kinds) or "–"]
        lines.append(f"| {family} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
