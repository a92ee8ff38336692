"""Prints a run before its start, and its result."""

from __future__ import annotations

import json
import shlex
from typing import Any

from dstrain.choices import Offload
from dstrain.errors import RunFailed
from dstrain.facts.cluster.cluster import Origin
from dstrain.facts.ds_config import zero_stage
from dstrain.launch.prepare.prepare import PreparedRun
from dstrain.monitor.outcomes import best_model
from dstrain.monitor.sinks.sink import upload_command
from dstrain.paths import shown
from dstrain.plan.labels import arithmetic
from dstrain.rundir import RunDir
from dstrain.units import format_bytes, format_count, format_seconds
from dstrain.wrapping import aligned


def before_lines(prepared: PreparedRun) -> list[str]:
    """Returns the run that starts, with notes."""
    job, hosts = prepared.job, prepared.hosts
    # of an assumed GPU neither the name nor the predicted memory is shown: both would be guesses
    is_known = prepared.cluster.gpu_origin is not Origin.ASSUMED
    device = "CPU" if prepared.on_cpu else prepared.cluster.gpu.name if is_known else "GPU"
    machines = "this machine" if prepared.is_local else f"{len(hosts.hosts)} hosts"
    numbers = arithmetic(job.precision, job.optimizer)
    lines = [
        f"run      {job.method} training of {shown(job.model)}",
        f"on       {hosts.num_slots} × {device}, {machines}; ZeRO-{zero_stage(prepared.ds_config)}, {numbers},"
        f" micro-batch {job.micro_batch} × {job.grad_accum} accumulated, {job.seq_len} tokens"
        f"{', packed' if job.packing else ''}{f', over SP {job.sp}' if job.sp > 1 else ''}"
        f"{f', over TP {job.tp}' if job.tp > 1 else ''}{f', over EP {job.ep}' if job.ep > 1 else ''}"
        + (f", {job.rope_scaling}" if job.rope_scaling else ""),
        f"into     {shown(str(prepared.run_dir.path))}",
    ]
    estimate = prepared.estimate
    if estimate is not None and is_known and not prepared.on_cpu:
        fits = "" if estimate.fits else "  ← does not fit"
        lines.append(f"memory   {format_bytes(estimate.memory.device_bytes_per_gpu)} per GPU predicted{fits}")
        if not estimate.fits:
            lines.append(f"         {estimate.shortage}; the run will probably run out of memory")
    if prepared.attention.says is not None:
        lines.append(f"attn     {prepared.attention.says}")
    lines += [f"note     {note}" for note in prepared.notes]
    return lines


def summary(run_dir: RunDir) -> dict[str, Any]:
    """Returns rank 0's summary, and the model states predicted and measured.

    Raises RunFailed if rank 0 wrote no summary.
    """
    if not run_dir.summary.exists():
        raise RunFailed("every rank ended without an error, but rank 0 wrote no summary", hint=f"Logs: {run_dir.logs}")
    written: dict[str, Any] = json.loads(run_dir.summary.read_text(encoding="utf-8"))
    return {"schema": 1, "run_dir": str(run_dir.path), **written, "states": _states(run_dir)}


def _states(run_dir: RunDir) -> dict[str, Any] | None:
    """Returns the bytes of model states of one rank, predicted and measured, or None if either is missing."""
    if not run_dir.states.exists() or not run_dir.plan.exists():
        return None
    ranks = json.loads(run_dir.states.read_text(encoding="utf-8"))["ranks"]
    plan = json.loads(run_dir.plan.read_text(encoding="utf-8"))
    states = plan["memory"]["states"]
    offloaded = plan["configuration"]["offload"] != Offload.NONE.value
    device = states["params"] + states["grads"] + states["optimizer"]
    measured = [rank["params"] + rank["grads"] + rank["optimizer"] for rank in ranks]
    return {
        "predicted_bytes_per_gpu": device,
        "measured_bytes_per_gpu": measured,
        "predicted_host_bytes_per_rank": states["host"] if offloaded else 0,
        "measured_host_bytes_per_rank": [rank["host"] for rank in ranks],
    }


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the summary as rows of a name and a value."""
    rows = []
    if summary.get("first_loss") is not None and summary.get("last_loss") is not None:
        rows.append(("loss, first → last", f"{summary['first_loss']:.3f} → {summary['last_loss']:.3f}"))
    if summary.get("eval_loss") is not None:
        rows.append(("evaluation loss", f"{summary['eval_loss']:.3f}"))
    if (best := best_model(summary)) is not None:
        rows.append(("best model", best.text))
    if summary.get("skipped_steps"):
        rows.append(("skipped steps", f"{summary['skipped_steps']} of {summary['steps']}: gradients not finite"))
    if summary.get("tokens_per_s"):
        total = f"{format_count(summary['tokens'])} tokens in {format_seconds(summary['train_s'])} of steps"
        rows.append(("tokens/s", f"{summary['tokens_per_s']:,.0f} ({total})"))
    rows += _state_rows(summary.get("states"))
    if summary.get("peak_bytes_per_gpu"):
        rows.append(("peak memory per GPU", format_bytes(summary["peak_bytes_per_gpu"])))
    rows.append(("run directory", shown(summary["run_dir"])))
    if summary.get("final"):
        rows.append(("final model", shown(summary["final"])))
    if summary.get("swanlab_dir"):
        rows.append((f"SwanLab ({summary.get('swanlab_mode')})", shown(summary["swanlab_dir"])))
    return rows


def _state_rows(states: dict[str, Any] | None) -> list[tuple[str, str]]:
    if states is None:
        return []
    rows = []
    for name, key in (("model states per rank", "bytes_per_gpu"), ("offloaded per rank", "host_bytes_per_rank")):
        predicted, measured = states[f"predicted_{key}"], states[f"measured_{key}"]
        if not predicted and not any(measured):
            continue
        low, high = min(measured), max(measured)
        span = " to ".join(dict.fromkeys([format_bytes(low), format_bytes(high)]))
        off = f" ({(high - predicted) / predicted:+.2%})" if predicted else ""
        rows.append((name, f"{format_bytes(predicted)} predicted, {span} measured{off}"))
    return rows


def summary_text(summary: dict[str, Any], run_dir: RunDir) -> str:
    """Returns the result of the run, and what to type next."""
    rows = summary_rows(summary)
    lines = ["", *aligned(rows), ""]
    lines.append(f"next: dstrain report {shlex.quote(shown(str(run_dir.path)))}")
    lines.append("      (how it went, and how far it was from its plan)")
    if summary.get("swanlab_to_upload"):
        command = upload_command([shown(folder) for folder in summary["swanlab_to_upload"]])
        lines += [f"      {command}", "      (uploads the curves, with an API key)"]
    return "\n".join(lines)
