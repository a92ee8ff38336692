"""Prints the doctor's findings."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.doctor.finding import SIGNS, Finding, Mark, count_text, errors
from dstrain.records import to_data

if TYPE_CHECKING:
    from dstrain.doctor.network_judge import Figures
    from dstrain.facts.cluster.network_measurement import Network

COLUMNS = 80
"""Columns of a terminal that everything but commands fits into."""
_GROUPS = {
    "job": "job",
    "hosts": "beside the other hosts",
    "software": "software",
    "ops": "DeepSpeed's extensions",
    "gpus": "GPUs",
    "kernel_log": "GPUs",
    "topology": "GPUs",
    "network": "network",
    "limits": "limits, RAM, disk",
    "space": "limits, RAM, disk",
    "online": "hubs and SwanLab",
}
"""Subject → the heading under which it is told."""
_PLAIN = str.maketrans({"✓": "+", "✗": "x", "→": ">", "─": "-", "·": "|", "×": "x"})


def lines(finding: Finding) -> list[str]:
    """Returns a finding: its mark and what was found, then what to type, which is never broken."""
    text = f"{SIGNS[finding.mark]} {finding.what}"
    if finding.fix is not None and len(text) + len(finding.fix) + 5 <= COLUMNS:
        return [f"  {text} → {finding.fix}"]
    found = textwrap.wrap(text, COLUMNS - 2, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    found += [f"  {line}" for line in finding.drawing]
    found += [f"  → {finding.fix}"] if finding.fix is not None else []
    return [f"  {line}" for line in found]


def grouped(findings: Sequence[Finding]) -> list[str]:
    """Returns findings under their headings."""
    found: list[str] = []
    for heading in dict.fromkeys(_GROUPS.values()):
        members = [finding for finding in findings if _GROUPS[finding.subject] == heading]
        if members:
            found += [heading, *(line for finding in members for line in lines(finding))]
    return found


def of_hosts(found: Mapping[str, Sequence[Finding]], variables: Mapping[str, str]) -> list[str]:
    """Returns the findings of several hosts: counts for each; what all that answer have, once; what others have.

    What is as it should be is only counted, but for pictures; `variables` are what `dstrain run` sets.
    """
    width = max(len(host) for host in found)
    told = [f"{_worst(findings)} {host:<{width}}  {count_text(findings)}" for host, findings in found.items()]
    if variables:
        told += [f"✓ dstrain run sets {' '.join(f'{name}={value}' for name, value in variables.items())}"]
    shown = {host: [each for each in all_ if each.mark is not Mark.OK or each.drawing] for host, all_ in found.items()}
    answering = [host for host, findings in found.items() if any(each.subject != "hosts" for each in findings)]
    common = (
        [each for each in shown[answering[0]] if all(each in shown[host] for host in answering)] if answering else []
    )
    if common:
        told += ["", f"every host{' that answers' if len(answering) < len(found) else ''}", *_lines(common)]
    for host, findings in shown.items():
        own = [each for each in findings if each not in common]
        told += ["", host, *_lines(own)] if own else []
    return told


def _lines(findings: Sequence[Finding]) -> list[str]:
    return [line for finding in findings for line in lines(finding)]


def _worst(findings: Sequence[Finding]) -> str:
    marks = {finding.mark for finding in findings}
    return SIGNS[next(mark for mark in (Mark.ERROR, Mark.WARNING, Mark.OK) if mark in marks or mark is Mark.OK)]


def document(found: Mapping[str, Sequence[Finding]], variables: Mapping[str, str]) -> dict[str, Any]:
    """Returns the answer as JSON-ready data; `variables` are what `dstrain run` sets for NCCL and Gloo."""
    everything = [finding for findings in found.values() for finding in findings]
    return {
        "schema": 1,
        "hosts": {host: [finding.document() for finding in findings] for host, findings in found.items()},
        "environment": dict(variables),
        "counts": {str(mark): sum(each.mark is mark for each in everything) for mark in Mark},
    }


def network_document(
    network: Network,
    figures: Figures,
    interfaces: Mapping[str, str],
    findings: Sequence[Finding],
    kept: Path | None,
) -> dict[str, Any]:
    """Returns a measurement of the network as JSON-ready data; `kept` is the file in which the next plan finds it."""
    links = {name: {"name": link.name, "bytes_per_s": link.bytes_per_s} for name, link in figures.links.items()}
    return {
        "schema": 1,
        "network": to_data(network),
        "interfaces": dict(interfaces),
        "links": {**links, "between_is_assumed": figures.is_assumed},
        "findings": [finding.document() for finding in findings],
        "counts": {str(mark): sum(each.mark is mark for each in findings) for mark in Mark},
        "kept": str(kept) if kept else None,
    }


def problem_text(found: Mapping[str, Sequence[Finding]]) -> str:
    """Returns how many things stand in the way of training, and where."""
    counts = {host: len(errors(findings)) for host, findings in found.items()}
    total = sum(counts.values())
    what = f"{total} thing{'s' if total > 1 else ''} stand{'' if total > 1 else 's'} in the way of training"
    return what if len(found) == 1 else f"{what}, on {', '.join(host for host, count in counts.items() if count)}"


def printable(text: str) -> str:
    """Returns a text that stdout can show: plain letters for signs where it is not UTF-8."""
    try:
        "✓✗→─·×".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return text.translate(_PLAIN)
    return text
