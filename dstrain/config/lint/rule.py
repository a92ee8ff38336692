"""A lint rule, and a short way to write one about a single key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.subject import Subject, shown

Find = Callable[[Subject], Iterable[Fault]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that can be wrong."""

    id: str
    """`DS` and three digits, which never change their meaning."""
    severity: Severity
    """How much it matters, where a fault does not say otherwise."""
    title: str
    """What it is about, in a few words."""
    find: Find
    """Yields what it finds."""
    source: str
    """Who says so: a file and symbol of the engine, or how it was seen."""


def when(path: str, breaks: Callable[[Subject], bool], *, problem: str, effect: str, fix: str) -> Find:
    """Returns a check that finds `path` at fault where `breaks` says so; `{value}` and `{stage}` stand for what is
    there. A path that is missing is reported where its object stands."""

    def find(subject: Subject) -> Iterable[Fault]:
        if breaks(subject):
            words = {"value": shown(subject.at(path, None)), "stage": subject.stage}
            yield Fault(
                pointer=tuple(path.split(".")),
                problem=problem.format_map(words),
                effect=effect.format_map(words),
                fix=fix,
            )

    return find
