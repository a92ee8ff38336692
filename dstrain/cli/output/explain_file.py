"""Prints the explanation of a whole configuration, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dstrain.cli.edits import cost_text
from dstrain.cli.output.plan import LIMITS, subject_lines
from dstrain.config.explain import (
    BATCH,
    OTHER,
    PRECISION,
    ZERO,
    Entry,
    Here,
    Section,
    estimate_of,
    rest_bytes,
    sections,
)
from dstrain.config.jsonc import dotted, json_pointer
from dstrain.config.key_bytes import scale
from dstrain.config.keys import meaning, summary
from dstrain.config.lint.rule import ABSENT, JobContext
from dstrain.config.resolve_auto import filled
from dstrain.facts.ds_config import offload_device, written_device, zero_stage
from dstrain.facts.workload import Workload
from dstrain.launch.prepare.job_context import request_of, workload_of
from dstrain.plan.estimate import unplanned_optimizer
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.labels import arithmetic, batch_label, label
from dstrain.plan.speed.compute import row_samples
from dstrain.units import format_bytes, format_seconds
from dstrain.wrapping import wrapped

_SHARED = {
    0: "Every GPU has all parameters, gradients and optimizer states",
    1: "Optimizer states are sharded over the GPUs; each has all parameters and gradients",
    2: "Gradients and optimizer states are sharded over the GPUs; each has all parameters",
    3: "Parameters, gradients and optimizer states are sharded over the GPUs; layers are gathered for use",
}
_DEVICES = {"cpu": "in host RAM", "nvme": "on NVMe"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The explanation of a configuration."""

    path: Path
    """The file."""
    config: Mapping[str, Any]
    """The configuration."""
    context: JobContext | None
    """The job that it belongs to, if there is one."""
    workload: Workload | None
    """Its model and cluster; None if one of them is unknown."""
    estimate: Estimate | None
    """Its memory and speed, if they can be estimated."""
    missing: str | None
    """Why there is no estimate."""
    sections: tuple[Section, ...]
    """Its keys."""


def explain(path: Path, config: Mapping[str, Any], context: JobContext | None, missing: str | None) -> Explanation:
    """Returns the explanation of a configuration."""
    answer: Estimate | str = missing or "no job was found"
    workload = workload_of(context) if context is not None else None
    if context is not None and context.job is not None:
        answer = unknown_model(context.job.job.model)
        if workload is not None:
            answer = estimate_of(Here(config=config, request=request_of(context.job.job), workload=workload))
    job = context.job.job if context and context.job else None
    model = context.model if context else None
    num_ranks = context.hosts.num_slots if context and context.hosts else None
    fills = filled(job, model, num_ranks=num_ranks) if job else {}
    by = scale(config, job, model, num_ranks=num_ranks)
    estimate = answer if isinstance(answer, Estimate) else None
    return Explanation(
        path=path,
        config=config,
        context=context,
        workload=workload,
        estimate=estimate,
        missing=None if isinstance(answer, Estimate) else answer,
        sections=tuple(sections(config, filled=fills, by=by, estimate=estimate)),
    )


def unknown_model(name: str) -> str:
    """Returns a line for an unknown model, with the command that says why."""
    return f"the model {name} is unknown; dstrain plan --model {name} says why"


def lines(explanation: Explanation) -> list[str]:
    """Returns the explanation in lines that fit a terminal."""
    text = [*_head(explanation), ""]
    for section in explanation.sections:
        text += [*_section(section, explanation), ""]
    if explanation.estimate is not None:
        parts = rest_bytes(explanation.estimate)
        text += [f"not set by the file: {_total(parts)} per GPU", f"  {_listed(parts)}"]
    return [wrapped(line) for line in "\n".join(text).rstrip("\n").split("\n")]


def _head(explanation: Explanation) -> Iterator[str]:
    """Yields model, machines, memory and speed."""
    estimate = explanation.estimate
    if explanation.workload is not None:
        yield from subject_lines(explanation.workload)
    yield f"file     {explanation.path}"
    if estimate is None:
        yield f"No estimate: {explanation.missing}. Sizes below are of single keys."
        return
    configuration = estimate.configuration
    numbers = arithmetic(configuration.model.precision, configuration.step.optimizer)
    yield f"config   {label(configuration)}, {numbers}"
    if (as_adamw := unplanned_optimizer(explanation.config)) is not None:
        yield f"         {as_adamw}"
    needs = estimate.memory
    fits = "" if estimate.fits else f"; does not fit: {estimate.shortage}"
    yield (
        f"memory   {format_bytes(needs.device_bytes_per_gpu)} per GPU at the peak, {needs.peak_instant};"
        f" {format_bytes(needs.host_bytes_per_node)} of host RAM per node{fits}"
    )
    if estimate.speed is not None:
        step, limit = format_seconds(estimate.speed.step_s), LIMITS[estimate.speed.limited_by]
        yield f"speed    {step} a step, {estimate.speed.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, limited by {limit}"


def _section(section: Section, explanation: Explanation) -> Iterator[str]:
    total = f": {_total(section.parts_bytes)} per GPU" if any(section.parts_bytes.values()) else ""
    yield f"{section.name}{total}"
    for sentence in _words(section, explanation):
        yield f"  {sentence}."
    if any(section.parts_bytes.values()):
        yield f"  {_listed(section.parts_bytes)}"
    for entry in section.entries:
        yield from _entry(entry, section)
    if section.silent:
        defaults = "; ".join(
            f"{key.path.removeprefix('zero_optimization.')} is {default}" for key, default in section.silent
        )
        yield f"  not written: {defaults}"


