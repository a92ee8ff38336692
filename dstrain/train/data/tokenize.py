"""Tokenizes conversations and texts, with labels on the answers only, into the columns of sequences."""

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
from dataclasses import asdict, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import datasets  # type: ignore[import-untyped]

from dstrain import units
from dstrain.facts.data.columns import IMAGES, VIDEOS
from dstrain.job.schema import Job
from dstrain.train.data.sources import Rows

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


NUMBERS = datasets.List(datasets.Value("int32"))
"""Type of a column with a list of numbers for each sample."""
_FILES = datasets.List(datasets.Value("string"))
MEDIA_TYPES = {IMAGES: _FILES, VIDEOS: datasets.List(_FILES)}
"""Type of each column with a list of files, or of frames, for each sample."""
FIGURES = ("length", "num_learned", "num_cut", "num_images", "num_videos")
"""Columns of a file with a number for each sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One sample in tokens."""

    columns: Mapping[str, Sequence[Any]]
    """Lists of numbers, or lists of such, and of files; empty ones if there is nothing to learn."""
    length: int = 0
    """Tokens; 0 if there is nothing to learn."""
    num_learned: int = 0
    num_cut: int = 0
    num_images: int = 0
    num_videos: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    """Key of `COUNTED` → number."""
    where: str = ""
    """Its place, such as file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form of samples in tokens: sequences, or pairs of them."""

    columns: Mapping[str, Any]
    """Name → type of the columns that the Trainer reads."""
    encoded: Callable[[Encoder, Rows, Refuse], Iterator[TokenRow]]
    """Yields the tokens of every sample; errors of unusable ones go to its last argument."""
    whole: Callable[[Any], Any] = lambda dataset: dataset
    """Returns the data set of the Trainer, given one with these columns."""
    loss_on: LossOn | None = None
    """The answers that count; None: as the job says."""
    media_reader: MediaReader | None = None
    """Reads images and videos; None: samples with any are refused."""

    @property
    def features(self) -> datasets.Features:
        """The columns of a file: those that the Trainer reads, figures of each sample, and a checksum."""
        figures = {name: datasets.Value("int32") for name in FIGURES}
        return datasets.Features({**self.columns, **figures, "crc": datasets.Value("uint32")})


def _sequences(encoder: Encoder, rows: Rows, refuse: Refuse) -> Iterator[TokenRow]:
    for sample in encoder.encode(rows.parsed(refuse), refuse):
        ids, labels = (sample.input_ids, sample.labels) if sample.teaches else ([], [])
        row = TokenRow(
            columns={"input_ids": ids, "labels": labels},
            length=len(ids),
            num_learned=sample.num_learned,
            num_cut=sample.num_cut,
            counts=counts_of(sample.counts),
            where=sample.where,
        )
        yield with_files(row, sample, encoder)


def with_files(row: TokenRow, sample: Encoded | None, encoder: Encoder) -> TokenRow:
    """Returns a row with the files of the images and videos of a sample, if the encoder reads any."""
    if encoder.media_reader is None:
        return row
    files = {name: getattr(sample, name) if sample is not None and row.length else () for name in MEDIA}
    counts: dict[str, Any] = {f"num_{name}": len(files[name]) for name in MEDIA}
    return replace(row, columns={**row.columns, **files}, **counts)


SEQUENCES = Form(columns={"input_ids": NUMBERS, "labels": NUMBERS}, encoded=_sequences)
"""Each sample is a sequence with labels."""


def with_media(form: Form, media_reader: MediaReader) -> Form:
    """Returns a form with the files of the images and videos of samples, for models with a tower."""
    return replace(form, columns={**form.columns, **MEDIA_TYPES}, media_reader=media_reader)


@lru_cache(maxsize=64)
def counts_of(counts: Counts) -> Mapping[str, int]:
    """Returns the counts of a conversation that are not 0, by their keys of `COUNTED`."""
    return MappingProxyType({name: count for name, count in asdict(counts).items() if count})


COUNTED = MappingProxyType(
    {
        "empty_answers": ("answer is", "answers are", "empty: the model learns to say nothing there"),
        "cut_answers": (
            "answer is", "answers are", "cut in the middle by seq_len: the model does not learn to end such answers",
        ),
        "cut_images": (
            "conversation is",
            "conversations are",
            "dropped: seq_len would cut images or videos (max_pixels and video_… limit them)",
        ),
        "lost_thoughts": ("answer is", "answers are", "trained without thoughts (thinking: {job.thinking})"),
        "empty_thoughts": (
            "answer begins",
            "answers begin",
            "with an empty block of thoughts (thinking: off makes it part of the prompt)",
        ),
        "control_texts": (
            "conversation has",
            "conversations have",
            "control tokens of a chat template in their own text: rendered already?",
        ),
        "lost_tools": ("conversation has", "conversations have", "tools that the chat template does not describe"),
        "lost_prompts": ("system prompt is", "system prompts are", "omitted by the chat template"),
        "equal_pairs": ("pair has", "pairs have", "equal answers, of which nothing can be learned"),
        "empty_sides": ("answer of a pair is", "answers of pairs are", "empty"),
    }
)  # fmt: skip
"""Field of `chat.Counts`, or a count of pairs → its text in the log: of one, of several, and what follows."""

_PLACED = frozenset({"empty_answers", "control_texts", "lost_tools", "equal_pairs", "empty_sides"})
"""Counts of samples that their author may want to look at."""
_UNKNOWN: Mapping[str, str] = MappingProxyType({})


def counted(counts: Mapping[str, int], job: Job, firsts: Mapping[str, str] = _UNKNOWN) -> list[str]:
    """Returns a line for each count above 0; `firsts` has the place of the first sample that each counts."""
    lines = []
    for what, (one, several, rest) in COUNTED.items():
        if count := counts.get(what, 0):
            first = f"; the first: {firsts[what]}" if what in _PLACED and firsts.get(what) else ""
            lines.append(f"{units.counted(count, one, several)} {rest.format(job=job)}{first}")
    return lines
