"""A finding: the result of a check, in one record and one form for files, machines and jobs."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dstrain.errors import Place
from dstrain.units import format_bytes
from dstrain.wrapping import COLUMNS, wrapped


class Severity(StrEnum):
    """How much a finding matters, the worst first."""

    ERROR = "error"
    """The run fails, or does something other than the file says."""
    WARNING = "warning"
    """The run works, but worse than it could, differently than expected, or at risk."""
    INFO = "info"
    """A note."""
    OK = "ok"
    """As it should be."""


SIGNS = {Severity.OK: "✓", Severity.WARNING: "!", Severity.ERROR: "✗"}
"""The printed sign of each severity of a check that has no file."""
NO_FILE = Place(file="")
"""The place of a finding about a machine or a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    rule: str
    """Id of the check: a lint rule such as DS101, or the subject of a check of machines such as `gpus`."""
    severity: Severity
    problem: str
    """The problem; of a severity of OK, the fact."""
    effect: str = ""
    """The consequence at run time."""
    fix: str = ""
    """The advice, or the command to type; empty if there is none."""
    place: Place = NO_FILE
    pointer: str = ""
    """JSON pointer of the key, such as /zero_optimization/stage; empty for the whole file, or another one."""
    changes: tuple[Any, ...] = ()
    """The fix as changes of the file (`config.document.Change`), if there is one safe fix."""
    table: tuple[str, ...] = ()
    """Lines of figures that illustrate it."""
    is_unfit: bool = False
    """Whether it makes the host unfit for a run with the others, which `hostfile check --reach` asks."""

    @property
    def line(self) -> str:
        """The finding in one line: place, rule, problem and fix; without a file, problem and fix.

        >>> Finding(rule="gpus", severity=Severity.ERROR, problem="no driver", fix="install it").line
        'no driver → install it'
        """
        if self.place is NO_FILE:
            return f"{self.problem}{f' → {self.fix}' if self.fix else ''}"
        return f"{self.place}: {self.rule}: {self.problem}; {self.fix}"

    def document(self) -> dict[str, Any]:
        """Returns the finding as `--json` prints it; an option is line 1, column 1 of itself."""
        if self.place is NO_FILE:
            data: dict[str, Any] = {"mark": str(self.severity), "subject": self.rule}
            data |= {"what": self.problem, "fix": self.fix or None}
            return data | ({"drawing": list(self.table)} if self.table else {})
        place = {"file": self.place.file, "line": self.place.line or 1, "column": self.place.column or 1}
        head = {"rule": self.rule, "severity": self.severity, "pointer": self.pointer}
        return head | place | {"problem": self.problem, "effect": self.effect, "fix": self.fix}


class Notes:
    """Collects the findings about one subject of a machine."""

    def __init__(self, subject: str) -> None:
        self.findings: list[Finding] = []
        self._subject = subject

    def ok(self, fact: str, table: Iterable[str] = ()) -> None:
        """Adds a fact without a problem."""
        self.findings.append(
            Finding(rule=self._subject, severity=Severity.OK, problem=fact, table=tuple(table)),
        )

    def warn(self, problem: str, fix: str | None, *, is_unfit: bool = False) -> None:
        """Adds a problem that makes training worse."""
        self.add(Severity.WARNING, problem, fix, is_unfit=is_unfit)

    def bad(self, problem: str, fix: str | None, *, is_unfit: bool = False) -> None:
        """Adds a problem that makes training fail."""
        self.add(Severity.ERROR, problem, fix, is_unfit=is_unfit)

    def add(self, severity: Severity, problem: str, fix: str | None, *, is_unfit: bool = False) -> None:
        """Adds a problem."""
        finding = Finding(rule=self._subject, severity=severity, problem=problem, fix=fix or "", is_unfit=is_unfit)
        self.findings.append(finding)


