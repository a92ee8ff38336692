"""Chooses the network interface for NCCL and Gloo: the one through which this host reaches the others.

By default NCCL takes the first interface other than `lo` and `docker*`, and Gloo the one that the host's own name
resolves to, which on Debian is the loopback. Both are often wrong, and the run hangs at startup.
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

from dstrain.errors import EnvironmentProblem, InvalidConfig

NCCL, GLOO = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"
"""Variables that name the interface: NCCL takes prefixes of names (exact names after `=`), Gloo exact names."""

_VIRTUAL = ("docker", "veth", "virbr", "cni", "br-", "flannel", "cali", "dummy", "ifb", "kube-", "podman", "vnet")
_ELSEWHERE = "203.0.113.1"  # reserved for documentation: only a default route leads there
_DISCARD_PORT = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One network interface of this machine."""

    name: str
    """Such as `eth0`."""
    is_up: bool
    addresses: tuple[str, ...]
    """IPv4 and IPv6 addresses, without link-local ones."""
    mtu: int
    """The largest packet, in bytes."""
    mbits_per_s: int
    """Link speed; 0 if unknown."""

    @property
    def is_virtual(self) -> bool:
        """Whether it is the loopback or leads to containers."""
        return self.name == "lo" or self.name.startswith(_VIRTUAL)


def interfaces() -> tuple[Interface, ...]:
    """Returns the interfaces of this machine."""
    all_stats = psutil.net_if_stats()
    machine = []
    for name, entries in psutil.net_if_addrs().items():
        texts = [entry.address for entry in entries if entry.family in {socket.AF_INET, socket.AF_INET6}]
        stats = all_stats.get(name)
        machine.append(
            Interface(
                name=name,
                is_up=stats is not None and stats.isup,
                addresses=tuple(text for text in texts if "%" not in text),
                mtu=stats.mtu if stats else 0,
                mbits_per_s=stats.speed if stats and 0 < stats.speed < 10**7 else 0,
            )
        )
    return tuple(machine)


def source_address(host: str) -> str | None:
    """Returns this machine's address on the route to a host, or None if the host's name is unknown.

    A connected UDP socket reads the kernel's routing table; nothing is sent. Names that only ssh knows are looked up
    in its configuration.
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
    """Returns this machine's address on the default route, or None without one."""
    return source_address(_ELSEWHERE)


def _ssh_name(name: str) -> str | None:
    """Returns the HostName of a name in ssh's configuration, or None."""
    if shutil.which("ssh") is None:
        return None
    with suppress(subprocess.SubprocessError, OSError):
        child = subprocess.run(["ssh", "-G", name], capture_output=True, text=True, timeout=2, stdin=subprocess.DEVNULL)
        for line in child.stdout.splitlines():
            key, _, value = line.partition(" ")
            if key == "hostname" and value.casefold() != name.casefold():
                return value
    return None


def choose_interface(
    interfaces: Sequence[Interface], routes: Mapping[str, str | None], default: str | None = None
) -> str | None:
    """Returns the one interface that leads to all other hosts, or None if there is no such interface.

    `routes` maps each other host to this machine's address on the route to it. If none is known, `default` counts, this
    machine's address on the default route.

    >>> eth = Interface(name="eth1", is_up=True, addresses=("10.0.0.1",), mtu=9000, mbits_per_s=100_000)
    >>> choose_interface([eth], {"node2": "10.0.0.1"})
    'eth1'
    """
    usable = [interface for interface in interfaces if interface.is_up and not interface.is_virtual]
    owners = {address: interface.name for interface in usable for address in interface.addresses}
    own = [address for address in routes.values() if address is not None and not ip_address(address).is_loopback]
    sources = own or ([default] if default is not None else [])
    names = {owners.get(address) for address in sources}
    return names.pop() if len(names) == 1 else None


