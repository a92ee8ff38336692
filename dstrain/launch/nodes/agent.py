"""The agent on every node of a run: `python -m dstrain.launch.nodes.agent NODE`, orders on stdin, events on stdout.

It ends its node's ranks when 30 s pass without a word from `run`, or at once when their connection ends: a login that
drops, a `run` that was killed and a network that is cut leave no rank behind.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TypeGuard

from dstrain.facts import attention_kernels, network, probe
from dstrain.facts.network import listener
from dstrain.facts.this_machine import versions
from dstrain.launch.environment import expanded
from dstrain.launch.failure.logs import left_out
from dstrain.launch.nodes.connection import Inbox
from dstrain.launch.nodes.node_runner import NodeRunner, environment_of_ranks, saves_on_term
from dstrain.launch.nodes.process_tree import adopting_orphans
from dstrain.launch.nodes.protocol import (
    Alive,
    Begin,
    End,
    Event,
    Go,
    Hello,
    Look,
    Problem,
    Ready,
    Save,
    Stacks,
    Wrote,
    encode,
)
from dstrain.launch.nodes.ready import Readying
from dstrain.launch.timeouts import TIMEOUTS, Timeouts
from dstrain.paths import write_atomic
from dstrain.rundir import RunDir

_POLL_S = 0.1
_MOST_BYTES = 4 * 2**20
"""Bytes that wait to be sent, until no more logs are read."""


def _is_log(event: Event) -> TypeGuard[Wrote]:
    """Returns whether an event is output of ranks or launchers, which stays in a file of this node."""
    return isinstance(event, Wrote) and event.name.startswith("logs/")


class Outbox:
    """Buffers events for `run`, so that a blocked connection never blocks the agent."""

    def __init__(self, handle: int, node: int) -> None:
        os.set_blocking(handle, False)
        self._handle = handle
        self._node = node
        self._waiting: deque[tuple[Event, bytes]] = deque()
        self._num_bytes = 0

    @property
    def has_room(self) -> bool:
        """Whether logs can be read on."""
        return self._num_bytes < _MOST_BYTES

    def put(self, event: Event) -> None:
        """Adds an event."""
        line = encode(event, self._node)
        self._waiting.append((event, line))
        self._num_bytes += len(line)

    def push(self) -> None:
        """Sends as much as the connection accepts."""
        while self._waiting:
            event, line = self._waiting[0]
            try:
                sent = os.write(self._handle, line)
            except OSError:  # full, or nobody there
                return
            self._num_bytes -= sent
            if sent == len(line):
                self._waiting.popleft()
            else:
                self._waiting[0] = event, line[sent:]

    def flush(self) -> None:
        """Sends everything, for a few seconds at most; then what is not output, which `run` needs to know the end."""
        self._send_until(time.monotonic() + TIMEOUTS.flush_s)
        if self._waiting:
            self._leave_out_logs()
            self._send_until(time.monotonic() + TIMEOUTS.flush_s)

    def _leave_out_logs(self) -> None:
        """Replaces waiting output by a line that says so, behind a message that is partly sent."""
        begun, *others = self._waiting
        num_bytes = Counter[tuple[str, bool]]()
        for event, _ in others:
            if _is_log(event):
                num_bytes[event.name, event.on_screen] += len(event.text)
        self._waiting = deque([begun])
        for (name, on_screen), size in num_bytes.items():
            self.put(Wrote(name=name, text=left_out(size, Path(name)), on_screen=on_screen))
        self._waiting += [item for item in others if not _is_log(item[0])]

    def _send_until(self, give_up: float) -> None:
        self.push()
        while self._waiting and (left := give_up - time.monotonic()) > 0:
            select.select([], [self._handle], [], left)
            self.push()


class Agent:
    """Executes orders, runs the node's ranks, and reports events."""

    def __init__(self, node: int, orders: int, events: int) -> None:
        """Reads orders from one file descriptor and writes events to another."""
        self._node = node
        self._inbox = Inbox(orders)
        self._outbox = Outbox(events, node)
        self._listener: socket.socket | None = None
        self._readying: Readying | None = None
        self._node_runner: NodeRunner | None = None
        self._begin: Begin | None = None
        self._timeouts = TIMEOUTS
        self._heard = time.monotonic()
        self._beat = 0.0
        self._lost: str | None = None
        self._term = False

    def run(self) -> None:
        """Runs until nothing of the run is left on this node, or until the connection ends before a start."""
        # Ctrl-C and a scheduler's warning reach every process of a job; `run` decides what they mean
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._note_term)
        with adopting_orphans():
            while not self._is_over():
                self._take_orders()
                if self._term:
                    self._heed_term()
                self._tick()
                self._outbox.push()
                self._wait()
            if self._readying is not None:
                self._readying.end()
        self._outbox.flush()

    def _is_over(self) -> bool:
        return self._node_runner.is_over if self._node_runner is not None else self._lost is not None

    def _note_term(self, number: int, frame: FrameType | None) -> None:
        self._term = True

    def _heed_term(self) -> None:
        """Passes a scheduler's SIGTERM on to ranks that save at it, and ends all others."""
        self._term = False
        if self._node_runner is None:
            self._lost = "SIGTERM"
        elif self._begin is not None and saves_on_term(self._begin, os.environ):
            self._node_runner.send(signal.SIGTERM)
        else:
            self._node_runner.end(self._timeouts.grace_s)

    def _wait(self) -> None:
        if self._node_runner is not None:
            self._node_runner.wait(_POLL_S)
        else:
            select.select([self._inbox.handle], [], [], _POLL_S)

    def _tick(self) -> None:
        now = time.monotonic()
        if self._lost is None and now - self._heard > self._timeouts.silence_s:
            self._give_up(f"no word from dstrain run for {self._timeouts.silence_s:.0f} s")
        if self._node_runner is not None:
            events = self._node_runner.tick(reads_logs=self._outbox.has_room)
        else:
            events = self._readying.poll() if self._readying else []
        for event in events:
            self._outbox.put(event)
        if self._begin is not None and now >= self._beat:
            self._beat = now + self._timeouts.beat_s
            self._outbox.put(self._node_runner.alive() if self._node_runner is not None else Alive(steps={}))

    def _take_orders(self) -> None:
        orders = self._inbox.receive() if self._lost is None else []
        if orders:
            self._heard = time.monotonic()
        for node, order in orders:
            if self._lost is None and node in {None, self._node}:
                self._obey(order)
        if self._lost is None and self._inbox.is_closed:
            self._give_up("the connection to dstrain run has ended")

    def _obey(self, order: object) -> None:
        node_runner = self._node_runner
        if isinstance(order, Look):
            self._outbox.put(self._hello(order))
        elif isinstance(order, Begin) and self._begin is None:
            self._make_ready(order)
        elif isinstance(order, Go) and node_runner is None and self._begin is not None:
            self._start(self._begin)
        elif isinstance(order, End) and node_runner is None:
            self._lost = "asked to end"
        elif isinstance(order, End) and node_runner is not None:
            node_runner.end(order.grace_s)
        elif isinstance(order, Save) and node_runner is not None:
            node_runner.send(signal.SIGUSR1)
        elif isinstance(order, Stacks) and node_runner is not None:
            node_runner.send(signal.SIGUSR2)

    def _make_ready(self, begin: Begin) -> None:
        self._begin = begin
        if begin.request is not None:
            write_atomic(RunDir(Path(begin.run_dir)).request, begin.request)
        self._timeouts = Timeouts(**begin.timeouts)
        if begin.master is None and not begin.ops:
            self._outbox.put(Ready())
            return
        try:
            self._readying = Readying(begin, environment_of_ranks(begin, os.environ))
        except OSError as error:
            self._refuse(f"cannot be prepared: {error}")

    def _start(self, begin: Begin) -> None:
        if self._listener is not None:
            self._listener.close()
        try:
            self._node_runner = NodeRunner(begin)
        except OSError as error:
            self._refuse(f"cannot start {begin.command[0] if begin.command else begin.run_dir}: {error}")

    def _refuse(self, why: str) -> None:
        self._outbox.put(Problem(text=why))
        self._lost = "nothing was started"

    def _hello(self, look: Look) -> Hello:
        run_dir = RunDir(Path(look.run_dir))
        try:
            shares = run_dir.token.read_text(encoding="utf-8") == look.token
        except OSError:
            shares = False
        if look.port is not None and self._listener is None:
            self._listener = listener(look.port) or (listener(0) if look.takes_another else None)
        variables = {**os.environ, **expanded(look.exports, os.environ)}
        kernels = attention_kernels.of_this_machine(variables)
        return Hello(
            host=socket.gethostname(),
            versions=versions(look.packages),
            shares_run_dir=shares,
            interface=_interface(look.others),
            num_gpus=len(probe.local_gpus()),
            attention_packages=dict(kernels.packages),
            attention_cached=dict(kernels.cached),
            attention_downloadable=list(kernels.downloadable),
            port=self._listener.getsockname()[1] if self._listener is not None else None,
            unlike={name: actual for name, size in look.files.items() if (actual := _bytes(name)) != size},
            clock=time.time(),
        )

    def _give_up(self, why: str) -> None:
        """Ends this node's ranks because `run` is gone, and logs it."""
        self._lost = why
        if self._node_runner is None or self._begin is None:
            return
        ranks = self._node_runner.ranks()
        self._node_runner.end(self._timeouts.grace_s)
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        what = f"ended ranks {', '.join(map(str, ranks))}" if ranks else "no rank was running"
        line = f"{now} {self._begin.host}: {why}; {what}\n"
        try:
            path = RunDir(Path(self._begin.run_dir)).watch_log(self._begin.host)
            with path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError:
            return


def _bytes(name: str) -> int | None:
    """Returns the size of a file; None if it cannot be read."""
    return Path(name).stat().st_size if os.access(name, os.R_OK) else None


def _interface(others: Sequence[str]) -> str | None:
    routes = {host: network.source_address(host) for host in others}
    return network.choose_interface(network.interfaces(), routes) if others else None


def node_number(word: str, environment: Mapping[str, str]) -> int:
    """Returns this node's number: `word` itself, or what it says about the name that SLURM gives this node.

    >>> node_number("1", {}), node_number("a=0,b=1", {"SLURMD_NODENAME": "b"})
    (1, 1)
    """
    if "=" not in word:
        return int(word)
    numbers = dict(pair.split("=") for pair in word.split(","))
    return int(numbers[environment["SLURMD_NODENAME"]])


if __name__ == "__main__":
    Agent(node_number(sys.argv[1], os.environ), sys.stdin.fileno(), sys.stdout.fileno()).run()
