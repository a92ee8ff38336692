"""Chooses the network interface for NCCL and Gloo: the one through which this host reaches the others.

Without being told, NCCL takes the first interface that is not `lo` or `docker*`, and Gloo the one that the host's own
name leads to, which on Debian is the loopback: both are wrong often enough for runs to hang at their start.
Source: NCCL user guide, NCCL_SOCKET_IFNAME; torch 2.13 distributed docs, "Choosing the network interface to use"
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address

import psutil

NCCL, GLOO = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"
"""Variables that name the interface: NCCL's takes beginnings of names, or after `=` whole ones; Gloo's whole ones."""

_VIRTUAL = ("docker", "veth", "virbr", "cni", "br-", "flannel", "cali", "dummy", "ifb", "kube-", "podman", "vnet")
_ELSEWHERE = "203.0.113.1"  # reserved for documentation: only a default route leads there
_DISCARD_PORT = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One network interface."""

    name: str
    """Such as `eth0`."""
    is_up: bool
    """Whether it is up."""
    addresses: tuple[str, ...]
    """Its IPv4 and IPv6 addresses, without those of the link alone."""
    mtu: int
    """The largest packet, in bytes."""
    mbits_per_s: int
    """Its speed; 0 where it does not say."""

    @property
    def is_virtual(self) -> bool:
        """Whether it leads to containers or to itself."""
        return self.name == "lo" or self.name.startswith(_VIRTUAL)


def interfaces() -> tuple[Interface, ...]:
    """Returns the interfaces of this machine."""
    stats = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        texts = [each.address for each in entries if each.family in {socket.AF_INET, socket.AF_INET6}]
        known = stats.get(name)
        found.append(
            Interface(
                name=name,
                is_up=known is not None and known.isup,
                addresses=tuple(text for text in texts if "%" not in text),
                mtu=known.mtu if known else 0,
                mbits_per_s=known.speed if known and 0 < known.speed < 10**7 else 0,
            )
        )
    return tuple(found)


def source_address(host: str) -> str | None:
    """Returns the own address from which this machine reaches a host, or None where it does not know its name.

    A connected UDP socket asks the kernel's routing table; nothing is sent. A name that only ssh knows is looked up in
    ssh's configuration.
    """
    name = host.rpartition("@")[2]
    for candidate in (name, _ssh_name(name)):
        if candidate is None:
            continue
        with suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(candidate, _DISCARD_PORT, type=socket.SOCK_DGRAM):
                with suppress(OSError), socket.socket(family, kind) as probe:
                    probe.connect(address)
                    return str(probe.getsockname()[0]).partition("%")[0]
    return None


def default_address() -> str | None:
    """Returns the own address from which the internet would be reached, or None without a default route."""
    return source_address(_ELSEWHERE)


def _ssh_name(name: str) -> str | None:
    """Returns the HostName that ssh's configuration gives a name, or None where it gives none."""
    if shutil.which("ssh") is None:
        return None
    with suppress(subprocess.SubprocessError, OSError):
        told = subprocess.run(["ssh", "-G", name], capture_output=True, text=True, timeout=2, stdin=subprocess.DEVNULL)
        for line in told.stdout.splitlines():
            key, _, value = line.partition(" ")
            if key == "hostname" and value.casefold() != name.casefold():
                return value
    return None


def choose_interface(
    found: Sequence[Interface], routes: Mapping[str, str | None], default: str | None = None
) -> str | None:
    """Returns the interface through which the other hosts are reached, or None where there is not one for all of them.

    `routes` holds for each other host the own address from which it is reached; where no host is known, `default` is
    taken, the own address of the default route.

    >>> eth = Interface(name="eth1", is_up=True, addresses=("10.0.0.1",), mtu=9000, mbits_per_s=100_000)
    >>> choose_interface([eth], {"node2": "10.0.0.1"})
    'eth1'
    """
    owners = {address: each.name for each in found if each.is_up and not each.is_virtual for address in each.addresses}
    own = [address for address in routes.values() if address is not None and not ip_address(address).is_loopback]
    sources = own or ([default] if default is not None else [])
    names = {owners.get(address) for address in sources}
    return names.pop() if len(names) == 1 else None


def interface_environment(name: str) -> dict[str, str]:
    """Returns the variables that make NCCL and Gloo use one interface.

    >>> interface_environment("eth1")
    {'NCCL_SOCKET_IFNAME': '=eth1', 'GLOO_SOCKET_IFNAME': 'eth1'}
    """
    return {NCCL: f"={name}", GLOO: name}


def agreed(names: Mapping[str, str | None]) -> str | None:
    """Returns the interface that all hosts have chosen, or None where they differ or one has none."""
    chosen = set(names.values())
    return chosen.pop() if len(chosen) == 1 else None


def disagreement(names: Mapping[str, str | None]) -> tuple[str, str] | None:
    """Returns what to say and what to type where several hosts have chosen different interfaces; None otherwise."""
    known = {host: name for host, name in names.items() if name is not None}
    if len(names) < 2 or (agreed(names) is not None):
        return None
    if not known:
        return "no host has an interface through which it reaches the others", "ip address; ip route"
    silent = [host for host in names if host not in known]
    if silent:
        return f"{', '.join(silent)}: no one interface leads to the other hosts", "ip address; ip route  (on that host)"
    usual = Counter(known.values()).most_common(1)[0][0]
    others = ", ".join(f"{name} on {host}" for host, name in known.items() if name != usual)
    everyone = ",".join(dict.fromkeys(known.values()))
    fix = f"dstrain run --launcher ssh, which tells each host its own; with others: export {NCCL}=={everyone}"
    return f"the hosts reach each other through {usual}, and through {others}", fix


def environment_of(names: Mapping[str, str | None], env: Mapping[str, str]) -> dict[str, str]:
    """Returns what a run sets, given the interface of each host: nothing on one host, where they differ, or where the
    user's own environment says it already.

    >>> environment_of({"a": "eth0", "b": "eth0"}, {"GLOO_SOCKET_IFNAME": "eth1"})
    {'NCCL_SOCKET_IFNAME': '=eth0'}
    """
    name = agreed(names)
    if len(names) < 2 or name is None:
        return {}
    return {key: value for key, value in interface_environment(name).items() if key not in env}
