"""Judges a network measurement: compares it with the figure of the link that it crosses."""

from __future__ import annotations

from dataclasses import dataclass

from dstrain.doctor.finding import Finding, Notes
from dstrain.facts.cluster import gpus
from dstrain.facts.cluster.cluster import Cluster, Origin, link_assumed_between_nodes
from dstrain.facts.cluster.gpus import Gpu
from dstrain.facts.cluster.links import Link, link
from dstrain.facts.cluster.network_measurement import Network, rate_text
from dstrain.units import format_bytes

FAR_BELOW = 0.5
"""Share of a link's figure below which something is wrong: collectives reach 0.7 to 0.9 of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The link that limits the measured all-reduce: between hosts, for each GPU, or inside the only host."""

    link: Link
    is_assumed: bool
    """Whether no plan names the link."""


def gpu_of(network: Network) -> Gpu:
    """Returns the GPU that took part."""
    return gpus.gpu(gpus.CPU) if network.gpu is None else gpus.from_nvml(network.gpu, network.gpu_memory_mib)


def expected(network: Network, planned: Cluster | None) -> Expected:
    """Returns the link of the plan for these GPUs, else that of typical servers with them."""
    gpu = gpu_of(network)
    if len(network.hosts) == 1:
        return Expected(link=link(gpu.link), is_assumed=False)
    if planned is not None and planned.gpu.name == gpu.name and planned.inter_link_origin is Origin.GIVEN:
        return Expected(link=planned.inter_link, is_assumed=False)
    return Expected(link=link_assumed_between_nodes(gpu), is_assumed=True)


def findings(network: Network, expected: Expected) -> list[Finding]:
    """Returns the table of times, and the bandwidth against the link's figure."""
    notes = Notes("network")
    notes.ok(f"{_where(network)}: all-reduce", drawing=table(network))
    # a ring crosses between two hosts on the adapters of all their GPUs
    if len(network.hosts) > 1:
        rate = network.bus_bytes_per_s / min(network.slots)
        measured = f"between hosts {rate_text(rate)} for each {'GPU' if network.backend == 'nccl' else 'rank'}"
    else:
        rate = network.bus_bytes_per_s
        measured = f"inside the host {rate_text(rate)}"
    share = rate / expected.link.bytes_per_s
    assumed = "assumed " if expected.is_assumed else ""
    text = f"{measured}, {percent(share)} of {assumed}{expected.link.name} ({rate_text(expected.link.bytes_per_s)})"
    # gloo inside one host is a matter of the CPU, not of a link
    if share >= FAR_BELOW or (network.backend == "gloo" and len(network.hosts) == 1):
        notes.ok(text)
    else:
        notes.warn(text, _fix(network, expected))
    return notes.findings


def _fix(network: Network, expected: Expected) -> str:
    """Returns commands that find out why the network is far slower than its link."""
    if len(network.hosts) == 1:
        return "nvidia-smi topo -m; nvidia-smi nvlink --status; unset NCCL_P2P_DISABLE"
    if network.backend == "gloo":
        tries = ["ethtool NAME; ip link show NAME  (speed, MTU); export GLOO_SOCKET_IFNAME=OTHER"]
    else:
        tries = [
            "unset NCCL_IB_DISABLE; ibstat (rate, errors); export NCCL_IB_HCA=mlx5, to use all adapters",
            "NCCL_DEBUG=INFO dstrain doctor --network  shows which transports NCCL uses",
        ]
    if expected.is_assumed:
        tries.append("or, if it is another link: dstrain gen-config --interconnect NAME")
    return "; ".join(tries)


def _where(network: Network) -> str:
    """Names the hosts and their ranks."""
    slots = sorted(set(network.slots))
    per_host = "-".join(map(str, slots[:1] + slots[-1:] if len(slots) > 1 else slots))
    ranks = f"{per_host} {'GPU' if network.backend == 'nccl' else 'rank'}{'s' if slots[-1] > 1 else ''}"
    count = len(network.hosts)
    place = f"{count} hosts of {ranks}" if count > 1 else f"{ranks} of {network.hosts[0]}"
    return f"{place}, {'NCCL' if network.backend == 'nccl' else 'Gloo'}"


def table(network: Network) -> list[str]:
    """Returns time and bus bandwidth by size, one line each."""
    rows = [("size", "time", "bus bandwidth")]
    for timing in network.timings:
        rows.append((format_bytes(timing.num_bytes), _ms(timing.seconds), rate_text(timing.bus_bytes_per_s)))
    lines = [f"{size:>9}{seconds:>12}{rate:>15}" for size, seconds, rate in rows]
    return [*lines, f"the smallest one takes {_ms(network.latency_s)}"]


def _ms(seconds: float) -> str:
    digits = 3 if seconds < 1e-3 else 2 if seconds < 0.1 else 0
    return f"{seconds * 1e3:.{digits}f} ms"


def percent(share: float) -> str:
    """Returns a share in percent, with one more digit below 10 %.

    >>> percent(0.84), percent(0.0096)
    ('84 %', '1.0 %')
    """
    return f"{share * 100:.{0 if share >= 0.0995 else 1}f} %"
