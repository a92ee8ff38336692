"""The record of a run that people share, without names of theirs: writes and reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dstrain.errors import DstrainError, InvalidConfig
from dstrain.facts.cluster import gpus, measured_links
from dstrain.facts.cluster.calibration import Calibration
from dstrain.facts.cluster.cluster import Cluster, Link, Origin, describe
from dstrain.facts.model import families
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import RowContents, Workload
from dstrain.monitor.comparison import Quantity
from dstrain.monitor.run_record import RunRecord
from dstrain.monitor.windows import counted
from dstrain.paths import shown
from dstrain.plan.calibration import Observed
from dstrain.plan.configuration import DEFAULTS, Configuration, flat
from dstrain.plan.memory.params import adapted_experts, linear_names
from dstrain.records import from_data, load_json, to_data, type_config
from dstrain.report.calibration import COMPILED, ObservedRun, observed, releases
from dstrain.report.report import Report

SCHEMA = 1
"""Version of the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A link, as the plan had it."""

    name: str
    bytes_per_s: float
    """Peak of one GPU in one direction or, if it was measured, the bus bandwidth."""
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Measurements of a run that count for a calibration; None: not measured, or disturbed."""

    step_s: float | None = None
    """Seconds of a step with as many tokens as planned."""
    error_ratio: float = 0.0
    reserved_bytes: int | None = None
    outside_bytes: int | None = None
    contents: RowContents | None = None
    """The contents of the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRun:
    """A run without paths, hosts, users, data, or the name of its model."""

    __pydantic_config__ = type_config

    schema: int = SCHEMA
    gpu: str
    """Name in dstrain's table of GPUs, or `unlisted`."""
    nodes: int
    gpus_per_node: int
    links: tuple[Wire, ...]
    """Inside a node, and between nodes if there are several."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Shape, by the keys of config.json. With `model_type`, the model can be built again from it."""
    num_params: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Choices of the configuration that are not the default ones."""
    versions: Mapping[str, str] = field(default_factory=dict)
    steps: int
    warm_up_steps: int = 0
    """Steps whose time does not count in `measured`."""
    planned: Mapping[Quantity, float] = field(default_factory=dict)
    measured: Mapping[Quantity, float] = field(default_factory=dict)
    counted: Counted | None = None
    """None: nothing of it counts, as on a CPU."""


def shape(model: ModelFacts) -> dict[str, Any]:
    """Returns the shape of a model by the keys of config.json; with `model_type` if it gives the same model again."""
    names = (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("intermediate_size", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "dtype"),
    )
    config: dict[str, Any] = {name: getattr(model, name) for name in names}
    if model.sliding_window is not None:
        config["sliding_window"] = model.sliding_window
    if model.moe is not None:
        config |= {"num_experts": model.moe.num_experts, "num_experts_per_tok": model.moe.experts_per_token}
        config["moe_intermediate_size"] = model.moe.intermediate_size
    named = {"model_type": model.model_type, **config}
    try:
        built = families.from_config(named, name=model.name, source=model.source)
    except DstrainError:
        return config
    return named if replace(built, rope_type=model.rope_type) == model else config


def read_shared(path: Path, calibration: Calibration) -> ObservedRun:
    """Returns the measurements of a shared record. Raises InvalidConfig if it is damaged or of no use."""
    run, name = load_json(SharedRun, path), shown(str(path))
    if run.counted is None:
        raise InvalidConfig(f"{name}: nothing of this run counts for a calibration", hint="Leave it out.")
    workload = replace(_workload(run, name, calibration), contents=run.counted.contents)
    settings = from_data(Configuration, dict(run.settings), locate=lambda place: f"{path}: /settings/{place}")
    counted = run.counted
    left_out: tuple[str, ...] = ()
    if settings.kernels.torch_compile:  # records of earlier versions count it
        counted, left_out = (
            replace(counted, step_s=None, reserved_bytes=None),
            (f"its step time and allocator: {COMPILED}",),
        )
    observed = Observed(
        name=name,
        workload=workload,
        configuration=settings,
        step_s=counted.step_s,
        error_ratio=counted.error_ratio,
        reserved_bytes=counted.reserved_bytes,
        outside_bytes=counted.outside_bytes,
    )
    versions = releases(run.versions)
    return ObservedRun(observed=observed, measurement=None, left_out=left_out, versions=versions)


def _workload(run: SharedRun, name: str, calibration: Calibration) -> Workload:
    """Returns model and machines of a record. Raises InvalidConfig if they cannot be built from it."""
    try:
        model = families.from_config(run.model, name=name, source=name)
        cluster = _cluster(run)
    except DstrainError as error:
        raise InvalidConfig(f"{name}: {error.problem}", hint="Leave it out.") from None
    if model.num_params != run.num_params:
        counts = f"{model.num_params:,} parameters in place of {run.num_params or 0:,}"
        raise InvalidConfig(f"{name}: its shape gives {counts}", hint="Leave it out.")
    return Workload(model=model, cluster=cluster, calibration=measured_links.with_rates(calibration, cluster))


def _cluster(run: SharedRun) -> Cluster:
    count = run.nodes * run.gpus_per_node
    cluster = describe(
        gpu=gpus.gpu(run.gpu), gpu_origin=Origin.GIVEN, gpus=count, gpus_per_node=min(count, run.gpus_per_node)
    )
    wires = [Link(name=wire.name, bytes_per_s=wire.bytes_per_s, source="a shared run") for wire in run.links]
    if wires:
        cluster = replace(cluster, intra_link=wires[0], intra_link_origin=run.links[0].origin)
    if len(wires) > 1:
        cluster = replace(cluster, inter_link=wires[1], inter_link_origin=run.links[1].origin)
    return cluster


UNLISTED = "unlisted"
"""In place of a GPU that is not in dstrain's table, whose name may be anything."""
_DIGITS = 5
"""Significant digits of a figure."""


