"""Turns the planning options into facts and a request, with the images of a sample counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dstrain.choices import Attention, LossKernel, Precision, Task
from dstrain.cli.console import say_lines
from dstrain.cli.options.typed import spelled
from dstrain.errors import DstrainError, InvalidConfig, Place
from dstrain.facts import probe
from dstrain.facts.cluster import cluster as clusters
from dstrain.facts.cluster import gpus, hostfile, machines
from dstrain.facts.cluster.cluster import Cluster, Origin, link
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.data.datafile import files_of, is_file_name, reading_for
from dstrain.facts.data.lengths import Eye, eye_of, usable_rows
from dstrain.facts.data.rows import spread
from dstrain.facts.data.turns import Conversation
from dstrain.facts.model import aliases, traces
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.model.traits import Part
from dstrain.facts.workload import Workload, measured_cluster, measured_workload
from dstrain.job.file import read_job
from dstrain.job.limits import PARTS, broken
from dstrain.job.model_changes import Lora
from dstrain.job.schema import Job
from dstrain.plan.named_parts import frozen_parts, images_beyond, traced_without, unplanned_parts, with_frozen
from dstrain.plan.request import Request
from dstrain.plan.search.search_space import DEFAULT_SEQ_LEN
from dstrain.records import require_in_range
from dstrain.units import MIB, counted, format_bytes

_ROWS = 200
"""Rows that are looked at."""


def counted_patches(options: Mapping[str, Any]) -> tuple[int, str | None]:
    """Returns the most patches that the images of a sample have, and how they were counted; 0 if they are not known.

    They are not without data here, for a model whose processor cuts images by another rule, and for videos.
    """
    data = options.get("data")
    if not data:
        return 0, None
    try:
        job = (
            read_job(Path(data), is_only_read=True).job
            if data.endswith((".yaml", ".yml"))
            else Job(model="", output_dir="", data=data)
        )
        sees = eye_of(_source(options), options["hub"], max_pixels=job.max_pixels, min_pixels=job.min_pixels)
        return (job.image_patches, None) if sees is None or job.image_patches else _most(job, sees)
    except (DstrainError, OSError):
        return 0, None  # the reader of the data reports the error


def _source(options: Mapping[str, Any]) -> str:
    """Returns the folder or the id of the model."""
    name = str(Path(options["model"]).expanduser())
    known = None if Path(name).exists() else aliases.resolve(options["model"])
    return known[1].hub_id if known is not None and known[1].hub_id else name


def _most(job: Job, sees: Eye) -> tuple[int, str | None]:
    found: list[int] = []
    sources = [source for source in job.train_sources if is_file_name(source.path)]
    files = [(source, file) for source in sources for file in files_of(source.path) if file.exists()]
    for source, file in files:
        rows, _ = spread(file, -(-_ROWS // len(files)))
        for _, sides in usable_rows(file, rows[:_ROWS], reading_for(source, job)):
            if isinstance(sides[0], Conversation) and sides[0].has_media:
                patches = sees.patches_of(sides[0])
                if patches is None:
                    return 0, None
                found.append(patches)
    if not found:
        return 0, None
    looked = f"the most that the images of a sample have, of {counted(len(found), 'sample')} that were looked at"
    return max(found), f"--image-patches {max(found)}: {looked} ({sum(found) / len(found):,.0f} on average)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """The inputs of the planner."""

    workload: Workload
    hosts: Hosts
    """Names of the machines; placeholders if none were given."""
    request: Request


def plan_inputs(options: dict[str, Any], *, last: Cluster | None = None, is_first: bool = True) -> PlanInputs:
    """Returns the inputs of the planner from the shared options.

    `last` is the cluster of the last run with the same options: it is used if this machine has no GPU and the options
    name none. Only the first question of a command prints notes.
    """
    hosts = _named_hosts(options)
    request = request_of(options)
    if not request.image_patches:
        patches, counted_how = counted_patches(options)
        request = replace(request, image_patches=patches)
        say_lines([f"note: {counted_how}"] if counted_how else [])
    found = probe.read_model(options["model"], hub=options["hub"], way=_trace_question(options, request))
    model = _with_parts(found, options, request)
    cluster, problem = measured_cluster(_cluster(options, hosts, last), hosts)
    if is_first and hosts is not None and not cluster.gpu.is_cpu and (lack := machines.shortage(hosts)) is not None:
        say_lines([f"note: {lack.problem}; dstrain run refuses it: {lack.hint}"])
    if is_first and problem is not None:
        say_lines([f"note: {problem}"])
    # a plan for machines that have no names yet leaves placeholders, which lint and run refuse
    if hosts is None:
        single = cluster.num_nodes == 1
        hosts = (
            hostfile.expand(f"localhost:{cluster.gpus_per_node}", None)
            if single
            else hostfile.placeholders(cluster.num_nodes, cluster.gpus_per_node)
        )
    return PlanInputs(workload=measured_workload(model, cluster), hosts=hosts, request=request)


def _with_parts(model: ModelFacts, options: Mapping[str, Any], request: Request) -> ModelFacts:
    """Returns the model with the parts marked that train. Raises InvalidConfig if they cannot train or be planned."""
    changed = _changed_parts(options)
    if request.image_patches and not model.has_tower:
        raise InvalidConfig(f"--image-patches: {model.name} has no vision tower", hint="Leave it out.")
    seq_len = request.seq_len or (None if options.get("data") else DEFAULT_SEQ_LEN)  # else chosen by the data
    if (problem := images_beyond(seq_len, request.image_patches, model)) is not None:
        raise InvalidConfig(f"--image-patches: {problem}", hint="Write a longer --seq-len, or fewer patches.")
    if not changed:
        return model
    job = Job(model="", output_dir="", method=request.method, image_patches=request.image_patches, **changed)
    problem = next((problem for _, problem in broken(job)), unplanned_parts(job, model))
    if not model.has_tower:
        problem = f"{model.name} has no vision tower"
    elif len(frozen_parts(job)) == len(Part):
        problem = "nothing is left to train"
    if problem is not None:
        more = "" if request.image_patches else "Write --image-patches N; "
        raise InvalidConfig(f"{spelled(changed)}: {problem}", hint=f"{more}see docs/data.md, Images.")
    return with_frozen(model, job)


def _changed_parts(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name, default in PARTS.items() if options.get(name, default) is not default}


def _trace_question(options: Mapping[str, Any], request: Request) -> traces.Question:
    """Returns how a model of an unknown family is traced."""
    job = Job(model="", output_dir="", image_patches=request.image_patches, **_changed_parts(options))
    return traces.Question(
        subject=traces.Subject(config={}),
        seq_len=request.seq_len or DEFAULT_SEQ_LEN,
        method=request.method,
        lora=request.lora,
        attn=(request.attn or Attention.AUTO).planned,
        is_packed=bool(request.packing),
        precision=request.precision or Precision.BF16,
        loss=request.loss or _least_loss(request),
        image_patches=request.image_patches,
        frozen_parts=traced_without(job),
    )


def _least_loss(request: Request) -> LossKernel:
    """Returns the loss of least memory that the parallelism and the task of a request allow."""
    if (request.tp or 1) > 1:
        return LossKernel.FULL
    return LossKernel.CHUNKED if request.task is Task.DPO else LossKernel.FUSED


def request_of(options: dict[str, Any]) -> Request:
    """Returns the request; options of `plan` alone allow more than gen-config can write."""
    values = {field.name: options[field.name] for field in fields(Request) if field.name in options}
    if "lora_rank" not in options:
        return Request(**values)
    names, experts = (
        tuple(name.strip() for name in options[key].split(",") if name.strip())
        for key in ("lora_targets", "lora_target_parameters")
    )
    if not names and not experts:
        raise InvalidConfig("--lora-targets names no layer", hint="Write --lora-targets all-linear, or layer names.")
    rank, dropout = options["lora_rank"], options["lora_dropout"]
    lora = Lora(rank=rank, dropout=dropout, targets=names, target_parameters=experts)
    require_in_range(lora, prefix="lora-")
    return Request(**values, lora=lora)


def _named_hosts(options: dict[str, Any]) -> Hosts | None:
    if options["hosts"] and options["hostfile"]:
        raise InvalidConfig("--hosts and --hostfile both name hosts", hint="Give one of them.")
    if options["hostfile"]:
        return machines.resolve_hosts(options["hostfile"], place=Place(file="--hostfile"))
    return _expanded(options) if options["hosts"] else None


def _expanded(options: dict[str, Any]) -> Hosts:
    """Returns the hosts of --hosts; those without `:slots` share --gpus, or have 8 each."""
    slots = options["gpus_per_node"]
    if slots is None:
        count = len(hostfile.expand(options["hosts"], 1).hosts)
        gpus = options["gpus"] or 0
        slots = gpus // count if gpus % count == 0 and 0 < gpus // count <= 8 else 8
    return hostfile.expand(options["hosts"], slots)


def uses_last(options: dict[str, Any], last: Cluster | None) -> bool:
    """Returns whether the cluster of the last run is used: its GPUs were measured, and this machine has none now."""
    return last is not None and last.gpu_origin is Origin.MEASURED and not options["gpu"] and not probe.local_gpus()


def _cluster(options: dict[str, Any], hosts: Hosts | None, last: Cluster | None) -> Cluster:
    """Returns the cluster: its GPU is the named one, else this machine's, else the last one, else assumed."""
    local = probe.local_gpus()
    previous = last if uses_last(options, last) else None
    count, per_node = options["gpus"], options["gpus_per_node"]
    planned = (previous.gpu, Origin.MEASURED) if previous else None
    gpu, origin = machines.resolve_gpu(given=options["gpu"], planned=planned)
    if options["gpu_memory_limit"] is not None:
        gpu = _limited(gpu, options["gpu_memory_limit"])
    if count is None and hosts is None:
        count = previous.num_gpus if previous else len(local) or None
        per_node = previous.gpus_per_node if previous and per_node is None else per_node
    # whether the cluster is this machine alone
    is_here = hosts is None and (count or 0) <= max(len(local), 1) and origin is Origin.MEASURED
    memory, memory_origin = _host_memory(options, gpu, previous, is_here=is_here)
    return clusters.describe(
        gpu=gpu,
        gpu_origin=origin,
        gpus=count,
        gpus_per_node=per_node,
        hosts=hosts,
        inter_link=link(options["interconnect"]) if options["interconnect"] else None,
        host_memory_bytes=memory,
        host_memory_origin=memory_origin,
        nvme_path=options["nvme"],
    )


