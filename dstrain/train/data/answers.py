"""Splits the assistant's messages into thoughts, visible text and tool calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dstrain.choices import Thinking
from dstrain.train.data.message_spans import Messages

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
            message["reasoning_content"] = self.thought
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
