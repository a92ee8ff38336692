"""The doctor's quick checks before every launch: this machine, without hubs, routes and topology."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dstrain.doctor.checks.all import findings
from dstrain.doctor.finding import Finding
from dstrain.doctor.gather import gather
from dstrain.doctor.requirements import of_prepared, question
from dstrain.facts.this_machine import is_this_machine, names

if TYPE_CHECKING:
    from dstrain.launch.prepare.prepare import PreparedRun

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
    return results if here else [finding for finding in results if finding.subject in _WITHOUT_RANKS]
