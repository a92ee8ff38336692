"""What this machine is called, and what it trains on."""

from __future__ import annotations

import platform
import socket
from importlib import metadata

import psutil

import dstrain

ACCELERATOR = "DS_ACCELERATOR"
"""DeepSpeed's own switch: `cpu` trains without GPUs."""


SAME_PACKAGES = ("torch", "deepspeed", "transformers", "dstrain")
"""What must be the same on every node of a run."""


def versions() -> dict[str, str | None]:
    """Returns the versions of Python and of `SAME_PACKAGES`; None for what is not installed."""
    found: dict[str, str | None] = {"Python": platform.python_version()}
    for name in SAME_PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["dstrain"] = dstrain.__version__  # of a checkout too
    return found


def names() -> frozenset[str]:
    """Returns the names and addresses under which a hostfile may mean this machine."""
    host = socket.gethostname()
    found = {host, host.partition(".")[0], socket.getfqdn()}
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in {socket.AF_INET, socket.AF_INET6}:
                found.add(address.address.partition("%")[0])
    return frozenset(found)
