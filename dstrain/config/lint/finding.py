"""A lint finding: its rule, its place, its effect at run time, and the fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dstrain.config.document import Change
from dstrain.config.jsonc import Pointer
from dstrain.errors import Place
from dstrain.wrapping import wrapped


class Severity(StrEnum):
    """How much a finding matters."""

    ERROR = "error"
    """The run fails, or does something other than the file says."""
    WARNING = "warning"
    """The run works, but worse than it could or differently than expected."""
    INFO = "info"
    """A note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The result of a rule, before it has a place."""

    pointer: Pointer = ()
    """The key at fault; a missing key is placed at its object."""
    problem: str
    """The problem in the file."""
    effect: str
    """The consequence at run time."""
    fix: str
    """The advice."""
    changes: tuple[Change, ...] = ()
    """The fix as changes of the file, if there is one safe fix."""
    at: int | None = None
    """Offset in the text, if the pointer does not determine it."""
    severity: Severity | None = None
    """The severity, if it differs from the rule's."""
    place: Place | None = None
    """The place, if it is in another file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault with its rule and place."""

    rule: str
    """Id of the rule, such as DS101."""
    severity: Severity
    pointer: str = ""
    """JSON pointer of the key, such as /zero_optimization/stage; empty for the whole file, or another one."""
    place: Place
    problem: str
    """The problem in the file."""
    effect: str
    """The consequence at run time."""
    fix: str
    """The advice."""
    changes: tuple[Change, ...] = ()
    """The fix as changes of the file, if there is one safe fix."""

    def document(self) -> dict[str, Any]:
        """Returns the finding as `--json` prints it; an option is line 1, column 1 of itself."""
        place = {"file": self.place.file, "line": self.place.line or 1, "column": self.place.column or 1}
        names = ("problem", "effect", "fix")
        head = {"rule": self.rule, "severity": self.severity, "pointer": self.pointer}
        return head | place | {name: getattr(self, name) for name in names}


def lines(finding: Finding, *, with_severity: bool = True) -> list[str]:
    """Returns a finding for display: place and problem on one machine-readable line, then effect and fix, wrapped to 80
    columns; commands to type stay whole."""
    kind = f"{finding.severity.value} " if with_severity else ""
    pointer = f" {finding.pointer}" if finding.pointer else ""
    head = printable(f"{finding.place}: {kind}{finding.rule}{pointer}: {finding.problem}")
    below = (wrapped(printable(text), indent="  ") for text in (finding.effect, f"fix: {finding.fix}"))
    return [head, *(row for text in below for row in text.splitlines())]


def printable(text: str) -> str:
    """Returns a text with control characters escaped, so that the contents of a file cannot control the terminal.

    >>> printable("a\\x1b[31m")
    'a\\\\x1b[31m'
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def json_pointer(pointer: Pointer) -> str:
    """Returns a pointer in the form of RFC 6901.

    >>> json_pointer(("zero_optimization", "a/b"))
    '/zero_optimization/a~1b'
    """
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in pointer)


def count_text(findings: Sequence[Finding]) -> str:
    """Returns the number of findings of each severity: `2 errors, 1 warning`."""
    parts = []
    for severity in Severity:
        count = sum(finding.severity is severity for finding in findings)
        if count:
            name = "note" if severity is Severity.INFO else severity.value
            parts.append(f"{count} {name}{'s' if count > 1 else ''}")
    return ", ".join(parts)
