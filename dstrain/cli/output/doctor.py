"""Prints the doctor's findings."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.findings import SIGNS, Finding, Severity, errors, lines, signs_text
from dstrain.records import to_data

if TYPE_CHECKING:
    from dstrain.doctor.network_measure import Answer, Expected

_GROUPS = {
    "job": "job",
    "hosts": "beside the other hosts",
    "software": "software",
    "attention": "software",
    "ops": "DeepSpeed's extensions",
    "gpus": "GPUs",
    "kernel_log": "GPUs",
    "topology": "GPUs",
    "network": "network",
    "limits": "limits, RAM, disk",
    "space": "limits, RAM, disk",
    "online": "hubs and SwanLab",
}
"""Subject → the heading of its findings."""
_PLAIN = str.maketrans({"✓": "+", "✗": "x", "→": ">", "─": "-", "·": "|", "×": "x"})


def grouped(findings: Sequence[Finding], *, verbose: bool) -> list[str]:
    """Returns findings under their headings; facts without a problem are only counted unless verbose."""
    rows: list[str] = []
    for heading in dict.fromkeys(_GROUPS.values()):
        members = [finding for finding in findings if _GROUPS[finding.rule] == heading]
        shown = _shown(members, verbose=verbose)
        if members:
            num_hidden = len(members) - len(shown)
            rows += [f"{heading}: {num_hidden} {SIGNS[Severity.OK]}" if num_hidden else heading, *_lines(shown)]
    return rows


def of_hosts(hosts: Mapping[str, Sequence[Finding]], variables: Mapping[str, str], *, verbose: bool) -> list[str]:
    """Returns the findings of several hosts: counts per host, then what all hosts that answer share, then the rest.

    Facts without a problem are only counted unless verbose, except for tables; `variables` are what `dstrain run` sets.
    """
    width = max(len(host) for host in hosts)
    rows = [f"{_worst(findings)} {host:<{width}}  {signs_text(findings)}" for host, findings in hosts.items()]
    if variables:
        rows += [f"✓ dstrain run sets {' '.join(f'{name}={value}' for name, value in variables.items())}"]
    shown = {host: _shown(findings, verbose=verbose) for host, findings in hosts.items()}
    answering = [host for host, findings in hosts.items() if any(finding.rule != "hosts" for finding in findings)]
    common = [
        finding for finding in shown[answering[0]] if all(finding in shown[host] for host in answering)
    ] if answering else []  # fmt: skip
    if common:
        rows += ["", f"every host{' that answers' if len(answering) < len(hosts) else ''}", *_lines(common)]
    for host, findings in shown.items():
        own = [finding for finding in findings if finding not in common]
        rows += ["", host, *_lines(own)] if own else []
    return rows


def _shown(findings: Sequence[Finding], *, verbose: bool) -> list[Finding]:
    return [finding for finding in findings if verbose or finding.severity is not Severity.OK or finding.table]


def _lines(findings: Sequence[Finding]) -> list[str]:
    return [line for finding in findings for line in lines(finding)]


def _worst(findings: Sequence[Finding]) -> str:
    present = {finding.severity for finding in findings}
    return next((sign for severity, sign in reversed(SIGNS.items()) if severity in present), SIGNS[Severity.OK])


def document(hosts: Mapping[str, Sequence[Finding]], variables: Mapping[str, str]) -> dict[str, Any]:
    """Returns the answer as JSON-ready data; `variables` are what `dstrain run` sets for NCCL and Gloo."""
    return {
        "schema": 1,
        "hosts": {host: [finding.document() for finding in findings] for host, findings in hosts.items()},
        "environment": dict(variables),
        "counts": _counts([finding for findings in hosts.values() for finding in findings]),
    }


def _counts(findings: Sequence[Finding]) -> dict[str, int]:
    return {str(mark): sum(finding.severity is mark for finding in findings) for mark in SIGNS}


def network_document(
    measurement: Answer, expected: Expected, findings: Sequence[Finding], kept: Path | None
) -> dict[str, Any]:
    """Returns a measurement of the network as JSON-ready data; `kept` is the file in which the next plan finds it."""
    link = expected.link
    return {
        "schema": 2,
        "network": to_data(measurement.network),
        "interfaces": dict(measurement.interfaces),
        "link": {"name": link.name, "bytes_per_s": link.bytes_per_s, "is_assumed": expected.is_assumed},
        "findings": [finding.document() for finding in findings],
        "counts": _counts(findings),
        "kept": str(kept) if kept else None,
    }


def problem_text(hosts: Mapping[str, Sequence[Finding]]) -> str:
    """Returns how many findings block training, and on which hosts."""
    counts = {host: len(errors(findings)) for host, findings in hosts.items()}
    total = sum(counts.values())
    what = f"{total} problem{'s' if total > 1 else ''} block{'' if total > 1 else 's'} training"
    return what if len(hosts) == 1 else f"{what}, on {', '.join(host for host, count in counts.items() if count)}"


def printable(text: str) -> str:
    """Returns a text that stdout can encode: ASCII in place of signs if it is not UTF-8."""
    try:
        "✓✗→─·×".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return text.translate(_PLAIN)
    return text
