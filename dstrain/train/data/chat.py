"""Renders a conversation through its chat template, and marks the characters that count in the loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dstrain.choices import Thinking
from dstrain.train.data.message_spans import Conversation, Places, Template, cannot_follow, placed, whole

Span = tuple[int, int]
Text = tuple[str, Sequence[Span]]

_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_PIECE = re.compile(_TAG.pattern + r"|\s|[^\s<\[]+|.")
_SPACE = re.compile(r"\s*")
_THOUGHT = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)
_NO_THOUGHT = re.compile(r"(?:<think>\s*)?</think>\s*$")
_TAGGED = "a</think>b"
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers for the log about one conversation."""

    empty_answers: int = 0
    lost_thoughts: int = 0
    """Answers whose thoughts are omitted."""
    empty_thoughts: int = 0
    """Answers that begin with an empty block of thoughts, which is learned."""
    lost_prompts: int = 0
    """System prompts that the template omits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A rendered conversation."""

    text: str
    """The text with special tokens."""
    spans: Sequence[Span]
    """Ranges of characters that count in the loss, in order."""
    counts: Counts


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

    def message(self, *, splits: bool) -> dict[str, str]:
        """Returns the message for a template; `splits`: the template splits text at a tag if it gets no thoughts."""
        message = {"role": "assistant", "content": self.visible}
        if self.thought or (splits and "</think>" in self.visible):
            message["reasoning_content"] = self.thought
        return message


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
class _Stretch:
    """The position of an answer in a text."""

    before: int
    """End of the message before it."""
    start: int
    """Start of its visible text, after header and thoughts."""
    end: int
    """Its end, including the end of turn."""


def answers_of(messages: Conversation, thinking: Thinking) -> tuple[dict[int, Answer], int]:
    """Returns the assistant's messages by their index, and how many of them lose their thoughts by `thinking`."""
    last_question = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)
    answers = {index: _answer(message) for index, message in enumerate(messages) if message["role"] == "assistant"}
    lost = 0
    for index, answer in answers.items():
        if thinking is Thinking.OFF or (thinking is Thinking.LAST and index < last_question):
            lost += bool(answer.thought)
            answers[index] = Answer(visible=answer.visible, cut=bool(answer.block))
    return answers, lost


def _answer(message: Mapping[str, str]) -> Answer:
    """Returns a message with its thoughts apart; as for the templates, an opening tag may be missing before them."""
    content = message["content"]
    if thought := message.get("reasoning_content", "").strip():
        return Answer(visible=content, thought=thought, block=f"<think>\n{thought}\n</think>\n\n")
    if content.lstrip().startswith("<think>") or "<think>" not in content:
        block = _THOUGHT.match(content)
        if block:
            return Answer(visible=content[block.end() :], thought=block[1].strip(), block=block[0])
    return Answer(visible=content)


