"""Describes a run for experiment trackers: name, tags, model, machines, batch, data, prediction."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.choices import Method
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.data.datafile import found
from dstrain.facts.ds_config import zero_stage
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.job.data_source import DataSource
from dstrain.job.schema import Job
from dstrain.job.secret_names import is_secret
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.labels import label
from dstrain.records import flat
from dstrain.units import format_bytes, format_count, format_seconds


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


def _short_names(sources: Sequence[DataSource]) -> str:
    return ", ".join(Path(source.path).name for source in sources) or "no data"


def _description(job: Job, config: Mapping[str, Any], machines: str) -> str:
    size = f" ({format_count(config['num_params'])} parameters)" if config["num_params"] else ""
    trained = config["num_trainable_params"]
    part = f", {format_count(trained)} of them trained" if trained and job.method is not Method.FULL else ""
    sentences = [
        f"{config['model_name']}{size}, {job.method.value}{part}, on {_short_names(job.train_sources)}",
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
