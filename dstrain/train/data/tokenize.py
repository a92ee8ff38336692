"""Tokenizes conversations and texts, with labels on the answers only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from dstrain.choices import LossOn, Thinking
from dstrain.errors import InvalidConfig, type_and_line
from dstrain.facts.data import media
from dstrain.facts.data.columns import MEDIA
from dstrain.facts.data.datafile import Refuse, stop
from dstrain.facts.data.media import Files
from dstrain.facts.data.turns import Conversation
from dstrain.train.data.chat import Counts, Span, Written
from dstrain.train.data.rendering import IGNORED, Renderer, learned_tokens
from dstrain.train.data.spans import OTHER_TEMPLATE

if TYPE_CHECKING:
    from dstrain.train.data.media import MediaReader

_MARKS = r"<\|im_(?:start|end)\|>|<\|(?:start|end)_header_id\|>|<\|eot_id\|>|<(?:start|end)_of_turn>|\[/?INST\]"
"""Marks of rendered conversations in ChatML, Llama 3, Gemma and Mistral."""
_BATCH_SAMPLES = 256
_OTHER = "Train a vision-language model, with all files of its repository."
_NOTHING = Counts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One sample in tokens, cut to the sequence length."""

    where: str
    """Its place, such as file and line."""
    input_ids: list[int]
    """Token ids."""
    labels: list[int]
    """Token ids of tokens that count in the loss, otherwise -100: (seq,), as `input_ids`."""
    num_cut: int
    """Truncated tokens."""
    counts: Counts
    images: tuple[str, ...] = ()
    """Files of its images."""
    videos: tuple[Files, ...] = ()
    """Files of its videos."""
    media_of: Sequence[int | None] = ()
    """Index of the image or video of each token, as `Expanded` has it; empty without: (seq,)."""

    @property
    def num_learned(self) -> int:
        """Tokens that count in the loss; the first token is never predicted."""
        return len(self.labels[1:]) - self.labels[1:].count(IGNORED)

    @property
    def teaches(self) -> bool:
        """Whether there is a token to learn."""
        return self.num_learned > 0


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Turns samples into tokens with one tokenizer and its chat template."""

    tokenizer: Any
    """A tokenizer of Transformers."""
    seq_len: int
    """Longest sample, in tokens."""
    loss_on: LossOn
    thinking: Thinking = Thinking.AUTO
    media_reader: MediaReader | None = None
    """Reads images and videos; None: samples with any are refused."""

    def encode(self, samples: Iterable[tuple[str, Conversation | str]], refuse: Refuse = stop) -> Iterator[Encoded]:
        """Yields the tokens of each sample, given as (place, conversation or text), in order.

        Errors of the chat template go to `refuse`, which raises them or returns to skip the sample.
        """
        remaining = iter(samples)
        while batch := list(islice(remaining, _BATCH_SAMPLES)):  # the tokenizer works on a batch in parallel
            texts = [(where, sample) for where, sample in batch if isinstance(sample, str)]
            if len(texts) == len(batch):
                yield from self._encode_texts(texts, refuse)
            else:
                conversations = [(where, sample) for where, sample in batch if not isinstance(sample, str)]
                yield from self._encode_chats(conversations, refuse)

    def _encode_texts(self, batch: list[tuple[str, str]], refuse: Refuse) -> Iterator[Encoded]:
        """Yields whole texts, between the tokens that begin and end a document; every token counts."""

        def encoded(texts: list[str]) -> Iterator[list[int]]:
            yield from self.tokenizer(texts, verbose=False)["input_ids"]

        for (where, _), found in zip(batch, _each(encoded, batch, refuse), strict=True):
            if found is None:
                continue
            ids = list(found)
            if ids[-1:] != [self.tokenizer.eos_token_id] and self.tokenizer.eos_token_id is not None:
                ids.append(self.tokenizer.eos_token_id)
            yield self._cut(where, ids, ids)

    def _encode_chats(self, batch: list[tuple[str, Conversation]], refuse: Refuse) -> Iterator[Encoded]:
        self._require_template()
        try:
            write = self._write
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise _refused(batch[0][0], error) from error
        conversations: list[tuple[str, Written, Conversation]] = []
        for where, conversation in batch:
            try:
                self._require_tower(conversation)
                conversations.append((where, self._counted(conversation, write(conversation)), conversation))
            except Exception as error:
                refuse(_refused(where, error))
        plain = [(where, written.text) for where, written, conversation in conversations if not conversation.has_media]
        tokens = _each(self._with_offsets, plain if self.tokenizer.is_fast else [], refuse)
        for where, written, conversation in conversations:
            try:
                if conversation.has_media:
                    yield self._encode_with_images(where, written, conversation)
                elif self.tokenizer.is_fast:
                    if (found := next(tokens)) is not None:
                        ids, offsets = found
                        yield self._cut(where, ids, _labels(ids, offsets, written.spans), written.counts)
                else:
                    yield self._encode_by_prefix(where, written)
            except InvalidConfig as error:
                refuse(error)

    @cached_property
    def _write(self) -> Callable[[Conversation], Written]:
        """Renders a conversation; the habits of the template are learned once."""
        renderer = Renderer(tokenizer=self.tokenizer, loss_on=self.loss_on, thinking=self.thinking, tagged=self._tagged)
        return renderer.writer()

    def _tagged(self, chats: Any, tools: Any, options: Mapping[str, Any]) -> Any:
        """Returns texts, and the stretches that the template's `{% generation %}` marks."""
        return render_jinja_template(
            chats,
            tools=tools,
            chat_template=self.tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **options},
        )

    def _counted(self, conversation: Conversation, written: Written) -> Written:
        if not self._has_control_tokens(conversation):
            return written
        return replace(written, counts=replace(written.counts, control_texts=1))

    def _has_control_tokens(self, conversation: Conversation) -> bool:
        """Returns whether a message has text that the tokenizer, or a known template, takes for a mark of its own."""
        pattern = _control_tokens(self.tokenizer)
        texts = (message["content"] for message in conversation.messages)
        return any(pattern.search(media.without_marks(text) if conversation.has_media else text) for text in texts)

    def _cut(self, where: str, ids: list[int], labels: list[int], counts: Counts = _NOTHING) -> Encoded:
        num_cut = max(0, len(ids) - self.seq_len)
        if num_cut and counts is not _NOTHING and IGNORED not in labels[self.seq_len - 1 : self.seq_len + 1]:
            counts = replace(counts, cut_answers=1)
        ids, labels = ids[: self.seq_len], labels[: self.seq_len]
        return Encoded(where=where, input_ids=ids, labels=labels, num_cut=num_cut, counts=counts)

    def _encode_with_images(self, where: str, written: Written, conversation: Conversation) -> Encoded:
        """Returns the tokens. Tokens of media have no loss, and no token has if `seq_len` would cut media."""
        assert self.media_reader is not None
        files: Any = {name: getattr(conversation, name) for name in MEDIA}
        try:
            found = self.media_reader.expanded(written.text, written.spans, files)
        except InvalidConfig as error:
            raise _refused(where, error) from None
        has_cut = any(index is not None for index in found.media_of[self.seq_len :])
        labels = _labels(found.input_ids, found.offsets, [] if has_cut else found.spans)
        labels = [label if index is None else IGNORED for label, index in zip(labels, found.media_of, strict=True)]
        counts = replace(written.counts, cut_images=int(has_cut))
        sample = self._cut(where, found.input_ids, labels, counts)
        return replace(sample, **files, media_of=found.media_of[: self.seq_len])

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
        return self._cut(where, ids, labels, written.counts)

    def _tokens(self, text: str | list[str], **options: Any) -> Any:
        """Returns the tokenizer's output for text with special tokens."""
        options |= {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        return self.tokenizer(text, add_special_tokens=False, **options)

    def _with_offsets(self, texts: list[str]) -> Iterator[tuple[list[int], list[Span]]]:
        """Yields the tokens of each text with their characters, by a fast tokenizer.

        Transformers' own classes only make lists of what the tokenizers library returns, which takes a third as long
        as making tokens. The first text goes through them: they set what else the library does with texts.
        """
        if not texts:
            return
        has_own = type(self.tokenizer)._encode_plus is not PreTrainedTokenizerFast._encode_plus
        through = self._tokens(texts if has_own else texts[:1], return_offsets_mapping=True)
        yield from zip(through["input_ids"], through["offset_mapping"], strict=True)
        if not has_own:
            for found in self.tokenizer.backend_tokenizer.encode_batch(texts[1:], add_special_tokens=False):
                yield found.ids, found.offsets

    def _require_tower(self, conversation: Conversation) -> None:
        if conversation.has_media and (self.media_reader is None or not self.tokenizer.is_fast):
            lack = "a fast tokenizer" if self.media_reader is not None else "a tower for them and its processor"
            raise InvalidConfig(f"has {' and '.join(conversation.media)}, but the model lacks {lack}", hint=_OTHER)

    def _require_template(self) -> None:
        if not getattr(self.tokenizer, "chat_template", None):
            raise InvalidConfig(
                f"the tokenizer of {self.tokenizer.name_or_path or 'this model'} has no chat template, "
                "but the data are conversations",
                hint="Use the instruction-tuned model's tokenizer, set chat_template: FILE, or write the data as text.",
            )


def _each(
    tokens: Callable[[list[str]], Iterator[Any]], texts: Sequence[tuple[str, str]], refuse: Refuse
) -> Iterator[Any]:
    """Yields the tokens of each text, given as (place, text), and None for one that `refuse` skips."""
    try:
        yield from list(tokens([text for _, text in texts]))
    except Exception as error:  # a tokenizer may be a program of the model's author, and names no text of a batch
        if len(texts) > 1:
            for one in texts:
                yield from _each(tokens, [one], refuse)
        else:
            refuse(InvalidConfig(f"{texts[0][0]}: the tokenizer rejects this text: {type_and_line(error)}"))
            yield None


def _labels(ids: list[int], offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """Returns the ids of the tokens that begin within one of the spans, and -100 for the others."""
    labels = [IGNORED] * len(ids)
    for learned in learned_tokens(offsets, spans):
        labels[learned] = ids[learned]
    return labels


@lru_cache(maxsize=8)
def _control_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Returns the pattern of a tokenizer's special tokens and of the marks of well-known chat templates."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= set(map(str, tokenizer.all_special_tokens))
    return re.compile("|".join([*map(re.escape, sorted(filter(str.strip, special), key=len, reverse=True)), _MARKS]))


def _refused(where: str, error: Exception) -> InvalidConfig:
    if isinstance(error, InvalidConfig):
        return InvalidConfig(f"{where}: {error.problem}", hint=error.hint)
    reason = str(error) or type(error).__name__
    return InvalidConfig(f"{where}: the chat template rejects this conversation: {reason}", hint=OTHER_TEMPLATE)
