"""Specifies a launch, connects to the agents of its nodes, and refuses nodes that do not match."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain import child_process
from dstrain.errors import EnvironmentProblem, InvalidConfig, not_installed
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.data.datafile import found
from dstrain.facts.network import interface_environment
from dstrain.facts.this_machine import usual_versions, version_problems
from dstrain.heartbeat import mark_on
from dstrain.job.schema import Job
from dstrain.launch import remote
from dstrain.launch.nodes.protocol import Hello, Lines, Order, decode, encode
from dstrain.launch.timeouts import TIMEOUTS, Timeouts
from dstrain.paths import python
from dstrain.rundir import RunDir
from dstrain.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a run."""

    number: int
    """Its place in the hostfile."""
    host: str
    """Its name in the hostfile."""
    is_here: bool
    command: tuple[str, ...]
    """The launcher that it starts."""
    first_rank: int
    num_ranks: int

    @property
    def ranks(self) -> range:
        """The numbers of its ranks."""
        return range(self.first_rank, self.first_rank + self.num_ranks)


def per_node(hosts: Hosts, commands: Sequence[Sequence[str]], here: Sequence[bool]) -> tuple[Node, ...]:
    """Returns the nodes of a run; `commands` and `here` are in the order of the hosts."""
    # the launcher numbers ranks by host, in the order of the hostfile
    first_ranks = accumulate((host.slots for host in hosts.hosts[:-1]), initial=0)
    return tuple(
        Node(
            number=number,
            host=host.name,
            is_here=here[number],
            command=tuple(command),
            first_rank=first,
            num_ranks=host.slots,
        )
        for number, (host, command, first) in enumerate(zip(hosts.hosts, commands, first_ranks, strict=True))
    )


