"""Writes report pages of recorded runs that differ in kind, with their plan and the findings of the health rules.

On a CPU that is memory alone: no time is planned there, and PyTorch counts no peak, which the page says. Of whole runs
the page is that of `dstrain report --html`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.health_exam.score import FACTS, FOLDER, Result
from benchmarks.health_exam.traces import JOB
from benchmarks.health_exam.whole_runs import WholeRun
from dstrain.choices import Precision
from dstrain.facts.cluster.cluster import Origin, describe
from dstrain.facts.cluster.gpus import gpu
from dstrain.facts.model.families import from_config
from dstrain.facts.workload import Workload
from dstrain.monitor.metrics import read_jsonl
from dstrain.monitor.run_record import read
from dstrain.plan.configuration import DEFAULTS, changed
from dstrain.plan.estimate import assess
from dstrain.records import to_data, to_json
from dstrain.report import page as report_page
from dstrain.report.report import report
from dstrain.rundir import RunDir

SHOWN = ("slow-rank-0", "memory-leak-0", "NaN-in-a-batch-0")
"""Recorded runs with a page: one rank among others, a trend with the time left, and a number that ends training."""
_BEGAN_S = 1_790_000_000.0
"""When each run is said to have begun, in seconds since the epoch, so that pages are the same each time."""


def write(results: Sequence[Result], whole: Sequence[WholeRun], folder: Path) -> list[Path]:
    """Writes a page for each result, named after its cause, and for each whole run, and returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = []
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        runs = [_run_directory(result, home / result.trace.name.rpartition("-")[0]) for result in results]
        for run in [*runs, *(one.write(home / one.name) for one in whole)]:
            path = folder / f"{run.path.name}.html"
            text = report_page.page([report(read(run), now=_BEGAN_S + 3600)])
            path.write_text(text.replace(temporary, ""), encoding="utf-8")
            pages.append(path)
    return pages


def _run_directory(result: Result, folder: Path) -> RunDir:
    """Returns a run directory with the metrics of a trace and the findings of the rules."""
    folder.mkdir()
    run, now = RunDir(folder), _BEGAN_S
    lines: list[dict[str, Any]] = []
    times: dict[int, float] = {}
    for record in read_jsonl(FOLDER / f"{result.trace.name}.jsonl"):
        steps = record.get("step", 0) - max(times, default=0)
        now += max(steps, 0) * record.get("step_s", 0.0)
        times[record.get("step", 0)] = now
        lines.append({**record, "time_s": round(now, 3)})
    findings = [{**asdict(one), "time_s": round(times[one.step], 3)} for one in result.findings]
    job = {**JOB, "model": "demo", "output_dir": str(folder), **result.trace.job}
    run.summary.write_text(json.dumps({"steps": result.steps, "ranks": 2}), encoding="utf-8")
    stage, experts = job.pop("zero", 2), job.pop("experts", 0)
    run.request.write_text(json.dumps(job), encoding="utf-8")
    _write_plan(run, job, stage, experts)
    for file, records in ((run.metrics, lines), (run.health, findings)):
        file.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return run


def _write_plan(run: RunDir, job: Mapping[str, Any], stage: int, experts: int) -> None:
    """Writes what was known and planned: the model of the recorded runs (`record.py`) on two ranks of a CPU."""
    width = 192 if stage == 3 else 64
    config = {
        "model_type": "qwen3",
        "vocab_size": FACTS.vocab_size,
        "hidden_size": width,
        "num_hidden_layers": 2,
        "intermediate_size": 3 * width,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 64,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    if experts:
        config |= {"model_type": "qwen3_moe", "num_experts": experts, "num_experts_per_tok": 2}
        config |= {"moe_intermediate_size": width, "norm_topk_prob": True, "decoder_sparse_step": 1}
    model = from_config(config, name="demo", source="health exam")
    cluster = describe(gpu=gpu("cpu"), gpu_origin=Origin.GIVEN, gpus=2)
    keys = {name: job[name] for name in ("seq_len", "micro_batch", "grad_accum", "packing") if name in job}
    planned = assess(
        Workload(model=model, cluster=cluster),
        changed(DEFAULTS, **keys, zero_stage=stage, precision=Precision(job["precision"])),
    )
    run.plan.write_text(to_json(planned), encoding="utf-8")
    facts = {"model": to_data(model), "cluster": to_data(cluster)}
    run.facts.write_text(json.dumps(facts), encoding="utf-8")
