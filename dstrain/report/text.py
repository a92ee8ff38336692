"""Prints the report of a run, as text or JSON."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import asdict
from textwrap import shorten
from typing import Any

from dstrain import units
from dstrain.config.lint.finding import printable
from dstrain.launch.run.state import GONE, LIVING
from dstrain.monitor.best_model import best_model
from dstrain.monitor.comparison import planned_speed
from dstrain.monitor.comparison_text import difference_text, split_text, table
from dstrain.monitor.row_contents import contents_text, trained_contents
from dstrain.monitor.windows import counted, throughput
from dstrain.paths import shown
from dstrain.plan.labels import label
from dstrain.records import to_data
from dstrain.report import out_of_memory
from dstrain.report.report import UNKNOWN, Report, Restart
from dstrain.units import format_bytes, format_seconds
from dstrain.wrapping import wrapped

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
        parts.append(f"{'for' if report.stage in {one.value for one in LIVING} else 'after'} {_spent(report)}")
    if (best := best_model(report.recorded.summary)) is not None and best.stopped_at is not None:
        parts.append("stopped early")
    run = report.recorded.state
    if run is not None and run.exit_code:
        parts.append(f"exit code {run.exit_code}")
    return ", ".join(parts)


def _spent(report: Report) -> str:
    return format_seconds(report.seconds or 0.0)


def lines(report: Report) -> list[str]:
    """Returns the report of one run: the verdict, its figures beside the plan, and what happened."""
    recorded = report.recorded
    head = [f"{shown(str(recorded.run_dir.path))}: {verdict(report)}"]
    head += [wrapped(printable(recorded.cause), indent="  ")] if recorded.cause else []
    if recorded.out_of_memory is not None:
        command = out_of_memory.command_of(recorded.state)
        head += ["", *out_of_memory.lines(recorded.out_of_memory, resumes=bool(report.checkpoints), command=command)]
    rows = list(_rows(report))
    width = max(len(name) for name, _ in rows)
    told = [wrapped(f"{name:<{width}}  {printable(value)}") for name, value in rows]
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
