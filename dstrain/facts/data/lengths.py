"""Lengths of training samples in tokens, from a sample of the rows and the model's tokenizer alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from dstrain.errors import InvalidConfig
from dstrain.facts.data.datafile import files_of, num_rows, parsed, reading_of
from dstrain.facts.data.preferences import Pair
from dstrain.facts.data.rows import Sample, spread
from dstrain.facts.data.sample_formats import Reading
from dstrain.facts.data.turns import Conversation

SAMPLED_ROWS = 2000
"""Rows that are read, spread over all files: a share of them is known to 2 percentage points, 19 times of 20."""
MARKS = 2
"""Special tokens that a chat template puts around a message, which it begins with the role's name on a line of its own.
Source: the templates of Qwen3 (`<|im_start|>`, `<|im_end|>`) and Gemma 3; Llama 3.1's have three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long the samples of a data set are."""

    tokens: tuple[int, ...]
    """Tokens of the sampled rows, shortest first, before any of them is cut."""
    num_samples: int
    """Samples of the whole data set; counted, or in a JSON list and in lines with gaps about as many."""

    def share_longer(self, seq_len: int) -> float:
        """Returns the share of samples that are longer, 0…1.

        >>> Lengths(tokens=(100, 200, 300, 4000), num_samples=8).share_longer(300)
        0.25
        """
        return sum(length > seq_len for length in self.tokens) / len(self.tokens)

    def at(self, share: float) -> int:
        """Returns the length that this share of the samples does not exceed.

        >>> Lengths(tokens=(100, 200, 300, 4000), num_samples=8).at(0.5)
        200
        """
        return self.tokens[max(0, round(share * len(self.tokens)) - 1)]


def mixed(parts: Sequence[Lengths], counts: Sequence[int]) -> Lengths:
    """Returns the lengths of an epoch with so many samples of each data set: as many of its quantiles as its share.

    >>> mixed([Lengths(tokens=(10, 20, 30), num_samples=3), Lengths(tokens=(900,), num_samples=1)], [30, 10]).at(0.7)
    30
    """
    if len(parts) == 1:
        return replace(parts[0], num_samples=counts[0])
    tokens: list[int] = []
    for part, count in zip(parts, counts, strict=True):
        drawn = max(1, round(SAMPLED_ROWS * count / sum(counts)))
        tokens += [part.tokens[(2 * number + 1) * len(part.tokens) // (2 * drawn)] for number in range(drawn)]
    return Lengths(tokens=tuple(sorted(tokens)), num_samples=sum(counts))


@lru_cache(maxsize=1)
def _encoder(tokenizer: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the library raises this class itself
        raise InvalidConfig(f"{tokenizer}: cannot be read as a tokenizer: {error}") from None


def read_lengths(data: str, reading: Reading, tokenizer: Path, *, sampled_rows: int = SAMPLED_ROWS) -> Lengths:
    """Returns the lengths of the samples of a data file or a glob; `tokenizer` is the model's tokenizer.json.

    Chat templates are not rendered: their share is the role's name and `MARKS` for each message. A pair of answers
    counts as the longer of its two samples. Unusable rows are left out, which `dstrain run` names. Raises InvalidConfig
    if no row is usable, one has images, or the tokenizer cannot be read.
    """
    encoder = _encoder(tokenizer)
    files = files_of(data)
    rows, texts, counted = 0, [], 0
    for file in files:
        sampled = list(spread(file, -(-sampled_rows // len(files))))
        counted += num_rows(file) or len(sampled)
        rows += len(sampled)
        texts += _usable(file, sampled, reading)
    if not texts:
        raise InvalidConfig(f"{data}: none of {rows:,} sampled rows is usable", hint="dstrain run names the problems.")
    flat = encoder.encode_batch_fast([text for sides in texts for text, _ in sides], add_special_tokens=False)
    sizes = iter(len(encoding.ids) for encoding in flat)
    lengths = [max(next(sizes) + around for _, around in sides) for sides in texts]
    return Lengths(tokens=tuple(sorted(lengths)), num_samples=counted)


Text = tuple[str, int]
"""All text of a sample, and the tokens around it."""


def _usable(file: Path, sampled: Sequence[Sample | InvalidConfig], reading: Reading) -> list[list[Text]]:
    """Returns the texts of each usable row, those of a pair being two."""
    found: list[list[Text]] = []
    rows = [row for row in sampled if isinstance(row, Sample)]
    if not rows:
        return []
    reading = reading_of(str(file), list(rows[0].row), reading)
    for row in rows:
        try:
            sample = parsed(row, reading)
        except InvalidConfig:
            continue
        if isinstance(sample, Conversation) and sample.images:
            raise InvalidConfig(f"{row.where}: has images, whose tokens the model's processor counts")
        found.append([_text(side) for side in (sample.sides if isinstance(sample, Pair) else (sample,))])
    return found


def _text(sample: Conversation | str) -> Text:
    if isinstance(sample, str):
        return sample, 1  # the end of the document
    parts = [_message(message) for message in sample.messages]
    if sample.tools:
        parts.append(json.dumps(list(sample.tools), ensure_ascii=False))
    return "\n".join(parts), MARKS * len(sample.messages)


def _message(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    calls = json.dumps(calls) if calls else None
    said = (message["role"], message.get("reasoning_content"), message.get("content"), calls)
    return "\n".join(str(text) for text in said if text)
