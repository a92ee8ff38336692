"""Records that `dstrain data` exchanges with its child processes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dstrain.job.schema import Job
from dstrain.records import type_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive tokens of one kind."""

    __pydantic_config__ = type_config

    text: str
    is_learned: bool
    """Whether they count in the loss."""
    is_special: bool
    """Whether it is a special token, such as the end of a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSample:
    """One sample as the model sees it."""

    __pydantic_config__ = type_config

    number: int
    """From 1, without skipped rows."""
    place: str
    """File and line."""
    pieces: tuple[Piece, ...]
    num_tokens: int
    num_learned: int
    num_cut: int
    """Tokens beyond `seq_len`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownData:
    """One data set: a sample, and counts."""

    __pydantic_config__ = type_config

    name: str
    samples: tuple[ShownSample, ...]
    """The sample, or both sides of a pair."""
    num_samples: int
    """Samples counted here, skipped rows excluded."""
    is_complete: bool
    """Whether these are all samples."""
    num_tokens: int
    """Tokens of samples with something to learn, up to `seq_len` each."""
    max_tokens: int
    """The longest of them."""
    num_learned: int
    """Tokens that count in the loss."""
    num_untaught: int
    """Samples without a token to learn."""
    num_long: int
    """Samples longer than `seq_len`."""
    counts: Mapping[str, int]
    """Such as `empty_answers` and `cut_answers`."""
    notes: tuple[str, ...]
    """The counts, unused columns and skipped rows, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowQuestion:
    """Standard input of the child process."""

    __pydantic_config__ = type_config

    job: Job
    sample: int
    """Number of the sample to show, from 1."""
    limit: int | None
    """Samples to count in each data set; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowAnswer:
    """Standard output of the child process."""

    __pydantic_config__ = type_config

    schema: int = 2
    data: tuple[ShownData, ...]
    """In the order of the job."""


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that would move the cursor or change the terminal."""


def marked(pieces: Sequence[Piece]) -> str:
    """Returns the text of a sample with marks around what has loss.

    >>> question = Piece(text="2 + 2?", is_learned=False, is_special=False)
    >>> marked([question, Piece(text="4", is_learned=True, is_special=False)])
    '2 + 2?⟦4⟧'
    """
    text, was_learned = "", False
    for piece in pieces:
        text += "⟦" * (piece.is_learned and not was_learned) + "⟧" * (was_learned and not piece.is_learned)
        text += printable(piece.text)
        was_learned = piece.is_learned
    return text + "⟧" * was_learned


def printable(text: str) -> str:
    """Returns a text whose control characters are spelled out, except for tabs and line ends."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the tokens of a data set are."""

    __pydantic_config__ = type_config

    name: str
    done: int
    """Finished samples."""
    total: int
    """All of them; 0 if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The data of a job in tokens."""

    __pydantic_config__ = type_config

    schema: int = 1
    num_samples: int
    """Samples of an epoch."""
    num_tokens: int
    """Tokens of an epoch, without padding."""
    num_learned: int
    """Tokens with loss."""
    num_made: int
    """Files of tokens that were missing; 0: nothing was left to do."""
    folders: tuple[str, ...]
    """Where the tokens are, by data set, those for evaluation included."""
    cache: str = ""
    """The folder of the tokens of all jobs, which nothing removes."""
    cache_bytes: int = 0
    """Its size."""
    notes: tuple[str, ...]
    """Lines about the data that `dstrain run` logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareMessage:
    """One line of the child process: how far it is, or its answer."""

    __pydantic_config__ = type_config

    progress: Progress | None = None
    prepared: Prepared | None = None