def learn(template: Template) -> Habits:
    """Returns the habits of a template, learned from conversations with one letter per message."""
    question, plain, thoughtful, tagged = (
        {"role": "user", "content": "q"},
        *(answer.message(splits=False) for answer in (Answer(visible="a"), Answer(visible="a", thought="t"))),
        Answer(visible=_TAGGED).message(splits=False),
    )
    prompt, prompt_places = placed(template, [question], prompt=True)
    bare, bare_places = placed(template, [question])
    short, places = placed(template, [question, plain])
    long, long_places = placed(template, [question, plain] * 2)
    try:
        prompted, asked = prompt[prompt_places[1] :], bare[bare_places[1] :]
        last_closing, after = short[places[3] :], long[long_places[3] : long_places[5]]
        lead, long_lead = short[places[1] : places[2]], long[long_places[1] : long_places[2]]
    except KeyError:
        raise cannot_follow("omits questions or answers") from None
    closing = _common(after, last_closing).strip()
    if not closing and (tag := _TAG.match(after.lstrip())):
        closing = tag[0]
    short, places = placed(template, [question, thoughtful])
    long, long_places = placed(template, [question, thoughtful, question, plain])
    header = _PIECE.findall(prompted[len(_common(prompted, asked)) :] or prompted)
    return Habits(
        headers=["".join(header[:count]) for count in range(len(header), 0, -1)],
        closing=closing,
        last_closing=last_closing.strip(),
        rewrites=lead != long_lead or short[places[1] : places[2]] != long[long_places[1] : long_places[2]],
        splits=_TAGGED not in placed(template, [question, tagged])[0],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """Renders conversations and locates answers, for templates without `{% generation %}`."""

    template: Template
    habits: Habits
    thinking: Thinking
    end: str
    """Appended if the template does not end the last answer."""

    def write(self, messages: Conversation) -> Written:
        """Returns a conversation as text, with the characters of each answer from after its header to what ends it.

        Raises InvalidConfig if the answers cannot be located.
        """
        answers, lost_thoughts = answers_of(messages, self.thinking)
        splits = self.habits.splits
        shown = [answers[i].message(splits=splits) if i in answers else one for i, one in enumerate(messages)]
        text, places, lost_prompts = whole(self.template, shown)
        written, spans, cursor, empty_thoughts = "", [], 0, 0
        for index, answer in answers.items():
            stretch = _stretch(text, places, index, self.habits, after=cursor, is_last=index == len(messages) - 1)
            lead = self._lead(text[stretch.before : stretch.start], shown, index, answer, places)
            begin = _after_header(lead, self.habits.headers)
            empty_thoughts += any(block.end() > begin for block in _EMPTY_THOUGHT.finditer(lead))
            written += text[cursor : stretch.before] + lead[max(0, cursor - stretch.before) :]
            spans.append((len(written) - len(lead) + begin, len(written) + stretch.end - stretch.start))
            written += text[stretch.start : stretch.end]
            cursor = stretch.end
        written += text[cursor:]
        if not self.habits.last_closing:
            written += self.end
            spans[-1] = (spans[-1][0], len(written))
        counts = Counts(
            empty_answers=_empty(answers),
            lost_thoughts=lost_thoughts,
            empty_thoughts=empty_thoughts,
            lost_prompts=lost_prompts,
        )
        return Written(text=written, spans=spans, counts=counts)

    def _lead(self, lead: str, messages: Conversation, index: int, answer: Answer, places: Places) -> str:
        """Returns what comes between the message before an answer and its own words, thoughts included.

        If the template writes earlier answers differently, it is the text of an answer that nothing follows.
        """
        anchored = 2 * index - 1 in places
        if self.habits.rewrites and self.thinking is not Thinking.LAST and index < len(messages) - 1 and anchored:
            text, its_places = placed(self.template, messages[: index + 1])
            alone = _stretch(text, its_places, index, self.habits, after=0, is_last=True)
            lead = text[alone.before : alone.start]
        begin = _after_header(lead, self.habits.headers)
        if not answer.block or (answer.thought in lead[begin:] if answer.thought else "</think>" in lead):
            return lead
        _, opening, rest = self.habits.headers[0].partition(
            "<think>"
        )  # DeepSeek-R1's data may begin after the opening tag
        return _NO_THOUGHT.sub("", lead) + ("" if "<think>" in answer.block else opening + rest) + answer.block


def as_written(messages: Conversation, thinking: Thinking, render: Callable[[Conversation], Text]) -> Written:
    """Returns a conversation as `render` writes it: a template that says itself where the answers are, or the whole."""
    answers, lost_thoughts = answers_of(messages, thinking)
    text, spans = render(
        [
            {"role": "assistant", "content": answers[i].visible} if i in answers and answers[i].cut else one
            for i, one in enumerate(messages)
        ]
    )
    counts = Counts(
        empty_answers=_empty(answers),
        lost_thoughts=lost_thoughts + sum(answer.thought not in text for answer in answers.values()),
        empty_thoughts=sum(len(_EMPTY_THOUGHT.findall(text, *span)) for span in spans),
        lost_prompts=sum(one["role"] == "system" and one["content"].strip() not in text for one in messages),
    )
    return Written(text=text, spans=spans, counts=counts)


def _empty(answers: Mapping[int, Answer]) -> int:
    return sum(not answer.visible.strip() for answer in answers.values())


def _stretch(text: str, places: Places, index: int, habits: Habits, *, after: int, is_last: bool) -> _Stretch:
    """Returns where the answer at `index` stands; the answer before it ends at `after`."""
    before = places.get(2 * index - 1, after)
    closing = habits.last_closing if is_last else habits.closing
    start = places.get(2 * index)
    if start is None:  # an empty answer has no mark: templates ask whether it is empty
        limit = min((place for mark, place in places.items() if mark >= 2 * index + 2), default=len(text))
        header = before + _after_header(text[before:limit], habits.headers)
        start = text.find(closing, header, limit) if closing else limit if is_last else -1
        if start < 0:
            raise cannot_follow(f"writes the empty message {index + 1} without an end of turn")
        return _Stretch(before=before, start=start, end=start + len(closing))
    end = places[2 * index + 1]
    if not is_last or closing:
        after_space = _match(_SPACE, text, end).end()
        tag = _TAG.match(text, after_space)
        if closing and text.startswith(closing, after_space):
            end = after_space + len(closing)
        elif tag:
            end = tag.end()
        else:
            raise cannot_follow("writes no end of turn after an answer")
    return _Stretch(before=before, start=start, end=end)


def _match(pattern: re.Pattern[str], text: str, position: int) -> re.Match[str]:
    match = pattern.match(text, position)
    assert match is not None
    return match


def _after_header(lead: str, headers: Sequence[str]) -> int:
    """Returns where the header ends in what stands before an answer.

    >>> _after_header("<|end|><|assistant|>", ["<|assistant|><think>", "<|assistant|>"]), len("<|end|><|assistant|>")
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
