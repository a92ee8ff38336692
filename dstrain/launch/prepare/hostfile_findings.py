"""Lint findings about hostfiles and jobs."""

from __future__ import annotations

import re
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from dstrain.config.lint.finding import Finding, Severity
from dstrain.config.lint.rules.syntax import NO_OBJECT, SYNTAX
from dstrain.errors import DstrainError, InvalidConfig

if TYPE_CHECKING:
    pass


HOSTFILE = "DS805"
"""The rule about hostfiles, which are another file."""


SLOTS = "DS806"
"""The rule about their slots and the GPUs that there are."""


DATA = "DS808"
"""The rule about the data of the job."""


OUTSIDE = MappingProxyType(
    {
        SYNTAX: "a text that cannot be read",
        NO_OBJECT: "a text that is no object",
        HOSTFILE: "a line of the hostfile that is wrong, or a placeholder",
        SLOTS: "slots of the hostfile that are not the GPUs that there are, or that were planned for",
        DATA: "data of the job that cannot be read or trained on, or evaluations without data",
    }
)
"""Rules that are about more than a configuration that can be read: id and title."""


def of_hostfile(error: InvalidConfig) -> list[Finding]:
    """Returns what the reader of hostfiles says as findings, one for each line."""
    found = []
    for said in error.problem.split("\n"):
        match = re.match(r"(.*?):(\d+):(?:(\d+):)? (.*)", said)
        name, line, column, problem = match.groups() if match else ("hostfile", "1", "1", said)
        problem, _, way = problem.rpartition("; ") if "; " in problem else (problem, "", "")
        effect = "DeepSpeed stops, or trains on other machines than you mean"
        fix = way or error.hint or "write lines such as `node1 slots=8`"
        finding = hostfile_finding(HOSTFILE, name, int(line), problem, effect, fix)
        found.append(replace(finding, severity=Severity.ERROR, column=int(column or 1)))
    return found


def of_job(error: DstrainError, where: str) -> Finding:
    """Returns what is wrong with a line of the job, which stands at `where`, as a finding."""
    match = re.fullmatch(r"(.*):(\d+):(\d+)", where)
    name, line, column = (match[1], int(match[2]), int(match[3])) if match else (where, 1, 1)
    problem = error.problem.removeprefix(f"{where}: ").replace("\n", "; ")
    found = hostfile_finding(DATA, name, line, problem, "dstrain run refuses it", error.hint or "mend the file")
    return replace(found, severity=Severity.ERROR, column=column)


def hostfile_finding(rule: str, name: str, line: int, problem: str, effect: str, fix: str) -> Finding:
    """Returns a warning about a line of a hostfile."""
    return Finding(
        rule=rule,
        severity=Severity.WARNING,
        pointer="",
        file=name,
        line=line,
        column=1,
        problem=problem,
        effect=effect,
        fix=fix,
    )