def shared(report: Report) -> SharedRun:
    """Returns the record of a run, in which no text is the user's: figures, choices, and names of dstrain's tables."""
    recorded = report.recorded
    cluster, model, estimate = recorded.cluster, recorded.model, recorded.estimate
    figures = [one for one in report.comparisons if one.quantity is not Quantity.HOST]
    planned = {one.quantity: one.planned for one in figures if estimate is not None and one.planned is not None}
    return SharedRun(
        gpu=_gpu(cluster),
        nodes=cluster.num_nodes if cluster is not None else 1,
        gpus_per_node=cluster.gpus_per_node if cluster is not None else max(1, len(recorded.states)),
        links=_links(cluster),
        model=shape(model) if model is not None else {},
        num_params=model.num_params if model is not None else None,
        settings=_settings(recorded),
        versions={package: _public(version) for package, version in recorded.versions.items()},
        steps=report.step,
        warm_up_steps=counted(recorded.windows).warm_up_steps,
        planned=planned,
        measured={one.quantity: one.measured for one in figures if one.measured is not None},
        counted=None if _names_layers(recorded) else _counted(recorded),
    )


def text(run: SharedRun) -> str:
    """Returns the record as JSON of about a kilobyte: unknown figures are left out, and figures have five digits."""
    data = _short(to_data(run))
    return json.dumps(data, separators=(",", ":"), ensure_ascii=True) + "\n"


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(one) for name, one in value.items() if one not in (None, {}, [])}
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _gpu(cluster: Cluster | None) -> str:
    is_known = cluster is not None and (cluster.gpu.is_listed or cluster.gpu.is_cpu)
    return cluster.gpu.name if cluster is not None and is_known else UNLISTED


def _links(cluster: Cluster | None) -> tuple[Wire, ...]:
    if cluster is None:
        return ()
    intra, inter = cluster.intra_link, cluster.inter_link
    inside = Wire(name=intra.name, bytes_per_s=intra.bytes_per_s, origin=cluster.intra_link_origin)
    between = Wire(name=inter.name, bytes_per_s=inter.bytes_per_s, origin=cluster.inter_link_origin)
    return (inside, between) if cluster.num_nodes > 1 else (inside,)


def _settings(recorded: RunRecord) -> dict[str, Any]:
    """Returns the choices that differ from the default ones; none if the plan is unknown."""
    if recorded.estimate is None:
        return {}
    default = flat(DEFAULTS)
    chosen = flat(recorded.estimate.configuration)
    if _names_layers(recorded):
        chosen.pop("lora", None)
    return {name: value for name, value in chosen.items() if value != default.get(name)}


def _names_layers(recorded: RunRecord) -> bool:
    """Returns whether the adapter wraps layers by names that may be the user's, as the model has none of them."""
    if recorded.estimate is None:
        return False
    known = {"all-linear", *(linear_names(recorded.model) if recorded.model is not None else ())}
    lora, model = recorded.estimate.configuration.model.lora, recorded.model
    named = [replace(lora, target_parameters=(name,)) for name in lora.target_parameters]
    return not known.issuperset(lora.targets) or not all(model and adapted_experts(model, each) for each in named)


def _public(version: str) -> str:
    """Returns a release without its local part, unless that names a build of PyTorch.

    >>> _public("2.13.0+cu130"), _public("0.19.8+acme.7")
    ('2.13.0+cu130', '0.19.8')
    """
    public, _, build = version.partition("+")
    return version if re.fullmatch(r"cpu|(cu|rocm)[\d.]+", build) else public


def _counted(recorded: RunRecord) -> Counted | None:
    """Returns the measurements that count for a calibration; None if none does, as on a CPU."""
    with suppress(DstrainError, OSError):
        run = observed(recorded, Calibration()).observed
        return Counted(
            step_s=run.step_s,
            error_ratio=run.error_ratio,
            reserved_bytes=run.reserved_bytes,
            outside_bytes=run.outside_bytes,
            contents=run.workload.contents,
        )
    return None
