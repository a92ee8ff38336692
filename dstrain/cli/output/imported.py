"""Prints an imported file: its cost beside dstrain's plan, its faults, and the keys without a counterpart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dstrain.cli.output.plan import subject_lines, table_lines, table_row
from dstrain.config.imports.converters import runs_deepspeed
from dstrain.config.imports.source import Fate
from dstrain.config.imports.walk import Imported, Note, Value
from dstrain.config.lint.rules.releases import Advisory
from dstrain.facts.cluster.cluster import Origin
from dstrain.facts.workload import Workload
from dstrain.findings import Finding, count_text, lines, printable
from dstrain.plan.configuration import flat
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.labels import label
from dstrain.plan.search.decide import Proposal, Survey
from dstrain.units import format_bytes
from dstrain.wrapping import COLUMNS, wrapped

HEADINGS = {
    Fate.OTHER_TRAINING: "would be another training",
    Fate.CHANGED: "has a counterpart that differs",
    Fate.MISSING: "has no counterpart",
    Fate.UNREAD: "is not imported",
    Fate.UNKNOWN: "is not in the table",
    Fate.NEEDLESS: "is not needed",
}
"""Headings of the keys that are not simply written, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """Facts about an imported file."""

    imported: Imported
    workload: Workload
    theirs: Estimate | None
    """The file's own settings; None if its DeepSpeed configuration cannot be estimated."""
    ours: Survey
    """The plan for the same model, data and batch without the file's choices."""
    findings: Sequence[Finding]
    """Findings of lint, with places in the file."""
    past_faults: Sequence[Advisory]
    """Faults of other releases of DeepSpeed with the file's settings."""


def report_lines(report: ImportReport) -> list[str]:
    """Returns the page: cost, faults, and keys without counterpart."""
    source = report.imported.source
    head = [f"{source.path}: {source.tool.title}", *subject_lines(report.workload), ""]
    past = [line for fault in report.past_faults for line in _past_lines(fault)]
    count = count_text(report.findings) if report.findings else "no problems"
    findings = [line for finding in report.findings for line in lines(finding)]
    faults = [f"lint: {count}", *findings, "", *([*past, ""] if past else [])]
    return [*head, *_cost_lines(report), "", *faults, *note_lines(report.imported.notes)]


def _cost_lines(report: ImportReport) -> list[str]:
    """Returns the figures of the file's settings, then dstrain's plan's if it is another one."""
    ours = report.ours.proposals[0]
    if report.theirs is None:
        return [
            "its DeepSpeed configuration cannot be estimated; the plan of dstrain:",
            *table_lines(_survey(report, ours)),
        ]
    theirs = Proposal(estimate=report.theirs, reasons=())
    if not report.theirs.fits:
        short = report.theirs.shortage
        verdict = f"as it is, it does not fit: {label(report.theirs.configuration)} needs {short}"
    else:
        left = report.theirs.usable_bytes_per_gpu - report.theirs.memory.device_bytes_per_gpu
        verdict = f"as it is, it fits, with {format_bytes(max(0, left))} to spare on each GPU"
    end = [*_without_stage(report), verdict]
    if table_row(1, report.theirs) == table_row(1, ours.estimate):
        return [*table_lines(_survey(report, theirs)), *end, "dstrain would choose the same"]
    fits = (
        "" if report.ours.fits else f", which does not fit either: it needs {ours.estimate.shortage}{_assumed(report)}"
    )
    which = wrapped(f"1 is the file, 2 what dstrain would choose{fits}").splitlines()
    return [*table_lines(_survey(report, theirs, ours)), *end, *which]


def _assumed(report: ImportReport) -> str:
    """Returns the option that says how much host RAM there is, where too little is assumed."""
    cluster, estimate = report.workload.cluster, report.ours.proposals[0].estimate
    is_short = estimate.fits_gpu and cluster.host_memory_origin is Origin.ASSUMED
    return ", which is assumed; say what a node has: --host-memory SIZE" if is_short else ""


