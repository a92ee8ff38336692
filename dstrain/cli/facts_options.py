"""The options that describe model, machines and request, shared by the verbs that plan; and what they become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from dstrain.choices import Attention, Hub, Method, Offload, Precision
from dstrain.cli.types import SIZE, Choice
from dstrain.errors import InvalidConfig
from dstrain.facts import cluster as clusters
from dstrain.facts import gpus, hostfile, links, probe
from dstrain.facts.cluster import Cluster, Origin
from dstrain.facts.hostfile import Hosts
from dstrain.facts.model import ModelFacts
from dstrain.plan.request import Request

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--model", required=True, metavar="NAME", help="Alias (qwen3-32b), hub id, local folder or config.json."
    ),
    click.option("--gpus", type=int, help="GPUs altogether.  [default: those of this machine, or of the hosts]"),
    click.option("--gpu", metavar="NAME", help="GPU model, such as h100 or 4090.  [default: read from this machine]"),
    click.option("--gpus-per-node", type=int, help="GPUs in each node.  [default: 8, or fewer when --gpus is fewer]"),
    click.option("--hosts", metavar="NAMES", help="Host names, such as gpu[01-02] or 10.0.0.1,10.0.0.2."),
    click.option("--hostfile", type=click.Path(path_type=Path), help="Hostfile in DeepSpeed's format."),
    click.option("--host-memory", type=SIZE, metavar="SIZE", help="RAM of each node, such as 512GiB."),
    click.option("--nvme", metavar="FOLDER", help="Folder on a local NVMe drive of each node; allows NVMe offload."),
    click.option("--interconnect", metavar="LINK", help="Link between nodes, per GPU, such as ib400 or roce100."),
    click.option("--hub", type=Choice(Hub), default=Hub.HF.value, show_default=True, help="Where ids are looked up."),
    click.option(
        "--method", type=Choice(Method), default=Method.FULL.value, show_default=True, help="What is trained."
    ),
    click.option("--seq-len", type=int, help="Longest sample in tokens.  [default: 4096, or the model's limit]"),
    click.option("--global-batch", type=int, help="Samples of one optimizer step over all GPUs.  [default: about 64]"),
    click.option("--micro-batch", type=int, help="Samples of one forward of one GPU.  [default: chosen]"),
    click.option("--zero-stage", type=click.IntRange(1, 3), help="ZeRO stage.  [default: chosen]"),
    click.option("--offload", type=Choice(Offload), help="What leaves GPU memory.  [default: chosen]"),
    click.option("--grad-ckpt/--no-grad-ckpt", default=None, help="Recompute activations.  [default: chosen]"),
    click.option("--precision", type=Choice(Precision), help="Dtype of forward and backward.  [default: by the GPU]"),
    click.option("--attn", type=Choice(Attention), help="Attention implementation.  [default: sdpa]"),
    click.option("--packing/--no-packing", default=False, show_default=True, help="Let short samples share rows."),
)


def facts_options(function: F) -> F:
    """Adds the options that describe model, machines and request."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What was asked, with the facts found."""

    model: ModelFacts
    """The model."""
    cluster: Cluster
    """The machines."""
    hosts: Hosts
    """Their names; placeholders where none were given."""
    request: Request
    """The wish."""


def question(options: dict[str, Any]) -> Question:
    """Returns model, cluster and request from the shared options; raises what the facts raise."""
    hosts = _named_hosts(options)
    model = probe.read_model(options["model"], hub=options["hub"])
    cluster = _cluster(options, hosts)
    names = (
        "method",
        "seq_len",
        "global_batch",
        "micro_batch",
        "zero_stage",
        "offload",
        "grad_ckpt",
        "precision",
        "attn",
        "packing",
    )
    request = Request(**{name: options[name] for name in names})
    if hosts is None:
        single = cluster.num_nodes == 1
        hosts = (
            hostfile.expand(f"localhost:{cluster.gpus_per_node}", None)
            if single
            else hostfile.placeholders(cluster.num_nodes, cluster.gpus_per_node)
        )
    return Question(model=model, cluster=cluster, hosts=hosts, request=request)


def _named_hosts(options: dict[str, Any]) -> Hosts | None:
    if options["hosts"] and options["hostfile"]:
        raise InvalidConfig("--hosts and --hostfile both name hosts", hint="Give one of them.")
    if options["hostfile"]:
        return probe.read_hostfile(options["hostfile"])
    return _expanded(options) if options["hosts"] else None


def _expanded(options: dict[str, Any]) -> Hosts:
    """Returns the named hosts; those without `:slots` share --gpus, or have 8 each."""
    slots = options["gpus_per_node"]
    if slots is None:
        count = len(hostfile.expand(options["hosts"], 1).hosts)
        gpus = options["gpus"] or 0
        slots = gpus // count if gpus % count == 0 and 0 < gpus // count <= 8 else 8
    return hostfile.expand(options["hosts"], slots)


def _cluster(options: dict[str, Any], hosts: Hosts | None) -> Cluster:
    """Returns the machines: the GPU as named, else as found here, else assumed."""
    count = options["gpus"]
    local = probe.local_gpus()
    if options["gpu"] is not None:
        gpu, origin = gpus.gpu(options["gpu"]), Origin.GIVEN
    elif local:
        smallest = min(local, key=lambda each: each.memory_mib)
        gpu, origin = gpus.from_nvml_name(smallest.name, smallest.memory_mib), Origin.MEASURED
    else:
        gpu, origin = gpus.gpu("a100-80g"), Origin.ASSUMED
    if count is None and hosts is None and local:
        count = len(local)
    is_here = hosts is None and (count or 0) <= max(len(local), 1) and (origin is Origin.MEASURED or gpu.name == "cpu")
    memory, memory_origin = options["host_memory"], Origin.GIVEN
    if memory is None and (is_here or gpu.name == "cpu"):
        memory, memory_origin = probe.host_memory_bytes(), Origin.MEASURED
    return clusters.describe(
        gpu=gpu,
        gpu_origin=origin,
        gpus=count,
        gpus_per_node=options["gpus_per_node"],
        hosts=hosts,
        inter_link=links.link(options["interconnect"]) if options["interconnect"] else None,
        host_memory_bytes=memory,
        host_memory_origin=memory_origin,
        nvme_path=options["nvme"],
    )
