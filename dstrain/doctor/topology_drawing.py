"""Draws how GPUs and network adapters are connected, in a few lines of text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from dstrain.doctor.finding import listed
from dstrain.doctor.gpu_facts import Topology
from dstrain.units import counted

COLUMNS = 72
"""Width of the picture."""
_CLOSE = {"PIX", "PXB"}
_SAME_NODE = {"PHB", "NODE"}


def draw(topology: Topology) -> list[str]:
    """Returns the picture: NVLink, then for each NUMA node what is behind one PCIe switch, joined by ─."""
    lines = [("NVLink", nvlink_text(topology))]
    groups = switches(topology)
    nodes: dict[str, list[str]] = {}
    for group in groups:
        nodes.setdefault(_node(group, groups, topology), []).append(_joined(group, topology))
    order = sorted(nodes, key=lambda node: (not node, node))
    lines += [
        (f"NUMA {node}" if node else "far" if len(nodes) > 1 else "PCIe", " · ".join(nodes[node])) for node in order
    ]
    width = max(len(label) for label, _ in lines) + 2
    drawn: list[str] = []
    for label, text in lines:
        drawn += textwrap.wrap(
            f"{label:<{width}}{text}",
            COLUMNS,
            subsequent_indent=" " * width,
            break_long_words=False,
            break_on_hyphens=False,
        )
    legend = ["a→b×n: n links from GPU a to GPU b"] if "→" in lines[0][1] else []
    legend += ["─ behind one PCIe switch, · through the CPU"] if any("─" in text for _, text in lines) else []
    return drawn + ([" " * width + f"({'; '.join(legend)})"] if legend else [])


def nvlink_text(topology: Topology) -> str:
    """Returns which GPUs NVLinks connect, and how many there are.

    >>> links = (("X", "NV4"), ("NV4", "X"))
    >>> nvlink_text(Topology(devices=("GPU0", "GPU1"), links=links, numa=("0", "0"), p2p=()))
    'GPU 0-1, every pair by 4 links'
    """
    count = topology.num_gpus
    links = nvlinks(topology)
    if not links:
        return "none"
    cliques = _components(range(count), links)
    texts = []
    for members in cliques:
        widths = {links.get((a, b), 0) for a in members for b in members if a < b}
        if len(members) > 1 and len(widths) == 1:
            texts.append(f"GPU {listed(members)}, every pair by {counted(widths.pop(), 'link')}")
        elif len(members) > 1:
            texts += [text for gpu in members if (text := _from_one(gpu, members, links))]
    return "; ".join(texts)


def _from_one(gpu: int, members: Sequence[int], links: dict[tuple[int, int], int]) -> str:
    """Returns the links of one GPU to those that come after it, such as `0→1-2×1 3×2`; empty if it has none."""
    by_width: dict[int, list[int]] = {}
    for other in members:
        width = links.get((gpu, other), 0)
        if other > gpu and width:
            by_width.setdefault(width, []).append(other)
    texts = [f"{listed(others)}×{width}" for width, others in sorted(by_width.items())]
    return f"{gpu}→{' '.join(texts)}" if texts else ""


def nvlinks(topology: Topology) -> dict[tuple[int, int], int]:
    """Returns the number of NVLinks of each connected pair of GPUs, in both orders."""
    counts = {}
    for row in range(topology.num_gpus):
        for column in range(topology.num_gpus):
            match = re.fullmatch(r"NV(\d+)", topology.links[row][column])
            if match is not None:
                counts[row, column] = int(match[1])
    return counts


def switches(topology: Topology) -> list[list[int]]:
    """Returns the devices behind each PCIe switch, by their order in the table; one on its own is a group too."""
    count = len(topology.devices)
    close = {(a, b) for a in range(count) for b in range(count) if topology.links[a][b] in _CLOSE}
    return _components(range(count), close)


def _components(members: Iterable[int], joined: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Returns groups of members that are connected, directly or through others."""
    group = {member: {member} for member in members}
    for a, b in joined:
        if group[a] is not group[b]:
            group[a] |= group[b]
            for member in group[b]:
                group[member] = group[a]
    return sorted({id(joined_members): sorted(joined_members) for joined_members in group.values()}.values())


def _node(group: Sequence[int], groups: Sequence[Sequence[int]], topology: Topology) -> str:
    """Returns the NUMA node of a group: its GPU's, or a GPU's on the same node; empty if unknown."""
    gpus = [device for device in group if device < topology.num_gpus]
    near = [
        gpu
        for gpu in range(topology.num_gpus)
        if any(topology.links[device][gpu] in _SAME_NODE for device in group if device != gpu)
    ]
    return next((topology.numa[gpu] for gpu in (*gpus, *near) if topology.numa[gpu]), "")


def _joined(group: Sequence[int], topology: Topology) -> str:
    """Returns a group as `GPU0─GPU1─mlx5_0-3`."""
    gpus = [str(device) for device in group if device < topology.num_gpus]
    nics = [topology.devices[device] for device in group if device >= topology.num_gpus]
    names = [f"GPU{','.join(gpus)}"] if gpus else []
    return "─".join([*names, *folded(nics)])


def folded(names: Sequence[str]) -> list[str]:
    """Returns names with runs of numbers at their ends folded.

    >>> folded(["mlx5_0", "mlx5_1", "mlx5_2", "bnxt_re0"])
    ['mlx5_0-2', 'bnxt_re0']
    """
    by_stem: dict[str, list[int]] = {}
    plain: list[str] = []
    for name in names:
        match = re.fullmatch(r"(.*?)(\d+)", name)
        if match is None:
            plain.append(name)
        else:
            by_stem.setdefault(match[1], []).append(int(match[2]))
    return [f"{stem}{listed(numbers)}" for stem, numbers in by_stem.items()] + plain
