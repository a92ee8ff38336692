"""A finding of the doctor: its mark, and the command that fixes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Mark(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    """As it should be."""
    WARNING = "warning"
    """Training runs, but slower or at risk."""
    ERROR = "error"
    """Training fails, or cannot be trusted."""


SIGNS = {Mark.OK: "✓", Mark.WARNING: "!", Mark.ERROR: "✗"}
"""The printed sign of each mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    mark: Mark
    subject: str
    """The check that it is from, a key of `checks.CHECKS`, or `hosts`, or `job`."""
    what: str
    fix: str | None = None
    """The command to type."""
    drawing: tuple[str, ...] = ()
    """Lines of a picture that illustrates it."""
    is_unfit: bool = False
    """Whether it makes the host unfit for a run with the others, which `hostfile check --reach` asks."""

    def document(self) -> dict[str, Any]:
        """Returns the finding as JSON-ready data."""
        data: dict[str, Any] = {"mark": str(self.mark), "subject": self.subject, "what": self.what, "fix": self.fix}
        return data | ({"drawing": list(self.drawing)} if self.drawing else {})


class Notes:
    """Collects the findings about one subject."""

    def __init__(self, subject: str) -> None:
        self.findings: list[Finding] = []
        self._subject = subject

    def ok(self, what: str, drawing: Iterable[str] = ()) -> None:
        """Adds a finding without a problem."""
        self.add(Mark.OK, what, drawing=tuple(drawing))

    def warn(self, what: str, fix: str | None, *, is_unfit: bool = False) -> None:
        """Adds a problem that makes training worse."""
        self.add(Mark.WARNING, what, fix, is_unfit=is_unfit)

    def bad(self, what: str, fix: str | None, *, is_unfit: bool = False) -> None:
        """Adds a problem that makes training fail."""
        self.add(Mark.ERROR, what, fix, is_unfit=is_unfit)

    def add(
        self,
        mark: Mark,
        what: str,
        fix: str | None = None,
        *,
        drawing: tuple[str, ...] = (),
        is_unfit: bool = False,
    ) -> None:
        """Adds a finding."""
        finding = Finding(mark=mark, subject=self._subject, what=what, fix=fix, drawing=drawing, is_unfit=is_unfit)
        self.findings.append(finding)


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings that block training."""
    return [finding for finding in findings if finding.mark is Mark.ERROR]


def count_text(findings: Iterable[Finding]) -> str:
    """Returns the number of findings of each mark.

    >>> count_text([Finding(mark=Mark.OK, subject="gpus", what="8 of them")])
    '1 ✓, 0 !, 0 ✗'
    """
    counts = Counter(finding.mark for finding in findings)
    return ", ".join(f"{counts[mark]} {sign}" for mark, sign in SIGNS.items())


def listed(numbers: Iterable[int]) -> str:
    """Returns numbers in order, with ranges folded.

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
