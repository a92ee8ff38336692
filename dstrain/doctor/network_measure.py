"""Measures the network with DeepSpeed's launcher on every host, and compares the rate with the link's figure."""

from __future__ import annotations

import base64
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from dstrain.doctor.hosts import own_names
from dstrain.errors import DstrainError, EnvironmentProblem
from dstrain.facts.cluster import gpus
from dstrain.facts.cluster.cluster import Cluster, Link, Origin, link, link_assumed_between_nodes
from dstrain.facts.cluster.gpus import Gpu
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.cluster.measured_links import Network
from dstrain.facts.network import wanted_port
from dstrain.facts.this_machine import is_this_machine, visible_devices
from dstrain.findings import Finding, Notes
from dstrain.heartbeat import Phase
from dstrain.launch import environment, remote
from dstrain.launch.command import chosen_devices, master
from dstrain.launch.environment import python_path
from dstrain.launch.failure.outcome import Outcome
from dstrain.launch.failure.report import explain
from dstrain.launch.nodes import connection
from dstrain.launch.nodes.connection import LaunchSpec, Node, check_hosts, new_mark, per_node
from dstrain.launch.nodes.coordinator import Coordinator
from dstrain.launch.nodes.protocol import Hello
from dstrain.launch.run.control import noting_signals
from dstrain.launch.timeouts import Timeouts
from dstrain.paths import python
from dstrain.records import from_data
from dstrain.rundir import RunDir
from dstrain.units import format_bytes, format_rate

MODULE = "dstrain.train.network_benchmark"
"""The program of every rank."""
LIMIT_S = 180.0
"""Seconds after which ranks count as stuck: they measure for at most 20, and may be slow to start."""
FOLDERS = "/tmp"
"""Parent of the folder for logs, which has the same name on every host."""
_TIMEOUTS = Timeouts(grace_s=3.0, hang_s=0, start_s=0)
_REMOVE_S = 5.0
TIME_IS_UP = "time limit"
"""The stop request of ranks that are stuck."""
_TRY = "`dstrain doctor --hostfile HOSTFILE` checks each host; NCCL_DEBUG=INFO makes NCCL log its choices."


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where to measure, and with what."""

    hosts: Hosts
    """The hosts; every slot gets a rank."""
    on_cpu: bool
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of the ranks in addition to this shell's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a measurement."""

    network: Network
    interfaces: Mapping[str, str]
    """The interface through which each host reached the others, if one was chosen."""


class Listener:
    """Reads the output of rank 0 line by line."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """`tell` gets progress messages."""
        self._tell = tell
        self._rest = ""
        self.doing = "starting"
        """The last step that the ranks reported."""
        self.network: Network | None = None
        """The measurement, once it has arrived."""

    def hear(self, text: str) -> None:
        """Takes a piece of text; lines of other programs, such as NCCL, are ignored."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            try:
                data = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(data, dict) and isinstance(data.get("doing"), str):
                self.doing = data["doing"]
                self._tell(self.doing)
            elif isinstance(data, dict) and "network" in data:
                self.network = from_data(Network, data["network"], locate=lambda place: ".".join(map(str, place)))


def measure(site: Site, tell: Callable[[str], None]) -> Answer:
    """Returns the measurement. Leaves nothing on any host, except logs on this machine if it failed.

    Raises EnvironmentProblem if hosts cannot be reached or ranks do not find each other, Interrupted at Ctrl-C.
    """
    names = own_names()
    here = tuple(is_this_machine(host.name, names) for host in site.hosts.hosts)
    if not all(here):
        connection.require_program(os.environ, by_srun=False)
        check_hosts(site.hosts)
    with _folder() as run_dir, noting_signals(run_dir.path / "screen.log") as stop_requests:
        spec = _spec(site, here, run_dir)
        listener, hellos = Listener(tell), dict[Node, Hello]()
        until = time.monotonic() + LIMIT_S

        def tick(phase: Phase, done: int | None, total: int) -> None:
            # a rank that is stuck in a collective neither prints nor ends
            if time.monotonic() > until and not stop_requests.stop:
                stop_requests.stop.append(TIME_IS_UP)

        def check(replies: Mapping[Node, Hello]) -> tuple[LaunchSpec, dict[int, dict[str, str]]]:
            hellos.update(replies)
            # rank 0's host takes another port if the wanted one is in use there, and every command names it
            port = next((hello.port for node, hello in replies.items() if node.number == 0), None)
            nodes = per_node(site.hosts, commands(site, here, run_dir, port or spec.master_port), here)
            final = replace(spec, nodes=nodes, master_port=port or spec.master_port)
            variables = interface_variables(site, replies, run_dir, final)
            return final, {node.number: own for node, own in variables.items()}

        try:
            outcome = Coordinator(spec, stop_requests, listener.hear, tick).run(check)
        finally:
            _clear(run_dir.path, hellos, names)
        network = result(outcome, listener, site, run_dir)
        return Answer(network=network, interfaces={n.host: h.interface for n, h in hellos.items() if h.interface})


