"""Judges a network measurement: compares it with the links' figures and names the slowest pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dstrain.doctor.finding import Finding, Notes
from dstrain.facts.cluster import gpus
from dstrain.facts.cluster.cluster import Cluster, Origin, link_assumed_between_nodes
from dstrain.facts.cluster.gpus import Gpu
from dstrain.facts.cluster.links import Link, link
from dstrain.facts.cluster.network_measurement import (
    ALL_GATHER,
    ALL_REDUCE,
    MEDIAN_FROM_HOSTS,
    Network,
    Pair,
    rate_text,
    slow_hosts,
)
from dstrain.units import format_bytes

FAR_BELOW = 0.5
"""Share of a link's figure below which something is wrong: collectives reach 0.7 to 0.9 of it."""
SLOW_PAIR = 0.7
"""Share of the usual pair's bandwidth below which a pair is slow: equal links differ by a tenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The expected bandwidth of the links."""

    between: Link
    """The link between hosts, for each GPU."""
    is_assumed: bool
    """Whether the link is assumed because none was given."""
    inside: Link
    """The link between the GPUs of one host."""

    @property
    def links(self) -> dict[str, Link]:
        """Both links by place."""
        return {"between": self.between, "inside": self.inside}


def gpu_of(network: Network) -> Gpu:
    """Returns the GPU that took part."""
    return gpus.gpu(gpus.CPU) if network.gpu is None else gpus.from_nvml(network.gpu, network.gpu_memory_mib)


def figures(gpu: Gpu, planned: Cluster | None) -> Figures:
    """Returns the expected bandwidth: of the link given to a plan for these GPUs, else of typical servers with them."""
    between, is_given = link_assumed_between_nodes(gpu), False
    if planned is not None and planned.gpu.name == gpu.name and planned.inter_link_origin is Origin.GIVEN:
        between, is_given = planned.inter_link, True
    return Figures(between=between, is_assumed=not is_given, inside=link(gpu.link))


def findings(network: Network, figures: Figures, interfaces: Mapping[str, str]) -> list[Finding]:
    """Returns findings; `interfaces` are those through which hosts reached each other."""
    notes = Notes("network")
    notes.ok(f"{_where(network)}: time and bus bandwidth", drawing=table(network))
    if network.between_bus_bytes_per_s is not None:
        _between(network, network.between_bus_bytes_per_s, figures, interfaces, notes)
    if network.inside_bus_bytes_per_s is not None:
        _inside(network, network.inside_bus_bytes_per_s, figures, notes)
    _ways(network, notes)
    if network.pairs:
        _slowest(network, interfaces, notes)
    return notes.findings


def _where(network: Network) -> str:
    """Returns what was measured, in words."""
    count, slots = len(network.hosts), sorted(set(network.slots))
    per_host = "-".join(map(str, slots[:1] + slots[-1:] if len(slots) > 1 else slots))
    what = "GPU" if network.backend == "nccl" else "rank"
    many = "s" if slots[-1] > 1 else ""
    place = f"{per_host} {what}{many}"
    place = f"{count} hosts of {place}" if count > 1 else f"{place} of {network.hosts[0]}"
    return f"{place}, {'NCCL' if network.backend == 'nccl' else 'Gloo'}"


def table(network: Network) -> list[str]:
    """Returns times and bus bandwidths by size, one line each."""
    timed = {(timing.name, timing.num_bytes): timing for timing in network.timings}
    sizes = sorted({num_bytes for _, num_bytes in timed})
    lines = [f"{'size':>9}  {'all-reduce':>22}  {'all-gather':>22}"]
    for num_bytes in sizes:
        cells = [f"{format_bytes(num_bytes):>9}"]
        for name in (ALL_REDUCE, ALL_GATHER):
            timing = timed.get((name, num_bytes))
            cells.append(f"{_ms(timing.seconds):>11}{rate_text(timing.bus_bytes_per_s):>11}" if timing else " " * 22)
        lines.append("  ".join(cells).rstrip())
    return [*lines, f"the smallest all-reduce takes {_ms(network.latency_s)}"]


def _ms(seconds: float) -> str:
    digits = 3 if seconds < 1e-3 else 2 if seconds < 0.1 else 0
    return f"{seconds * 1e3:.{digits}f} ms"


def _between(
    network: Network, bus_bytes_per_s: float, figures: Figures, interfaces: Mapping[str, str], notes: Notes
) -> None:
    """Compares the bandwidth between hosts with the link's; a ring crosses on the adapters of all GPUs."""
    per_gpu = bus_bytes_per_s / min(network.slots)
    share = per_gpu / figures.between.bytes_per_s
    assumed = "assumed " if figures.is_assumed else ""
    figure = f"{percent(share)} of {assumed}{figures.between.name} ({rate_text(figures.between.bytes_per_s)})"
    what = f"between hosts {rate_text(per_gpu)} for each {_unit(network)}, {figure}"
    inside = network.inside_bus_bytes_per_s
    if share >= FAR_BELOW:
        notes.ok(what)
    elif inside is not None and bus_bytes_per_s > 0.9 * inside:
        notes.ok(f"{what}; the links inside the hosts are as slow ({rate_text(inside)})")
    else:
        notes.warn(what, _between_fix(network, figures, interfaces))


