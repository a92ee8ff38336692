"""A finding of the doctor: its mark, and the command that fixes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Mark(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    """As it should be."""
    WARNING = "warning"
    """Training runs, worse than it could, or until something else happens."""
    ERROR = "error"
    """Training fails, or cannot be trusted."""


SIGNS = {Mark.OK: "✓", Mark.WARNING: "!", Mark.ERROR: "✗"}
"""How a mark is printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    mark: Mark
    """How much it matters."""
    subject: str
    """The check that it is from, a key of `checks.CHECKS`, or `hosts`, or `job`."""
    what: str
    """What was found."""
    fix: str | None = None
    """What to type, or to do."""
    drawing: tuple[str, ...] = ()
    """Lines of a picture that goes with it."""

    def document(self) -> dict[str, Any]:
        """Returns the finding as JSON-ready data."""
        found: dict[str, Any] = {"mark": str(self.mark), "subject": self.subject, "what": self.what, "fix": self.fix}
        return found | ({"drawing": list(self.drawing)} if self.drawing else {})


class Notes:
    """Findings about one subject, taken down one after the other."""

    def __init__(self, subject: str) -> None:
        self.findings: list[Finding] = []
        """What was taken down."""
        self._subject = subject

    def ok(self, what: str, drawing: Iterable[str] = ()) -> None:
        """Takes down what is as it should be."""
        self._add(Mark.OK, what, None, tuple(drawing))

    def warn(self, what: str, fix: str | None) -> None:
        """Takes down what makes training worse."""
        self._add(Mark.WARNING, what, fix)

    def bad(self, what: str, fix: str | None) -> None:
        """Takes down what makes training fail."""
        self._add(Mark.ERROR, what, fix)

    def _add(self, mark: Mark, what: str, fix: str | None, drawing: tuple[str, ...] = ()) -> None:
        self.findings.append(Finding(mark=mark, subject=self._subject, what=what, fix=fix, drawing=drawing))


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings that stand in the way of training."""
    return [finding for finding in findings if finding.mark is Mark.ERROR]


def count_text(findings: Iterable[Finding]) -> str:
    """Returns how many findings there are of each mark.

    >>> count_text([Finding(mark=Mark.OK, subject="gpus", what="8 of them")])
    '1 ✓, 0 !, 0 ✗'
    """
    counts = Counter(finding.mark for finding in findings)
    return ", ".join(f"{counts[mark]} {sign}" for mark, sign in SIGNS.items())


def listed(numbers: Iterable[int]) -> str:
    """Returns numbers in order, runs of them folded.

    >>> listed([3, 0, 1, 2, 7])
    '0-3,7'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
