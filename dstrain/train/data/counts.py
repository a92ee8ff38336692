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
            "dropped: seq_len would cut images, videos or audios (max_pixels, video_…, audio_… limit them)",
        ),
        "cut_audios": ("audio is", "audios are", "cut at audio_max_seconds (default: what the processor takes)"),
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
        "desirable": ("answer is", "answers are", "desirable"),
        "undesirable": ("answer is", "answers are", "undesirable"),
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
    ratio = _balance(counts, job)
    if ratio is not None and not BALANCED[0] <= ratio <= BALANCED[1]:
        keys = "kto: desirable_weight and undesirable_weight"
        lines.append(f"weighted, that is {ratio:.2g} desirable to 1 undesirable; 1 to 1.33 is recommended ({keys})")
    return lines


BALANCED = (1.0, 4 / 3)
"""Weighted desirable answers for each weighted undesirable one. Source: arXiv 2402.01306, equation 8."""


def _balance(counts: Mapping[str, int], job: Job) -> float | None:
    """Returns the weighted desirable answers for each undesirable one; None unless there are both."""
    desirable, undesirable = counts.get("desirable", 0), counts.get("undesirable", 0)
    if not desirable or not undesirable:
        return None
    return job.kto.desirable_weight * desirable / (job.kto.undesirable_weight * undesirable)
