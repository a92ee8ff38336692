"""Reads the last metrics of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dstrain.launch.failure.logs import tail_of
from dstrain.rundir import RunDir


def last_metrics(run_dir: RunDir) -> dict[str, Any] | None:
    """Returns the newest line of the metrics that has a loss; a line that is still being written does not count."""
    for line in reversed(tail_of(run_dir.metrics).splitlines()):
        with suppress(ValueError):
            record = json.loads(line)
            if "step" in record and isinstance(record.get("loss"), int | float):
                return dict(record)
    return None


def metrics_words(record: Mapping[str, Any]) -> str:
    """Returns a line of the metrics in words, which begin with the number of its step.

    >>> metrics_words({"step": 7, "loss": 2.5, "tokens_per_s": 1234.5})
    '7, loss 2.5000, 1,234 tokens/s'
    """
    speed = f", {record['tokens_per_s']:,.0f} tokens/s" if record.get("tokens_per_s") else ""
    return f"{record['step']}, loss {record['loss']:.4f}{speed}"
