"""Facts about the machines: nodes, GPUs, links, host memory, disks, and the source of each fact.

Every figure of a link is the peak of the wire, of which collectives reach about 0.7 to 0.9; the planner accounts for
that. Links between nodes assume one adapter per GPU, as in every 8-GPU server with NVLink; in `eth25/8`, 8 GPUs share
one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from dstrain.errors import InvalidConfig, nearest
from dstrain.facts.cluster.gpus import Gpu
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.records import type_config
from dstrain.units import GIB, MIB, counted

DEFAULT_GPUS_PER_NODE = 8
"""GPUs per node without a hostfile and `--gpus-per-node`: as in servers with NVLink."""

ASSUMED_INTER_LINKS: Mapping[str, str] = MappingProxyType(
    {
        "nvlink5": "ib400",  # DGX and HGX B200: eight ConnectX-7
        "nvlink4": "ib400",  # DGX H100 and H200: eight ConnectX-7
        "nvlink4-h800": "ib400",
        "nvlink3": "ib200",  # DGX A100: eight ConnectX-6
        "nvlink3-a800": "ib200",
        "nvlink2": "ib100/2",  # DGX-1V: four adapters for eight GPUs
        "infinity-fabric": "roce400",  # MI300X platforms: eight adapters of 400 Gbit/s
        "infinity-fabric-4": "roce400",
        "pcie5": "roce100",
        "pcie5x8": "eth25",
        "pcie4": "eth25",
        "pcie4x8": "eth25",
        "pcie3": "eth25",
        "loopback": "eth10",
    }
)
"""Link of the GPU → default link between nodes; for PCIe a cautious guess."""

ASSUMED_HOST_BYTES_PER_GPU = 128 * GIB
"""Assumed RAM per GPU with NVLink, but at least the GPU's memory: 1 TiB for eight, as in the smaller DGX A100."""

ASSUMED_CPU_HOST_BYTES = 16 * GIB
"""RAM assumed for a node without GPUs whose RAM was not measured."""


class Origin(StrEnum):
    """The origin of a fact."""

    GIVEN = "given"
    MEASURED = "measured"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    __pydantic_config__ = type_config

    num_nodes: int
    gpus_per_node: int
    """GPUs used on each node."""
    gpu: Gpu
    gpu_origin: Origin
    """Given, measured by NVML, or assumed."""
    intra_link: Link
    """The link between GPUs of one node."""
    intra_link_origin: Origin = Origin.ASSUMED
    """Measured, or assumed from the GPU's data sheet."""
    inter_link: Link
    """The link between nodes, per GPU."""
    inter_link_origin: Origin
    host_memory_bytes: int
    """RAM of one node that training may use."""
    host_memory_origin: Origin
    nvme_path: str | None
    """Folder on a local NVMe drive of each node, or None."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes together."""
        return self.num_nodes * self.gpus_per_node


