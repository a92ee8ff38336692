"""The record of a run that people share: what ran and what it measured, without names of theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dstrain.errors import DstrainError, InvalidConfig
from dstrain.facts.cluster import gpus, measured_links
from dstrain.facts.cluster.calibration import Calibration
from dstrain.facts.cluster.cluster import Cluster, Origin, describe
from dstrain.facts.cluster.links import Link
from dstrain.facts.data.row_contents import RowContents
from dstrain.facts.model import families
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.monitor.observed_run import COMPILED, ObservedRun, releases
from dstrain.monitor.windows import Measurement
from dstrain.paths import shown
from dstrain.plan.calibration.observed import Observed
from dstrain.plan.configuration import Configuration
from dstrain.records import from_data, load_json, type_config

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
class Figures:
    """Figures of a run, planned or measured; None if they are unknown."""

    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None
    comm_s: float | None = None
    """Seconds of a step in which ranks wait for collectives."""
    bus_bytes_per_s: float | None = None
    peak_bytes_per_gpu: float | None = None
    reserved_bytes_per_gpu: float | None = None
    states_bytes_per_gpu: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What of a run counts for a calibration; None: not measured, or disturbed."""

    step_s: float | None = None
    """Seconds of a step with as many tokens as planned."""
    error_ratio: float = 0.0
    reserved_bytes: int | None = None
    outside_bytes: int | None = None
    contents: RowContents | None = None
    """What the rows held."""


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
    planned: Figures = Figures()
    measured: Figures = Figures()
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
    """Returns what a shared record tells a calibration. Raises InvalidConfig if it is damaged or tells nothing."""
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
    measurement = Measurement(
        windows=0,
        steps=run.steps,
        step_s=run.measured.step_s,
        error_ratio=counted.error_ratio,
        tokens_per_s=None,
        tokens_per_step=0.0,
        data_wait_share=0.0,
        alloc_retries=0.0,
        ranks=(),
    )
    versions = releases(run.versions)
    return ObservedRun(observed=observed, measurement=measurement, left_out=left_out, versions=versions)


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
