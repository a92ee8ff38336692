"""Lint findings about hostfiles and jobs."""

from __future__ import annotations

from types import MappingProxyType

from dstrain.config.lint.finding import Finding, Severity
from dstrain.config.lint.rules.syntax import NO_OBJECT, SYNTAX
from dstrain.errors import DstrainError, InvalidConfig, Place

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
    return [
        Finding(
            rule=HOSTFILE,
            severity=Severity.ERROR,
            place=part.place or Place(file="hostfile", line=1, column=1),
            problem=part.text,
            effect="DeepSpeed stops, or trains on other machines than you mean",
            fix=part.hint or "write lines such as `node1 slots=8`",
        )
        for part in error.parts or (error,)
    ]


def of_job(error: DstrainError, place: Place) -> Finding:
    """Returns what is wrong with the key of the job that is written at a place, as a finding."""
    return Finding(
        rule=DATA,
        severity=Severity.ERROR,
        place=place,
        problem=error.text.replace("\n", "; "),
        effect="dstrain run refuses it",
        fix=error.hint or "mend the file",
    )
