"""A lint rule, and checks of single keys as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.subject import Subject, shown

Find = Callable[[Subject], Iterable[Fault]]
Breaks = Callable[[Subject], bool]
STOPS = "the run stops when the engine starts"
REFUSES = "DeepSpeed refuses the configuration"
REMOVE_ONE = "remove one of them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A check and its description."""

    id: str
    """`DS` and three digits, which never change their meaning."""
    severity: Severity
    """Default severity; a fault may have its own."""
    title: str
    """The subject in a few words."""
    find: Find
    """Yields the faults of a configuration."""
    source: str
    """Evidence: a file and symbol of the engine, or a measurement."""


def when(path: str, breaks: Breaks, *, problem: str, effect: str = STOPS, fix: str) -> Find:
    """Returns a check that reports `path` if `breaks` is true. A missing key is reported at its object."""
    return each_of({path: breaks}, problem=problem, effect=effect, fix=fix)


def each_of(
    paths: Mapping[str, Breaks],
    given: Breaks = lambda subject: True,
    *,
    problem: str,
    effect: str = STOPS,
    fix: str = REMOVE_ONE,
) -> Find:
    """Returns a check that reports every path whose condition is true, if the `given` one is.

    The texts may contain `{path}`, `{name}` (its last part), `{value}` (the value in the file) and `{stage}`.
    """

    def find(subject: Subject) -> Iterable[Fault]:
        for path, breaks in paths.items():
            if given(subject) and breaks(subject):
                parts = tuple(path.split("."))
                value = shown(subject.at(path, None))
                words = {"path": path, "name": parts[-1], "value": value, "stage": subject.stage}
                yield Fault(
                    pointer=parts,
                    problem=problem.format_map(words),
                    effect=effect.format_map(words),
                    fix=fix.format_map(words),
                )

    return find
