"""Reads the context of a job before it runs: its hosts, its model and its cluster."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dstrain.config.edits.lock import planned_contents
from dstrain.config.lint.rule import JobContext
from dstrain.errors import DstrainError, EnvironmentProblem, InvalidConfig
from dstrain.facts import probe
from dstrain.facts.cluster import cluster as clusters
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.cluster.gpus import CPU
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.cluster.machines import hosts_of, is_local, resolve_gpu
from dstrain.facts.data import datafile
from dstrain.facts.data.rows import count_rows
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.model.traces import Question, Subject
from dstrain.facts.this_machine import trains_on_cpu
from dstrain.facts.workload import RowContents, Workload, measured_cluster, measured_workload
from dstrain.job.data_source import held_out_counts
from dstrain.job.file import JobFile
from dstrain.job.schema import Job
from dstrain.plan.configuration import Configuration, choices, flat
from dstrain.plan.named_parts import traced_without, unplanned_parts, with_frozen
from dstrain.plan.request import SPEED, Request


def job_context(file: JobFile, planned: Cluster | None) -> JobContext:
    """Returns the context of a job that is not run; without its hosts and its cluster if its hostfile is wrong.

    If this machine has no GPU, the cluster is the one of the job's plan.
    """
    model, _ = model_of(file.job)
    try:
        hosts = hosts_of(file)
    except InvalidConfig:
        return JobContext(job=file, model=model, planned=planned)
    cluster, _ = describe(hosts, planned, on_cpu=trains_on_cpu(os.environ, file.job.env))
    return JobContext(job=file, hosts=hosts, model=model, cluster=cluster, planned=planned)


def model_of(job: Job) -> tuple[ModelFacts | None, list[str]]:
    """Returns the facts of the model, or None and a line that says why there is no estimate."""
    try:
        model = probe.read_model(job.model, hub=job.hub, way=trace_question(job))
    except (InvalidConfig, EnvironmentProblem) as error:
        return None, [f"no estimate of memory: {error.problem}"]
    model = with_frozen(model, job)
    reason = unplanned_parts(job, model)
    return model, [reason] if reason is not None else []


def trace_question(job: Job) -> Question:
    """Returns how a model of an unknown family is traced."""
    return Question(
        subject=Subject(config={}),
        seq_len=job.seq_len,
        method=job.method,
        lora=job.lora,
        attn=job.attn.planned,
        is_packed=job.packing,
        precision=job.precision,
        loss=job.loss,
        image_patches=job.image_patches,
        frozen_parts=traced_without(job),
    )


def describe(
    hosts: Hosts, planned: Cluster | None, *, on_cpu: bool, is_run: bool = False
) -> tuple[Cluster, str | None]:
    """Describes the cluster from this machine, or from the plan if this machine has no GPU and is not to run the job;
    with its measured links, and a note if their file cannot be read.

    A link between nodes that was given to the plan stays.
    """
    is_given = planned is not None and planned.inter_link_origin is Origin.GIVEN
    inter_link = planned.inter_link if planned is not None and is_given else None
    planned = None if is_run else planned
    gpu, origin = resolve_gpu(
        given=CPU if on_cpu else None,
        planned=(planned.gpu, Origin.GIVEN) if planned is not None else None,  # whatever it was then
    )
    memory, memory_origin = probe.host_memory_bytes() if is_local(hosts) else None, Origin.MEASURED
    if planned is not None and not on_cpu and origin is not Origin.MEASURED:
        memory, memory_origin = planned.host_memory_bytes, planned.host_memory_origin
    cluster = clusters.describe(
        gpu=gpu,
        gpu_origin=origin,
        gpus=None,
        hosts=hosts,
        inter_link=inter_link,
        host_memory_bytes=memory,
        host_memory_origin=memory_origin,
    )
    return measured_cluster(cluster, hosts)


def sizes_of(job: Job) -> list[int] | None:
    """Returns the most samples that each data set of a job may have; None if one is not in files that are here."""
    sizes = []
    for source in job.train_sources:
        files = [Path(path) for path in datafile.found(source.path)]
        if not files or not all(path.is_file() for path in files):
            return None
        try:
            rows = count_rows(files).most
        except InvalidConfig:  # an error of the data
            return None
        sizes.append(min(rows, source.max_samples or job.max_samples or rows))
    return sizes


def counted_steps(context: JobContext) -> int | None:
    """Returns the steps of a job that says epochs, by the rows of its data, each of which is a sample; None if they are
    not known before it runs."""
    job = context.asked
    if job is None or context.hosts is None or job.max_steps or job.streaming or job.packing:
        return None
    sizes = sizes_of(job)
    if not sizes or any(source.weight is not None for source in job.train_sources):
        return None
    with suppress(InvalidConfig):  # of a val_split, which has an error of its own
        held_out = held_out_counts(sizes, job.val_split) if job.val_split is not None else ()
        per_epoch = math.ceil((sum(sizes) - sum(held_out)) / job.samples_per_step(context.hosts.num_slots))
        return math.ceil(per_epoch * job.num_train_epochs)
    return None


def workload_of(context: JobContext) -> Workload | None:
    """Returns the workload of a job with its measured figures; None if its model or its cluster is unknown.

    None too if other parts of a model train than the planner counts.
    """
    if context.model is None or context.cluster is None:
        return None
    if context.job and unplanned_parts(context.job.job, context.model):
        return None
    return measured_workload(context.model, context.cluster, contents_of(context.job))


def contents_of(file: JobFile | None) -> RowContents | None:
    """Returns the contents of a job's rows when its configuration was generated; None if unknown."""
    with suppress(DstrainError):  # a damaged lock is reported where it is needed
        return planned_contents(Path(file.job.ds_config).parent) if file is not None else None
    return None


def request_of(job: Job) -> Request:
    """Returns the job as a complete request."""
    return Request(**{field.name: getattr(job, field.name) for field in fields(Request) if hasattr(job, field.name)})


def open_request(job: Job, present: Configuration, num_ranks: int, open_choices: Collection[str]) -> Request:
    """Returns the job as a request with the same global batch that leaves some choices open, the accumulation always.

    The other choices come from its present configuration. One of every how many layers is recomputed is open only
    if it is open whether any is.
    """
    values = flat(present)
    chosen = {name: values[name] for name in SPEED if choices()[name].is_of_zero}
    opened = {*open_choices, "grad_accum"} - (set() if "grad_ckpt" in open_choices else {"grad_ckpt_every_n_layers"})
    asked: dict[str, Any] = {**chosen, **dict.fromkeys(opened), "global_batch": job.samples_per_step(num_ranks)}
    return replace(request_of(job), **asked)
