"""Makes what experiment trackers get of a run: a card at its start, a report at its end."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from dstrain import units
from dstrain.choices import Method
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.data.datafile import found
from dstrain.facts.ds_config import zero_stage
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.job.code_variables import is_secret
from dstrain.job.data_source import DataSource
from dstrain.job.schema import Job
from dstrain.monitor.comparison import COLUMNS, comparisons, rows_of, split_text, step_parts
from dstrain.monitor.outcomes import best_model
from dstrain.monitor.run_record import RunRecord, read
from dstrain.monitor.sinks.registry import Guarded
from dstrain.monitor.sinks.sink import REPORT, End, Table, markdown
from dstrain.monitor.windows import counted, series
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.labels import label
from dstrain.records import flat
from dstrain.rundir import RunDir
from dstrain.units import format_bytes, format_count, format_seconds

_WEIGHS = ("action", "severity")
_MOST_RULES = 8
"""Health rules that are named with their message."""


def end_report(run: RunRecord, *, how: str) -> Table | None:
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
    best = best_model(run.summary)
    lines += [f"**best model**: {best.text}", ""] if best is not None and how == End.SUCCESS else []
    last = {line["rule"]: line for line in run.findings}
    weights = {"stop": 0, "critical": 1}  # of the action, or else of the severity
    heaviest = sorted(last.items(), key=lambda row: min(weights.get(str(row[1].get(key)), 2) for key in _WEIGHS))
    lines += [f"- **{rule}** {line['message']}" for rule, line in heaviest[:_MOST_RULES]]
    lines += ["", "`dstrain report` on the run directory has the rest."] if last else ["No health rule was broken."]
    return Table(name=REPORT, step=step, text="\n".join(lines) + "\n", columns=COLUMNS, rows=rows)


def report_to(sinks: Sequence[Guarded], run_dir: RunDir, *, how: str) -> None:
    """Gives the sinks the report of a run, and the load of its experts.

    No error in it reaches training, such as one from a damaged file.
    """
    tables: list[Table] = []
    with suppress(Exception):
        run = read(run_dir) if sinks else None
        if run is not None and (report := end_report(run, how=how)) is not None:
            tables = [*([run.experts.table(report.step)] if run.experts is not None else []), report]
    for table, sink in product(tables, sinks):
        sink.show(table)


def _losses(run: RunRecord) -> str:
    losses, evaluations = series(run.windows, "loss"), series(run.evaluations, "eval_loss")
    text = f"{losses[0][1]:.4f} at step {losses[0][0]} → {losses[-1][1]:.4f}" if losses else "not finite"
    return text + (f"; evaluation {evaluations[-1][1]:.4f} at step {evaluations[-1][0]}" if evaluations else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCard:
    """The description of a run in experiment trackers."""

    name: str
    """Such as `qwen3-8b-lora-4x4090-zero2`."""
    description: str
    """Model, data, machines and prediction in a few sentences."""
    tags: tuple[str, ...]
    config: Mapping[str, Any]
    """The same as values to sort and filter by; None if unknown."""


def run_card(
    job: Job,
    ds_config: Mapping[str, Any],
    *,
    num_ranks: int,
    model: ModelFacts | None,
    cluster: Cluster | None,
    estimate: Estimate | None,
) -> RunCard:
    """Returns the description of a run; the job's own name takes precedence."""
    name = _word(model.name if model is not None else Path(job.model).name)
    gpu = _word(cluster.gpu.name.removeprefix("rtx-")) if cluster is not None else "gpu"
    stage = zero_stage(ds_config)
    machines = f"{num_ranks}x{gpu}"
    tags = (name, job.method.value, machines, f"zero{stage}", job.precision.value)
    config = {
        "model_name": model.name if model is not None else job.model,
        "num_params": model.num_params if model is not None else None,
        "num_active_params": model.num_active_params if model is not None else None,
        "num_trainable_params": estimate.num_trainable_params if estimate is not None else None,
        "method": job.method.value,
        "gpu": cluster.gpu.name if cluster is not None else None,
        "num_gpus": num_ranks,
        "num_nodes": cluster.num_nodes if cluster is not None else None,
        "zero_stage": stage,
        "global_batch": job.samples_per_step(num_ranks),
        "data": _names(job.train_sources),
        "data_bytes": _size(job.train_sources),
        "eval_data": _names(job.eval_sources),
        "predicted": _predicted(estimate, cluster),
    }
    name = job.monitor.name or "-".join(tags[:4])
    return RunCard(name=name, description=_description(job, config, machines), tags=tags, config=config)


