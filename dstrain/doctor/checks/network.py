"""Checks the network: its interface, RDMA devices and the port of rank 0, hubs, caches, proxies and SwanLab."""

from __future__ import annotations

from collections.abc import Sequence

from dstrain.choices import SwanLabMode
from dstrain.doctor.facts import Endpoint, Facts, Network, Online, RdmaPort
from dstrain.doctor.requirements import Needs
from dstrain.errors import InvalidConfig
from dstrain.facts.network import GLOO, NCCL, Interface, choose_interface
from dstrain.findings import Notes, folded
from dstrain.monitor.mode import decide_mode
from dstrain.units import GIB, format_bytes

_ROCE_MTU = 4200
"""MTU from which RDMA over Ethernet sends 4096 bytes in a packet, its most."""


def check_network(net: Network, facts: Facts, needs: Needs, notes: Notes) -> None:
    """Adds findings about the network."""
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


_SMALL = 20 * GIB
"""Free space of a cache below which an ordinary model does not fit."""
_MIRRORS = {
    "Hugging Face": "export HF_ENDPOINT=https://hf-mirror.com; or if the cache has everything: export HF_HUB_OFFLINE=1",
    "ModelScope": "needed with hub: modelscope only; elsewhere name local folders",
}
_CERTIFICATE = "export SSL_CERT_FILE=/path/to/ca.pem REQUESTS_CA_BUNDLE=/path/to/ca.pem  (your proxy's certificate)"


def check_online(online: Online, facts: Facts, needs: Needs, notes: Notes) -> None:
    """Adds findings about hubs, SwanLab and proxies."""
    if needs.has_job and not needs.hubs:
        notes.ok("model and data are local; no hub is needed")
    for name in needs.hubs:
        _hub(name, online, notes)
    if needs.wants_swanlab and needs.is_first:
        _swanlab(online, needs, notes)
    if online.proxies:
        _proxies(online, needs, notes)


def _hub(name: str, online: Online, notes: Notes) -> None:
    cache, endpoint = online.caches.get(name), online.endpoints.get(name)
    kept = f"; {cache.path}: {format_bytes(cache.free_bytes)} free" if cache else ""
    if name == "Hugging Face" and online.is_offline:
        notes.ok(f"{name} is offline (HF_HUB_OFFLINE); only its cache is used{kept}")
        return
    if endpoint is not None and endpoint.took_s is not None:
        notes.ok(f"{endpoint.url} answers in {endpoint.took_s:.1f} s{kept}")
    elif endpoint is not None:
        notes.warn(f"{_silent(endpoint, online)}{kept}", _fix(endpoint, _MIRRORS[name]))
    if cache is not None and not cache.is_writable:
        notes.warn(f"{cache.path}, {name}'s cache, cannot be written", _move(name))
    elif cache is not None and endpoint is not None and endpoint.took_s is not None and cache.free_bytes < _SMALL:
        notes.warn(f"{cache.path}, {name}'s cache, has only {format_bytes(cache.free_bytes)} free", _move(name))


def _silent(endpoint: Endpoint, online: Online) -> str:
    through = f" through {online.proxies['https_proxy']}" if "https_proxy" in online.proxies else ""
    return f"{endpoint.url} cannot be reached{through}: {endpoint.problem}"


def _fix(endpoint: Endpoint, otherwise: str) -> str:
    return _CERTIFICATE if "CERTIFICATE_VERIFY" in (endpoint.problem or "") else otherwise


def _move(name: str) -> str:
    return f"export {'HF_HOME' if name == 'Hugging Face' else 'MODELSCOPE_CACHE'}=/a/large/disk"


def _swanlab(online: Online, needs: Needs, notes: Notes) -> None:
    has_key = bool(needs.environment.get("SWANLAB_API_KEY")) or online.has_swanlab_login
    try:
        mode = decide_mode(needs.swanlab_mode, needs.environment, logged_in=online.has_swanlab_login)
    except InvalidConfig as error:
        notes.bad(f"SwanLab: {error.problem}", error.hint)
        return
    if mode is SwanLabMode.ONLINE and not has_key:
        notes.bad("SwanLab is set to online, but has no key", "swanlab login; or: export SWANLAB_MODE=offline")
        return
    endpoint = online.endpoints.get("SwanLab")
    if mode is not SwanLabMode.ONLINE:
        why = "" if has_key else ", without a key: `swanlab login`, or SWANLAB_API_KEY, would upload the curves"
        notes.ok(f"SwanLab runs {mode}{why}")
    elif endpoint is not None and endpoint.took_s is not None:
        notes.ok(f"SwanLab has a key, and {endpoint.url} answers in {endpoint.took_s:.1f} s")
    elif endpoint is not None:
        fix = "export SWANLAB_MODE=offline, and later: swanlab sync"
        notes.warn(f"SwanLab: {_silent(endpoint, online)}", _fix(endpoint, fix))


def _proxies(online: Online, needs: Needs, notes: Notes) -> None:
    proxies = ", ".join(f"{name}={value}" for name, value in online.proxies.items())
    if needs.num_hosts > 1 and needs.is_first and "no_proxy" not in online.proxies:
        notes.warn(f"{proxies}: also between the hosts", "export no_proxy=localhost,127.0.0.1,10.0.0.0/8  (your hosts)")
    else:
        notes.ok(proxies)
