"""Makes the report that experiment trackers get at the end of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

from dstrain import units
from dstrain.facts.cluster.cluster import Cluster
from dstrain.monitor.best_model import BestModel, best_model
from dstrain.monitor.comparison import comparisons, step_parts
from dstrain.monitor.comparison_text import COLUMNS, rows_of, split_text
from dstrain.monitor.expert_balance import LoadMap, newest
from dstrain.monitor.sinks.jsonl import current_steps, read_jsonl
from dstrain.monitor.sinks.registry import Guarded
from dstrain.monitor.sinks.sink import REPORT, End, Table, markdown
from dstrain.monitor.windows import Line, counted, series, states_by_rank
from dstrain.plan.estimate_records import Estimate
from dstrain.rundir import RunDir

_WEIGHS = ("action", "severity")
_MOST_RULES = 8
"""Health rules that are named with their message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run at its end, as `comparison.Measured` wants it."""

    estimate: Estimate | None
    """The prediction for this run."""
    cluster: Cluster | None
    windows: Sequence[Line]
    """Metrics of each logged window."""
    states: Sequence[Mapping[str, int]]
    """Measured bytes of model states, by rank."""
    evaluations: Sequence[Line] = ()
    """Metrics of each evaluation."""
    findings: Sequence[Line] = ()
    """Warnings of the health rules."""
    experts: LoadMap | None = None
    """The load of each expert in the last window; None of a dense model."""
    best: BestModel | None = None
    """The best model, and whether the run stopped early; None if the job does not keep it, or the run failed."""


def read_end(run_dir: RunDir, *, estimate: Estimate | None, cluster: Cluster | None) -> Ended:
    """Returns the records of a run, without warnings of an earlier run in the same folder."""
    lines = read_jsonl(run_dir.metrics)
    logged = current_steps(lines)
    windows = [line for line in logged if "loss" in line]
    began = next((line["time_s"] for line in windows if "time_s" in line), 0.0)
    states: tuple[Mapping[str, int], ...] = ()
    best: BestModel | None = None
    with suppress(OSError, ValueError):
        best = best_model(json.loads(run_dir.summary.read_text(encoding="utf-8")))
    with suppress(OSError, ValueError):
        states = states_by_rank(json.loads(run_dir.states.read_text(encoding="utf-8")))
    return Ended(
        estimate=estimate,
        cluster=cluster,
        windows=windows,
        states=states,
        evaluations=[line for line in logged if "eval_loss" in line],
        best=best,
        experts=newest([line for line in lines if line.get("time_s", began) >= began]),
        findings=[line for line in read_jsonl(run_dir.health) if line.get("time_s", began) >= began],
    )


def end_report(run: Ended, *, how: str) -> Table | None:
    """Returns the report of a run; None before its first logged step. `how` is how it ended, in a word."""
    if not run.windows:
        return None
    rows, step = tuple(rows_of(comparisons(run), run.cluster)), int(run.windows[-1]["step"])
    title = f"{how} after {units.counted(step, 'step')}"
    lines = [f"# {title}", "", markdown(COLUMNS, rows), ""] if rows else [f"# {title}", ""]
    if split := split_text(step_parts(run)):
        note = counted(run.windows).note
        lines += [f"**a step**: {split}{f' ({note})' if note else ''}", ""]
    lines += [f"**loss**: {_losses(run)}", ""]
    lines += [f"**best model**: {run.best.text}", ""] if run.best is not None and how == End.SUCCESS else []
    last = {line["rule"]: line for line in run.findings if line.get("rule")}
    weights = {"stop": 0, "critical": 1}  # of the action, or else of the severity
    heaviest = sorted(last.items(), key=lambda row: min(weights.get(str(row[1].get(key)), 2) for key in _WEIGHS))
    lines += [f"- **{rule}** {line.get('message', '')}" for rule, line in heaviest[:_MOST_RULES]]
    lines += ["", "`dstrain report` on the run directory has the rest."] if last else ["No health rule was broken."]
    return Table(name=REPORT, step=step, text="\n".join(lines) + "\n", columns=COLUMNS, rows=rows)


def report_to(
    sinks: Sequence[Guarded], run_dir: RunDir, cluster: Cluster | None, *, estimate: Estimate | None, how: str
) -> None:
    """Gives the sinks the report of a run, and the load of its experts.

    No error in it reaches training, such as one from a damaged file.
    """
    tables: list[Table] = []
    with suppress(Exception):
        run = read_end(run_dir, estimate=estimate, cluster=cluster) if sinks else None
        if run is not None and (report := end_report(run, how=how)) is not None:
            tables = [*([run.experts.table(report.step)] if run.experts is not None else []), report]
    for table, sink in product(tables, sinks):
        sink.show(table)


def _losses(run: Ended) -> str:
    losses, evaluations = series(run.windows, "loss"), series(run.evaluations, "eval_loss")
    text = f"{losses[0][1]:.4f} at step {losses[0][0]} → {losses[-1][1]:.4f}" if losses else "not finite"
    return text + (f"; evaluation {evaluations[-1][1]:.4f} at step {evaluations[-1][0]}" if evaluations else "")