def _without_stage(report: ImportReport) -> list[str]:
    """Returns the origin of the ZeRO stage of a file that names none, which its tool trains with DDP."""
    source = report.imported.source
    if runs_deepspeed(source) or any(key in report.imported.values for key in ("plan.zero_stage", "plan.ds_config")):
        return []
    return [f"{source.tool.title} trains it without ZeRO; its stage and offload are those of dstrain"]


def _survey(report: ImportReport, *proposals: Proposal) -> Survey:
    return replace(report.ours, proposals=proposals)


def _past_lines(fault: Advisory) -> list[str]:
    """Returns the training of a file that ran under a release with a fault."""
    releases = f"{fault.since} to before {fault.fixed}" if fault.since else f"before {fault.fixed}"
    text = f"under DeepSpeed {releases} it trained something else: {fault.effect} (DeepSpeed#{fault.pull}, {fault.id})"
    return wrapped(text).splitlines()


def read_lines(imported: Imported) -> list[str]:
    """Returns the contents of a file that is refused: its values, and the keys that are not simply written. The error
    names those for which it is refused."""
    source = imported.source
    read = [
        f"  {value.place}: {value.key} → {target}: {printable(str(value.value))}" for target, value in _read(imported)
    ]
    others = [note for note in imported.notes if note.fate is not Fate.OTHER_TRAINING]
    return [f"{source.path}: {source.tool.title}", "read", *read, *note_lines(others)]


def _read(imported: Imported) -> list[tuple[str, Value]]:
    """Returns the values that a file itself gives, in its order, with their targets."""
    given = [(target, value) for target, value in imported.values.items() if not value.is_default]
    return sorted(given, key=lambda pair: (pair[1].place.file, pair[1].place.line or 0))


def read_document(imported: Imported) -> dict[str, Any]:
    """Returns the contents of a file that is refused, as JSON-ready data."""
    read = [
        {"target": target, "value": value.value, "key": value.key, "file": value.place.file, "line": value.place.line}
        for target, value in _read(imported)
    ]
    return {**_file_document(imported), "read": read}


def _file_document(imported: Imported) -> dict[str, Any]:
    return {
        "schema": 1,
        "file": str(imported.source.path),
        "tool": imported.source.tool.name,
        "notes": [note.document() for note in imported.notes],
    }


def note_lines(notes: Iterable[Note]) -> list[str]:
    """Returns the keys that are not simply written, by what became of them, each with its place and what to do."""
    found: list[str] = []
    for fate, heading in HEADINGS.items():
        these = [note for note in notes if note.fate is fate]
        if not these:
            continue
        found.append(heading)
        if fate is Fate.NEEDLESS:
            found += wrapped(f"  {', '.join(map(_short, these))}").splitlines()
            continue
        found += [line for note in these for line in _note_lines(note)]
    return found


def _note_lines(note: Note) -> list[str]:
    """Returns a note on one line, or with its text below if that is longer than a line."""
    head, text = printable(f"  {note.place}: {note.key}:"), printable(note.text)
    if len(head) + len(text) < COLUMNS:
        return [f"{head} {text}"]
    return [head, *wrapped(f"    {text}").splitlines()]


def _short(note: Note) -> str:
    return f"{note.key} ({note.place.line})" if note.place.line else note.key


def report_document(report: ImportReport, files: dict[str, str]) -> dict[str, Any]:
    """Returns the page as JSON-ready data."""
    theirs, ours = report.theirs, report.ours.first
    return {
        **_file_document(report.imported),
        "imported": None if theirs is None else _figures(theirs),
        "planned": _figures(ours),
        "findings": [finding.document() for finding in report.findings],
        "past_faults": [
            {"rule": fault.id, **{name: getattr(fault, name) for name in ("since", "fixed", "effect", "source")}}
            for fault in report.past_faults
        ],
        "files": files,
    }


def _figures(estimate: Estimate) -> dict[str, Any]:
    return {
        "title": label(estimate.configuration),
        "fits": estimate.fits,
        **flat(estimate.configuration),
        "device_bytes_per_gpu": estimate.memory.device_bytes_per_gpu,
        "host_bytes_per_node": estimate.memory.host_bytes_per_node,
        "step_s": estimate.speed.step_s if estimate.speed else None,
    }
