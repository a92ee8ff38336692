"""Writes a plan as one HTML page: the terminal's figures, and the plans of near questions for its sliders."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from signal import SIG_DFL, SIGINT, signal
from typing import Any

from dstrain import __version__
from dstrain.cli.console import talk
from dstrain.cli.options.question import PlanInputs
from dstrain.cli.options.typed import spelled
from dstrain.cli.output.plan import PARTS, considered, part_bytes, plan_document, table_row
from dstrain.facts.cluster.cluster import Cluster
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.labels import label
from dstrain.plan.search.decide import Axes, Point, Survey, grid_axes, grid_points
from dstrain.plan.search.infeasible import NO_WAY, Way
from dstrain.plan.search.search_space import global_batch
from dstrain.report.html import CHINESE, render
from dstrain.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The question on the command line."""

    verb: str
    """`plan` or `gen-config`."""
    typed: Mapping[str, Any]
    """The options that were typed, now or the last time."""
    inputs: PlanInputs
    """The facts and the request they stand for."""

    @property
    def names_hosts(self) -> bool:
        """Whether the machines are named, so that `--gpus` cannot change their number."""
        return bool(self.typed.get("hosts") or self.typed.get("hostfile"))

    def command(self, **changed: Any) -> str:
        """Returns the command, with other options or as it was typed."""
        options = {**self.typed, **changed}
        return f"dstrain {self.verb} {spelled({key: value for key, value in options.items() if value is not None})}"


def page(survey: Survey, question: Question, ways: Sequence[Way] = (), *, name: str) -> str:
    """Returns the page of a plan; shows on a terminal that the plans of near questions are being computed."""
    from concurrent.futures import ProcessPoolExecutor  # needed only where a page is written

    workload, request = question.inputs.workload, question.inputs.request
    keeps_nodes = question.names_hosts or question.typed.get("gpus_per_node")
    per_node = workload.cluster.gpus_per_node if keeps_nodes else None
    near = grid_axes(workload, request, survey.first, gpus_per_node=per_node)
    # what the engine holds depends on the number of ranks, and is cached; Ctrl-C ends the processes without a traceback
    parts = [replace(near, clusters=(cluster,)) for cluster in near.clusters]
    with ProcessPoolExecutor(min(len(parts), os.cpu_count() or 1), None, signal, (SIGINT, SIG_DFL)) as pool:
        lists = pool.map(partial(grid_points, workload, request, survey.first), parts)
        with talk.status(f"{name}: planning near questions for its sliders"):
            grid = [point for part in lists for point in part]
    return render("plan", _data(survey, question, ways, near, grid))


def _data(survey: Survey, question: Question, ways: Sequence[Way], near: Axes, grid: Sequence[Point]) -> dict[str, Any]:
    """Returns all that the page shows as JSON-ready data; figures are texts as in the terminal."""
    workload, first = question.inputs.workload, survey.first
    cluster, asked = workload.cluster, question.inputs.request.micro_batch
    seq_len = first.configuration.batch.seq_len
    gpus = [machines.num_gpus for machines in near.clusters]
    return {
        "version": __version__,
        "plan": plan_document(survey, workload),
        "command": question.command(),
        "machines": {"shape": _shape(cluster), "gib": f"{cluster.gpu.memory_bytes / GIB:.1f}"},
        "method": str(question.inputs.request.method),
        "precision": str(first.configuration.model.precision),
        "seq_len": seq_len,
        "answers": [_answer(cluster, proposal.estimate) for proposal in survey.proposals],
        "ways": [{"text": str(way), "command": question.command(**way.options)} for way in ways],
        "no_way": NO_WAY,
        "considered": considered(survey),
        "notes": list(survey.notes),
        "parts": [part.name for part in PARTS],
        "chinese": dict(CHINESE),
        "axes": {"gpus": gpus, "seq_len": list(near.seq_len), "micro_batch": list(near.micro_batch)},
        "asked": {"gpus": cluster.num_gpus, "seq_len": seq_len, "micro_batch": asked},
        "points": [_point(question, point) for point in grid],
    }


def _point(question: Question, point: Point) -> dict[str, Any]:
    """Returns the answer to a near question, or the problem, and the command that asks it."""
    changed: dict[str, Any] = {"gpus": point.cluster.num_gpus, "seq_len": point.seq_len}
    if question.names_hosts:
        del changed["gpus"]
    changed |= {"micro_batch": point.micro_batch} if point.micro_batch else {}
    is_typed = not question.names_hosts or point.cluster.num_gpus == question.inputs.workload.cluster.num_gpus
    typed = replace(question, typed={key: value for key, value in question.typed.items() if key != "micro_batch"})
    values = {"shape": _shape(point.cluster), "command": typed.command(**changed) if is_typed else ""}
    if isinstance(point.answer, Estimate):
        return {**values, **_answer(point.cluster, point.answer)}
    return {**values, "problem": point.answer.problem}


def _answer(cluster: Cluster, estimate: Estimate) -> dict[str, Any]:
    """Returns the figures of a plan."""
    memory, configuration = estimate.memory, estimate.configuration
    _, _, gpu, host, step, tokens, mfu, limit = table_row(0, estimate)
    parts = [part_bytes(memory.breakdown_bytes, part) for part in PARTS]
    return {
        "title": label(configuration),
        "samples": global_batch(cluster, configuration),
        "fits_gpu": estimate.fits_gpu,
        "fits_host": estimate.fits_host,
        "step": step,
        "tokens": tokens,
        "mfu": mfu,
        "limit": limit,
        "peak": memory.peak_instant,
        "gpu": {"total": gpu, **_bar(parts, estimate.usable_bytes_per_gpu, cluster.gpu.memory_bytes, digits=1)},
        "host": {
            "total": host,
            **_bar([memory.host_bytes_per_node], estimate.usable_bytes_per_host, cluster.host_memory_bytes, digits=0),
        },
        "nvme": f"{memory.nvme_bytes_per_node / GIB:.0f}" if memory.nvme_bytes_per_node else "",
    }


def _bar(parts: Sequence[int], usable: int, capacity: int, *, digits: int) -> dict[str, Any]:
    """Returns a stacked bar: GiB of its parts and marks as texts, and their share of its length in percent."""
    scale = max(capacity, sum(parts), 1) / 100
    return {
        "parts": [{"gib": f"{size / GIB:.{digits}f}", "share": round(size / scale, 2)} for size in parts],
        "usable": {"gib": f"{usable / GIB:.{digits}f}", "share": round(usable / scale, 2)},
        "capacity": {"gib": f"{capacity / GIB:.{digits}f}", "share": round(capacity / scale, 2)},
    }


def _shape(cluster: Cluster) -> str:
    return f"{cluster.num_nodes} × {cluster.gpus_per_node}"
