"""Conversations and texts to token ids and labels, with the loss on the answers only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dstrain.choices import LossOn
from dstrain.errors import InvalidConfig

IGNORED = -100
"""Label of a token that does not count in the loss. Source: torch.nn.CrossEntropyLoss(ignore_index=-100)."""

Conversation = list[dict[str, str]]
Span = tuple[int, int]

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BATCH_SAMPLES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One sample in tokens, cut to the sequence length."""

    input_ids: list[int]
    """Token ids."""
    labels: list[int]
    """The same ids where the token counts in the loss, elsewhere -100."""
    num_cut: int
    """Tokens that did not fit."""

    @property
    def teaches(self) -> bool:
        """Whether a token is left to learn; the first token is never predicted."""
        return any(label != IGNORED for label in self.labels[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Turns samples into tokens with one tokenizer and its chat template."""

    tokenizer: Any
    """A tokenizer of Transformers."""
    seq_len: int
    """Longest sample in tokens."""
    loss_on: LossOn
    """Which tokens count in the loss."""

    def encode(self, samples: Iterable[tuple[str, Conversation | str]]) -> Iterator[Encoded]:
        """Yields the tokens of each sample, given as (where it stands, conversation or text), in order.

        Raises InvalidConfig, with where the sample stands, when the chat template cannot render it.
        """
        remaining = iter(samples)
        while batch := list(islice(remaining, _BATCH_SAMPLES)):  # the tokenizer works on a batch in parallel
            texts = [sample for _, sample in batch if isinstance(sample, str)]
            if len(texts) == len(batch):
                yield from self._encode_texts(texts)
            else:
                yield from self._encode_chats([(where, sample) for where, sample in batch if isinstance(sample, list)])

    def _encode_texts(self, texts: list[str]) -> Iterator[Encoded]:
        """Yields whole texts, between the tokens that begin and end a document; every token counts."""
        for encoded in self.tokenizer(texts, verbose=False)["input_ids"]:
            ids = list(encoded)
            if ids[-1:] != [self.tokenizer.eos_token_id] and self.tokenizer.eos_token_id is not None:
                ids.append(self.tokenizer.eos_token_id)
            yield self._cut(ids, ids)

    def _encode_chats(self, batch: list[tuple[str, Conversation]]) -> Iterator[Encoded]:
        self._require_template()
        if self.loss_on is LossOn.ANSWER and _GENERATION_TAG.search(self.tokenizer.get_chat_template()):
            yield from (self._encode_tagged(where, messages) for where, messages in batch)
            return
        rendered = [self._render(where, messages) for where, messages in batch]
        if not self.tokenizer.is_fast:
            yield from (
                self._encode_by_prefix(where, *sample) for (where, _), sample in zip(batch, rendered, strict=True)
            )
            return
        out = self._tokens([text for text, _ in rendered], return_offsets_mapping=True)
        for ids, offsets, (_, answers) in zip(out["input_ids"], out["offset_mapping"], rendered, strict=True):
            counts = _inside(offsets, answers)
            yield self._cut(ids, [token if inside else IGNORED for token, inside in zip(ids, counts, strict=True)])

    def _cut(self, ids: list[int], labels: list[int]) -> Encoded:
        return Encoded(
            input_ids=ids[: self.seq_len], labels=labels[: self.seq_len], num_cut=max(0, len(ids) - self.seq_len)
        )

    def _encode_tagged(self, where: str, messages: Conversation) -> Encoded:
        """Returns the tokens with the template's own word, `{% generation %}`, on what is the answer."""
        try:
            out = self.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        except Exception as error:  # a template is a program of the model's author: it raises what it likes
            raise _refused(where, error) from error
        ids, mask = out["input_ids"], out["assistant_masks"]
        return self._cut(ids, [token if inside else IGNORED for token, inside in zip(ids, mask, strict=True)])

    def _encode_by_prefix(self, where: str, text: str, answers: Sequence[Span]) -> Encoded:
        """Returns the tokens for a tokenizer without offsets: the text is tokenized up to each border of an answer."""
        ids = self._tokens(text)["input_ids"]
        labels = [IGNORED] * len(ids)
        for start, end in answers:
            before, upto = self._tokens(text[:start])["input_ids"], self._tokens(text[:end])["input_ids"]
            if ids[: len(before)] != before or ids[: len(upto)] != upto:
                raise InvalidConfig(
                    f"{where}: the tokens of an answer cannot be told from those of the question with this tokenizer",
                    hint="Set loss_on: all, or use a fast tokenizer.",
                )
            labels[len(before) : len(upto)] = ids[len(before) : len(upto)]
        return self._cut(ids, labels)

    def _tokens(self, text: str | list[str], **options: Any) -> Any:
        """Returns the tokenizer's output for text that holds its special tokens already."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False, **options)

    def _require_template(self) -> None:
        if not getattr(self.tokenizer, "chat_template", None):
            raise InvalidConfig(
                f"the tokenizer of {self.tokenizer.name_or_path or 'this model'} has no chat template, "
                "and the data are conversations",
                hint="Use the instruction-tuned model's tokenizer, put a chat_template.jinja beside it, "
                "or write the data as text.",
            )

    def _render(self, where: str, messages: Conversation) -> tuple[str, Sequence[Span]]:
        """Returns the conversation as text, special tokens included, and the characters that count in the loss."""
        try:
            text = self._template(messages)
            return text, [(0, len(text))] if self.loss_on is LossOn.ALL else self._answers(where, messages, text)
        except InvalidConfig:
            raise
        except Exception as error:
            raise _refused(where, error) from error

    def _template(self, messages: Conversation, *, prompt: bool = False) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))

    def _answers(self, where: str, messages: Conversation, text: str) -> list[Span]:
        """Returns the characters of each answer, from after the words that prompt it to its end-of-turn token."""
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        starts = [self._start(where, messages, turn, text) for turn in turns]
        closing = _closing(text[starts[-1] :], messages[-1]["content"])
        spans = []
        for turn, start, limit in zip(turns, starts, [*starts[1:], len(text)], strict=True):
            upto = text if turn == turns[-1] else self._template(messages[: turn + 1])
            if text.startswith(upto):
                end = len(upto)
            else:  # the template writes an answer otherwise once another turn follows: Qwen3 leaves its thoughts out
                end = _rewritten_end(where, text[:limit], start, closing, messages[turn]["content"])
            # the line break after the end-of-turn token is the template's: no model has to write it
            spans.append((start, start + len(text[start:end].rstrip()) if closing else end))
        return spans

    def _start(self, where: str, messages: Conversation, turn: int, text: str) -> int:
        """Returns where the answer at `turn` starts: after the template's generation prompt for the messages before."""
        before = messages[:turn]
        if not before:
            return max(0, text.find(messages[0]["content"].strip()))
        prompt = self._template(before, prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        bare = self._template(before)  # the prompt may open thoughts that the answer does not have: DeepSeek-R1
        if text.startswith(bare):
            return next(place for place, (one, other) in enumerate(zip(prompt, text, strict=False)) if one != other)
        raise InvalidConfig(
            f"{where}: the chat template writes earlier turns otherwise when later ones follow, "
            "so answers cannot be told from questions",
            hint="Set loss_on: all, or use a template with {% generation %} around the answers.",
        )


def _closing(last: str, content: str) -> str:
    """Returns the end-of-turn text, as it stands after the last answer: `<|im_end|>`; empty where it cannot be told.

    >>> _closing("<think>\\n\\n</think>\\n\\nFour.<|im_end|>\\n", "Four.")
    '<|im_end|>'
    """
    lines = content.strip().splitlines() or [""]
    found = last.rfind(lines[-1]) if lines[-1] else 0
    return "" if found < 0 else last[found + len(lines[-1]) :].strip()


def _rewritten_end(where: str, text: str, start: int, closing: str, content: str) -> int:
    """Returns where a rewritten answer ends: after the first end-of-turn text, if what precedes it is the answer's."""
    found = text.find(closing, start) if closing else -1
    shown = text[start:found].strip()
    if found < 0 or not (content.strip().endswith(shown) or shown.endswith(content.strip())):
        raise InvalidConfig(
            f"{where}: the chat template writes an earlier answer in a way that cannot be followed",
            hint="Set loss_on: all, or use a template with {% generation %} around the answers.",
        )
    return found + len(closing)


def _inside(offsets: Iterable[Span], spans: Sequence[Span]) -> list[bool]:
    """Returns for each token whether it begins within one of the spans; both are in order.

    Tokenizers that trim white space from offsets (Llama 3) give a token of white space alone an empty one at its end:
    it begins where the token before it ended.
    """
    inside = []
    index = previous_end = 0
    for start, end in offsets:
        begin = min(start, previous_end) if start == end else start
        previous_end = end
        while index < len(spans) and begin >= spans[index][1]:
            index += 1
        inside.append(index < len(spans) and begin >= spans[index][0])
    return inside


def _refused(where: str, error: Exception) -> InvalidConfig:
    return InvalidConfig(f"{where}: the chat template does not accept this conversation: {error}")
