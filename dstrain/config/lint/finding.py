"""A lint finding: its rule, its place, its effect at run time, and the fix."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dstrain.config.document import Change
from dstrain.config.jsonc import Pointer
from dstrain.errors import Place


class Severity(StrEnum):
    """How much a finding matters."""

    ERROR = "error"
    """The run ends, or does something else than the file says."""
    WARNING = "warning"
    """It runs, worse than it could, or not as somebody may think."""
    INFO = "info"
    """Worth knowing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What a rule found, before it has a line and a column."""

    pointer: Pointer = ()
    """The key that is at fault; a missing one names its object."""
    problem: str
    """What stands there."""
    effect: str
    """What happens at run time."""
    fix: str
    """What to write."""
    changes: tuple[Change, ...] = ()
    """The fix as changes of the file, where it has one safe answer."""
    at: int | None = None
    """Offset in the text, where the pointer does not say it."""
    severity: Severity | None = None
    """Its severity, where it is not the rule's."""
    place: Place | None = None
    """Its place, where it is in another file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    rule: str
    """Id of the rule, such as DS101."""
    severity: Severity
    """How much it matters."""
    pointer: str = ""
    """JSON pointer of the key, such as /zero_optimization/stage; empty for the whole file, or another one."""
    place: Place
    """Where it is written."""
    problem: str
    """What stands there."""
    effect: str
    """What happens at run time."""
    fix: str
    """What to write."""
    changes: tuple[Change, ...] = ()
    """The fix as changes of the file, where it has one safe answer."""

    def document(self) -> dict[str, Any]:
        """Returns the finding as `--json` prints it; an option is line 1, column 1 of itself."""
        place = {"file": self.place.file, "line": self.place.line or 1, "column": self.place.column or 1}
        names = ("problem", "effect", "fix")
        head = {"rule": self.rule, "severity": self.severity, "pointer": self.pointer}
        return head | place | {name: getattr(self, name) for name in names}


def lines(finding: Finding, *, with_severity: bool = True) -> list[str]:
    """Returns a finding as people read it: place and problem on a line that tools can read, then what happens and what
    to write, in lines of up to 80 columns."""
    kind = f"{finding.severity.value} " if with_severity else ""
    pointer = f" {finding.pointer}" if finding.pointer else ""
    found = [printable(f"{finding.place}: {kind}{finding.rule}{pointer}: {finding.problem}")]
    wrapper = textwrap.TextWrapper(
        80, initial_indent="  ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return [*found, *wrapper.wrap(printable(finding.effect)), *wrapper.wrap(printable(f"fix: {finding.fix}"))]


def printable(text: str) -> str:
    """Returns a text in which control characters are spelled out: what a file holds must not steer a terminal.

    >>> printable("a\\x1b[31m")
    'a\\\\x1b[31m'
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def json_pointer(pointer: Pointer) -> str:
    """Returns a pointer as RFC 6901 writes it.

    >>> json_pointer(("zero_optimization", "a/b"))
    '/zero_optimization/a~1b'
    """
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in pointer)


def count_text(findings: Sequence[Finding]) -> str:
    """Returns how many findings there are of each severity: `2 errors, 1 warning`."""
    parts = []
    for severity in Severity:
        count = sum(finding.severity is severity for finding in findings)
        if count:
            name = "note" if severity is Severity.INFO else severity.value
            parts.append(f"{count} {name}{'s' if count > 1 else ''}")
    return ", ".join(parts)
