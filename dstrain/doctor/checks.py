"""Judges a machine: its limits, RAM, disks and network; runs all checks in the order in which they are reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrain.choices import SwanLabMode
from dstrain.doctor import gpu_checks, software_checks
from dstrain.doctor.facts import Endpoint, Facts, Folder, Limits, Network, Online, RdmaPort, Space
from dstrain.doctor.gather import gather
from dstrain.doctor.requirements import Needs, of_prepared, question
from dstrain.errors import InvalidConfig
from dstrain.facts.network import GLOO, NCCL, Interface, choose_interface
from dstrain.facts.this_machine import is_this_machine, names
from dstrain.findings import (
    LARGER_DISK,
    LARGER_DRIVE,
    LESS_RAM,
    OTHER_FOLDER,
    UNWRITABLE,
    Finding,
    Notes,
    Severity,
    folded,
    too_full,
    too_little_ram,
)
from dstrain.monitor.sinks.sink import decide_mode
from dstrain.units import GIB, MIB, format_bytes, format_sizes

if TYPE_CHECKING:
    from dstrain.launch.prepare.prepare import PreparedRun

SHM_PER_CPU_RANK = 66 * MIB
"""Shared memory of DeepSpeed's CPU collectives for each rank. Source: deepspeed 0.19.8 csrc/cpu/comm/shm.cpp."""
SHM_PER_GPU_RANK = 33 * MIB
"""Shared memory of NCCL for each GPU that uses it, roughly: 4 MiB per channel and peer."""
SHM_PER_WORKER = 64 * MIB
"""Shared memory of a data loader's process for batches in flight."""
SHM_COMFORTABLE = GIB
"""Shared memory below which NVIDIA advises `docker run --shm-size=1g`. Source: NCCL user guide, troubleshooting."""
FILES, FILES_PER_RANK, FILES_PER_WORKER = 1024, 8, 1024
"""Files that a rank opens: libraries, weights, logs; sockets to every other rank; tensors of its data loader."""
FEWEST_FILES = 256
"""Files without which PyTorch does not start."""
MEMLOCK_FOR_RDMA = 64 * MIB
"""Locked memory below which RDMA buffers cannot be registered."""


def check_limits(limits: Limits, facts: Facts, needs: Needs, notes: Notes) -> None:
    """Adds findings about the system's limits."""
    ranks = needs.slots or max(1, len(facts.gpus.gpus) if facts.gpus else 1)
    fine = [*_shm(limits, ranks, needs, notes), *_files(limits, needs, notes)]
    has_rdma = facts.network is not None and bool(facts.network.active_ports)
    fine += _memlock(limits, needs, notes, has_rdma=has_rdma)
    if fine:
        notes.ok(", ".join(fine))


def _shm(limits: Limits, ranks: int, needs: Needs, notes: Notes) -> list[str]:
    if limits.shm_bytes is None or limits.shm_free_bytes is None:
        notes.bad("/dev/shm is not mounted", "mount -t tmpfs -o size=50% tmpfs /dev/shm")
        return []
    fix = f"sudo mount -o remount,size={'50%' if limits.shm_bytes < SHM_COMFORTABLE else '80%'} /dev/shm"
    if limits.is_container:
        fix = "docker run --ipc=host …, or --shm-size=16g; in Kubernetes an emptyDir of medium Memory at /dev/shm"
    per_rank = SHM_PER_CPU_RANK if needs.on_cpu else SHM_PER_GPU_RANK if ranks > 1 else 0
    wanted = ranks * (per_rank + needs.workers * SHM_PER_WORKER)
    free, size = format_bytes(limits.shm_free_bytes), format_bytes(limits.shm_bytes)
    if limits.shm_free_bytes < wanted:
        who = f"{ranks} ranks need" if ranks > 1 else "a rank needs"
        what = f"/dev/shm has {free} free of {size}, and {who} {format_bytes(wanted)}: they die of SIGBUS"
        notes.bad(what, fix if limits.shm_bytes < 2 * wanted else "ls -lS /dev/shm  shows leftover files; remove them")
    elif limits.shm_bytes < SHM_COMFORTABLE:
        notes.warn(f"/dev/shm is small, {size}", fix)
    else:
        return [f"/dev/shm {free} free"]
    return []


