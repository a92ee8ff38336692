"""Prints how gen-config changes the files, and what to type next."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dstrain.choices import Method, Optimizer
from dstrain.cli.options.question import PlanInputs
from dstrain.cli.output.plan import time_lines
from dstrain.facts.cluster import hostfile
from dstrain.facts.cluster.cluster import Cluster
from dstrain.job.yaml_source import parse_yaml
from dstrain.plan.estimate_records import Plan
from dstrain.plan.run_time import RunTime
from dstrain.units import format_seconds, format_sizes

if TYPE_CHECKING:
    from dstrain.launch.prepare.edit_effects import Edited


def diff(out: Path, files: Mapping[str, str]) -> str:
    """Returns the unified diff from the present files to the new ones."""
    pieces: list[str] = []
    for name, text in files.items():
        path = out / name
        present = path.read_bytes().decode(errors="replace") if path.is_file() else ""
        pieces += difflib.unified_diff(
            present.splitlines(keepends=True), text.splitlines(keepends=True), str(path), f"{path} (new)"
        )
    return "".join(pieces)


def other_lines(generated: Mapping[str, str], files: Mapping[str, str]) -> list[str]:
    """Returns notes on an edited job that names another model or configuration than this plan."""
    lines = []
    for key in ("model", "ds_config"):
        yours, planned = (_job_key(text, key) for text in (files.get("job.yaml"), generated["job.yaml"]))
        if yours is None:
            lines.append(
                f"note     job.yaml names no {key}, and this plan is for {planned}: write `{key}: {planned}` there"
            )
        elif yours != planned:
            what = f": give --model {yours} to plan that" if key == "model" else ", which it does not read"
            lines.append(f"note     job.yaml names {key} {yours}, and this plan is for {planned}{what}")
    return lines


def _job_key(text: str | None, key: str) -> Any:
    return parse_yaml(text, "job.yaml")[0].get(key) if text else None


def edited_lines(edited: Edited, trained: RunTime | None, cluster: Cluster) -> list[str]:
    """Returns the training by the files with the edits that stay, if it differs from the plan."""
    estimate = edited.estimate
    if not estimate.fits:
        lines = [f"edits    the files keep yours, too large: {estimate.shortage}"]
    else:
        needed, usable = format_sizes(estimate.memory.device_bytes_per_gpu, estimate.usable_bytes_per_gpu)
        step = f", {format_seconds(estimate.speed.step_s)} a step" if estimate.speed else ""
        lines = [f"edits    the files keep yours: {needed.split()[0]} of {usable} per GPU{step}"]
    return [*lines, *time_lines(trained, cluster)] if trained is not None else lines


def next_lines(
    out: Path,
    files: Mapping[str, str],
    asked: PlanInputs,
    plan: Plan,
    *,
    with_edits: Mapping[str, Any] = MappingProxyType({"fits": True}),
    has_errors: bool = False,
) -> list[str]:
    """Returns the next commands, one line each: not the run, if lint refuses the files, or if they do not fit
    `with_edits` or have no plan."""
    where = "" if out == Path() else f"{out}/"
    steps = []
    # a hostfile of the user's own, given by --hostfile in this folder, is not among the generated files
    hosts = hostfile.parse(files["hostfile"], "hostfile") if "hostfile" in files else asked.hosts
    if hosts.placeholder_lines:
        steps.append(f"put the names of your nodes into {where}hostfile")
    configuration = plan.chosen.configuration
    is_quantized = configuration.model.method is Method.QLORA or configuration.step.optimizer is Optimizer.ADAMW_8BIT
    if is_quantized and find_spec("bitsandbytes") is None:
        steps.append("pip install 'dstrain[qlora]'")
    if configuration.kernels.liger and find_spec("liger_kernel") is None:
        steps.append("pip install 'dstrain[kernels]'")
    if parse_yaml(files["job.yaml"], "job.yaml")[0].get("data") is None:
        steps.append(f"name your training data in {where}job.yaml")
    # `run` would refuse files with errors, and run out of memory with edits that do not fit
    command, path = ("dstrain run", f"{where}job.yaml") if with_edits["fits"] else ("dstrain explain --edits", f"{out}")
    if has_errors:
        command, path = "dstrain lint", f"{where}ds_config.json"
    steps.append(f"{command} {path}" if where else command)
    return [f"next: {step}" if len(steps) == 1 else f"next {number}: {step}" for number, step in enumerate(steps, 1)]
