"""What is counted about conversations, in words."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dstrain import units
from dstrain.job.schema import Job

COUNTED = MappingProxyType(
    {
        "empty_answers": ("answer is", "answers are", "empty: the model learns to say nothing there"),
        "cut_answers": (
            "answer is", "answers are", "cut in the middle by seq_len: the model does not learn to end such answers",
        ),
        "cut_images": (
            "conversation is",
            "conversations are",
            "dropped: seq_len would cut images or videos (max_pixels and video_… limit them)",
        ),
        "lost_thoughts": ("answer is", "answers are", "trained without thoughts (thinking: {job.thinking})"),
        "empty_thoughts": (
            "answer begins",
            "answers begin",
            "with an empty block of thoughts (thinking: off makes it part of the prompt)",
        ),
        "control_texts": (
            "conversation has",
            "conversations have",
            "control tokens of a chat template in their own text: rendered already?",
        ),
        "lost_tools": ("conversation has", "conversations have", "tools that the chat template does not describe"),
        "lost_prompts": ("system prompt is", "system prompts are", "omitted by the chat template"),
        "equal_pairs": ("pair has", "pairs have", "equal answers, of which nothing can be learned"),
        "empty_sides": ("answer of a pair is", "answers of pairs are", "empty"),
    }
)  # fmt: skip
"""Field of `chat.Counts`, or a count of pairs → its text in the log: of one, of several, and what follows."""

_PLACED = frozenset({"empty_answers", "control_texts", "lost_tools", "equal_pairs", "empty_sides"})
"""Counts of samples that their author may want to look at."""
_UNKNOWN: Mapping[str, str] = MappingProxyType({})


def counted(counts: Mapping[str, int], job: Job, firsts: Mapping[str, str] = _UNKNOWN) -> list[str]:
    """Returns a line for each count above 0; `firsts` has the place of the first sample that each counts."""
    lines = []
    for what, (one, several, rest) in COUNTED.items():
        if count := counts.get(what, 0):
            first = f"; the first: {firsts[what]}" if what in _PLACED and firsts.get(what) else ""
            lines.append(f"{units.counted(count, one, several)} {rest.format(job=job)}{first}")
    return lines
