"""What this machine is called, and what it trains on."""

from __future__ import annotations

import socket

import psutil

ACCELERATOR = "DS_ACCELERATOR"
"""DeepSpeed's own switch: `cpu` trains without GPUs."""


def names() -> frozenset[str]:
    """Returns the names and addresses under which a hostfile may mean this machine."""
    host = socket.gethostname()
    found = {host, host.partition(".")[0], socket.getfqdn()}
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in {socket.AF_INET, socket.AF_INET6}:
                found.add(address.address.partition("%")[0])
    return frozenset(found)