def _files(limits: Limits, needs: Needs, notes: Notes) -> list[str]:
    soft, hard = limits.open_files, limits.open_files_hard
    world = needs.hosts.num_slots if needs.hosts else 1
    wanted = FILES + (FILES_PER_RANK * world if world > 8 else 0) + FILES_PER_WORKER * needs.workers
    if soft is None or soft >= wanted:
        return [f"{soft or 'unlimited'} open files"]
    most = 65536 if hard is None else min(hard, 65536)
    fix = f"ulimit -n {most}"
    if most < wanted:
        raised = "echo '* - nofile 65536' | sudo tee -a /etc/security/limits.conf, and log in again"
        fix = "docker run --ulimit nofile=65536 …" if limits.is_container else raised
    what = f"{soft} open files are allowed; a rank may need {wanted}"
    if soft < FEWEST_FILES:
        notes.bad(what, fix)
    else:
        notes.warn(what, fix)
    return []


def _memlock(limits: Limits, needs: Needs, notes: Notes, *, has_rdma: bool) -> list[str]:
    allowed = limits.memlock_bytes
    if allowed is None:
        return ["unlimited locked memory"]
    if has_rdma and needs.num_hosts > 1 and allowed < MEMLOCK_FOR_RDMA:
        what = f"{format_bytes(allowed)} of locked memory is allowed: RDMA cannot register its buffers"
        fix = "echo '* - memlock unlimited' | sudo tee -a /etc/security/limits.conf, and log in again"
        notes.bad(what, "docker run --ulimit memlock=-1 …" if limits.is_container else fix)
        return []
    return [f"{format_bytes(allowed)} locked memory, enough {'here' if has_rdma else 'without RDMA'}"]


LEAST_FREE = 10 * GIB
"""Free space below which a run directory is likely to fill up."""


def check_space(space: Space, facts: Facts, needs: Needs, notes: Notes) -> None:
    """Adds findings about RAM and disks; none without a job."""
    if needs.host_bytes is not None:
        _ram(space, needs.host_bytes, notes)
    for path in space.unreadable:
        notes.bad(
            f"{path} cannot be read here, and every rank reads it", f"ls -ld {path}; share or copy it", is_unfit=True
        )
    output, nvme = space.folders.get("output"), space.folders.get("nvme")
    if output is not None:
        _output(output, needs, notes)
    if nvme is not None:
        _nvme(nvme, needs, notes)


def _ram(space: Space, wanted: int, notes: Notes) -> None:
    need, has, free = format_sizes(wanted, space.ram_bytes, space.available_bytes)
    if wanted > space.ram_bytes:
        notes.bad(too_little_ram("the job", need, f"has {has}"), LESS_RAM)
    elif wanted > space.available_bytes:
        notes.warn(too_little_ram("the job", need, f"has {free} free of {has}"), "ps aux --sort=-rss | head")
    else:
        notes.ok(f"RAM: {need} needed, {free} of {has} free")


def _output(folder: Folder, needs: Needs, notes: Notes) -> None:
    """Adds whether checkpoints fit. All hosts but the first need a share of each: if the folder is not shared, every
    host writes its own ranks' part."""
    if not folder.is_writable:
        notes.bad(UNWRITABLE.format(key="output_dir", folder=folder.path), OTHER_FOLDER)
        return
    if needs.checkpoint_bytes is None:
        if folder.free_bytes < LEAST_FREE:
            what = f"{folder.path}: only {format_bytes(folder.free_bytes)} free, and the size of checkpoints is unknown"
            notes.warn(what, LARGER_DISK, is_unfit=True)
        return
    one = needs.checkpoint_bytes if needs.is_first else needs.checkpoint_bytes // needs.num_hosts
    free, size = format_bytes(folder.free_bytes), format_bytes(one)
    count = needs.num_checkpoints
    fits = folder.free_bytes // one if one else 0
    where, larger = f"in {folder.path}", LARGER_DISK
    if folder.free_bytes < one:
        notes.bad(too_full("one checkpoint takes", one, folder.free_bytes, where), larger)
    elif count is None:
        what = f"{folder.path}: every checkpoint of {size} is kept, and {fits} fit into the {free} of free space"
        limit = min(2, fits - 1) if one else 2  # of two that fit, the first goes after the second was written
        notes.warn(what, f"dstrain run --set save_total_limit={limit}" if limit else larger)
    elif folder.free_bytes < one * count:
        what = too_full(f"{count} checkpoints that exist at once take", one * count, folder.free_bytes, where)
        notes.bad(what, f"dstrain run --set save_total_limit=1; or {larger}" if fits > 1 else larger)
    else:
        notes.ok(f"disk: {count} × {size} of checkpoints, {free} free")


