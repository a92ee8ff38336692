"""Run directories for reports: one of a real run on two CPU ranks, and some as GPUs would leave them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from cases import ask

from dstrain.facts.cluster.cluster import Cluster
from dstrain.job.schema import Job
from dstrain.monitor.comparison import communication_s
from dstrain.monitor.metrics import JsonlFile, read_jsonl
from dstrain.monitor.outcomes import Check, CheckName, Preflight
from dstrain.monitor.run_record import read
from dstrain.monitor.verdict import FirstSteps
from dstrain.oom import (
    Allocator,
    Batch,
    Blocks,
    ModelStates,
    NamedTensors,
    OutOfMemory,
    Part,
    PartBytes,
    Phase,
    Predicted,
    ProposedChange,
)
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


def gpu_run(
    folder: Path,
    *,
    slower: float = 1.0,
    waits: float = 0.0,
    more_bytes: int = 0,
    steps: int = 40,
    more: dict[str, Any] | None = None,
) -> Path:
    """Writes what 8 H100 would leave that train as planned, and returns the folder.

    Each step takes `slower` times what is planned, of which the share `waits` is waiting for data, and holds
    `more_bytes` beyond the plan. `more` are other metrics of each window, such as those of `collectives`.
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
    place.metrics.write_text("".join(f"{json.dumps(line | (more or {}))}\n" for line in lines))
    return folder


def collectives(*, least: float = 1.0, late: float = 0.0, bus_share: float = 1.0) -> dict[str, Any]:
    """Returns the metrics of collectives: `least` times the planned on rank 7, `late` s more on others."""
    _, chosen = _planned()
    assert chosen.speed is not None
    planned = communication_s(chosen.speed) * least
    by_rank = [*[planned + late] * 7, planned]
    mean = sum(by_rank) / 8
    return {
        "comm_s": mean,
        "comm_share": mean / chosen.speed.step_s,
        "comm_s_by_rank": by_rank,
        "comm_bytes": 4e10,
        "comm_calls": 800.0,
        "comm/all_gather_s": mean * 0.75,
        "comm/all_gather_bytes": 3e10,
        "comm/all_gather_calls": 600.0,
        "comm/reduce_scatter_s": mean * 0.25,
        "comm/reduce_scatter_bytes": 1e10,
        "comm/reduce_scatter_calls": 200.0,
        "bus_bytes_per_s": 3.5e11 * bus_share,
        "bus_share": bus_share,
    }


def judged(folder: Path) -> Path:
    """Adds to a run what its checks and its first steps found, as its ranks would, and returns the folder."""
    place = RunDir(folder)
    checks = (
        Check(name=CheckName.WORST_BATCH, passed=True, text="1 × 4,096 tokens, forward and backward", seconds=1.5),
        Check(name=CheckName.FIRST_LOSS, passed=False, text="20; a model that guesses has 11.9"),
    )
    place.preflight.write_text(to_json(Preflight(step=0, checks=checks, seconds=2.0, limit_s=60.0)))
    cluster, _ = _planned()
    job = Job(model="m", data="d", output_dir=str(folder))
    steps = FirstSteps(record=replace(read(place), job=job, ds_config={}, model=None, cluster=cluster))
    verdicts = [
        found | {"time_s": line["time_s"] + 0.001}
        for line in read_jsonl(place.metrics)
        if (verdict := steps.see(line, steps=line["step"])) is not None and (found := verdict.to_data())
    ]
    for data in verdicts:
        JsonlFile(place.metrics).append(data)
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


def out_of_memory(folder: Path) -> Path:
    """Adds to a run what its rank 3 held when it ran out of memory, and what the launcher added; returns the folder."""
    cluster, chosen = _planned()
    parts = to_data(chosen.memory.breakdown_bytes)
    tensors = NamedTensors(name="after mlp.gate_proj", size_bytes=96 * 2**20, count=36)
    ledger = [(Part.PARAMS, 16 * 2**30, 17 * 2**30), (Part.OTHER, 2**30, 3 * 2**30), (Part.OUTSIDE, 2**30, None)]
    change = ProposedChange(
        change="micro-batch 2 × 16 accumulated, ZeRO-3",
        set=("micro_batch=2", "grad_accum=16"),
        ds_config={"zero_optimization.stage": 3},
        device_bytes_per_gpu=55 * 2**30,
        step_ratio=0.031,
        keeps_batch=True,
    )
    record = OutOfMemory(
        rank=3,
        phase=Phase.BACKWARD,
        step=4,
        batch=Batch(rows=4, tokens_per_row=4096, samples=(4096, 1000)),
        measured=Allocator(
            requested_bytes=2 * 2**30,
            allocated_bytes=70 * 2**30,
            reserved_bytes=76 * 2**30,
            free_bytes=2**30,
            device_bytes=cluster.gpu.memory_bytes,
        ),
        largest=(Blocks(size_bytes=4 * 2**30, count=2),),
        states=ModelStates(params=17 * 2**30, grads=0, optimizer=0, host=0),
        predicted=Predicted(
            device_bytes_per_gpu=chosen.memory.device_bytes_per_gpu,
            live_bytes_per_gpu=chosen.memory.live_bytes_per_gpu,
            reserved_bytes_per_gpu=chosen.memory.reserved_bytes_per_gpu,
            peak_instant="layer backward",
            parts=parts,
            largest=(tensors,),
        ),
        ledger=tuple(PartBytes(part=part, predicted_bytes=plan, measured_bytes=held) for part, plan, held in ledger),
        fixes=(change,),
    )
    RunDir(folder).oom.write_text(to_json(record))
    return folder