class NoResult(EnvironmentProblem):
    """Ranks failed or took too long; their logs are kept, and the message names the folder."""


@contextmanager
def _folder() -> Iterator[RunDir]:
    """Yields a folder for logs, which is kept if there is no result."""
    at = FOLDERS if os.access(FOLDERS, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="dstrain-network-", dir=at))
    path.chmod(0o700)
    (path / "logs").mkdir()
    try:
        yield RunDir(path)
    except DstrainError as error:
        if not isinstance(error, NoResult):
            shutil.rmtree(path, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)


def _spec(site: Site, here: Sequence[bool], run_dir: RunDir) -> LaunchSpec:
    """Returns the specification of the launch."""
    own = dict(site.variables)
    if site.on_cpu and "OMP_NUM_THREADS" not in os.environ:
        own.setdefault("OMP_NUM_THREADS", "1")
    user = "" if all(here) else environment.read_user_files(os.environ, home=Path.home(), folder=Path.cwd())
    secrets = environment.secrets(os.environ, own, user)
    path = python_path(os.environ)
    exported = environment.exports(own, path)
    local = environment.launcher_environment(os.environ, exported, secrets)
    port, named = wanted_port(None, os.environ)
    return LaunchSpec(
        nodes=per_node(site.hosts, commands(site, here, run_dir, port), here),
        run_dir=run_dir,
        mark=new_mark(),
        open=lambda nodes: connection.connect(nodes, local, path),
        environment={"PYTHONPATH": path} if path else {},
        unset=tuple(secrets),
        exports=environment.for_nodes({**os.environ, **exported}, own, user),
        master_port=port,
        takes_another_port=named is None,
        master=master(site.hosts) if len(site.hosts.hosts) > 1 else None,
        timeouts=_TIMEOUTS,
    )