def _nvme(folder: Folder, needs: Needs, notes: Notes) -> None:
    if not folder.is_writable:
        says = UNWRITABLE.format(key="nvme_path", folder=folder.path)
        notes.bad(says, f"sudo install -d -o $USER {folder.path}")
    elif folder.free_bytes < needs.nvme_bytes:
        says = too_full("offloaded states take", needs.nvme_bytes, folder.free_bytes, f"in {folder.path}")
        notes.bad(says, LARGER_DRIVE)
    else:
        notes.ok(f"NVMe: {format_bytes(needs.nvme_bytes)} needed, {format_bytes(folder.free_bytes)} free")


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
    # a port of another kind may be unused on purpose, such as one for storage
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of a machine."""

    id: str
    """The subject of its findings."""
    fact: str
    """The field of `Facts` that it judges."""
    find: Callable[[Any, Facts, Needs, Notes], None]
    """Adds what it finds in that field to the notes."""

    def findings(self, facts: Facts, needs: Needs) -> list[Finding]:
        """Returns its findings about one machine; none if its facts are unknown."""
        notes, fact = Notes(self.id), getattr(facts, self.fact)
        if fact is not None:
            self.find(fact, facts, needs, notes)
        return notes.findings


CHECKS: tuple[Check, ...] = (
    Check(id="software", fact="software", find=software_checks.check_software),
    Check(id="attention", fact="attention", find=software_checks.check_attention),
    Check(id="ops", fact="toolchain", find=software_checks.check_ops),
    Check(id="gpus", fact="gpus", find=gpu_checks.check_gpus),
    Check(id="kernel_log", fact="kernel_log", find=gpu_checks.check_kernel_log),
    Check(id="topology", fact="topology", find=gpu_checks.check_topology),
    Check(id="network", fact="network", find=check_network),
    Check(id="limits", fact="limits", find=check_limits),
    Check(id="space", fact="space", find=check_space),
    Check(id="online", fact="online", find=check_online),
)
"""In the order in which they are reported."""


def findings(facts: Facts, needs: Needs) -> list[Finding]:
    """Returns all findings about one machine."""
    collected: list[Finding] = []
    for check in CHECKS:
        problem = facts.failed.get(check.fact)
        if problem is not None:
            failed = f"{check.id}: {problem}"
            collected.append(Finding(rule=check.id, severity=Severity.WARNING, problem=failed))
        collected += check.findings(facts, needs)
    return collected


_WITHOUT_RANKS = ("software", "space")


def quick(prepared: PreparedRun, environment: Mapping[str, str]) -> list[Finding]:
    """Returns the findings about this machine before a launch, within 5 s: errors stop the run, warnings are printed.

    It checks versions, stale locks, GPUs with their ECC and Xid errors, limits, RAM and disk against the estimate,
    and the port of rank 0. `environment` is the launcher's. A machine without ranks needs only
    the software and the disk.
    """
    own = names()
    here = [host for host in prepared.hosts.hosts if is_this_machine(host.name, own)]
    needs = of_prepared(prepared, environment, here[0] if here else prepared.hosts.hosts[0])
    results = findings(gather(question(needs), environment), needs)
    return results if here else [finding for finding in results if finding.rule in _WITHOUT_RANKS]
