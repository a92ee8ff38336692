"""Checks the interface for NCCL and Gloo, RDMA devices, MTU, and the port of rank 0."""

from __future__ import annotations

from collections.abc import Sequence

from dstrain.doctor.facts import Facts, Network, RdmaPort
from dstrain.doctor.finding import Finding, Notes
from dstrain.doctor.requirements import Needs
from dstrain.doctor.topology_drawing import folded
from dstrain.facts.network_interface import GLOO, NCCL, Interface, choose_interface

_ROCE_MTU = 4200
"""MTU from which RDMA over Ethernet sends 4096 bytes in a packet, its most."""


def check(facts: Facts, needs: Needs) -> list[Finding]:
    """Returns findings about the network."""
    net, notes = facts.network, Notes("network")
    if net is None:
        return []
    chosen = interface(net)
    _variables(net, chosen, needs, notes)
    if needs.num_hosts > 1 and not needs.is_quick:
        _ways(net, chosen, needs, notes)
        _rdma(net, chosen, needs, notes)
    elif not needs.is_quick:
        way = f"{_described(chosen)} leads to the internet" if chosen else "no interface has a route to the internet"
        ports = net.active_ports
        notes.ok(way + (f"; RDMA: {_ports(ports)}" if ports else "") + "; on one host no variable is needed")
    if needs.is_first:
        _port(net, needs, notes)
    return notes.findings


def interface(net: Network) -> Interface | None:
    """Returns the interface that NCCL and Gloo should use on this host."""
    name = choose_interface(net.interfaces, net.routes, net.default_address)
    return next((card for card in net.interfaces if card.name == name), None)


def _described(chosen: Interface) -> str:
    speed = f", {chosen.mbits_per_s / 1000:g} Gb/s" if chosen.mbits_per_s else ""
    return f"{chosen.name} ({chosen.addresses[0]}, MTU {chosen.mtu}{speed})"


def _variables(net: Network, chosen: Interface | None, needs: Needs, notes: Notes) -> None:
    """Adds variables of the user that match no interface: ranks would not find each other."""
    names = [card.name for card in net.interfaces if card.is_up]
    for variable in (NCCL, GLOO):
        value = needs.environment.get(variable)
        if value and not matches(variable, value, names):
            fix = f"export {variable}={'=' if variable == NCCL else ''}{chosen.name}" if chosen else f"unset {variable}"
            notes.bad(f"{variable}={value} matches no interface here that is up: {', '.join(names)}", fix)


def matches(variable: str, value: str, names: Sequence[str]) -> bool:
    """Returns whether a variable's value matches an interface. Source: NCCL user guide, NCCL_SOCKET_IFNAME.

    >>> matches(NCCL, "=eth", ["eth0"]), matches(NCCL, "eth,ib", ["eth0"]), matches(NCCL, "^eth", ["eth0", "ib0"])
    (False, True, True)
    """
    if variable == GLOO:
        return all(name in names for name in value.split(","))
    is_not, is_exact = value.startswith("^"), value.lstrip("^").startswith("=")
    wanted = [word for word in value.lstrip("^=").split(",") if word]
    hit = [any(name == word if is_exact else name.startswith(word) for word in wanted) for name in names]
    return any(is_hit != is_not for is_hit in hit)


def _ways(net: Network, chosen: Interface | None, needs: Needs, notes: Notes) -> None:
    hosts = needs.hosts.hosts if needs.hosts else ()
    if not net.master_is_known:
        name = hosts[0].name.rpartition("@")[2]
        notes.bad(f"{name}, the host of rank 0, cannot be resolved here", f"echo ADDRESS {name} >> /etc/hosts")
    unknown = [host for host, address in net.routes.items() if address is None and host != hosts[0].name]
    if unknown:
        notes.warn(
            f"cannot be resolved here: {', '.join(unknown)}", "write them into /etc/hosts, or their addresses here"
        )
    if chosen is not None:
        notes.ok(f"{_described(chosen)} leads to the other hosts")
        return
    ways = ", ".join(dict.fromkeys(address for address in net.routes.values() if address is not None))
    what = f"the other hosts are reached from {ways}" if ways else "no other host is reached"
    notes.warn(f"{what}, not through one real interface", f"ip route get OTHER_HOST; export {NCCL}==NAME")


def _ports(ports: Sequence[RdmaPort]) -> str:
    """Returns ports by kind, such as `mlx5_0-7, 400 Gb/s InfiniBand`."""
    kinds: dict[str, list[str]] = {}
    for port in ports:
        kinds.setdefault(f"{port.gbits_per_s:g} Gb/s {port.link_layer}", []).append(port.device)
    return "; ".join(f"{', '.join(folded(devices))}, {kind}" for kind, devices in kinds.items())


def _rdma(net: Network, chosen: Interface | None, needs: Needs, notes: Notes) -> None:
    up = net.active_ports
    if needs.on_cpu:
        return
    if not up:
        speed = f" at {chosen.mbits_per_s / 1000:g} Gb/s" if chosen and chosen.mbits_per_s else ""
        idle = f" ({', '.join(folded([port.device for port in net.rdma]))} down)" if net.rdma else ""
        notes.warn(f"no RDMA device is up{idle}: NCCL goes over TCP{speed}", "rdma link; ibstat; sudo modprobe mlx5_ib")
        return
    notes.ok(f"RDMA: {_ports(up)}")
    alike = {(port.gbits_per_s, port.link_layer) for port in up}
    down = [port.device for port in net.rdma if port not in up and (port.gbits_per_s, port.link_layer) in alike]
    if down:
        notes.warn(f"RDMA ports down: {', '.join(folded(down))}", f"ibstat {down[0]}; check the cable")
    if needs.environment.get("NCCL_IB_DISABLE") == "1":
        notes.warn("NCCL_IB_DISABLE=1 keeps NCCL from using RDMA", "unset NCCL_IB_DISABLE")
    mtus = {card.name: card.mtu for card in net.interfaces}
    low = [
        p.interface
        for p in up
        if p.link_layer == "Ethernet" and p.interface and mtus.get(p.interface, 9000) < _ROCE_MTU
    ]
    if low:
        what = f"MTU {mtus[low[0]]} on {', '.join(low)}: RDMA sends small packets over it"
        notes.warn(what, f"sudo ip link set {low[0]} mtu 9000  (on every host and switch alike)")


def _port(net: Network, needs: Needs, notes: Notes) -> None:
    if net.port_user is None:
        notes.ok(f"port {needs.port} is free for rank 0")
    elif "MASTER_PORT" in needs.environment:
        notes.bad(f"port {needs.port} (MASTER_PORT) is used by {net.port_user}", "unset MASTER_PORT")
    else:
        notes.warn(f"port {needs.port} is used by {net.port_user}; dstrain run selects another one", None)
