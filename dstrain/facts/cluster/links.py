"""Links between GPUs, inside a node and between nodes, in bytes per second of one GPU in one direction.

Every figure is the peak of the wire, of which collectives reach about 0.7 to 0.9; the planner accounts for that. Links
between nodes assume one adapter per GPU, as in every 8-GPU server with NVLink; in `eth25/8`, 8 GPUs share one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from dstrain.errors import InvalidConfig, nearest


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
