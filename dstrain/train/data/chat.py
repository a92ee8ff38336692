"""Locates answers in a chat template's output, and learns what it writes around them: for templates without marks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

from dstrain.choices import Thinking
from dstrain.facts.data.turns import Conversation
from dstrain.train.data.spans import Messages, Places, Skeletons, Template, cannot_follow, placed, whole

_THOUGHT = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A message of the assistant, split into thoughts and visible text."""

    visible: str
    """The text after the thoughts."""
    thought: str = ""
    """The thoughts, stripped of white space."""
    block: str = ""
    """The thoughts with their tags as in the data; empty if the data have no such block."""
    cut: bool = False
    """Whether thoughts were removed."""
    calls: Sequence[Mapping[str, Any]] = ()
    """Tool calls, in OpenAI's form."""

    @property
    def is_empty(self) -> bool:
        """Whether it has neither text nor calls."""
        return not self.visible.strip() and not self.calls

    def message(self, *, splits: bool) -> dict[str, Any]:
        """Returns the message for a template; `splits`: the template splits text at a tag if it gets no thoughts."""
        message: dict[str, Any] = {"role": "assistant", "content": self.visible}
        if self.thought or (splits and "</think>" in self.visible):
            # gpt-oss reads `thinking`, which Transformers fills in from the other name in its newest releases alone
            message["reasoning_content"] = message["thinking"] = self.thought
        return message | ({"tool_calls": list(self.calls)} if self.calls else {})


def answers_of(messages: Messages, thinking: Thinking) -> tuple[dict[int, Answer], int]:
    """Returns the assistant's messages by their index, and how many of them lose their thoughts by `thinking`."""
    last_question = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)
    answers = {index: _answer(message) for index, message in enumerate(messages) if message["role"] == "assistant"}
    lost = 0
    for index, answer in answers.items():
        if thinking is Thinking.OFF or (thinking is Thinking.LAST and index < last_question):
            lost += bool(answer.thought)
            answers[index] = replace(answer, thought="", block="", cut=bool(answer.block))
    return answers, lost


def _answer(message: Mapping[str, Any]) -> Answer:
    """Returns a message with its thoughts apart; as for the templates, an opening tag may be missing before them."""
    content, calls = message["content"], message.get("tool_calls", ())
    if thought := message.get("reasoning_content", "").strip():
        return Answer(visible=content, thought=thought, block=f"<think>\n{thought}\n</think>\n\n", calls=calls)
    if content.lstrip().startswith("<think>") or "<think>" not in content:
        block = _THOUGHT.match(content)
        if block:
            visible = content[block.end() :]
            return Answer(visible=visible, thought=block[1].strip(), block=block[0], calls=calls)
    return Answer(visible=content, calls=calls)


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
    """The text before the name of the first call of a message."""
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
    # a last answer may be closed otherwise, or not at all: what both have ends a turn
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
    """Returns the text of a template between any text of an answer and the name of the first call.

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
    """Returns the common beginning of two texts, in whole tags and words.

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
    """Returns the common end of two texts, in whole tags and words.

    >>> _common_end("</think><call>f", "c<call>f")
    '<call>f'
    """
    common = ""
    for piece, same in zip(reversed(_PIECE.findall(text)), reversed(_PIECE.findall(other)), strict=False):
        if piece != same:
            break
        common = piece + common
    return common


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
        # some templates end the last turn for generation, but what ends an answer must be learned
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
        """Returns the text between the message before an answer and its own words, thoughts included.

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
            # without a text, the place is that of the first call, and its opening has to be learned as well
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
