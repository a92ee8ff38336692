"""Learns what a chat template writes around answers and tool calls, from conversations with one letter per message."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dstrain.train.data.answers import Answer
from dstrain.train.data.message_spans import Messages, Template, cannot_follow, placed

TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_PIECE = re.compile(TAG.pattern + r"|\s|[^\s<\[]+|.")
_TAGGED = "a</think>b"
_ID = "abcdefghi"
"""The id of a call; Mistral's templates ask for nine letters."""
_QUESTION = {"role": "user", "content": "q"}
_NAME = "qzx"
_CALL = {"type": "function", "id": _ID, "function": {"name": _NAME, "arguments": {"x": "v"}}}
_RESULT = {"role": "tool", "content": "r", "name": _NAME, "tool_call_id": _ID}


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """The text that a template writes around answers."""

    headers: Sequence[str]
    """The prompt of an answer, whole and cut after each of its words, the longest first; an answer may leave out what
    the prompt opens. In Mistral's templates, which write nothing there, it is the end of the question."""
    closing: str
    """The end of an answer that another turn follows; empty if there is none."""
    last_closing: str
    """The end of the last answer; empty if only the next turn ends it (GLM-4)."""
    rewrites: bool
    """Whether an answer changes once another turn follows: Qwen3 omits its thoughts."""
    splits: bool
    """Whether text before any `</think>` is treated as thoughts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHabits:
    """The text that a template writes around tool calls."""

    opening: str
    """What precedes the name of the first call of a message."""
    closing: str
    """The end of a message with calls; it may be the beginning of the result (GLM-4.5, Gemma 4)."""
    headers: Sequence[str]
    """As `Habits.headers`, of an answer to the result of a tool."""


def learn(template: Template) -> Habits:
    """Returns the habits of a template."""
    plain, thoughtful, tagged = (
        answer.message(splits=False)
        for answer in (Answer(visible="a"), Answer(visible="a", thought="t"), Answer(visible=_TAGGED))
    )
    short, places = placed(template, [_QUESTION, plain])
    long, long_places = placed(template, [_QUESTION, plain] * 2)
    try:
        headers = _headers(template, [_QUESTION], end=1)
        last_closing, after = short[places[3] :], long[long_places[3] : long_places[5]]
        lead, long_lead = short[places[1] : places[2]], long[long_places[1] : long_places[2]]
    except KeyError:
        raise cannot_follow("omits questions or answers") from None
    closing = _common(after, last_closing).strip()
    if not closing and (tag := TAG.match(after.lstrip())):
        closing = tag[0]
    short, places = placed(template, [_QUESTION, thoughtful])
    long, long_places = placed(template, [_QUESTION, thoughtful, _QUESTION, plain])
    return Habits(
        headers=headers,
        closing=closing,
        last_closing=last_closing.strip(),
        rewrites=lead != long_lead or short[places[1] : places[2]] != long[long_places[1] : long_places[2]],
        splits=_TAGGED not in placed(template, [_QUESTION, tagged])[0],
    )


def learn_calls(template: Template, habits: Habits) -> CallHabits:
    """Returns the habits of a template with tool calls. Raises InvalidConfig if it writes none."""
    calls = Answer(visible="", calls=[_CALL]).message(splits=False)
    spoken = Answer(visible="c", calls=[_CALL]).message(splits=False)
    last, last_places = placed(template, [_QUESTION, calls])
    long, places = placed(template, [_QUESTION, calls, _RESULT])
    try:
        tail = long[places[3] : places[5]]
        common = _common(tail, last[last_places[3] :])
        opening = _opening(template, spoken, last[last_places[1] : last_places[2]], habits)
        headers = _headers(template, [_QUESTION, calls, _RESULT], end=5)
    except KeyError:
        raise cannot_follow("does not write tool calls") from None
    tags = TAG.findall(common) if habits.last_closing else TAG.findall(tail[len(common) :])[:1]
    if not tags:
        raise cannot_follow("writes no end of turn after tool calls")
    return CallHabits(opening=opening, closing=tags[-1], headers=headers)


def _opening(template: Template, spoken: dict[str, object], lead: str, habits: Habits) -> str:
    """Returns what a template writes between any text of an answer and the name of the first call.

    It is the end that `lead`, which precedes the name if there is no text, has in common with a message with text.
    """
    text, places = placed(template, [_QUESTION, spoken])
    name = text.find(_NAME, places[2]) if 2 in places else -1
    if name < 0:  # Mistral's templates omit the text, Gemma 4's writes it after the calls
        return lead[after_header(lead, habits.headers) :]
    opening = _common_end(lead, text[places[2] : name])
    if any(header in opening for header in habits.headers):
        opening = opening[after_header(opening, habits.headers) :]
    return opening.lstrip()


def _headers(template: Template, messages: Messages, *, end: int) -> list[str]:
    """Returns the prompt of an answer to these messages, the last of which ends at the mark `end`."""
    prompt, prompt_places = placed(template, messages, prompt=True)
    bare, bare_places = placed(template, messages)
    prompted, asked = prompt[prompt_places[end] :], bare[bare_places[end] :]
    opened = prompted[len(_common(prompted, asked)) :]
    tags = [] if opened else list(TAG.finditer(prompted))
    header = _PIECE.findall(opened or prompted)
    headers = ["".join(header[:count]) for count in range(len(header), 0, -1)]
    if tags:  # the answer follows what ends the message before it, which begins with an id in Mistral's templates
        headers.insert(1, prompted[tags[-1].start() :])
    return headers


def after_header(lead: str, headers: Sequence[str]) -> int:
    """Returns where the header ends in what stands before an answer.

    >>> after_header("<|end|><|assistant|>", ["<|assistant|><think>", "<|assistant|>"]), len("<|end|><|assistant|>")
    (20, 20)
    """
    for header in headers:
        place = lead.find(header)
        if place >= 0:
            return place + len(header)
    raise cannot_follow("writes answers differently from its generation prompt")


def _common(text: str, other: str) -> str:
    """Returns what two texts have in common at their beginning, in whole tags and words.

    >>> _common("<|end|><|user|>", "<|end|><|endoftext|>")
    '<|end|>'
    """
    common = ""
    for piece, same in zip(_PIECE.findall(text), _PIECE.findall(other), strict=False):
        if piece != same:
            break
        common += piece
    return common


def _common_end(text: str, other: str) -> str:
    """Returns what two texts have in common at their end, in whole tags and words.

    >>> _common_end("</think><call>f", "c<call>f")
    '<call>f'
    """
    common = ""
    for piece, same in zip(reversed(_PIECE.findall(text)), reversed(_PIECE.findall(other)), strict=False):
        if piece != same:
            break
        common = piece + common
    return common
