"""Tokenizes conversations and texts, with labels on the answers only."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from dstrain.choices import LossOn, Thinking
from dstrain.errors import InvalidConfig
from dstrain.facts.data.datafile import Refuse, stop
from dstrain.train.data.chat import Counts, Follower, Span, Text, Written, as_written, learn
from dstrain.train.data.message_spans import OTHER_TEMPLATE, Conversation

IGNORED = -100
"""Label of a token that does not count in the loss. Source: torch.nn.CrossEntropyLoss(ignore_index=-100)."""

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BATCH_SAMPLES = 256
_NOTHING = Counts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One sample in tokens, cut to the sequence length."""

    input_ids: list[int]
    """Token ids."""
    labels: list[int]
    """Token ids of tokens that count in the loss, otherwise -100: (seq,), as `input_ids`."""
    num_cut: int
    """Truncated tokens."""
    counts: Counts

    @property
    def teaches(self) -> bool:
        """Whether there is a token to learn; the first token is never predicted."""
        return any(label != IGNORED for label in self.labels[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Turns samples into tokens with one tokenizer and its chat template."""

    tokenizer: Any
    """A tokenizer of Transformers."""
    seq_len: int
    """Longest sample, in tokens."""
    loss_on: LossOn
    thinking: Thinking = Thinking.AUTO

    def encode(self, samples: Iterable[tuple[str, Conversation | str]], refuse: Refuse = stop) -> Iterator[Encoded]:
        """Yields the tokens of each sample, given as (place, conversation or text), in order.

        Errors of the chat template go to `refuse`, which raises them or returns to skip the sample.
        """
        remaining = iter(samples)
        while batch := list(islice(remaining, _BATCH_SAMPLES)):  # the tokenizer works on a batch in parallel
            texts = [sample for _, sample in batch if isinstance(sample, str)]
            if len(texts) == len(batch):
                yield from self._encode_texts(texts)
            else:
                conversations = [(where, sample) for where, sample in batch if not isinstance(sample, str)]
                yield from self._encode_chats(conversations, refuse)

    def _encode_texts(self, texts: list[str]) -> Iterator[Encoded]:
        """Yields whole texts, between the tokens that begin and end a document; every token counts."""
        for encoded in self.tokenizer(texts, verbose=False)["input_ids"]:
            ids = list(encoded)
            if ids[-1:] != [self.tokenizer.eos_token_id] and self.tokenizer.eos_token_id is not None:
                ids.append(self.tokenizer.eos_token_id)
            yield self._cut(ids, ids)

    def _encode_chats(self, batch: list[tuple[str, Conversation]], refuse: Refuse) -> Iterator[Encoded]:
        self._require_template()
        try:
            write = self._writer()
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise _refused(batch[0][0], error) from error
        conversations: list[tuple[str, Written]] = []
        for where, messages in batch:
            try:
                conversations.append((where, write(messages)))
            except Exception as error:
                refuse(_refused(where, error))
        if not self.tokenizer.is_fast:
            for where, written in conversations:
                try:
                    yield self._encode_by_prefix(where, written)
                except InvalidConfig as error:
                    refuse(error)
            return
        texts = [written.text for _, written in conversations]
        out = self._tokens(texts, return_offsets_mapping=True) if texts else {"input_ids": [], "offset_mapping": []}
        for ids, offsets, (_, written) in zip(out["input_ids"], out["offset_mapping"], conversations, strict=True):
            yield self._cut(ids, _labels(ids, offsets, written.spans), written.counts)

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

    def _template(self, *conversations: Conversation, prompt: bool = False) -> list[str]:
        """Returns rendered conversations; with `prompt` each is followed by the generation prompt."""
        options = {"enable_thinking": False} if self.thinking is Thinking.OFF else {}
        return list(
            self.tokenizer.apply_chat_template(
                [list(messages) for messages in conversations], tokenize=False, add_generation_prompt=prompt, **options
            )
        )

    def _whole(self, messages: Conversation) -> Text:
        (text,) = self._template(messages)
        return text, [(0, len(text))]

    def _tagged(self, messages: Conversation) -> Text:
        """Returns the text, with the answers marked by the template's `{% generation %}`."""
        options = {"enable_thinking": False} if self.thinking is Thinking.OFF else {}
        rendered: Any = render_jinja_template(
            [[dict(message) for message in messages]],
            chat_template=self.tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **options},
        )
        (text,), (spans,) = rendered
        return text, spans

    def _cut(self, ids: list[int], labels: list[int], counts: Counts = _NOTHING) -> Encoded:
        num_cut = max(0, len(ids) - self.seq_len)
        return Encoded(input_ids=ids[: self.seq_len], labels=labels[: self.seq_len], num_cut=num_cut, counts=counts)

    def _encode_by_prefix(self, where: str, written: Written) -> Encoded:
        """Returns the tokens for a tokenizer without offsets, by tokenizing prefixes up to each border of an answer."""
        ids = self._tokens(written.text)["input_ids"]
        labels = [IGNORED] * len(ids)
        for start, end in written.spans:
            before, upto = (self._tokens(written.text[:border])["input_ids"] for border in (start, end))
            if ids[: len(before)] != before or ids[: len(upto)] != upto:
                raise InvalidConfig(
                    f"{where}: this tokenizer merges tokens of an answer with those of the question",
                    hint="Use a fast tokenizer (a model folder with tokenizer.json).",
                )
            labels[len(before) : len(upto)] = ids[len(before) : len(upto)]
        return self._cut(ids, labels, written.counts)

    def _tokens(self, text: str | list[str], **options: Any) -> Any:
        """Returns the tokenizer's output for text with special tokens."""
        options |= {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        return self.tokenizer(text, add_special_tokens=False, **options)

    def _require_template(self) -> None:
        if not getattr(self.tokenizer, "chat_template", None):
            raise InvalidConfig(
                f"the tokenizer of {self.tokenizer.name_or_path or 'this model'} has no chat template, "
                "but the data are conversations",
                hint="Use the instruction-tuned model's tokenizer, set a template (chat_template: FILE), "
                "or write the data as text.",
            )


def _labels(ids: list[int], offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """Returns the ids of the tokens that begin within one of the spans, and -100 for the others.

    Tokenizers that trim white space from offsets (Llama 3) give a token of white space alone an empty one at its end:
    it begins where the token before it ended.
    """
    ends = chain((0,), (end for _, end in offsets))
    begins = [start if start < end else min(start, last) for (start, end), last in zip(offsets, ends, strict=False)]
    labels = [IGNORED] * len(ids)
    for start, end in spans:
        first, after = bisect_left(begins, start), bisect_left(begins, end)
        labels[first:after] = ids[first:after]
    return labels


def _refused(where: str, error: Exception) -> InvalidConfig:
    if isinstance(error, InvalidConfig):
        return InvalidConfig(f"{where}: {error.problem}", hint=error.hint)
    reason = str(error) or type(error).__name__
    return InvalidConfig(f"{where}: the chat template rejects this conversation: {reason}", hint=OTHER_TEMPLATE)
