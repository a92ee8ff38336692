"""Probes interfaces, routes to the other hosts, RDMA devices, and the port of rank 0."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from dstrain.doctor.facts import Network, Question, RdmaPort
from dstrain.doctor.run_probes import all_at_once
from dstrain.facts import network_interface
from dstrain.facts.ports import is_free

_NAMES_S = 3.0
"""How long names of hosts may take to be looked up."""
_RDMA = Path("/sys/class/infiniband")


def look(question: Question, environment: Mapping[str, str]) -> Network:
    """Returns the network as this machine sees it; nothing is sent."""
    asked = () if question.is_quick else (*question.others, *([question.master] if question.master else []))
    looks = {host: partial(network_interface.source_address, host) for host in asked}
    sources = all_at_once(looks, _NAMES_S)
    return Network(
        interfaces=network_interface.interfaces(),
        routes={host: sources[host].value for host in asked if host != question.master or host in question.others},
        default_address=network_interface.default_address(),
        master_is_known=question.master is None or question.is_quick or sources[question.master].value is not None,
        rdma=rdma_ports(_RDMA),
        port_user=None if question.port is None else _user(question.port),
    )


def rdma_ports(root: Path) -> tuple[RdmaPort, ...]:
    """Returns the ports of RDMA devices below `/sys/class/infiniband`."""
    ports = []
    for port in sorted(root.glob("*/ports/*"), key=lambda path: (_natural(path.parts[-3]), path.name)):
        device = port.parent.parent
        rate = re.match(r"[\d.]+", _read(port / "rate"))
        ports.append(
            RdmaPort(
                device=device.name,
                state=_read(port / "state").rpartition(":")[2].strip(),
                gbits_per_s=float(rate[0]) if rate else 0.0,
                link_layer=_read(port / "link_layer"),
                interface=next((card.name for card in sorted((device / "device" / "net").glob("*"))), None),
            )
        )
    return tuple(ports)


def _natural(name: str) -> list[int | str]:
    """Returns a key by which `mlx5_10` comes after `mlx5_9`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace").strip()
    return ""


def _user(port: int) -> str | None:
    """Returns the process that listens on a port; None if rank 0 could."""
    if is_free(port):
        return None
    with suppress(psutil.Error, OSError):
        for item in psutil.net_connections("tcp"):
            if item.status == psutil.CONN_LISTEN and item.laddr and item.laddr.port == port and item.pid:
                return f"{psutil.Process(item.pid).name()} ({item.pid})"
    return "another user's program"
