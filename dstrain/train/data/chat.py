"""Renders a conversation through its chat template, and marks the characters that count in the loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any

from dstrain.choices import Thinking
from dstrain.facts.data.turns import Conversation
from dstrain.train.data.answers import Answer, answers_of
from dstrain.train.data.habits import TAG, CallHabits, Habits, after_header, learn_calls
from dstrain.train.data.message_spans import Messages, Places, Skeletons, Template, cannot_follow, placed, whole

Span = tuple[int, int]
Text = tuple[str, Sequence[Span]]

_SPACE = re.compile(r"\s*")
_NO_THOUGHT = re.compile(r"(?:<think>\s*)?</think>\s*$")
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers for the log about one conversation."""

    empty_answers: int = 0
    cut_answers: int = 0
    """Answers of which `seq_len` keeps only a part."""
    lost_thoughts: int = 0
    """Answers whose thoughts are omitted."""
    empty_thoughts: int = 0
    """Answers that begin with an empty block of thoughts, which is learned."""
    lost_prompts: int = 0
    """System prompts that the template omits."""
    cut_images: int = 0
    """Conversations whose images or videos `seq_len` would cut."""
    control_texts: int = 0
    """Conversations whose own text has control tokens."""
    lost_tools: int = 0
    """Conversations whose descriptions of tools the template omits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A rendered conversation."""

    text: str
    """The text with special tokens."""
    spans: Sequence[Span]
    """Ranges of characters that count in the loss, in order."""
    counts: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """The position of an answer in a text."""

    before: int
    """End of the message before it."""
    start: int
    """Start of its visible text, after header and thoughts."""
    end: int
    """Its end, including the end of turn."""


@dataclass(frozen=True, kw_only=True)
class Follower:
    """Renders conversations and locates answers, for templates without `{% generation %}`."""

    template: Template
    habits: Habits
    thinking: Thinking
    end: str
    """Appended if the template does not end the last answer."""

    @cached_property
    def skeletons(self) -> Skeletons:
        """The text around messages of conversations without tools."""
        return Skeletons(self.template)

    @cached_property
    def call_habits(self) -> CallHabits:
        """The text around tool calls."""
        return learn_calls(self.template, self.habits)

    def write(self, conversation: Conversation) -> Written:
        """Returns a conversation as text, with the characters of each answer from after its header to what ends it.

        Raises InvalidConfig if the answers cannot be located.
        """
        template = partial(self.template, tools=conversation.tools)
        messages, splits = conversation.messages, self.habits.splits
        answers, lost_thoughts = answers_of(messages, self.thinking)
        shown = [answers[i].message(splits=splits) if i in answers else one for i, one in enumerate(messages)]
        around = whole(template, shown) if conversation.tools else self.skeletons.whole(shown)
        text, places, lost_prompts = around
        written, spans, cursor, empty_thoughts = "", [], 0, 0
        for index, answer in answers.items():
            stretch = self._stretch(text, places, shown, index, after=cursor)
            lead, begin = self._lead(text, template, shown, index, answer, stretch, places)
            empty_thoughts += any(block.end() > begin for block in _EMPTY_THOUGHT.finditer(lead))
            written += text[cursor : stretch.before] + lead[max(0, cursor - stretch.before) :]
            spans.append((len(written) - len(lead) + begin, len(written) + stretch.end - stretch.start))
            written += text[stretch.start : stretch.end]
            cursor = stretch.end
        written += text[cursor:]
        if not self.habits.last_closing:
            written += self.call_habits.closing if answers[len(messages) - 1].calls else self.end
            spans[-1] = (spans[-1][0], len(written))
        counts = Counts(
            empty_answers=_num_empty(answers),
            lost_thoughts=lost_thoughts,
            empty_thoughts=empty_thoughts,
            lost_prompts=lost_prompts,
        )
        return Written(text=written, spans=spans, counts=counts)

    def _lead(
        self,
        text: str,
        template: Template,
        messages: Messages,
        index: int,
        answer: Answer,
        stretch: _Stretch,
        places: Places,
    ) -> tuple[str, int]:
        """Returns what comes between the message before an answer and its own words, thoughts included.

        With it comes the place in it where the answer begins.

        If the template writes earlier answers differently, it is the text of an answer that nothing follows.
        """
        lead, headers = text[stretch.before : stretch.start], self._headers(messages, index)
        anchored = 2 * index - 1 in places
        if self.habits.rewrites and self.thinking is not Thinking.LAST and index < len(messages) - 1 and anchored:
            text, its_places = placed(template, messages[: index + 1])
            alone = self._stretch(text, its_places, messages[: index + 1], index, after=0)
            lead = text[alone.before : alone.start]
        begin = after_header(lead, headers)
        if not answer.block or (answer.thought in lead[begin:] if answer.thought else "</think>" in lead):
            return lead, begin
        _, opening, rest = headers[0].partition("<think>")  # DeepSeek-R1's data may begin after the opening tag
        lead = _NO_THOUGHT.sub("", lead) + ("" if "<think>" in answer.block else opening + rest) + answer.block
        return lead, after_header(lead, headers)

    def _headers(self, messages: Messages, index: int) -> Sequence[str]:
        """Returns the prompts of the answer at `index`."""
        is_after_tool = index > 0 and messages[index - 1]["role"] == "tool"
        return self.call_habits.headers if is_after_tool else self.habits.headers

    def _stretch(self, text: str, places: Places, messages: Messages, index: int, *, after: int) -> _Stretch:
        """Returns where the answer at `index` stands; the answer before it ends at `after`."""
        is_last, message = index == len(messages) - 1, messages[index]
        before = places.get(2 * index - 1, after)
        closing = self.habits.last_closing if is_last else self.habits.closing
        start = places.get(2 * index)
        limit = min((place for mark, place in places.items() if mark >= 2 * index + 2), default=len(text))
        if message.get("tool_calls"):
            return self._calls_stretch(text, places, message, index, before=before, limit=limit, is_last=is_last)
        if start is None:  # an empty answer has no mark: templates ask whether it is empty
            header = before + after_header(text[before:limit], self._headers(messages, index))
            start = text.find(closing, header, limit) if closing else limit if is_last else -1
            if start < 0:
                raise cannot_follow(f"writes the empty message {index + 1} without an end of turn")
            return _Stretch(before=before, start=start, end=start + len(closing))
        end = places[2 * index + 1]
        if not is_last or closing:
            end = _end_of_turn(text, end, closing)
        return _Stretch(before=before, start=start, end=end)

    def _calls_stretch(
        self,
        text: str,
        places: Places,
        message: Mapping[str, Any],
        index: int,
        *,
        before: int,
        limit: int,
        is_last: bool,
    ) -> _Stretch:
        """Returns where a message with calls stands, from its text or else what opens the first call."""
        habits = self.call_habits
        start = places[2 * index]
        end = places.get(2 * index + 1, start)
        if not message["content"].strip():
            start -= len(habits.opening)
            if not text.startswith(habits.opening, start):
                raise cannot_follow(f"opens the calls of message {index + 1} in another way")
        if is_last and not self.habits.last_closing:
            end = len(text)
        else:
            closing = text.find(habits.closing, end, limit)
            if closing < 0:
                raise cannot_follow(f"writes the calls of message {index + 1} without an end of turn")
            end = closing + len(habits.closing)
        _require_calls(text, message, index, start, end)
        return _Stretch(before=before, start=start, end=end)


