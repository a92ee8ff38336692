"""Prints how gen-config changes the files, and what to type next."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from dstrain.choices import Method, Optimizer
from dstrain.cli.options.question import PlanInputs
from dstrain.facts.cluster import hostfile
from dstrain.job.yaml_source import parse_yaml
from dstrain.plan.estimate_records import Plan


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


def next_lines(out: Path, files: Mapping[str, str], asked: PlanInputs, plan: Plan) -> list[str]:
    """Returns what to type next, one line each."""
    where = "" if out == Path() else f"{out}/"
    steps = []
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
    steps.append(f"dstrain run {where}job.yaml" if where else "dstrain run")
    return [f"next: {step}" if len(steps) == 1 else f"next {number}: {step}" for number, step in enumerate(steps, 1)]
