"""Run directories for reports: one of a real run on two CPU ranks, and some as GPUs would leave them."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from cases import ask

from dstrain.facts.cluster.cluster import Cluster
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.search.decide import decide
from dstrain.records import to_data, to_json
from dstrain.rundir import RunDir

NIGHT = Path(__file__).parent / "night"
"""Recorded: 60 steps of `dstrain demo`'s model on two CPU ranks, one of which was killed after step 22, with two hand
edits of job.yaml. The paths are those of somebody at home; checkpoints and logs are left out."""
BEGAN = 1_790_000_000.0
"""When the runs that are written here began, in seconds since the epoch."""


def night(folder: Path) -> Path:
    """Returns a copy of the recorded run."""
    shutil.copytree(NIGHT, folder)
    return folder


def gpu_run(folder: Path, *, slower: float = 1.0, waits: float = 0.0, more_bytes: int = 0, steps: int = 40) -> Path:
    """Writes what 8 H100 would leave that train as planned, and returns the folder.

    Each step takes `slower` times what is planned, of which the share `waits` is waiting for data, and holds
    `more_bytes` beyond the plan.
    """
    cluster, chosen = _planned()
    folder.mkdir()
    place = RunDir(folder)
    place.plan.write_text(to_json(chosen))
    place.facts.write_text(json.dumps({"model": None, "cluster": to_data(cluster)}))
    place.request.write_text(json.dumps({"model": "qwen3-8b", "output_dir": str(folder), "max_steps": steps}))
    held = {name: getattr(chosen.memory.states, name) for name in ("params", "grads", "optimizer", "host")}
    place.states.write_text(json.dumps({"ranks": [held] * 8}))
    lines = [_window(step, chosen, slower=slower, waits=waits, more_bytes=more_bytes) for step in range(1, steps + 1)]
    place.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


@cache
def _planned() -> tuple[Cluster, Estimate]:
    """Returns the machines and the plan of these runs."""
    asked = ask(model="qwen3-8b", gpus=8, gpu="h100")
    return asked.workload.cluster, decide(asked.workload, asked.request).chosen


def _window(step: int, chosen: Estimate, *, slower: float, waits: float, more_bytes: int) -> dict[str, Any]:
    assert chosen.speed is not None
    peaks = [chosen.memory.live_bytes_per_gpu + more_bytes - rank for rank in range(8)]
    rate = chosen.speed.tokens_per_s_per_gpu / slower
    return {
        "step": step,
        "time_s": BEGAN + step * slower * chosen.speed.step_s,
        "loss": 2.0 - step / 100,
        "grad_norm": 1.0,
        "tokens_per_s": 8 * rate,
        "tokens_per_s_per_gpu": rate,
        "mfu": chosen.speed.mfu_ratio / slower,
        "step_s": chosen.speed.step_s * slower * (9 if step == 1 else 1),
        "data_wait_share": waits,
        "padding_share": 0.0,
        "peak_bytes_per_gpu": max(peaks),
        "peak_bytes_by_rank": peaks,
        "reserved_bytes_per_gpu": chosen.memory.reserved_bytes_per_gpu,
    }
