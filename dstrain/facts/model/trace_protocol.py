"""The tracer's wire format: questions in, one answer to each out."""

from __future__ import annotations

from dataclasses import dataclass

from dstrain.facts.model.trace_records import Description, Question, Trace
from dstrain.facts.model.traced_activations import ActivationProfile
from dstrain.records import type_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a question has no answer."""

    __pydantic_config__ = type_config

    problem: str
    """What happened, in a line."""
    hint: str | None = None
    """What to do, if anything can be done."""


Answer = Trace | Description | ActivationProfile | Failure
"""What a question is answered with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What the tracer reads from its standard input."""

    __pydantic_config__ = type_config

    questions: tuple[Question, ...]
    """In the order of the answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What the tracer writes to its standard output, and what is kept in the cache."""

    __pydantic_config__ = type_config

    answers: tuple[Answer, ...]
    """In the order of the questions."""