def interface_environment(name: str) -> dict[str, str]:
    """Returns the variables that make NCCL and Gloo use an interface.

    >>> interface_environment("eth1")
    {'NCCL_SOCKET_IFNAME': '=eth1', 'GLOO_SOCKET_IFNAME': 'eth1'}
    """
    return {NCCL: f"={name}", GLOO: name}


def agreed(names: Mapping[str, str | None]) -> str | None:
    """Returns the interface that all hosts have chosen, or None if they differ or one has none."""
    chosen = set(names.values())
    return chosen.pop() if len(chosen) == 1 else None


def disagreement(names: Mapping[str, str | None]) -> tuple[str, str] | None:
    """Returns (problem, fix) if several hosts have chosen different interfaces, else None."""
    known = {host: name for host, name in names.items() if name is not None}
    if len(names) < 2 or (agreed(names) is not None):
        return None
    if not known:
        return "no host has an interface that leads to the others", "ip address; ip route"
    silent = [host for host in names if host not in known]
    if silent:
        return (
            f"{', '.join(silent)}: no single interface leads to the other hosts",
            "ip address; ip route  (on that host)",
        )
    usual = Counter(known.values()).most_common(1)[0][0]
    others = ", ".join(f"{name} on {host}" for host, name in known.items() if name != usual)
    everyone = ",".join(dict.fromkeys(known.values()))
    fix = f"dstrain run sets the interface of each host; otherwise: export {NCCL}=={everyone}"
    return f"the hosts use different interfaces: mostly {usual}, but {others}", fix


def environment_of(names: Mapping[str, str | None], env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a run sets, given each host's interface; none on a single host, if hosts differ, or
    if the user has set them.

    >>> environment_of({"a": "eth0", "b": "eth0"}, {"GLOO_SOCKET_IFNAME": "eth1"})
    {'NCCL_SOCKET_IFNAME': '=eth0'}
    """
    name = agreed(names)
    if len(names) < 2 or name is None:
        return {}
    return {key: value for key, value in interface_environment(name).items() if key not in env}


DEFAULT_PORT = 29500
"""The default port. Source: deepspeed constants.py"""
_BACKLOG = 4096


def wanted_port(named: int | None, environment: Mapping[str, str]) -> tuple[int, str | None]:
    """Returns the port for rank 0 and its source: the option, else MASTER_PORT, else (29500, None).

    Raises InvalidConfig if MASTER_PORT is not a port.
    """
    if named is not None:
        return named, "--master-port"
    text = environment.get("MASTER_PORT")
    if not text:
        return DEFAULT_PORT, None
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise InvalidConfig(f'MASTER_PORT is "{text}", not a port', hint="Ports are 1 to 65535.")
    return int(text), "MASTER_PORT"


def local_port(named: int | None, environment: Mapping[str, str]) -> tuple[int, str | None]:
    """Returns the port of rank 0 on this machine and its source: as requested, else any free port, so that runs that
    start at the same time get different ones.

    Raises EnvironmentProblem if the requested port is in use.
    """
    number, where = wanted_port(named, environment)
    if where is None:
        with socket.create_server(("", 0)) as free:
            return int(free.getsockname()[1]), None
    if not is_free(number):
        hint = f"`ss -ltnp | grep :{number}` shows the process; choose another port, or none."
        raise EnvironmentProblem(f"{where}: port {number} is in use on this machine", hint=hint)
    return number, where


def is_free(number: int) -> bool:
    """Returns whether rank 0 could listen on a port of this machine; closing connections do not count."""
    server = listener(number)
    if server is not None:
        server.close()
    return server is not None


def listener(number: int) -> socket.socket | None:
    """Returns a socket that listens on a port (0: any) as rank 0 will, or None if the port is in use."""
    for family in (socket.AF_INET6, socket.AF_INET):
        with suppress(OSError, ValueError):  # there may be no IPv6
            is_dual = family == socket.AF_INET6
            return socket.create_server(("", number), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual)
    return None