def without_secrets(value: Any, name: str = "") -> Any:
    """Returns JSON data without secrets: values whose key names a secret, and addresses with a password.

    >>> without_secrets({"comet": {"api_key": "x", "project": "p"}, "proxy": "http://me:pw@host"})
    {'comet': {'api_key': '(secret)', 'project': 'p'}, 'proxy': '(secret)'}
    """
    if isinstance(value, Mapping):
        is_hidden = is_secret(name.rpartition(".")[2])  # an edit of a secret: its values before and after
        return {key: without_secrets(item, name if is_hidden else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, name) for item in value]
    is_hidden = (
        value not in (None, "") and not isinstance(value, bool) and is_secret(name.rpartition(".")[2], str(value))
    )
    return "(secret)" if is_hidden else value


def filterable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a number or a text by dotted key, which trackers can filter by; they show nested data as one text.

    >>> filterable({"job": {"seed": 1, "lora": {"targets": ["q_proj", "v_proj"]}, "data": [{"path": "a.json"}]}})
    {'job.seed': 1, 'job.lora.targets': 'q_proj, v_proj', 'job.data': '{"path": "a.json"}'}
    """

    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return {
        key: ", ".join(map(text, value)) if isinstance(value, list | tuple) else value
        for key, value in flat(config).items()
    }


def _word(name: str) -> str:
    """Returns a name in the form of a tag: `Qwen/Qwen3 8B` becomes `qwen3-8b`."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower().rstrip("/").rpartition("/")[2]).strip("-.") or "model"


def _names(sources: Sequence[DataSource]) -> str | None:
    """Returns the paths of data sets, separated by commas."""
    return ", ".join(source.path for source in sources) or None


def _size(sources: Sequence[DataSource]) -> int | None:
    """Returns the bytes of local data files, or None if one is not local."""
    try:
        return sum(Path(path).stat().st_size for source in sources for path in found(source.path)) or None
    except OSError:
        return None


def _predicted(estimate: Estimate | None, cluster: Cluster | None) -> dict[str, Any] | None:
    """Returns the plan's prediction; without times on a CPU, whose speed is unknown."""
    if estimate is None:
        return None
    speed = estimate.speed if cluster is not None and cluster.gpu.name != "cpu" else None
    return {
        "plan": label(estimate.configuration),
        "device_bytes_per_gpu": estimate.memory.device_bytes_per_gpu,
        "host_bytes_per_node": estimate.memory.host_bytes_per_node,
        "step_s": speed.step_s if speed is not None else None,
        "tokens_per_s_per_gpu": speed.tokens_per_s_per_gpu if speed is not None else None,
        "uncertainty_ratio": speed.uncertainty_ratio if speed is not None else None,
    }


def _description(job: Job, config: Mapping[str, Any], machines: str) -> str:
    size = f" ({format_count(config['num_params'])} parameters)" if config["num_params"] else ""
    trained = config["num_trainable_params"]
    part = f", {format_count(trained)} of them trained" if trained and job.method is not Method.FULL else ""
    data = ", ".join(Path(source.path).name for source in job.train_sources) or "no data"
    sentences = [
        f"{config['model_name']}{size}, {job.method.value}{part}, on {data}",
        f"{machines}, ZeRO-{config['zero_stage']}, {config['global_batch']} samples of {job.seq_len} tokens per step",
    ]
    predicted = config["predicted"]
    if predicted is not None:
        pace = ""
        if predicted["step_s"] is not None:
            spread = f"{100 * predicted['uncertainty_ratio']:.0f} %"
            pace = f", {format_seconds(predicted['step_s'])} per step (± {spread})"
        sentences.append(
            f"predicted: {format_bytes(predicted['device_bytes_per_gpu'])} per GPU{pace}; {predicted['plan']}"
        )
    return ". ".join(sentences)