def describe(
    *,
    gpu: Gpu,
    gpu_origin: Origin,
    gpus: int | None,
    gpus_per_node: int | None = None,
    hosts: Hosts | None = None,
    inter_link: Link | None = None,
    host_memory_bytes: int | None = None,
    host_memory_origin: Origin = Origin.GIVEN,
    nvme_path: str | None = None,
) -> Cluster:
    """Returns the cluster of these options and hosts; defaults for None have the origin `assumed`.

    `gpus` may be None if `hosts` is given. A CPU's memory is the node's RAM, divided by its ranks. Raises
    InvalidConfig if the numbers contradict each other.
    """
    for option, value in (("--gpus", gpus), ("--gpus-per-node", gpus_per_node)):
        if value is not None and value <= 0:
            raise InvalidConfig(f"{option} is {value}", hint=f"Give 1 or more, such as `{option} 8`.")
    if hosts is not None:
        num_nodes, per_node = _shape_of_hosts(hosts, gpus=gpus, gpus_per_node=gpus_per_node)
    elif gpus is not None:
        num_nodes, per_node = _shape_of_count(gpus, gpus_per_node)
    else:
        raise InvalidConfig("the number of GPUs is unknown", hint="Give `--gpus 8`, or `--hostfile FILE`.")
    host_bytes = host_memory_bytes
    if host_bytes is None:
        host_bytes, host_memory_origin = assumed_host_memory_bytes(gpu, per_node), Origin.ASSUMED
    # ranks on CPUs share the RAM of their node
    if gpu.is_cpu and gpu.memory_mib == 0:
        gpu = replace(gpu, memory_mib=host_bytes // per_node // MIB)
    return Cluster(
        num_nodes=num_nodes,
        gpus_per_node=per_node,
        gpu=gpu,
        gpu_origin=gpu_origin,
        intra_link=link(gpu.link),
        inter_link=inter_link or link_assumed_between_nodes(gpu),
        inter_link_origin=Origin.ASSUMED if inter_link is None else Origin.GIVEN,
        host_memory_bytes=host_bytes,
        host_memory_origin=host_memory_origin,
        nvme_path=nvme_path,
    )


def resized(cluster: Cluster, gpus: int, *, gpus_per_node: int | None = None) -> Cluster:
    """Returns a cluster of another number of the same GPUs, in nodes of `gpus_per_node`, of several nodes' size, or as
    `describe` assumes. RAM stays if it was given, or measured on as many GPUs; else it is assumed again. Raises
    InvalidConfig if the number does not fill the nodes."""
    num_nodes, per_node = _shape_of_count(
        gpus, gpus_per_node or (cluster.gpus_per_node if cluster.num_nodes > 1 else None)
    )
    gpu, host_bytes, origin = cluster.gpu, cluster.host_memory_bytes, cluster.host_memory_origin
    is_measured_here = origin is Origin.MEASURED and (gpu.is_cpu or gpus <= cluster.num_gpus)
    if not is_measured_here and origin is not Origin.GIVEN:
        host_bytes, origin = assumed_host_memory_bytes(gpu, per_node), Origin.ASSUMED
    if gpu.is_cpu:
        gpu = replace(gpu, memory_mib=host_bytes // per_node // MIB)
    return replace(
        cluster,
        num_nodes=num_nodes,
        gpus_per_node=per_node,
        gpu=gpu,
        host_memory_bytes=host_bytes,
        host_memory_origin=origin,
    )


def _shape_of_count(gpus: int, gpus_per_node: int | None) -> tuple[int, int]:
    """Returns (nodes, GPUs per node) for a number of GPUs. Raises InvalidConfig if it does not fill the nodes."""
    per_node = gpus_per_node or DEFAULT_GPUS_PER_NODE
    if gpus <= per_node:
        return 1, gpus
    if gpus % per_node == 0:
        return gpus // per_node, per_node
    assumed = "" if gpus_per_node else " (assumed)"
    below = gpus - gpus % per_node
    divisors = [size for size in range(per_node, 1, -1) if gpus % size == 0][:2]
    split = "".join(f", or `--gpus-per-node {size}` for {gpus // size} nodes" for size in divisors)
    raise InvalidConfig(
        f"--gpus {gpus} does not fill nodes of {per_node} GPUs{assumed}",
        hint=f"Give `--gpus {below}` or `--gpus {below + per_node}`{split}.",
    )


def _shape_of_hosts(hosts: Hosts, *, gpus: int | None, gpus_per_node: int | None) -> tuple[int, int]:
    """Returns (nodes, GPUs per node) of the hosts. Raises InvalidConfig if the options disagree."""
    slots = sorted({host.slots for host in hosts.hosts})
    count = len(hosts.hosts)
    if len(slots) > 1:
        rows = "\n".join(
            f"{_place(hosts, order)}: {host.name} has {counted(host.slots, 'slot')}"
            for order, host in enumerate(hosts.hosts)
        )
        raise InvalidConfig(
            f"{hosts.name}: the hosts have different numbers of slots; dstrain plans for equal nodes\n{rows}",
            hint=f"Write slots={slots[0]} for every host, or leave out the others.",
        )
    per_node = slots[0]
    contents = f"{hosts.name} has {'one host' if count == 1 else f'{count} hosts'} with slots={per_node}"
    if gpus_per_node is not None and gpus_per_node != per_node:
        raise InvalidConfig(
            f"--gpus-per-node {gpus_per_node}, but {contents}",
            hint=f"Leave it out, or write slots={gpus_per_node} there.",
        )
    if gpus is not None and gpus != hosts.num_slots:
        # other hosts come before other slots, which only the machines can have
        fixes = [f"`--gpus {hosts.num_slots}`"]
        if gpus % per_node == 0:
            needed = gpus // per_node
            fixes.append(f"a list of {needed} host{'s' if needed > 1 else ''}")
        elif gpus % count == 0:
            fixes.append(f"slots={gpus // count}")
        problem = f"--gpus {gpus}, but {contents}: {counted(hosts.num_slots, 'GPU')}"
        raise InvalidConfig(problem, hint=f"Give {' or '.join(fixes)}.")
    return count, per_node


def _place(hosts: Hosts, order: int) -> str:
    line = hosts.hosts[order].line
    return hosts.name if line is None else f"{hosts.name}:{line}"


def link_assumed_between_nodes(gpu: Gpu) -> Link:
    """Returns the default link between nodes, per GPU (`ASSUMED_INTER_LINKS`)."""
    return link(ASSUMED_INTER_LINKS[gpu.link])


def assumed_host_memory_bytes(gpu: Gpu, gpus_per_node: int) -> int:
    """Returns the assumed RAM of one node: per GPU its own memory, with NVLink at least 128 GiB."""
    if gpu.is_cpu:
        return gpu.memory_bytes * gpus_per_node or ASSUMED_CPU_HOST_BYTES
    has_fabric = gpu.link.startswith(("nvlink", "infinity"))
    return gpus_per_node * max(gpu.memory_bytes, ASSUMED_HOST_BYTES_PER_GPU if has_fabric else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection between GPUs."""

    name: str
    """`nvlink4`, `ib400` …"""
    bytes_per_s: float
    """Peak bytes per second of one GPU, in one direction."""
    source: str
    """The source of the figure."""
    latency_s: float | None = None
    """Time of the smallest all-reduce of all ranks over it; None if it was not measured. Plans do not use it."""


_PCIE = "PCI-SIG: {0} GT/s × {1} lanes × 128/130 / 8 bits"
_ADAPTER = "line rate of {0} Gbit/s / 8 bits, one adapter for each GPU"

# fmt: off
_ROWS = (
    Link(name="nvlink2", bytes_per_s=150e9, source="https://images.nvidia.com/content/volta-architecture/pdf/volta-architecture-whitepaper.pdf: 6 links × 25 GB/s in each direction"),
    Link(name="nvlink3", bytes_per_s=300e9, source="https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf: 12 links × 25 GB/s in each direction"),
    Link(name="nvlink3-a800", bytes_per_s=200e9, source="A800 data sheet: 400 GB/s, both directions together"),
    Link(name="nvlink4", bytes_per_s=450e9, source="https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper: 18 links × 25 GB/s in each direction"),
    Link(name="nvlink4-h800", bytes_per_s=200e9, source="H800 data sheet: 400 GB/s, both directions together"),
    Link(name="nvlink5", bytes_per_s=900e9, source="https://resources.nvidia.com/en-us-blackwell-architecture: 18 links × 50 GB/s in each direction"),
    Link(name="infinity-fabric", bytes_per_s=448e9, source="https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html: 7 links × 64 GB/s in each direction"),
    Link(name="infinity-fabric-4", bytes_per_s=537.6e9, source="https://www.amd.com/en/products/accelerators/instinct/mi350/mi355x.html: 7 links × 76.8 GB/s in each direction"),
    Link(name="pcie3", bytes_per_s=15.75e9, source=_PCIE.format(8, 16)),
    Link(name="pcie4x8", bytes_per_s=15.75e9, source=_PCIE.format(16, 8)),
    Link(name="pcie4", bytes_per_s=31.5e9, source=_PCIE.format(16, 16)),
    Link(name="pcie5x8", bytes_per_s=31.5e9, source=_PCIE.format(32, 8)),
    Link(name="pcie5", bytes_per_s=63e9, source=_PCIE.format(32, 16)),
    Link(name="loopback", bytes_per_s=2e9, source="gloo over 127.0.0.1: a rough figure, for trying things out without a GPU"),
    Link(name="ib100", bytes_per_s=12.5e9, source=_ADAPTER.format(100)),
    Link(name="ib200", bytes_per_s=25e9, source=_ADAPTER.format(200)),
    Link(name="ib400", bytes_per_s=50e9, source=_ADAPTER.format(400)),
    Link(name="ib800", bytes_per_s=100e9, source=_ADAPTER.format(800)),
    Link(name="roce25", bytes_per_s=3.125e9, source=_ADAPTER.format(25)),
    Link(name="roce100", bytes_per_s=12.5e9, source=_ADAPTER.format(100)),
    Link(name="roce200", bytes_per_s=25e9, source=_ADAPTER.format(200)),
    Link(name="roce400", bytes_per_s=50e9, source=_ADAPTER.format(400)),
    Link(name="eth10", bytes_per_s=1.25e9, source=_ADAPTER.format(10)),
    Link(name="eth25", bytes_per_s=3.125e9, source=_ADAPTER.format(25)),
    Link(name="eth100", bytes_per_s=12.5e9, source=_ADAPTER.format(100)),
)
# fmt: on

LINKS: Mapping[str, Link] = MappingProxyType({row.name: row for row in _ROWS})
"""Every link by name."""


def link(name: str) -> Link:
    """Returns the link of that name, ignoring case; `NAME/N` is one adapter shared by N GPUs.

    Raises InvalidConfig for an unknown name.

    >>> link("IB400").bytes_per_s, link("eth25/8").bytes_per_s
    (50000000000.0, 390625000.0)
    """
    word, slash, sharers = name.strip().lower().partition("/")
    row = LINKS.get(word)
    if row is None:
        near = nearest(word, LINKS)
        hint = f'Did you mean "{near}"?' if near else "Known: " + ", ".join(LINKS)
        raise InvalidConfig(f'"{name}" is not a link', hint=hint)
    if not slash:
        return row
    if re.fullmatch(r"[1-9][0-9]{0,3}", sharers) is None:
        problem = f'"{name}" is not a link: the number after the slash counts the GPUs that share one adapter'
        raise InvalidConfig(problem, hint=f'Write "{word}/8" if 8 GPUs share one.')
    shared = f"{row.source}, here shared by {sharers}"
    return replace(row, name=f"{word}/{sharers}", bytes_per_s=row.bytes_per_s / int(sharers), source=shared)
