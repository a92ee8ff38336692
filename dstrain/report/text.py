"""Prints the report of a run, as text or JSON."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from textwrap import shorten
from typing import Any

from dstrain import units
from dstrain.findings import printable
from dstrain.monitor.comparison import (
    NONE,
    Quantity,
    difference_text,
    figure,
    name_of,
    off_text,
    planned_speed,
    split_text,
    table,
)
from dstrain.monitor.outcomes import best_model
from dstrain.monitor.run_record import contents_text, trained_contents
from dstrain.monitor.windows import counted, throughput
from dstrain.oom import NamedTensors, OutOfMemory
from dstrain.paths import shown
from dstrain.plan.labels import label
from dstrain.records import to_data
from dstrain.report.report import UNKNOWN, Report, Restart, differing
from dstrain.rundir import GONE, LIVING, RUN, State, line_of
from dstrain.units import format_bytes, format_count, format_seconds
from dstrain.wrapping import aligned, wrapped

TOTAL = "total"
"""The last row of the table."""


def memory_lines(record: OutOfMemory, *, resumes: bool, command: str) -> list[str]:
    """Returns the block of a report: where, the parts of memory, the largest tensors, and changes that fit.

    `resumes` says whether a checkpoint exists to go on from; `command` starts the run.
    """
    head = [f"Out of GPU memory: {record.where}"]
    head += [f"  {record.measured.words}"] if record.measured is not None else []
    return [
        *map(wrapped, head),
        *_table(record),
        *_largest(record),
        *_changes(record, resumes=resumes, command=command),
    ]


def command_of(state: State | None) -> str:
    """Returns the line that starts a run again, as it was typed if that is known."""
    return line_of(state.command if state is not None else RUN)


def memory_rows(record: OutOfMemory) -> list[tuple[str, str, str]]:
    """Returns the name of each part, its planned and its measured bytes, and their totals; empty without a plan."""
    ledger = record.ledger
    if not ledger:
        return []
    planned, measured = [one.predicted_bytes for one in ledger], [one.measured_bytes for one in ledger]
    known = [size for size in measured if size is not None]
    total = sum(known) if len(known) == len(ledger) else None
    names = [*(str(one.part) for one in ledger), TOTAL]
    sizes = zip([*planned, sum(planned)], [*measured, total], strict=True)
    return [
        (name, format_bytes(size), "-" if held is None else format_bytes(held))
        for name, (size, held) in zip(names, sizes, strict=True)
    ]


def largest_text(one: NamedTensors) -> str:
    """Returns the number, the size and the name of some tensors."""
    return printable(f"{one.count} × {format_bytes(one.size_bytes)}  {one.name}")


def _table(record: OutOfMemory) -> Iterator[str]:
    found = [("", "planned", "measured"), *memory_rows(record)]
    if len(found) == 1:
        return
    yield ""
    yield from (f"  {line}" for line in aligned(found, right={1, 2}))


def _largest(record: OutOfMemory) -> Iterator[str]:
    predicted = record.predicted
    if predicted is not None and predicted.largest:
        yield from ("", f"Largest tensors at the planned peak ({printable(predicted.peak_instant)}):")
        yield from (f"  {largest_text(one)}" for one in predicted.largest)
    elif predicted is not None:
        yield from ("", f"Planned peak: {printable(predicted.peak_instant)}; no tensor is listed")
    if record.largest:
        yield from ("", "Largest live blocks of the GPU:")
        yield from (f"  {one.count} × {format_bytes(one.size_bytes)}" for one in record.largest)


def _changes(record: OutOfMemory, *, resumes: bool, command: str) -> Iterator[str]:
    if record.fixes:
        yield from ("", "Changes that fit, by the plan and by what was measured:")
    for number, one in enumerate(record.fixes, 1):
        yield wrapped(f"  {number}. {printable(one.text)}")
        yield f"     {printable(one.typed(resumes=resumes, command=command))}"  # in one line, to be copied


_MOST_MARKS = 5
_MOST_SAMPLES = 3
"""Generated texts that are shown."""
_SAMPLE_COLUMNS = 100
"""Characters of a prompt or a text, at most."""


def verdict(report: Report) -> str:
    """Returns in one line whether a run ended, and how."""
    words = {GONE: "gone: `dstrain run` was killed, or its machine went down", UNKNOWN: "not known to have ended"}
    steps = units.counted(report.total_steps or report.step, "step")
    steps = f"{report.step:,} of {steps}" if report.total_steps else steps
    rule = report.stopped_by
    parts = [words.get(report.stage, report.stage) if rule is None else f"ended by the health rule {rule}", steps]
    if report.seconds is not None:
        word = "for" if report.stage in {one.value for one in LIVING} else "after"
        parts.append(f"{word} {format_seconds(report.seconds)}")
    if (best := best_model(report.recorded.summary)) is not None and best.stopped_at is not None:
        parts.append("stopped early")
    run = report.recorded.state
    if run is not None and run.exit_code:
        parts.append(f"exit code {run.exit_code}")
    return ", ".join(parts)


def lines(report: Report) -> list[str]:
    """Returns the report of one run: the verdict, its figures beside the plan, and what happened."""
    recorded = report.recorded
    head = [f"{shown(str(recorded.run_dir.path))}: {verdict(report)}"]
    head += [wrapped(printable(recorded.cause), indent="  ")] if recorded.cause else []
    if recorded.out_of_memory is not None:
        command = command_of(recorded.state)
        head += ["", *memory_lines(recorded.out_of_memory, resumes=bool(report.checkpoints), command=command)]
    told = [wrapped(line) for line in aligned([(name, printable(value)) for name, value in _rows(report)])]
    return [*head, "", *table(report.comparisons, recorded.cluster), "", *told]


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    """Yields the other facts of a run as rows of a name and a value."""
    if report.largest is not None:
        yield "differs most", difference_text(report.largest)
    yield from (("checks", text) for text in checks_text(report))
    if first := first_text(report):
        yield "first steps", first
    if note := counted(report.recorded.windows).note:
        yield "times", note
    if split := split_text(report.parts):
        yield "a step", split
    if contents := contents_text(report.recorded.estimate, trained_contents(report.recorded.windows)):
        yield "rows", contents
    if report.traffic:
        yield "collectives", traffic_text(report)
    if report.losses:
        yield "loss", loss_text(report)
    if (best := best_model(report.recorded.summary)) is not None:
        yield "best model", best.text
    if report.recorded.experts is not None:
        yield "experts", report.recorded.experts.text
    yield from (("sample", text) for text in _samples(report))
    yield from (("health", text) for text in _health(report))
    if report.quarters:
        yield "throughput", throughput_text(report)
    yield from (("restart", restart_text(one)) for one in report.restarts)
    yield from (("adapted", adapted_text(line)) for line in report.recorded.adaptations)
    yield from (("checkpoints", text) for text in _checkpoints(report))
    yield from (("edit", edit_text(edit)) for edit in report.recorded.edits or ())
    for one in report.advisories or ():
        yield "advisory", f"{one.rule}: {one.problem}: {one.effect}. {one.fix}"
    yield "ran", _ran(report)
    if report.recorded.run_dir.start_script.exists():
        yield "run again", f"bash {shown(str(report.recorded.run_dir.start_script))}"
    yield from (("not known", text) for text in report.missing)
    if planned_speed(report.recorded) is not None and report.stage not in LIVING:
        command = f"dstrain report {shlex.quote(shown(str(report.recorded.run_dir.path)))} --calibrate"
        yield "next", f"`{command}` lets later plans use what this run measured"


def checks_text(report: Report) -> Iterator[str]:
    """Yields the checks before the first step in a line, and each that did not pass in one of its own."""
    record = report.recorded.preflight
    if record is None:
        return
    passed = ", ".join(check.name for check in record.checks if check.passed)
    yield f"{passed or 'none'} passed before the first step, in {format_seconds(record.seconds)}"
    yield from (check.line for check in record.checks if not check.passed)


def first_text(report: Report) -> str:
    """Returns the verdict of the first steps on the plan, and the change that they suggest; empty before them."""
    first = report.first
    if first is None:
        return ""
    parts = [difference_text(first.cause)] if first.cause is not None else []
    parts += [f"to change: {first.setting}: {first.gain}"] if first.setting else []
    return f"after step {first.step:,}: " + "; ".join([*parts, *([first.note] if first.note else [])])


def traffic_text(report: Report) -> str:
    """Returns the collectives of a step: bytes of each kind, and the seconds in which ranks wait for them."""
    kinds = (
        f"{kind} {format_bytes(size)}" + (f" in {format_seconds(seconds)}" if seconds else "")
        for kind, size, seconds in report.traffic
        if size or seconds
    )
    return f"of a step, with the time that ranks wait for them: {', '.join(kinds)}"


def loss_text(report: Report) -> str:
    """Returns the first and the last loss, and the losses of evaluations."""
    text = f"{report.losses[0][1]:.4f} at step {report.losses[0][0]} → {report.losses[-1][1]:.4f}"
    if report.evaluations:
        step, last = report.evaluations[-1]
        best_step, best = min(report.evaluations, key=lambda pair: pair[1])
        text += f"; evaluation {last:.4f} at step {step}"
        text += f", best {best:.4f} at step {best_step}" if best < last else ", its best"
    return text


def _samples(report: Report) -> Iterator[str]:
    """Yields the texts that were generated last, in a line each."""
    texts = report.recorded.samples
    for one in texts[:_MOST_SAMPLES]:
        prompt, text = (shorten(part, _SAMPLE_COLUMNS, placeholder=" …") for part in (one.prompt, one.text))
        yield f'step {one.step:,}, "{prompt}" → "{text}"'
    if len(texts) > _MOST_SAMPLES:
        yield f"and {len(texts) - _MOST_SAMPLES} more: {report.recorded.run_dir.samples.name}"


def _health(report: Report) -> Iterator[str]:
    if not report.marks:
        yield "no rule was broken"
    for mark in report.marks[:_MOST_MARKS]:
        often = f", {mark.count} times from step {mark.first_step} to {mark.last_step}" if mark.count > 1 else ""
        yield f"{mark.rule} ({mark.severity}){often}: {mark.message}"
    if len(report.marks) > _MOST_MARKS:
        yield f"and {len(report.marks) - _MOST_MARKS} other rules: {report.recorded.run_dir.health.name}"


def throughput_text(report: Report) -> str:
    """Returns the speed of all GPUs over the run, with what slows it."""
    whole, quarters = throughput(report.recorded.windows), " → ".join(f"{rate:,.0f}" for rate in report.quarters)
    rates = [f"{quarters} tokens/s over the quarters of the run"] if len(report.quarters) > 1 else []
    rates += [f"{whole.tokens_per_s:,.0f}{'' if rates else ' tokens/s'} in all steps"] if whole is not None else []
    shares = (("waiting for data", report.data_wait_share), ("padding", report.padding_share))
    return ", ".join([*rates, *(f"{100 * share:.1f} % {name}" for name, share in shares if share is not None)])


def restart_text(restart: Restart) -> str:
    """Returns where and why a run was started again."""
    where = f"from step {restart.from_step}" if restart.from_step else "from the beginning"
    at = time.strftime(" at %Y-%m-%d %H:%M", time.localtime(restart.time_s)) if restart.time_s is not None else ""
    if restart.cause is None:
        return f"{where}, by hand"
    return f"{where}{at}{f', {restart.change}' if restart.change else ''}, after: {restart.cause.splitlines()[0]}"


def adapted_text(line: Any) -> str:
    """Returns a change after an out-of-memory with its keys."""
    engine = (f"{key}: {json.dumps(value)}" for key, value in line["ds_config"].items())
    return f"{line['change']}: {', '.join([*map(str, line['set']), *engine])}"


def _checkpoints(report: Report) -> Iterator[str]:
    steps = ", ".join(f"{step}" for step in report.checkpoints[-8:])
    final = report.recorded.summary.get("final")
    more = "… " if len(report.checkpoints) > 8 else ""
    text = f"step {more}{steps}" if steps else "none"
    yield text + (f"; final model {shown(final)}" if isinstance(final, str) else "")
    yield from (f"skipped: {problem}" for problem in report.damaged)


def edit_text(edit: Any) -> str:
    """Returns a hand edit: the file, the key, the generated and the current value."""
    values = [json.dumps(edit[name], ensure_ascii=False) if name in edit else "absent" for name in ("base", "yours")]
    return f"{edit.get('file')}: {edit['key']} {values[0]} → {values[1]}"


def _ran(report: Report) -> str:
    recorded = report.recorded
    parts = [machines_text(report)]
    if recorded.estimate is not None:
        parts.append(label(recorded.estimate.configuration))
    parts += [f"{name} {version}" for name, version in recorded.versions.items()]
    return "; ".join([part for part in parts[:2] if part] + [", ".join(parts[2:])] if parts[2:] else parts)


def machines_text(report: Report) -> str:
    """Returns the ranks, the GPU and the nodes of a run, as far as they are known."""
    run, cluster = report.recorded.state, report.recorded.cluster
    ranks = report.recorded.summary.get("ranks") or len(report.recorded.states) or None
    if ranks is None and cluster is not None:
        ranks = cluster.num_gpus
    device = "GPU of unknown kind" if cluster is None else "CPU" if cluster.gpu.is_cpu else cluster.gpu.name
    nodes = f" on {', '.join(run.nodes)}" if run is not None and run.nodes else ""
    return f"{ranks or '?'} × {device}{nodes}"


def document(report: Report) -> dict[str, Any]:
    """Returns the report of one run as JSON-ready data."""
    recorded = report.recorded
    names = ("stage", "seconds", "step", "total_steps", "data_wait_share", "padding_share")
    lists, steps = ("quarters", "checkpoints", "damaged", "missing"), throughput(recorded.windows)
    return {
        "run_dir": str(recorded.run_dir.path),
        **{name: getattr(report, name) for name in names},
        "tokens_per_s": None if steps is None else steps.tokens_per_s,
        "comparisons": [asdict(one) | {"off": one.off} for one in report.comparisons],
        "differs_most": asdict(report.largest) if report.largest else None,
        "warm_up_steps": counted(recorded.windows).warm_up_steps,
        "parts": [asdict(one) for one in report.parts],
        "collectives": [{"kind": kind, "bytes": size, "seconds": spent} for kind, size, spent in report.traffic],
        "first_steps": asdict(report.first) if report.first else None,
        "out_of_memory": to_data(recorded.out_of_memory) if recorded.out_of_memory else None,
        "preflight": to_data(recorded.preflight) if recorded.preflight else None,
        "losses": report.losses,
        "evaluations": report.evaluations,
        "best": recorded.summary.get("best"),
        "experts": asdict(recorded.experts) if recorded.experts else None,
        "samples": [asdict(one) for one in recorded.samples],
        "health": [asdict(mark) for mark in report.marks],
        **{name: list(getattr(report, name)) for name in lists},
        "restarts": [asdict(one) for one in report.restarts],
        "adaptations": list(recorded.adaptations),
        "edits": None if recorded.edits is None else list(recorded.edits),
        "advisories": None if report.advisories is None else [asdict(one) for one in report.advisories],
        "versions": dict(recorded.versions),
        "gpu": recorded.cluster.gpu.name if recorded.cluster is not None else None,
        "cause": recorded.cause or None,
        "stopped_by": report.stopped_by,
        "failure": recorded.failure,
        "start_script": str(recorded.run_dir.start_script) if recorded.run_dir.start_script.exists() else None,
    }


_MOST_CHARACTERS = 28
"""Longest cell."""


def side_by_side(reports: Sequence[Report]) -> list[list[str]]:
    """Returns runs side by side, as rows of cells: the settings that differ, then what came of them."""
    rows = [["", *(_cell(shown(str(one.recorded.run_dir.path))) for one in reports)]]
    for key, values in differing(reports).items():
        rows.append([key, *map(_cell, values)])
    rows.append(["hand edits", *(_count(one.recorded.edits) for one in reports)])
    rows.append(["end", *(f"{one.stage}: {one.stopped_by}" if one.stopped_by else one.stage for one in reports)])
    rows.append(["steps", *(f"{one.step:,}" for one in reports)])
    rows.append(["loss", *(f"{one.losses[-1][1]:.4f}" if one.losses else NONE for one in reports)])
    best = [min((value for _, value in one.evaluations), default=None) for one in reports]
    rows.append(["best evaluation", *(NONE if value is None else f"{value:.4f}" for value in best)])
    for quantity in Quantity:
        # a row for each quantity that at least one of the runs has measured
        found = [next((each for each in one.comparisons if each.quantity is quantity), None) for one in reports]
        if any(each is not None for each in found):
            cells = [NONE if each is None else figure(quantity, each.measured) for each in found]
            offs = [off_text(each).split(" (")[0] if each is not None else "" for each in found]
            rows.append(
                [
                    name_of(quantity, reports[0].recorded.cluster),
                    *(f"{c} ({o})" if o else c for c, o in zip(cells, offs, strict=True)),
                ]
            )
    tokens = [one.recorded.windows[-1].get("tokens_seen") if one.recorded.windows else None for one in reports]
    rows.append(["tokens", *(format_count(seen) if isinstance(seen, int) else NONE for seen in tokens)])
    rows.append(["health", *(", ".join(mark.rule for mark in one.marks) or "good" for one in reports)])
    rows.append(["restarts", *(str(len(one.restarts)) for one in reports)])
    return rows


def side_by_side_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows of cells as text, with cut cells; the end of a key says more than its beginning."""
    rows = [[_cell(row[0]), *row[1:]] for row in rows]
    cut = [
        [printable(c if len(c) <= _MOST_CHARACTERS else f"{c[: _MOST_CHARACTERS - 1]}…") for c in row] for row in rows
    ]
    return aligned(cut)


def _cell(value: object) -> str:
    """Returns the value of a setting; a path by its end, which differs."""
    if isinstance(value, str):
        return value if len(value) <= _MOST_CHARACTERS else f"…{value[1 - _MOST_CHARACTERS :]}"
    return NONE if value is None else json.dumps(value, ensure_ascii=False)


def _count(edits: Sequence[Any] | None) -> str:
    return NONE if edits is None else str(len(edits))
