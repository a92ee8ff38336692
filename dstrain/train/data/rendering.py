"""Renders conversations as training has them, with any tokenizer that applies a chat template, and measures them.

It imports no heavy package: plans render a few rows too.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dstrain.choices import Hub, LossOn, Task, Thinking
from dstrain.config.templates import ChatTemplate
from dstrain.errors import InvalidConfig
from dstrain.facts.data.lengths import Measure, encoder_of
from dstrain.facts.data.turns import Conversation
from dstrain.facts.model.hub_config import read_chat_files
from dstrain.job.schema import Job
from dstrain.train.data.chat import Follower, Span, Text, Written, as_written, lacks_tools, learn
from dstrain.train.data.spans import OTHER_TEMPLATE, Messages, takes_only_parts, with_arguments, with_parts

IGNORED = -100
"""Label of a token that does not count in the loss. Source: torch.nn.CrossEntropyLoss(ignore_index=-100)."""
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

Tagged = Callable[[list[list[Any]], Any, Mapping[str, Any]], tuple[list[str], list[list[Span]]]]
"""Renders conversations, given tools and options, with the stretches that `{% generation %}` marks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renderer:
    """Renders conversations, and marks the characters that count in the loss."""

    tokenizer: Any
    """A tokenizer of Transformers, or what stands for it: its methods for chat templates, and its special tokens."""
    loss_on: LossOn
    thinking: Thinking
    tagged: Tagged

    def writer(self) -> Callable[[Conversation], Written]:
        """Returns the function that renders a conversation with the characters that count in the loss."""
        write = self._writer()
        return lambda conversation: self._masked(conversation, write(conversation))

    def _writer(self) -> Callable[[Conversation], Written]:
        """Returns the function that renders a conversation with the characters that count in the loss."""
        if self.loss_on is LossOn.ALL:
            return partial(as_written, thinking=self.thinking, render=self._whole)
        if _GENERATION_TAG.search(self.tokenizer.get_chat_template()):
            return partial(as_written, thinking=self.thinking, render=self._tagged)
        habits = learn(self._template)
        end, unknown = habits.closing, self.tokenizer.unk_token_id
        if not end or self.tokenizer.convert_tokens_to_ids(end) in (None, unknown):
            end = self.tokenizer.eos_token or ""
        if not (habits.last_closing or end):
            raise InvalidConfig(
                "the chat template writes no end of turn after answers, and the tokenizer has no eos_token",
                hint="Set a template that ends every answer with a token: chat_template: FILE",
            )
        return Follower(template=self._template, habits=habits, thinking=self.thinking, end=end).write

    def _masked(self, conversation: Conversation, written: Written) -> Written:
        """Returns the text without loss on answers of weight 0, and with `loss_on: last` on all but the last one."""
        counts = {"lost_tools": 1} if lacks_tools(conversation, written) else {}
        if counts:
            written = replace(written, counts=replace(written.counts, **counts))
        if self.loss_on is not LossOn.LAST and not conversation.unlearned:
            return written
        answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        wanted = {*(answers[-1:] if self.loss_on is LossOn.LAST else answers)} - conversation.unlearned
        if len(wanted) == len(answers):
            return written
        if self.loss_on is LossOn.ALL:
            raise InvalidConfig("an answer has weight 0, but loss_on is all", hint="loss_on: answer")
        if len(written.spans) != len(answers):
            problem = f"the chat template marks {len(written.spans)} stretches, but there are {len(answers)} answers"
            raise InvalidConfig(f"{problem}, so single answers cannot be left out of the loss", hint=OTHER_TEMPLATE)
        spans = [span for span, answer in zip(written.spans, answers, strict=True) if answer in wanted]
        return replace(written, spans=spans)

    def _template(self, *conversations: Messages, prompt: bool = False, tools: Any = None) -> list[str]:
        """Returns rendered conversations; with `prompt` each is followed by the generation prompt."""
        options = {"tokenize": False, "add_generation_prompt": prompt, "tools": tools, **self._options}
        texts: list[str] = with_arguments(
            lambda chats: list(self.tokenizer.apply_chat_template(chats, **options)),
            [self._as_templates_take(messages) for messages in conversations],
        )
        return texts

    def _whole(self, messages: Messages, tools: Any) -> Text:
        (text,) = self._template(messages, tools=tools)
        return text, [(0, len(text))]

    def _tagged(self, messages: Messages, tools: Any) -> Text:
        """Returns the text, with the answers marked by the template's `{% generation %}`."""
        (text,), (spans,) = with_arguments(
            lambda chats: self.tagged(chats, tools, self._options),
            [[dict(message) for message in self._as_templates_take(messages)]],
        )
        return text, spans

    def _as_templates_take(self, messages: Messages) -> list[Mapping[str, Any]]:
        only_parts = takes_only_parts(self.tokenizer)
        return [with_parts(message, always=only_parts) for message in messages]

    @property
    def _options(self) -> dict[str, Any]:
        return {"enable_thinking": False} if self.thinking is Thinking.OFF else {}


def learned_tokens(offsets: Sequence[Span], spans: Sequence[Span]) -> Iterator[slice]:
    """Yields the tokens that begin within each of the spans, given the characters of each token.

    Tokenizers that trim white space from offsets (Llama 3) give a token of white space alone an empty one at its end:
    it begins where the token before it ended.
    """

    def begin(token: int) -> int:
        start, end = offsets[token]
        return start if start < end else min(start, offsets[token - 1][1] if token else 0)

    tokens = range(len(offsets))
    for start, end in spans:
        yield slice(bisect_left(tokens, start, key=begin), bisect_left(tokens, end, key=begin))


def measure_of(job: Job, source: str, hub: Hub, tokenizer: Path) -> Measure | None:
    """Returns the function that measures conversations of a job; None if the model has no chat template here."""
    files = read_chat_files(source, hub)
    text = job.chat_template or files.template
    if text is None:
        return None
    encoder = encoder_of(tokenizer)
    template = ChatTemplate(
        chat_template=text, special_tokens=files.special_tokens, token_id=lambda token: encoder.token_to_id(token)
    )
    loss_on = LossOn.LAST if job.task is Task.DPO else job.loss_on
    renderer = Renderer(tokenizer=template, loss_on=loss_on, thinking=job.thinking, tagged=template.tagged)

    def measure(conversations: Sequence[Conversation]) -> list[tuple[int, int] | None]:
        try:
            write = renderer.writer()
        except Exception:  # a template is a program of the model's author and may raise anything; dstrain run names it
            return [None] * len(conversations)
        found: list[tuple[int, int] | None] = []
        for conversation in conversations:
            try:
                written = write(conversation)
            except Exception:
                found.append(None)
                continue
            encoding = encoder.encode(written.text, add_special_tokens=False)
            learned = (range(len(encoding.ids))[part] for part in learned_tokens(encoding.offsets, written.spans))
            found.append((len(encoding.ids), sum(map(len, learned))))
        return found

    return measure
