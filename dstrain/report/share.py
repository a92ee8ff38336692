"""Makes the record of a run that people share."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from dstrain.errors import DstrainError
from dstrain.facts.cluster.calibration import Calibration
from dstrain.facts.cluster.cluster import Cluster
from dstrain.monitor.comparison import Quantity
from dstrain.monitor.observed_run import read_run
from dstrain.monitor.shared_run import Counted, Figures, SharedRun, Wire, shape
from dstrain.monitor.windows import counted
from dstrain.plan.configuration import DEFAULTS, flat
from dstrain.plan.memory.adapters import adapted_experts, linear_names
from dstrain.records import to_data
from dstrain.report.recorded import Recorded
from dstrain.report.report import Report

UNLISTED = "unlisted"
"""In place of a GPU that is not in dstrain's table, whose name may be anything."""
_DIGITS = 5
"""Significant digits of a figure."""
_FIELDS = {field.name for field in fields(Figures)}


def shared(report: Report) -> SharedRun:
    """Returns the record of a run, in which no text is the user's: figures, choices, and names of dstrain's tables."""
    recorded = report.recorded
    cluster, model, estimate = recorded.cluster, recorded.model, recorded.estimate
    planned = {one.quantity: one.planned for one in report.comparisons}
    measured = {one.quantity: one.measured for one in report.comparisons}
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
        planned=_figures(planned) if estimate is not None else Figures(),
        measured=_figures(measured),
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


def _settings(recorded: Recorded) -> dict[str, Any]:
    """Returns the choices that differ from the default ones; none if the plan is unknown."""
    if recorded.estimate is None:
        return {}
    default = flat(DEFAULTS)
    chosen = flat(recorded.estimate.configuration)
    if _names_layers(recorded):
        chosen.pop("lora", None)
    return {name: value for name, value in chosen.items() if value != default.get(name)}


def _names_layers(recorded: Recorded) -> bool:
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


def _figures(values: dict[Quantity, float | None]) -> Figures:
    return Figures(**{name.value: value for name, value in values.items() if name.value in _FIELDS})


def _counted(recorded: Recorded) -> Counted | None:
    """Returns the measurements that count for a calibration; None if none does, as on a CPU."""
    with suppress(DstrainError, OSError):
        observed = read_run(recorded.run_dir, Calibration()).observed
        return Counted(
            step_s=observed.step_s,
            error_ratio=observed.error_ratio,
            reserved_bytes=observed.reserved_bytes,
            outside_bytes=observed.outside_bytes,
            contents=observed.workload.contents,
        )
    return None
