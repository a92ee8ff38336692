"""All checks, in the order in which they are reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from dstrain.doctor.checks import attention, gpus, kernel_log, limits, network, online, ops, software, space, topology
from dstrain.doctor.facts import Facts
from dstrain.doctor.finding import Finding, Mark
from dstrain.doctor.requirements import Needs

Check = Callable[[Facts, Needs], list[Finding]]
CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "software": software.check,
        "attention": attention.check,
        "ops": ops.check,
        "gpus": gpus.check,
        "kernel_log": kernel_log.check,
        "topology": topology.check,
        "network": network.check,
        "limits": limits.check,
        "space": space.check,
        "online": online.check,
    }
)
"""Subject → its check: facts and needs in, findings out."""
_LOOK_OF = {"ops": "toolchain"}
"""Checks whose probe has another name."""


def findings(facts: Facts, needs: Needs) -> list[Finding]:
    """Returns all findings about one machine."""
    collected: list[Finding] = []
    for subject, check in CHECKS.items():
        problem = facts.failed.get(_LOOK_OF.get(subject, subject))
        if problem is not None:
            collected.append(Finding(mark=Mark.WARNING, subject=subject, what=f"{subject}: {problem}"))
        collected += check(facts, needs)
    return collected
