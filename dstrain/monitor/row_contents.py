"""What rows held that a run has trained on, and its plan for such rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace

from dstrain.errors import DstrainError
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.data.row_contents import RowContents
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import measured_workload
from dstrain.monitor.windows import Line, number
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.speed.step_time import delayed, speed
from dstrain.records import from_data

_NAMES = tuple(field.name for field in fields(RowContents))


def trained_contents(windows: Sequence[Line]) -> RowContents | None:
    """Returns what rows held, the mean over the tokens of all windows; None if a window does not say it, or nonsense.

    >>> one = {"tokens": 300, "sample_tokens": 10.0, "attended_tokens": 20.0, "target_share": 0.5}
    >>> trained_contents([one, {**one, "tokens": 100, "attended_tokens": 40.0}])
    RowContents(sample_tokens=10.0, attended_tokens=25.0, target_share=0.5)
    >>> trained_contents([{**one, "attended_tokens": 0.0}])
    """
    rows = [[number(window.get(name)) for name in ("tokens", *_NAMES)] for window in windows]
    known = [[value for value in row if value is not None] for row in rows]
    total = sum(row[0] for row in known if row)
    if not total or any(len(row) != len(_NAMES) + 1 for row in known):
        return None
    means = (sum(row[0] * row[index] for row in known) / total for index in range(1, len(_NAMES) + 1))
    with suppress(DstrainError):
        return from_data(RowContents, dict(zip(_NAMES, means, strict=True)), locate=str)
    return None


def as_trained(
    estimate: Estimate | None, model: ModelFacts | None, cluster: Cluster | None, contents: RowContents | None
) -> Estimate | None:
    """Returns the estimate with the speed for rows with these contents, if it has a speed and they are known."""
    if estimate is None or estimate.speed is None or model is None or cluster is None or contents is None:
        return estimate
    known = speed(measured_workload(model, cluster, contents), estimate.configuration)
    if known is None:
        return estimate
    return replace(estimate, speed=delayed(known, estimate.memory.retries_per_step))


def contents_text(estimate: Estimate | None, contents: RowContents | None) -> str:
    """Returns what times are planned for, in words; empty if they are planned for whole rows."""
    if estimate is None or estimate.speed is None or contents is None:
        return ""
    labels = f"{contents.target_share:.0%} of the tokens with a label"
    if not estimate.configuration.batch.packing:
        return f"times are planned for the rows of this run: {labels}"
    return f"times are planned for the rows of this run: samples of {contents.sample_tokens:,.0f} tokens, {labels}"
