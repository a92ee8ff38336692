"""Checks how GPUs are connected: NVLink, PCIe switches, and peer-to-peer access (P2P)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from dstrain.doctor import topology_drawing
from dstrain.doctor.facts import Facts
from dstrain.doctor.finding import Finding, Notes, listed
from dstrain.doctor.gpu_facts import Topology
from dstrain.doctor.requirements import Needs

_SWITCHED = 6
"""NVLinks of a pair from which an NVSwitch must join them, with all pairs alike."""
_NO_P2P: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "CNS": ("the chipset does not pass it on", "turn off IOMMU and ACS in the BIOS; lspci -vv | grep ACSCtl"),
        "TNS": ("they are too far apart on PCIe", "put them behind one CPU, or leave it: NCCL goes through RAM"),
        "NS": ("not supported", "nvidia-smi topo -p2p r; update the driver; turn off IOMMU in the BIOS"),
        "DR": ("turned off in the driver's registry", "remove RMForceP2PType from /etc/modprobe.d/*nvidia*"),
        "U": ("for an unknown reason", "nvidia-smi topo -p2p r"),
    }
)
"""nvidia-smi's abbreviation → why a pair of GPUs has no P2P, and what to do."""


def check(facts: Facts, needs: Needs) -> list[Finding]:
    """Returns findings about the connections between GPUs."""
    topology, notes = facts.topology, Notes("topology")
    if topology is None or topology.num_gpus < 2 or needs.on_cpu:
        return []
    links = topology_drawing.nvlinks(topology)
    notes.ok(f"the {topology.num_gpus} GPUs are connected {_how(topology)}", topology_drawing.draw(topology))
    counts = set(links.values())
    if max(counts, default=0) >= _SWITCHED and len(counts) > 1:
        fewer = [(a, b) for (a, b), count in sorted(links.items()) if a < b and count < max(counts)]
        what = f"{pairs_text(fewer)}: {min(counts)} NVLinks, elsewhere {max(counts)}: links are down"
        notes.bad(what, "nvidia-smi nvlink -s; sudo reboot")
    if links and needs.environment.get("NCCL_P2P_DISABLE") == "1":
        notes.warn("NCCL_P2P_DISABLE=1 keeps NCCL from using NVLink", "unset NCCL_P2P_DISABLE")
    _p2p(topology, notes)
    return notes.findings


def _how(topology: Topology) -> str:
    if topology_drawing.nvlinks(topology):
        return "by NVLink"
    kinds = {topology.links[a][b] for a in range(topology.num_gpus) for b in range(topology.num_gpus) if a != b}
    over = " and between CPUs" if "SYS" in kinds else ""
    return f"by PCIe{over}, without NVLink"


def _p2p(topology: Topology, notes: Notes) -> None:
    """Adds pairs of GPUs that cannot read each other's memory."""
    pairs: dict[str, list[tuple[int, int]]] = {}
    for a, row in enumerate(topology.p2p):
        for b, state in enumerate(row):
            if a < b and state not in {"OK", "X"}:
                pairs.setdefault(state, []).append((a, b))
    linked = set(topology_drawing.nvlinks(topology))
    for state, unreachable in pairs.items():
        broken = [pair for pair in unreachable if pair in linked]
        who = pairs_text(broken or unreachable)
        if broken:
            notes.bad(
                f"{who}: NVLinks, and no P2P ({state})", "sudo systemctl status nvidia-fabricmanager; sudo reboot"
            )
        elif state == "GNS":
            notes.ok("no P2P with GPUs of this kind: NCCL goes through shared memory")
        else:
            why, fix = _NO_P2P.get(state, (state, "nvidia-smi topo -p2p r"))
            notes.warn(f"{who}: no P2P, {why}: NCCL goes through RAM", fix)


def pairs_text(pairs: Sequence[tuple[int, int]]) -> str:
    """Returns pairs of GPUs, folded if they are all pairs of some GPUs, or all pairs with one.

    >>> pairs_text([(0, 1), (0, 2), (1, 2)]), pairs_text([(0, 3), (1, 3), (3, 4)]), pairs_text([(0, 1), (2, 3)])
    ('GPU 0-2', 'GPU 3 with 0-1,4', 'GPU 0 with 1, 2 with 3')
    """
    gpus = {gpu for pair in pairs for gpu in pair}
    if len(pairs) == len(gpus) * (len(gpus) - 1) // 2:
        return f"GPU {listed(gpus)}"
    shared = set.intersection(*(set(pair) for pair in pairs))
    if shared:
        return f"GPU {listed(shared)} with {listed(gpus - shared)}"
    return "GPU " + ", ".join(f"{a} with {b}" for a, b in pairs)
