"""Rules about releases of DeepSpeed with known faults or other defaults, made from the table of advisories."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.config.lint.advisories import ADVISORIES, Advisory, Effect, every
from dstrain.config.lint.rule import Fault, Find, Rule, Subject, fault
from dstrain.findings import Severity


def _find(advisory: Advisory) -> Find:
    """Returns the check of one advisory; a finding that rests on an unknown is at most a warning."""

    def find(subject: Subject) -> Iterator[Fault]:
        affected = advisory.affects(subject.versions)
        applies = False if affected is False else every(affected, advisory.has_settings(subject))
        if applies is False:
            return
        is_maybe_error = applies is None and advisory.severity is Severity.ERROR
        unless = "; part of that is not in this file" if applies is None else ""
        upgrade = "" if advisory.kind is Effect.DEFAULT else f"pip install 'deepspeed>={advisory.fixed}', or "
        yield fault(
            advisory.pointer,
            f"deepspeed {subject.versions['deepspeed']}: {advisory.settings}{unless}",
            f"{advisory.effect} ({advisory.history})",
            f"{upgrade}{advisory.otherwise}",
            severity=Severity.WARNING if is_maybe_error else None,
        )

    return find


def past_faults(subject: Subject) -> list[Advisory]:
    """Returns the faults by which other releases than the installed one train something wrong with these settings."""
    return [
        advisory
        for advisory in ADVISORIES
        if advisory.kind is Effect.WRONG
        and advisory.affects(subject.versions) is False
        and advisory.has_settings(subject)
    ]


RULES = tuple(
    Rule(
        id=advisory.id,
        severity=advisory.severity,
        title=f"release: {advisory.settings}",
        find=_find(advisory),
        source=advisory.source,
    )
    for advisory in ADVISORIES
)
"""One rule for each advisory."""