def commands(site: Site, here: Sequence[bool], run_dir: RunDir, port: int) -> list[list[str]]:
    """Returns for each host the command of DeepSpeed's launcher for its ranks: the one that `deepspeed` starts there.

    Source: deepspeed 0.19.8 launcher/launch.py: parse_args
    """
    devices = {host.name: list(range(host.slots)) for host in site.hosts.hosts}
    is_local = len(site.hosts.hosts) == 1 and here[0]
    if is_local and not site.on_cpu:
        chosen = chosen_devices(site.hosts, visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES")))
        devices = {site.hosts.hosts[0].name: list(chosen)} if chosen is not None else devices
    world = base64.urlsafe_b64encode(json.dumps(devices).encode()).decode()
    layout = json.dumps({host.name: host.slots for host in site.hosts.hosts})
    address = "127.0.0.1" if is_local else master(site.hosts)
    words = python("-m", "deepspeed.launcher.launch", f"--world_info={world}", f"--master_addr={address}")
    words += [f"--master_port={port}", "--no_local_rank", "--enable_each_rank_log", str(run_dir.logs)]
    return [[*words, f"--node_rank={number}", "--module", MODULE, layout] for number, _ in enumerate(site.hosts.hosts)]


def interface_variables(
    site: Site, hellos: Mapping[Node, Hello], run_dir: RunDir, spec: LaunchSpec
) -> dict[Node, dict[str, str]]:
    """Returns the variables by which each host's ranks use the interface that leads to the others, as a run sets them.

    Raises EnvironmentProblem if the hosts cannot run together; they need no file system in common.
    """
    alone = {node: replace(hello, shares_run_dir=True) for node, hello in hellos.items()}
    connection.require_compatible(alone, run_dir, spec.master_port, on_cpu=site.on_cpu)
    return connection.own_interfaces(hellos, spec.exports.keys())


def result(outcome: Outcome, listener: Listener, site: Site, run_dir: RunDir) -> Network:
    """Returns the measurement. Raises the error of a signal, or NoResult with the ranks' output."""
    if listener.network is not None and outcome.stopped_by in {None, TIME_IS_UP}:
        return listener.network
    if outcome.stopped_by == TIME_IS_UP:
        problem = f"no result within {LIMIT_S:.0f} s; last step of the ranks: {listener.doing}"
        raise NoResult(f"{problem}\nLogs: {run_dir.logs}", hint=_TRY)
    error = explain(outcome, hosts=site.hosts, run_dir=run_dir, again=_TRY)
    if outcome.stopped_by is not None:
        raise type(error)(error.problem)
    raise NoResult(error.problem, hint=error.hint)


def _clear(folder: Path, hellos: Mapping[Node, Hello], names: frozenset[str]) -> None:
    """Removes the folder of logs on hosts that have their own; this machine has a copy."""
    hosts = [node.host for node, hello in hellos.items() if not hello.shares_run_dir and not node.is_here]
    if hosts:
        command = ["rm", "-rf", str(folder)]
        with ThreadPoolExecutor(max_workers=min(64, len(hosts))) as pool:
            list(pool.map(lambda host: remote.ask(host, command, names, timeout_s=_REMOVE_S), hosts))


FAR_BELOW = 0.5
"""Share of a link's figure below which something is wrong: collectives reach 0.7 to 0.9 of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The link that limits the measured all-reduce: between hosts, for each GPU, or inside the only host."""

    link: Link
    is_assumed: bool
    """Whether no plan names the link."""


def gpu_of(network: Network) -> Gpu:
    """Returns the GPU that took part."""
    return gpus.gpu(gpus.CPU) if network.gpu is None else gpus.from_nvml(network.gpu, network.gpu_memory_mib)


def expected(network: Network, planned: Cluster | None) -> Expected:
    """Returns the link of the plan for these GPUs, else a typical server's."""
    gpu = gpu_of(network)
    if len(network.hosts) == 1:
        return Expected(link=link(gpu.link), is_assumed=False)
    if planned is not None and planned.gpu.name == gpu.name and planned.inter_link_origin is Origin.GIVEN:
        return Expected(link=planned.inter_link, is_assumed=False)
    return Expected(link=link_assumed_between_nodes(gpu), is_assumed=True)


def findings(network: Network, expected: Expected) -> list[Finding]:
    """Returns the table of times, and the bandwidth against the link's figure."""
    notes = Notes("network")
    notes.ok(f"{_where(network)}: all-reduce", table=table(network))
    # a ring crosses between two hosts on the adapters of all their GPUs
    if len(network.hosts) > 1:
        rate = network.bus_bytes_per_s / min(network.slots)
        measured = f"between hosts {format_rate(rate)} for each {'GPU' if network.backend == 'nccl' else 'rank'}"
    else:
        rate = network.bus_bytes_per_s
        measured = f"inside the host {format_rate(rate)}"
    share = rate / expected.link.bytes_per_s
    assumed = "assumed " if expected.is_assumed else ""
    text = f"{measured}, {percent(share)} of {assumed}{expected.link.name} ({format_rate(expected.link.bytes_per_s)})"
    # gloo inside one host is a matter of the CPU, not of a link
    if share >= FAR_BELOW or (network.backend == "gloo" and len(network.hosts) == 1):
        notes.ok(text)
    else:
        notes.warn(text, _fix(network, expected))
    return notes.findings


def _fix(network: Network, expected: Expected) -> str:
    """Returns commands that find out why the network is far slower than its link."""
    if len(network.hosts) == 1:
        return "nvidia-smi topo -m; nvidia-smi nvlink --status; unset NCCL_P2P_DISABLE"
    if network.backend == "gloo":
        tries = ["ethtool NAME; ip link show NAME  (speed, MTU); export GLOO_SOCKET_IFNAME=OTHER"]
    else:
        tries = [
            "unset NCCL_IB_DISABLE; ibstat (rate, errors); export NCCL_IB_HCA=mlx5, to use all adapters",
            "NCCL_DEBUG=INFO dstrain doctor --network  shows which transports NCCL uses",
        ]
    if expected.is_assumed:
        tries.append("or, if it is another link: dstrain gen-config --interconnect NAME")
    return "; ".join(tries)


def _where(network: Network) -> str:
    """Names the hosts and their ranks."""
    slots = sorted(set(network.slots))
    per_host = "-".join(map(str, slots[:1] + slots[-1:] if len(slots) > 1 else slots))
    ranks = f"{per_host} {'GPU' if network.backend == 'nccl' else 'rank'}{'s' if slots[-1] > 1 else ''}"
    count = len(network.hosts)
    place = f"{count} hosts of {ranks}" if count > 1 else f"{ranks} of {network.hosts[0]}"
    return f"{place}, {'NCCL' if network.backend == 'nccl' else 'Gloo'}"


def table(network: Network) -> list[str]:
    """Returns time and bus bandwidth by size, one line each."""
    rows = [("size", "time", "bus bandwidth")]
    for timing in network.timings:
        rows.append((format_bytes(timing.num_bytes), _ms(timing.seconds), format_rate(timing.bus_bytes_per_s)))
    lines = [f"{size:>9}{seconds:>12}{rate:>15}" for size, seconds, rate in rows]
    return [*lines, f"the smallest one takes {_ms(network.latency_s)}"]


def _ms(seconds: float) -> str:
    digits = 3 if seconds < 1e-3 else 2 if seconds < 0.1 else 0
    return f"{seconds * 1e3:.{digits}f} ms"


def percent(share: float) -> str:
    """Returns a share in percent, with one more digit below 10 %.

    >>> percent(0.84), percent(0.0096)
    ('84 %', '1.0 %')
    """
    return f"{share * 100:.{0 if share >= 0.0995 else 1}f} %"
