"""Lengths of conversations as their chat template writes them: of a few exactly, of the others predicted from these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dstrain.facts.data.turns import Conversation

RENDERED = 64
"""Conversations that are rendered; one takes 1 to 15 ms, with tools and thoughts of earlier answers the most."""
Measure = Callable[[Sequence[Conversation]], Sequence[tuple[int, int] | None]]
"""Returns the tokens of each conversation and those that count in the loss; None for one that the template refuses.

A mark for each image and video is among them."""


_MARKS = 3
"""Tokens of an image or a video in a rendered text, which `Size.of_media` has too but for one: its mark, and
one on each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of a sample in tokens."""

    tokens: int
    learned: int
    """Tokens that count in the loss."""
    of_media: int = 0
    """Tokens of images and videos."""
    of_tools: int = 0
    """Tokens of the descriptions of tools as JSON."""
    of_thoughts: int = 0
    """Tokens of thoughts before the last answer."""


def rendered(samples: Sequence[Conversation | str], sizes: Sequence[Size], measure: Measure) -> list[Size]:
    """Returns the sizes as the chat template has them, given those without it.

    Rendered are samples in even distances by their size, the shortest and the longest among them. What the template
    adds to the others is the least-squares fit to these over their texts, messages and tools. Texts stay as they are.
    """
    import numpy as np  # here: a plan without data needs none of it

    found = list(sizes)
    chats = sorted((i for i, one in enumerate(samples) if not isinstance(one, str)), key=lambda i: sizes[i].tokens)
    if not chats:
        return found
    step = max(1, (len(chats) - 1) / max(1, RENDERED - 1))
    chosen = sorted({chats[round(number * step)] for number in range(min(RENDERED, len(chats)))})
    measured = dict(zip(chosen, measure([_chat(samples[index]) for index in chosen]), strict=True))
    exact = {index: one for index, one in measured.items() if one is not None}
    if not exact:
        return found
    for index, (tokens, learned) in exact.items():
        of_media = sizes[index].of_media - _MARKS * _num_media(samples[index])
        found[index] = replace(sizes[index], tokens=tokens + max(0, of_media), learned=learned)
    features = np.array([_features(_chat(samples[index]), sizes[index]) for index in chats], float)
    rows = [place for place, index in enumerate(chats) if index in exact]
    before, after = (np.array([[one[i].tokens, one[i].learned] for i in chats], float) for one in (sizes, found))
    added = features @ np.linalg.lstsq(features[rows], (after - before)[rows], rcond=None)[0]
    for place, index in enumerate(chats):
        if index not in exact:
            tokens, learned = (max(1, round(float(number))) for number in before[place] + added[place])
            found[index] = replace(sizes[index], tokens=tokens, learned=min(tokens, learned))
    return found


def _features(sample: Conversation, size: Size) -> tuple[float, ...]:
    """Returns the numbers on which the tokens depend that a template adds."""
    answers = sum(message["role"] == "assistant" for message in sample.messages)
    text = size.tokens - size.of_media
    return 1.0, bool(sample.tools), len(sample.messages), answers, size.of_tools, size.of_thoughts, text


def _num_media(sample: Conversation | str) -> int:
    return 0 if isinstance(sample, str) else sum(len(getattr(sample, name)) for name in sample.media)


def _chat(sample: Conversation | str) -> Conversation:
    assert not isinstance(sample, str)
    return sample
