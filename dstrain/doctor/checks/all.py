"""Judges machines: all checks, in the order in which they are reported, and those before a launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrain.doctor.checks import gpus, machine, network, software
from dstrain.doctor.facts import Facts
from dstrain.doctor.gather import gather
from dstrain.doctor.requirements import Needs, of_prepared, question
from dstrain.facts.this_machine import is_this_machine, names
from dstrain.findings import Finding, Notes, Severity

if TYPE_CHECKING:
    from dstrain.launch.prepare.prepare import PreparedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of a machine."""

    id: str
    """The subject of its findings."""
    fact: str
    """The field of `Facts` that it judges."""
    find: Callable[[Any, Facts, Needs, Notes], None]
    """Adds what it finds in that field to the notes."""

    def findings(self, facts: Facts, needs: Needs) -> list[Finding]:
        """Returns its findings about one machine; none if its facts are unknown."""
        notes, fact = Notes(self.id), getattr(facts, self.fact)
        if fact is not None:
            self.find(fact, facts, needs, notes)
        return notes.findings


CHECKS: tuple[Check, ...] = (
    Check(id="software", fact="software", find=software.check_software),
    Check(id="attention", fact="attention", find=software.check_attention),
    Check(id="ops", fact="toolchain", find=software.check_ops),
    Check(id="gpus", fact="gpus", find=gpus.check_gpus),
    Check(id="kernel_log", fact="kernel_log", find=gpus.check_kernel_log),
    Check(id="topology", fact="topology", find=gpus.check_topology),
    Check(id="network", fact="network", find=network.check_network),
    Check(id="limits", fact="limits", find=machine.check_limits),
    Check(id="space", fact="space", find=machine.check_space),
    Check(id="online", fact="online", find=network.check_online),
)
"""In the order in which they are reported."""


def findings(facts: Facts, needs: Needs) -> list[Finding]:
    """Returns all findings about one machine."""
    collected: list[Finding] = []
    for check in CHECKS:
        problem = facts.failed.get(check.fact)
        if problem is not None:
            failed = f"{check.id}: {problem}"
            collected.append(Finding(rule=check.id, severity=Severity.WARNING, problem=failed))
        collected += check.findings(facts, needs)
    return collected


_WITHOUT_RANKS = ("software", "space")


def quick(prepared: PreparedRun, environment: Mapping[str, str]) -> list[Finding]:
    """Returns the findings about this machine before a launch, within 5 s: errors stop the run, warnings are printed.

    It checks versions, stale locks, GPUs with their ECC and Xid errors, limits, RAM and disk against the estimate,
    and the port of rank 0. `environment` is the launcher's. A machine without ranks needs only
    the software and the disk.
    """
    own = names()
    here = [host for host in prepared.hosts.hosts if is_this_machine(host.name, own)]
    needs = of_prepared(prepared, environment, here[0] if here else prepared.hosts.hosts[0])
    results = findings(gather(question(needs), environment), needs)
    return results if here else [finding for finding in results if finding.rule in _WITHOUT_RANKS]