UNWRITABLE = "{key} {folder} cannot be written"
OTHER_FOLDER = "name another output_dir, or change the owner or mode of the folder"
LARGER_DISK = "free some space, or name an output_dir on a larger disk"
LARGER_DRIVE = "free some space, or name an nvme_path on a larger drive"
LESS_RAM = "offload less, or use more nodes: dstrain plan shows what fits"
"""A fault of the folder that a key names, and the cures of faults of folders and RAM."""


def too_full(what_takes: str, needed: int, free: int, where: str) -> str:
    """Returns that a disk has less free space than something takes.

    >>> too_full("one checkpoint takes", 3 * 2**30, 2**30, "in output")
    'one checkpoint takes 3.00 GiB, and 1.00 GiB are free in output'
    """
    return f"{what_takes} {format_bytes(needed)}, and {format_bytes(free)} are free {where}"


def too_little_ram(who: str, needed: str, has: str, when: str = "") -> str:
    """Returns that a node has less RAM than something needs; `has` tells how much, such as `has 64 GiB`."""
    return f"{who} needs {needed} of RAM on each node{when}, which {has}"


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings that are errors."""
    return [finding for finding in findings if finding.severity is Severity.ERROR]


def lines(finding: Finding, *, with_severity: bool = True) -> list[str]:
    """Returns a finding for display, wrapped to 80 columns; commands to type stay whole.

    With a file: place and problem on one machine-readable line, then effect and fix. Without one: its sign and the
    problem, then the command that fixes it.
    """
    if finding.place is NO_FILE:
        return _signed(finding)
    kind = f"{finding.severity.value} " if with_severity else ""
    pointer = f" {finding.pointer}" if finding.pointer else ""
    head = printable(f"{finding.place}: {kind}{finding.rule}{pointer}: {finding.problem}")
    below = (wrapped(printable(text), indent="  ") for text in (finding.effect, f"fix: {finding.fix}"))
    return [head, *(row for text in below for row in text.splitlines())]


def _signed(finding: Finding) -> list[str]:
    text = f"{SIGNS[finding.severity]} {finding.problem}"
    if finding.fix and len(text) + len(finding.fix) + 5 <= COLUMNS:
        return [f"  {text} → {finding.fix}"]
    rows = textwrap.wrap(text, COLUMNS - 2, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    rows += [f"  {line}" for line in finding.table]
    rows += [f"  → {finding.fix}"] if finding.fix else []
    return [f"  {row}" for row in rows]


def printable(text: str) -> str:
    """Returns a text with control characters escaped, so that the contents of a file cannot control the terminal.

    >>> printable("a\\x1b[31m")
    'a\\\\x1b[31m'
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def count_text(findings: Sequence[Finding]) -> str:
    """Returns the number of findings of each severity: `2 errors, 1 warning`."""
    parts = []
    for severity in Severity:
        count = sum(finding.severity is severity for finding in findings)
        if count:
            name = "note" if severity is Severity.INFO else severity.value
            parts.append(f"{count} {name}{'s' if count > 1 else ''}")
    return ", ".join(parts)


def signs_text(findings: Iterable[Finding]) -> str:
    """Returns the number of findings of each sign.

    >>> signs_text([Finding(rule="gpus", severity=Severity.OK, problem="8 of them")])
    '1 ✓, 0 !, 0 ✗'
    """
    counts = Counter(finding.severity for finding in findings)
    return ", ".join(f"{counts[severity]} {sign}" for severity, sign in SIGNS.items())


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


def folded(names: Sequence[str]) -> list[str]:
    """Returns names with runs of numbers at their ends folded.

    >>> folded(["mlx5_0", "mlx5_1", "mlx5_2", "bnxt_re0"])
    ['mlx5_0-2', 'bnxt_re0']
    """
    by_stem: dict[str, list[int]] = {}
    plain: list[str] = []
    for name in names:
        match = re.fullmatch(r"(.*?)(\d+)", name)
        if match is None:
            plain.append(name)
        else:
            by_stem.setdefault(match[1], []).append(int(match[2]))
    return [f"{stem}{listed(numbers)}" for stem, numbers in by_stem.items()] + plain
