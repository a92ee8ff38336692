"""Records the traces: real runs of two ranks on the CPU, from a tiny model that was trained before."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from benchmarks.health_exam.rank import SETTINGS
from benchmarks.health_exam.traces import JOB, Trace
from dstrain.monitor.sinks.jsonl import read_jsonl
from dstrain.train.demo import make_model
from tests.train.engine import Engine
from tests.train.launching import change_job, environment, make_run

KEPT = (
    *("step", "event", "from_step", "loss", "loss_nonfinite", "grad_norm", "grad_norm_nonfinite", "learning_rate"),
    *("eval_loss", "tokens_per_s", "step_s", "data_wait_share", "padding_share", "masked_share", "host_bytes_max"),
    *(
        "host_used_share",
        "forward_s_by_rank",
        "forward_s_per_token_by_rank",
        "cpu_wait_share_by_rank",
        "own_s_by_rank",
        "queued_s_by_rank",
        "comm_s_by_rank",
        "checkpoint_s",
        "checkpoint_share",
    ),
)
"""What rules read of a line."""


def record(traces: Sequence[Trace], folder: Path, *, pause_s: float, say: Callable[[str], None]) -> None:
    """Writes a file for each trace, with pauses in which others may use the machine."""
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        demo = home / "demo"
        program = [sys.executable, "-m", "dstrain.train.demo", str(demo)]
        subprocess.run(program, check=True, capture_output=True, env=environment(home))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(demo / "model")
        make_model(tokenizer, hidden_size=64, num_hidden_layers=2).save_pretrained(demo / "model")
        lines = (demo / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (demo / "few.jsonl").write_text("".join(lines[:40]), encoding="utf-8")
        with Engine(home) as engine:
            base = _run(engine, home / "base", demo, max_steps=400, learning_rate=3e-3)
            for file in (base / "final").iterdir():
                shutil.copyfile(file, demo / "model" / file.name)
            for trace in traces:
                time.sleep(pause_s)
                began = time.monotonic()
                _write(_recorded(engine, home, demo, trace), folder / f"{trace.name}.jsonl")
                say(f"{trace.name}: {time.monotonic() - began:.0f} s")


def _recorded(engine: Engine, home: Path, demo: Path, trace: Trace) -> Path:
    """Returns the metrics of a run with a cause."""
    settings = {"cause": trace.injected, "onset": trace.onset, "size": trace.size, "on_rank": trace.on_rank}
    job = {name: str(demo / value) if name in ("data", "eval_data") else value for name, value in trace.job.items()}
    run = _run(engine, home / trace.name, demo, settings, **job)
    if trace.resumed:
        change_job(run, **{**trace.resumed, "resume": str(run / trace.resumed["resume"])})
        _train(engine, run)
    return run / "metrics.jsonl"


def _run(engine: Engine, run: Path, demo: Path, settings: dict[str, Any] | None = None, **job: Any) -> Path:
    keys: dict[str, Any] = {**JOB, **job, "zero": {"stage": job.get("zero", 2)}}
    make_run(run, demo, **keys)
    nothing = {"cause": "none", "onset": 1, "size": 0.0, "on_rank": 0}
    (run / SETTINGS).write_text(json.dumps((settings or nothing) | {"is_first": True}), encoding="utf-8")
    _train(engine, run)
    return run


def _train(engine: Engine, run: Path) -> None:
    """Raises RuntimeError with the end of the log if a rank fails."""
    codes = engine.run("benchmarks.health_exam.rank", run, log=Path(f"{run}.log"))
    if any(codes):
        raise RuntimeError(
            f"{run.name}: exit codes {codes}\n{Path(f'{run}.log.0').read_text(encoding='utf-8')[-3000:]}"
        )


def _write(metrics: Path, to: Path) -> None:
    """Keeps what rules read, with four digits."""
    kept = [{name: _short(line[name]) for name in KEPT if name in line} for line in read_jsonl(metrics)]
    lines = [
        json.dumps(line, separators=(",", ":")) for line in kept if "step" in line or line.get("event") == "resume"
    ]
    to.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
