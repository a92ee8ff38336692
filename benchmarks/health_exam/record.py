"""Records the traces: real runs of two ranks on the CPU, from a tiny model that was trained before."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from transformers import PreTrainedTokenizerFast

from benchmarks.health_exam.rank import SETTINGS
from benchmarks.health_exam.traces import JOB, Trace
from dstrain.facts.cluster.cluster import Cluster, Link, Origin, describe
from dstrain.facts.cluster.gpus import gpu
from dstrain.facts.probe import read_model
from dstrain.monitor.metrics import read_jsonl
from dstrain.records import to_data
from dstrain.train.demo import make_model
from tests.train.engine import Engine
from tests.train.launching import change_job, environment, make_run

SHARED = (
    *("tokens_per_s", "step_s", "data_wait_share", "forward_s_by_rank", "forward_s_per_token_by_rank"),
    *("cpu_wait_share_by_rank", "own_s_by_rank", "queued_s_by_rank", "comm_s_by_rank"),
    *("bus_bytes_per_s", "bus_share", "checkpoint_s", "checkpoint_share", "host_used_share"),
)
"""What other processes of the machine change."""
KEPT = (
    *("step", "event", "from_step", "loss", "loss_nonfinite", "grad_norm", "grad_norm_nonfinite", "learning_rate"),
    *("eval_loss", "padding_share", "masked_share", "host_bytes_max"),
    *("expert_load_cv", "expert_load_max_over_mean", "dead_experts", "experts", "skipped_steps", "loss_scale"),
    *SHARED,
)
"""What rules read of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The common start of all runs under a ZeRO stage: a trained model, and the measurements of its training."""

    folder: Path
    """The demo, with that model."""
    is_first: bool = False
    """Whether ranks run before other processes of the machine."""
    bytes_per_s: float | None = None
    """Bus bandwidth of large collectives; None: nobody measured it."""


def record(
    traces: Sequence[Trace], folder: Path, *, pause_s: float, is_first: bool, say: Callable[[str], None]
) -> None:
    """Writes a file for each trace, with pauses in which others may use the machine.

    With `is_first`, ranks run before other processes of the machine.
    """
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        with Engine(home) as engine:
            bases: dict[tuple[int, int], Base] = {}
            for trace in traces:
                time.sleep(pause_s)
                began = time.monotonic()
                kind = trace.job.get("zero", 2), trace.job.get("experts", 0)
                if kind not in bases:
                    bases[kind] = replace(_trained(engine, home, *kind), is_first=is_first)
                _write(_recorded(engine, home, bases[kind], trace), bases[kind], folder / f"{trace.name}.jsonl")
                say(f"{trace.name}: {time.monotonic() - began:.0f} s")


def _trained(engine: Engine, home: Path, stage: int, experts: int) -> Base:
    """Trains a model for the runs under a ZeRO stage; under ZeRO-3 it is one with collectives of more than a MiB."""
    demo = home / f"demo-{stage}-{experts}"
    program = [sys.executable, "-m", "dstrain.train.demo", str(demo)]
    subprocess.run(program, check=True, capture_output=True, env=environment(home))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo / "model")
    width = 192 if stage == 3 else 64
    model = make_model(tokenizer, hidden_size=width, num_hidden_layers=2, num_experts=experts)
    model.save_pretrained(demo / "model")
    lines = (demo / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (demo / "few.jsonl").write_text("".join(lines[:40]), encoding="utf-8")
    base = Base(folder=demo)
    job: dict[str, Any] = {"max_steps": 400 if stage != 3 else 200, "learning_rate": 3e-3, "zero": stage}
    job |= {"router_aux_loss_coef": 0.02} if experts else {}
    run = _run(engine, home / f"base-{stage}-{experts}", base, **job)
    for file in (run / "final").iterdir():
        shutil.copyfile(file, demo / "model" / file.name)
    if stage != 3:
        return base
    windows = [line for line in read_jsonl(run / "metrics.jsonl") if "bus_bytes_per_s" in line][10:]
    return Base(
        folder=demo,
        bytes_per_s=median(line["bus_bytes_per_s"] for line in windows),
    )


def measured_links(model: Path, bytes_per_s: float) -> dict[str, Any]:
    """Returns the facts of a run on two CPU ranks whose links were measured."""
    cluster: Cluster = describe(gpu=gpu("cpu"), gpu_origin=Origin.GIVEN, gpus=2)
    link = Link(name="loopback (measured)", bytes_per_s=bytes_per_s, source="exam")
    cluster = replace(cluster, intra_link=link, intra_link_origin=Origin.MEASURED)
    return {"model": to_data(read_model(str(model))), "cluster": to_data(cluster)}


def _recorded(engine: Engine, home: Path, base: Base, trace: Trace) -> Path:
    """Returns the metrics of a run with a cause."""
    cause = trace.cause
    settings = {
        "cause": cause.injected if cause is not None else "none",
        "onset": trace.onset,
        "size": trace.size,
        "on_rank": trace.on_rank,
        "grows_over": cause.grows_over if cause is not None else 0,
    }
    job = {
        name: str(base.folder / value) if name in ("data", "eval_data") else value for name, value in trace.job.items()
    }
    run = _run(engine, home / trace.name, base, settings, **job)
    if trace.resumed:
        change_job(run, **{**trace.resumed, "resume": str(run / trace.resumed["resume"])})
        _train(engine, run)
    return run / "metrics.jsonl"


def _run(engine: Engine, run: Path, base: Base, settings: dict[str, Any] | None = None, **job: Any) -> Path:
    keys: dict[str, Any] = {**JOB, **job, "zero": {"stage": job.get("zero", 2)}}
    keys.pop("experts", None)
    make_run(run, base.folder, **keys)
    if base.bytes_per_s is not None:
        facts = measured_links(base.folder / "model", base.bytes_per_s)
        (run / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    nothing = {"cause": "none", "onset": 1, "size": 0.0, "on_rank": 0}
    (run / SETTINGS).write_text(json.dumps((settings or nothing) | {"is_first": base.is_first}), encoding="utf-8")
    _train(engine, run)
    return run


def _train(engine: Engine, run: Path) -> None:
    """Raises RuntimeError with the end of the log if a rank fails."""
    codes = engine.run("benchmarks.health_exam.rank", run, log=Path(f"{run}.log"))
    if any(codes):
        raise RuntimeError(
            f"{run.name}: exit codes {codes}\n{Path(f'{run}.log.0').read_text(encoding='utf-8')[-3000:]}"
        )


def _write(metrics: Path, base: Base, to: Path) -> None:
    """Keeps what rules read, with four digits, after what was planned.

    If ranks shared their cores, what depends on other processes is left out.
    """
    names = [name for name in KEPT if base.is_first or name not in SHARED]
    kept = [{name: _short(line[name]) for name in names if name in line} for line in read_jsonl(metrics)]
    lines = [
        json.dumps(line, separators=(",", ":")) for line in kept if "step" in line or line.get("event") == "resume"
    ]
    to.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
