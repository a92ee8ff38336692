"""Turns the planning options into facts and a request."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from dstrain.choices import Attention, LossKernel, Precision
from dstrain.cli.console import say_lines
from dstrain.errors import InvalidConfig, Place
from dstrain.facts import probe
from dstrain.facts.cluster import calibration, gpus, hostfile, links, machines, measured_links
from dstrain.facts.cluster import cluster as clusters
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.model import trace_records
from dstrain.facts.workload import Workload
from dstrain.job.schema import Lora
from dstrain.plan.request import Request
from dstrain.plan.search.search_space import DEFAULT_SEQ_LEN


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """What was asked, with the facts found."""

    workload: Workload
    hosts: Hosts
    """Names of the machines; placeholders if none were given."""
    request: Request


def plan_inputs(options: dict[str, Any], *, last: Cluster | None = None) -> PlanInputs:
    """Returns model, cluster and request from the shared options; raises what the facts raise.

    `last` are machines that were found when the same was asked before: they stand where none are found here and the
    options do not say.
    """
    hosts = _named_hosts(options)
    request = _request(options)
    model = probe.read_model(options["model"], hub=options["hub"], way=_way(request))
    cluster = _with_measured_links(_cluster(options, hosts, last), hosts)
    if hosts is None:
        single = cluster.num_nodes == 1
        hosts = (
            hostfile.expand(f"localhost:{cluster.gpus_per_node}", None)
            if single
            else hostfile.placeholders(cluster.num_nodes, cluster.gpus_per_node)
        )
    rates = measured_links.with_rates(calibration.read(), cluster)
    workload = Workload(model=model, cluster=cluster, calibration=rates)
    return PlanInputs(workload=workload, hosts=hosts, request=request)


def _way(request: Request) -> trace_records.Question:
    """Returns how a model of an unknown family is traced; it is attention that the length matters to."""
    return trace_records.Question(
        subject=trace_records.Subject(config={}),
        seq_len=request.seq_len or DEFAULT_SEQ_LEN,
        method=request.method,
        lora=request.lora,
        attn=request.attn or Attention.SDPA,
        is_packed=request.packing,
        precision=request.precision or Precision.BF16,
    )


def _request(options: dict[str, Any]) -> Request:
    """Returns the wish; options of `plan` alone lift what gen-config cannot carry out."""
    asked = {field.name: options[field.name] for field in fields(Request) if field.name in options}
    if "states" not in options:
        return Request(**asked)
    if options["lora_rank"] < 1:
        raise InvalidConfig(f"--lora-rank is {options['lora_rank']}", hint="Write --lora-rank 8 or more.")
    if not 0 <= options["lora_dropout"] < 1:
        raise InvalidConfig(f"--lora-dropout is {options['lora_dropout']}", hint="Write a share, such as 0.05.")
    names = tuple(name.strip() for name in options["lora_targets"].split(",") if name.strip())
    if not names:
        raise InvalidConfig("--lora-targets names no layer", hint="Write --lora-targets all-linear, or layers.")
    asked["loss"] = options["loss"] or (LossKernel.FUSED if options["liger"] else LossKernel.FULL)
    return Request(
        **asked,
        lora=Lora(rank=options["lora_rank"], dropout=options["lora_dropout"], targets=names),
        state_dtypes=options["states"],
        writable=False,
    )


def _named_hosts(options: dict[str, Any]) -> Hosts | None:
    if options["hosts"] and options["hostfile"]:
        raise InvalidConfig("--hosts and --hostfile both name hosts", hint="Give one of them.")
    if options["hostfile"]:
        return machines.resolve_hosts(options["hostfile"], place=Place(file="--hostfile"))
    return _expanded(options) if options["hosts"] else None


def _expanded(options: dict[str, Any]) -> Hosts:
    """Returns the named hosts; those without `:slots` share --gpus, or have 8 each."""
    slots = options["gpus_per_node"]
    if slots is None:
        count = len(hostfile.expand(options["hosts"], 1).hosts)
        gpus = options["gpus"] or 0
        slots = gpus // count if gpus % count == 0 and 0 < gpus // count <= 8 else 8
    return hostfile.expand(options["hosts"], slots)


def uses_last(options: dict[str, Any], last: Cluster | None) -> bool:
    """Returns whether the GPUs of the last time stand for those that are found here: they were, and now none are."""
    return last is not None and last.gpu_origin is Origin.MEASURED and not options["gpu"] and not probe.local_gpus()


def _cluster(options: dict[str, Any], hosts: Hosts | None, last: Cluster | None) -> Cluster:
    """Returns the machines: the GPU as named, else as found here, else as found the last time, else assumed."""
    local = probe.local_gpus()
    known = last if uses_last(options, last) else None
    count, per_node = options["gpus"], options["gpus_per_node"]
    planned = (known.gpu, Origin.MEASURED) if known else None
    gpu, origin = machines.resolve_gpu(given=options["gpu"], planned=planned)
    if hosts is not None and not gpu.is_cpu and (lack := machines.shortage(hosts)) is not None:
        say_lines([f"note: {lack.problem}; dstrain run refuses it: {lack.hint}"])
    if count is None and hosts is None:
        count = known.num_gpus if known else len(local) or None
        per_node = known.gpus_per_node if known and per_node is None else per_node
    memory, memory_origin = _host_memory(options, gpu, known, is_here=_is_here(hosts, count, local, origin))
    return clusters.describe(
        gpu=gpu,
        gpu_origin=origin,
        gpus=count,
        gpus_per_node=per_node,
        hosts=hosts,
        inter_link=links.link(options["interconnect"]) if options["interconnect"] else None,
        host_memory_bytes=memory,
        host_memory_origin=memory_origin,
        nvme_path=options["nvme"],
    )


def _with_measured_links(cluster: Cluster, hosts: Hosts | None) -> Cluster:
    """Returns the machines with the links as `dstrain doctor --network` measured them on these hosts, where it did; a
    file that cannot be read is passed over, and said."""
    is_here = cluster.num_nodes == 1 and (cluster.gpu_origin is Origin.MEASURED or cluster.gpu.is_cpu)
    if hosts is None and not is_here:
        return cluster
    entries, problem = measured_links.read()
    if problem is not None:
        say_lines([f"note: {problem}"])
    names = measured_links.names([host.name for host in hosts.hosts] if hosts else ["localhost"], socket.gethostname())
    found = measured_links.find(entries, names, gpu=cluster.gpu.name, gpus_per_node=cluster.gpus_per_node)
    return measured_links.with_links(cluster, found) if found is not None else cluster


def _is_here(hosts: Hosts | None, count: int | None, local: Sequence[Any], origin: Origin) -> bool:
    """Returns whether this machine alone is meant."""
    return hosts is None and (count or 0) <= max(len(local), 1) and origin is Origin.MEASURED


def _host_memory(
    options: dict[str, Any], gpu: gpus.Gpu, known: Cluster | None, *, is_here: bool
) -> tuple[int | None, Origin]:
    """Returns the RAM of a node and where the figure is from: as given, of the last time, or of this machine."""
    if options["host_memory"] is not None:
        return options["host_memory"], Origin.GIVEN
    if known is not None:
        return known.host_memory_bytes, known.host_memory_origin
    if is_here or gpu.is_cpu:
        return probe.host_memory_bytes(), Origin.MEASURED
    return None, Origin.GIVEN