def _limited(gpu: gpus.Gpu, limit_bytes: int) -> gpus.Gpu:
    """Returns the GPU with as much memory as training may use. Raises InvalidConfig for more than it has, or none."""
    if gpu.is_cpu:
        raise InvalidConfig("--gpu-memory-limit: a CPU has no GPU memory", hint="Use --host-memory.")
    if not MIB <= limit_bytes <= gpu.memory_bytes:
        has = format_bytes(gpu.memory_bytes)
        raise InvalidConfig(
            f"--gpu-memory-limit is {format_bytes(limit_bytes)}; {gpu.name} has {has}", hint=f"Write {has} or less."
        )
    return replace(gpu, memory_mib=limit_bytes // MIB)


def _host_memory(
    options: dict[str, Any], gpu: gpus.Gpu, previous: Cluster | None, *, is_here: bool
) -> tuple[int | None, Origin]:
    """Returns the RAM of a node and its origin: as given, as in the last run, or this machine's."""
    if options["host_memory"] is not None:
        return options["host_memory"], Origin.GIVEN
    if previous is not None:
        return previous.host_memory_bytes, previous.host_memory_origin
    if is_here or gpu.is_cpu:
        return probe.host_memory_bytes(), Origin.MEASURED
    return None, Origin.GIVEN