def check_hosts(hosts: Hosts) -> None:
    """Raises InvalidConfig if the other nodes cannot find rank 0 by its name."""
    first = hosts.hosts[0].name
    if len(hosts.hosts) > 1 and (first.startswith(("localhost", "127.")) or first == "::1"):
        raise InvalidConfig(
            f"{hosts.name}: rank 0 is on {first}, which every node resolves to itself",
            hint="Write this machine's name or address there, as the other nodes know it.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """The specification of one launch."""

    nodes: tuple[Node, ...]
    """The nodes and their commands."""
    run_dir: RunDir
    mark: str
    open: Callable[[Sequence[Node]], list[Channel]]
    environment: Mapping[str, str]
    """Variables of launchers on other machines, in addition to their agent's."""
    unset: tuple[str, ...]
    """Variables that launchers on other machines must not have."""
    exports: Mapping[str, str]
    """Further variables: name → text between a shell's double quotes."""
    master_port: int
    takes_another_port: bool = False
    """Whether rank 0 may listen on another port if that one is in use."""
    master: str | None = None
    """The host of rank 0 as the ranks get it; None if all ranks are on one node."""
    ops: tuple[str, ...] = ()
    files: Mapping[str, int] = field(default_factory=dict)
    """Files that every rank reads → their bytes here."""
    packages: tuple[str, ...] = ()
    """Packages that this job needs, whose versions must be the same on every node."""
    request: str | None = None
    """The text of request.json, if it was decided after the copy to other disks."""
    saved_bytes: int = 0
    """Bytes of one checkpoint; 0 if unknown."""
    timeouts: Timeouts = TIMEOUTS

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return sum(node.num_ranks for node in self.nodes)

    def mark_of(self, node: Node) -> str:
        """Returns the mark of a node's processes."""
        return mark_on(self.mark, node.number)


@dataclass
class StopRequests:
    """Requests of signal handlers and `dstrain stop` to a run."""

    stop: list[str] = field(default_factory=list)
    """Sources of stop requests; a second entry means at once."""
    save: bool = False
    """Whether to save a checkpoint and leave."""
    is_interrupt: bool = False
    """Whether the first stop request was Ctrl-C."""
    is_heeded: bool = False
    """Whether the requests are read now; before and after that a signal ends `run` directly."""


def new_mark() -> str:
    """Returns a mark that no other start has."""
    return uuid.uuid4().hex


_AGENT = "dstrain.launch.nodes.agent"
_MOST_BYTES = 2**20


def require_program(environment: Mapping[str, str], *, by_srun: bool) -> None:
    """Raises EnvironmentProblem if the program that reaches other nodes is not installed on this machine."""
    program, package = ("srun", "slurm-client") if by_srun else ("ssh", "openssh-client")
    if shutil.which(program, path=environment.get("PATH")) is None:
        raise not_installed("a run on other nodes needs", program, install=f"apt-get install {package}")


def connect(
    nodes: Sequence[Node], environment: Mapping[str, str], python_path: str, *, by_srun: bool = False
) -> list[Channel]:
    """Opens the connections to the agents of some nodes; srun has one for all of them.

    `environment` is for agents on this machine, `python_path` is the PYTHONPATH of all others.
    """
    if by_srun:
        word = ",".join(f"{node.host}={node.number}" for node in nodes)
        line = remote.srun([node.host for node in nodes], _agent(word, python_path))
        return [Channel(line, environment, [node.number for node in nodes])]
    return [
        Channel(python("-m", _AGENT, str(node.number)), environment, [node.number])
        if node.is_here
        else Channel(remote.on_host(node.host, _agent(str(node.number), python_path)), os.environ, [node.number])
        for node in nodes
    ]


def _agent(word: str, python_path: str) -> list[str]:
    """Returns the command of the agent on another host; `word` says which node it is (`agent.node_number`)."""
    return ["env", f"PYTHONPATH={python_path}", *python("-m", _AGENT, word)]


class Inbox:
    """Messages that arrive on a pipe; reading never blocks."""

    def __init__(self, handle: int) -> None:
        os.set_blocking(handle, False)
        self.handle = handle
        """The pipe's file descriptor."""
        self.is_closed = False
        """Whether nothing more will come."""
        self.noise: list[str] = []
        """The last lines that are no messages, such as a shell's greeting."""
        self._lines = Lines()

    def receive(self) -> list[tuple[int | None, Any]]:
        """Returns the messages that have arrived, with the nodes that they are from or for."""
        messages = []
        while not self.is_closed:
            try:
                raw = os.read(self.handle, 2**16)
            except BlockingIOError:
                break
            except OSError:
                raw = b""
            self.is_closed = not raw
            for line in self._lines.feed(raw):
                message = decode(line)
                if message is None:
                    self.noise = [*self.noise[-9:], line.decode(errors="replace")]
                else:
                    messages.append(message)
        return messages


class Channel:
    """The connection to the agents of some nodes: orders go in, events come out; nothing here blocks."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], nodes: Sequence[int]) -> None:
        """Starts the process, in a session of its own: Ctrl-C is for `run`, which decides what to do."""
        self.nodes = tuple(nodes)
        """The numbers of the nodes."""
        self._waiting = b""
        self._lock = threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the channel
        self._process = remote.start(command, self._errors, env)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in = self._process.stdin.fileno()
        os.set_blocking(self._in, False)
        self._inbox = Inbox(self._process.stdout.fileno())

    @property
    def handle(self) -> int:
        """The file descriptor on which events come."""
        return self._inbox.handle

    @property
    def is_closed(self) -> bool:
        """Whether nothing more will come."""
        return self._inbox.is_closed

    def send(self, order: Order, node: int | None = None) -> None:
        """Sends an order to one of the nodes, or to all."""
        # the heart sends from a thread of its own
        with self._lock:
            # an agent that takes nothing any more is noticed by its silence
            if self.is_closed or len(self._waiting) > _MOST_BYTES:
                return
            self._waiting += encode(order, node)
            with suppress(OSError):
                self._waiting = self._waiting[os.write(self._in, self._waiting) :]

    def receive(self) -> list[tuple[int, Any]]:
        """Returns the agents' events, with the node of each."""
        return [(node, event) for node, event in self._inbox.receive() if node is not None and node in self.nodes]

    def last_words(self) -> str:
        """Returns the last message of ssh or srun, or how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5 if self.is_closed else 0)
        self._errors.seek(0)
        errors = self._errors.read().decode(errors="replace")
        code = self._process.poll()
        ending = "no answer" if code is None else f"the connection ended with code {code}"
        return remote.last_line(errors) or remote.last_line("\n".join(self._inbox.noise)) or ending

    def close(self) -> None:
        """Ends the connection, which ends what the agents still have, and the process."""
        self._inbox.is_closed = True
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        give_up = time.monotonic() + TIMEOUTS.close_s
        while self._process.poll() is None and time.monotonic() < give_up:
            with suppress(OSError):  # an agent with much to say could not end otherwise
                os.read(self._inbox.handle, 2**20)
            time.sleep(0.02)
        child_process.end(self._process)
        self._process.stdout.close()  # type: ignore[union-attr]
        self._errors.close()


class Heart:
    """Sends a sign of life to all channels, also while `run` waits for its terminal to take what it prints."""

    def __init__(self, channels: Sequence[Channel], order: Order, every_s: float) -> None:
        self._channels = channels
        self._order = order
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(self._every_s):
            for channel in self._channels:
                channel.send(self._order)

    def stop(self) -> None:
        """Stops."""
        self._stop.set()
        self._thread.join()


_OF_A_MODEL = frozenset({".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py"})
"""Endings of the names of files that are read with a model."""


def files_of(job: Job) -> dict[str, int]:
    """Returns the files here that ranks read, with their bytes; nothing for what comes from a hub."""
    data = [Path(path) for name in job.data_paths for path in found(name)]
    model = Path(job.model)
    paths = [*data, *(path for path in sorted(model.glob("*")) if path.suffix in _OF_A_MODEL)]
    return {str(path): path.stat().st_size for path in paths if path.is_file()}


def require_compatible(
    hellos: Mapping[Node, Hello],
    run_dir: RunDir,
    port: int,
    *,
    on_cpu: bool,
    files: Mapping[str, int] = MappingProxyType({}),
    may_be_apart: bool = False,
    keeps_best: bool = False,
) -> None:
    """Raises EnvironmentProblem, with every reason at once, if the nodes cannot run together.

    `files` is what ranks read, with the bytes here; `may_be_apart` where the run directory was copied to other nodes,
    but not if the run `keeps_best`, the checkpoint of its best evaluation, which stays on one disk.
    """
    # each kind of problem has a hint of its own, so one kind is raised at a time
    problems = _unfit(hellos, port, on_cpu=on_cpu)
    if problems:
        hint = (
            "Install the same versions everywhere, give no more slots than GPUs, or name another port: --master-port."
        )
        raise EnvironmentProblem("\n".join(problems), hint=hint)
    differ = [f"{node.host}: {said}" for node, hello in hellos.items() for said in _differing(hello, files)]
    if differ:
        raise EnvironmentProblem(
            "\n".join(differ),
            hint="Copy model and data to every node, to the same paths.",
        )
    apart = [node.host for node, hello in hellos.items() if not hello.shares_run_dir]
    if apart and not may_be_apart:
        raise EnvironmentProblem(
            f"{run_dir.path} on {', '.join(apart)} is not the run directory of this machine",
            hint="Put output_dir on a file system that all nodes share, or let --sync copy code and run directory.",
        )
    if apart and keeps_best:
        raise EnvironmentProblem(
            f"the best checkpoint stays on a disk that all nodes share, but {', '.join(apart)} has one of its own",
            hint="Put output_dir on a file system that all nodes share, or load_best: false, without early_stopping.",
        )


def _unfit(hellos: Mapping[Node, Hello], port: int, *, on_cpu: bool) -> list[str]:
    """Returns the problems of the nodes themselves."""
    usual = usual_versions([hello.versions for hello in hellos.values()])
    problems = [
        f"{node.host}: {problem}"
        for node, hello in hellos.items()
        for problem in version_problems(hello.versions, usual)
    ]
    problems += [
        f"{node.host}: port {port} for rank 0 is in use"
        for node, hello in hellos.items()
        if node.number == 0 and hello.port is None
    ]
    problems += [
        f"{node.host}: {counted(node.num_ranks, 'slot')} in the hostfile, but {counted(hello.num_gpus, 'GPU')} there"
        for node, hello in hellos.items()
        if not on_cpu and node.num_ranks > hello.num_gpus
    ]
    return problems


def _differing(hello: Hello, files: Mapping[str, int]) -> Iterator[str]:
    """Yields how a node's files differ from those here; of many files of a folder the first one."""
    seen = set()
    for name, size in hello.unlike.items():
        folder = str(Path(name).parent)
        if name in files and folder not in seen:
            seen.add(folder)
            yield f"{name} cannot be read" if size is None else f"{name} has {size:,} bytes, and {files[name]:,} here"


def own_interfaces(hellos: Mapping[Node, Hello], named: Collection[str]) -> dict[Node, dict[str, str]]:
    """Returns the variables by which each node's ranks use the interface that leads to the others, but those `named`
    by the user."""
    variables = {
        node: {} if hello.interface is None else interface_environment(hello.interface)
        for node, hello in hellos.items()
    }
    return {node: {name: own[name] for name in own if name not in named} for node, own in variables.items()}
