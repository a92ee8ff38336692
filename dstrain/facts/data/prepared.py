"""Records that `dstrain data prepare` exchanges with its child process."""

from __future__ import annotations

from dataclasses import dataclass

from dstrain.records import type_config


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