def _between_fix(network: Network, figures: Figures, interfaces: Mapping[str, str]) -> str:
    """Returns what to try if the network is far slower than its link."""
    names = ",".join(dict.fromkeys(interfaces.values())) or "NAME"
    tries = []
    if network.backend == "gloo":
        tries.append(f"ethtool {names}; ip link show {names}  (speed, MTU); export GLOO_SOCKET_IFNAME=OTHER")
    elif "NET/Socket" in network.ways:
        tries.append(f"NCCL went over TCP through {names}: unset NCCL_IB_DISABLE; rdma link; export NCCL_IB_HCA=mlx5")
        tries.append("without RDMA: ip link set NAME mtu 9000; export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4")
    else:
        tries.append("ibstat (rate, errors); export NCCL_IB_HCA=mlx5, to use all adapters; MTU 9000 for RoCE")
    if network.backend == "nccl":
        tries.append("NCCL_DEBUG=INFO dstrain doctor --network  shows which transports NCCL uses")
    if figures.is_assumed:
        tries.append("or, if it is another link: dstrain gen-config --interconnect NAME")
    return "; ".join(tries)


def _inside(network: Network, bus_bytes_per_s: float, figures: Figures, notes: Notes) -> None:
    """Compares the bandwidth inside the slowest host with the link between its GPUs."""
    share = bus_bytes_per_s / figures.inside.bytes_per_s
    where = "inside the host"
    if network.inside:
        slowest = min(network.inside, key=lambda host: host.bus_bytes_per_s)
        where = f"inside {network.hosts[slowest.host]}, the slowest,"
    what = f"{where} {rate_text(bus_bytes_per_s)}, {percent(share)} of {figures.inside.name}"
    what += f" ({rate_text(figures.inside.bytes_per_s)})"
    if share >= FAR_BELOW or network.backend == "gloo":
        notes.ok(what)
        return
    fix = "nvidia-smi topo -m; nvidia-smi nvlink --status"
    if "SHM" in network.ways:
        fix = "GPUs reach each other through RAM: unset NCCL_P2P_DISABLE; nvidia-smi topo -p2p r; turn ACS off (BIOS)"
    notes.warn(what, fix)


def _ways(network: Network, notes: Notes) -> None:
    """Reports the transports that NCCL used, and whether adapters read GPU memory."""
    if not network.ways:
        return
    nets = [way for way in network.ways if way.startswith("NET/")]
    without = [way for way in nets if way != "NET/Socket" and f"{way}/GDRDMA" not in nets and "GDRDMA" not in way]
    what = f"NCCL went over {', '.join(network.ways)}"
    if without:
        fix = "sudo modprobe nvidia_peermem; or export NCCL_NET_GDR_LEVEL=SYS  where GPU and adapter are far apart"
        notes.warn(f"{what}: without GPUDirect RDMA, so through the RAM of the host", fix)
    else:
        notes.ok(what)


def _slowest(network: Network, interfaces: Mapping[str, str], notes: Notes) -> None:
    """Names the slowest pair, and the host whose pairs are all slow."""
    slowest = min(network.pairs, key=lambda pair: pair.bytes_per_s)
    usual = network.usual_pair_bytes_per_s or slowest.bytes_per_s
    text = f"slowest pair: {_named(network, slowest)}, {rate_text(slowest.bytes_per_s)}"
    if len(network.pairs) == 1:
        notes.ok(
            f"the only pair: {_named(network, slowest)}, {rate_text(slowest.bytes_per_s)} with one {_unit(network)}"
        )
        return
    seen = f" ({len(network.pairs)} of {network.num_pairs} measured)" if len(network.pairs) < network.num_pairs else ""
    against = "fastest" if len(network.hosts) < MEDIAN_FROM_HOSTS else "median"
    what = f"{text}, {percent(slowest.bytes_per_s / usual)} of the {against} one ({rate_text(usual)}){seen}"
    if slowest.bytes_per_s >= SLOW_PAIR * usual:
        notes.ok(what)
        return
    guilty = [network.hosts[host] for host in slow_hosts(network, SLOW_PAIR)]
    if guilty:
        what += f"; every pair of {', '.join(guilty)} is slow"
        name = interfaces.get(guilty[0], "NAME")
        rdma = "; ibstat" if network.backend == "nccl" else ""
        fix = f"ssh {guilty[0]} 'ethtool {name}; ip -s link show {name}{rdma}'  (speed, errors, MTU, cable)"
    else:
        fix = "check the path between these two: cable, switch port, route; ibdiagnet, or ping -M do -s 8972 HOST"
    notes.warn(what, fix)


def _named(network: Network, pair: Pair) -> str:
    return f"{network.hosts[pair.first]} and {network.hosts[pair.second]}"


def percent(share: float) -> str:
    """Returns a share in percent, with one more digit below 10 %.

    >>> percent(0.84), percent(0.0096)
    ('84 %', '1.0 %')
    """
    return f"{share * 100:.{0 if share >= 0.0995 else 1}f} %"


def _unit(network: Network) -> str:
    return "GPU" if network.backend == "nccl" else "rank"