def as_written(conversation: Conversation, thinking: Thinking, render: Callable[..., Text]) -> Written:
    """Returns a conversation as `render` writes it: a template that says itself where the answers are, or the whole."""
    messages = conversation.messages
    answers, lost_thoughts = answers_of(messages, thinking)
    text, spans = render(
        [
            answers[i].message(splits=False) if i in answers and answers[i].cut else one
            for i, one in enumerate(messages)
        ],
        conversation.tools,
    )
    counts = Counts(
        empty_answers=_num_empty(answers),
        lost_thoughts=lost_thoughts + sum(answer.thought not in text for answer in answers.values()),
        empty_thoughts=sum(len(_EMPTY_THOUGHT.findall(text, *span)) for span in spans),
        lost_prompts=sum(one["role"] == "system" and one["content"].strip() not in text for one in messages),
    )
    return Written(text=text, spans=spans, counts=counts)


def lacks_tools(conversation: Conversation, written: Written) -> bool:
    """Returns whether the name of a tool stands nowhere outside of the answers."""
    if not conversation.tools:
        return False
    borders = [0, *chain.from_iterable(written.spans), len(written.text)]
    outside = [written.text[start:end] for start, end in zip(borders[::2], borders[1::2], strict=True)]
    names = (str(tool["function"].get("name")) for tool in conversation.tools)
    return not all(any(name in text for text in outside) for name in names)


def _num_empty(answers: Mapping[int, Answer]) -> int:
    return sum(answer.is_empty for answer in answers.values())


def _require_calls(text: str, message: Mapping[str, Any], index: int, start: int, end: int) -> None:
    """Raises InvalidConfig unless all calls of a message stand in this part of a text: gpt-oss writes the first one."""
    for call in message["tool_calls"]:
        name = call["function"]["name"]
        start = text.find(name, start, end) + len(name)
        if start < len(name):
            raise cannot_follow(f"omits a call of message {index + 1}, or writes it before the text")


def _end_of_turn(text: str, end: int, closing: str) -> int:
    """Returns where the token after an answer, whose text ends at `end`, ends: `closing`, or another tag."""
    space = _SPACE.match(text, end)
    assert space is not None
    if closing and text.startswith(closing, space.end()):
        return space.end() + len(closing)
    if tag := TAG.match(text, space.end()):
        return tag.end()
    raise cannot_follow("writes no end of turn after an answer")