def _words(section: Section, explanation: Explanation) -> Iterator[str]:
    """Yields sentences about a section."""
    if section.name == ZERO:
        yield _SHARED[zero_stage(explanation.config)]
        yield from _offload_words(explanation)
    elif section.name == PRECISION and explanation.estimate is not None:
        precision = explanation.estimate.configuration.model.precision
        yield f"Forward and backward in {precision}, {precision.num_bytes} bytes a parameter"
    elif section.name == BATCH and explanation.context is not None and explanation.context.job is not None:
        job, hosts = explanation.context.job.job, explanation.context.hosts
        ranks = hosts.num_slots if hosts else 1
        shared = ("s" if ranks > 1 else "") + (f" ÷ SP {job.sp}" if job.sp > 1 else "")
        shared += f" ÷ TP {job.tp}" if job.tp > 1 else ""
        yield (
            f"{ranks} GPU{shared} × micro-batch {job.micro_batch} × {job.grad_accum} accumulated"
            f" = {batch_label(job.samples_per_step(ranks), packing=job.packing, row_samples=_row_samples(explanation))}"
            f" a step, of up to {job.seq_len} tokens"
            + (f"; positions stretched: {job.rope_scaling}" if job.rope_scaling else "")
        )
    elif section.meaning is not None and section.name not in (OTHER, BATCH, PRECISION):
        yield section.meaning.removesuffix(".")


def _row_samples(explanation: Explanation) -> float | None:
    """Returns the mean samples of a row; None if they are unknown."""
    if explanation.estimate is None or explanation.workload is None:
        return None
    return row_samples(explanation.estimate.configuration, explanation.workload.contents)


def _offload_words(explanation: Explanation) -> Iterator[str]:
    for name, what in (("offload_optimizer", "Optimizer states"), ("offload_param", "Parameters")):
        device = offload_device(explanation.config, name)
        if device != "none":
            yield f"{what} are {_DEVICES[device]}"
        elif written_device(explanation.config, name) != "none":
            yield f"{name} has no effect at stage {zero_stage(explanation.config)}: see dstrain lint"
    if explanation.estimate is not None and (text := _elsewhere(explanation.estimate)):
        yield text


def _elsewhere(estimate: Estimate) -> str:
    """Returns the sizes of the states that are not on the GPU, or nothing if all of them are."""
    states, node = estimate.memory.states, format_bytes(estimate.memory.host_bytes_per_node)
    parts = {"in host RAM": states.host, "in host staging buffers": states.staging, "on NVMe": states.nvme}
    sizes = [f"{format_bytes(count)} {where}" for where, count in parts.items() if count]
    return f"Each rank has {', '.join(sizes)}; a node needs {node} of RAM with its processes" if sizes else ""


def _entry(entry: Entry, section: Section) -> Iterator[str]:
    """Yields a key with its value and its meaning."""
    value = json.dumps(entry.value, ensure_ascii=False)
    if entry.filled is not ABSENT:
        value += f" = {json.dumps(entry.filled, ensure_ascii=False)} from the job"
    idle = "; not read at this stage" if entry.is_idle else ""
    yield f"  {dotted(entry.pointer).removeprefix('zero_optimization.')}: {value}{cost_text(entry.cost)}{idle}"
    if entry.key is None:
        yield "      Not a key of DeepSpeed: see dstrain lint."
    else:
        gone = f" Gone since DeepSpeed {entry.key.removed}." if entry.key.removed else ""
        instead = f" Instead: {entry.key.instead}." if entry.key.instead else ""
        does = summary(entry.key) if entry.pointer[:-1] == (section.name,) else meaning(entry.key)
        yield f"      {does}{gone}{instead}"


def _total(parts: Mapping[str, int]) -> str:
    return format_bytes(sum(parts.values()))


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items() if count)


def document(explanation: Explanation) -> dict[str, Any]:
    """Returns the answer as JSON-ready data."""
    estimate = explanation.estimate
    return {
        "schema": 1,
        "file": str(explanation.path),
        "missing": explanation.missing,
        "memory": {
            "device_bytes_per_gpu": estimate.memory.device_bytes_per_gpu,
            "host_bytes_per_node": estimate.memory.host_bytes_per_node,
            "nvme_bytes_per_node": estimate.memory.nvme_bytes_per_node,
            "fits": estimate.fits,
        }
        if estimate
        else None,
        "step_s": estimate.speed.step_s if estimate and estimate.speed else None,
        "sections": [_section_document(section, explanation) for section in explanation.sections],
        "beside_the_file_bytes": rest_bytes(estimate) if estimate else None,
    }


def _section_document(section: Section, explanation: Explanation) -> dict[str, Any]:
    return {
        "name": section.name,
        "words": list(_words(section, explanation)),
        "parts_bytes_per_gpu": section.parts_bytes,
        "keys": [
            {
                "pointer": json_pointer(entry.pointer),
                "value": entry.value,
                "filled": None if entry.filled is ABSENT else entry.filled,
                "meaning": meaning(entry.key) if entry.key else None,
                "cost": asdict(entry.cost) if entry.cost else None,
                "is_read_with_this_stage": not entry.is_idle,
            }
            for entry in section.entries
        ],
        "defaults": {key.path: default for key, default in section.silent},
    }
