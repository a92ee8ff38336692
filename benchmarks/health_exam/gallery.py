"""Writes the report page of a recorded run for each cause, with what the health rules say of it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.health_exam.score import FOLDER, Result
from benchmarks.health_exam.traces import JOB
from dstrain.cli.output import report_page
from dstrain.monitor.sinks.jsonl import read_jsonl
from dstrain.report.recorded import read
from dstrain.report.report import report
from dstrain.rundir import RunDir

_BEGAN_S = 1_790_000_000.0
"""When each run is said to have begun, in seconds since the epoch, so that pages are the same each time."""


def write(results: Sequence[Result], folder: Path) -> list[Path]:
    """Writes a page for each result, named after its cause, and returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = []
    with tempfile.TemporaryDirectory() as temporary:
        for result in results:
            cause = result.trace.cause
            assert cause is not None
            run = _run_directory(result, Path(temporary) / result.trace.name.rpartition("-")[0])
            path = folder / f"{run.path.name}.html"
            text = report_page.page([report(read(run), now=_BEGAN_S + 3600)])
            path.write_text(text.replace(temporary, ""), encoding="utf-8")
            pages.append(path)
    return pages


def _run_directory(result: Result, folder: Path) -> RunDir:
    """Returns a run directory with the metrics of a trace and the findings of the rules."""
    folder.mkdir()
    run, now = RunDir(folder), _BEGAN_S
    lines: list[dict[str, Any]] = []
    times: dict[int, float] = {}
    for record in read_jsonl(FOLDER / f"{result.trace.name}.jsonl"):
        if record.get("event") == "plan":
            continue
        steps = record.get("step", 0) - max(times, default=0)
        now += max(steps, 0) * record.get("step_s", 0.0)
        times[record.get("step", 0)] = now
        lines.append({**record, "time_s": round(now, 3)})
    findings = [{**asdict(one), "time_s": round(times[one.step], 3)} for one in result.findings]
    job = {**JOB, "model": "demo", "output_dir": str(folder), **result.trace.job}
    run.summary.write_text(json.dumps({"steps": result.steps, "ranks": 2}), encoding="utf-8")
    run.request.write_text(json.dumps(job), encoding="utf-8")
    for file, records in ((run.metrics, lines), (run.health, findings)):
        file.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return run
