"""What is counted about conversations, in words."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dstrain.job.schema import Job

COUNTED = MappingProxyType(
    {
        "empty_answers": "answers are empty: the model learns to say nothing there",
        "cut_answers": "answers are cut in the middle by seq_len: the model does not learn to end them",
        "cut_images": "conversations are dropped: seq_len would cut their images (max_pixels makes these smaller)",
        "lost_thoughts": "answers are trained without their thoughts (thinking: {job.thinking})",
        "empty_thoughts": "answers begin with an empty block of thoughts (thinking: off makes it part of the prompt)",
        "lost_tools": "conversations have tools that the chat template does not describe",
        "lost_prompts": "system prompts are omitted by the chat template",
        "equal_pairs": "pairs have equal answers, of which nothing can be learned",
        "empty_sides": "answers of pairs are empty",
        "desirable": "answers are desirable",
        "undesirable": "answers are undesirable",
    }
)
"""Field of `chat.Counts`, or a count of pairs → its text in the log."""


def counted(counts: Mapping[str, int], job: Job) -> list[str]:
    """Returns a line for each count above 0."""
    lines = [f"{count:,} {COUNTED[what].format(job=job)}" for what, count in counts.items() if count]
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
