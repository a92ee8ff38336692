"""The quick part of the doctor, before every launch: this machine, without hubs, routes and topology."""

from __future__ import annotations

from collections.abc import Mapping

from dstrain.launch.doctor.checks.all import findings
from dstrain.launch.doctor.finding import Finding
from dstrain.launch.doctor.gather import gather
from dstrain.launch.doctor.needs import of_prepared, question
from dstrain.launch.prepare import Prepared


def quick(prepared: Prepared, environment: Mapping[str, str]) -> list[Finding]:
    """Returns what matters on this machine before a launch, within 5 s: errors stop the run, warnings are told.

    Looked at are versions, stale locks, GPUs with their ECC and Xid errors, limits, RAM and disk against the estimate,
    and the port of rank 0. `environment` is what the launcher will have.
    """
    needs = of_prepared(prepared, environment)
    return findings(gather(question(needs), environment), needs)
