"""The connection to a node's agent (with srun, to all agents): a process with stdin and stdout."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dstrain import child_process
from dstrain.errors import EnvironmentProblem
from dstrain.launch import remote
from dstrain.launch.nodes.layout import Node
from dstrain.launch.nodes.protocol import Lines, Order, decode, encode
from dstrain.launch.timeouts import TIMEOUTS
from dstrain.paths import python

_AGENT = "dstrain.launch.nodes.agent"
_MOST_BYTES = 2**20


def require_program(environment: Mapping[str, str], *, by_srun: bool) -> None:
    """Raises EnvironmentProblem if the program that reaches other nodes is not installed on this machine."""
    program, package = ("srun", "slurm-client") if by_srun else ("ssh", "openssh-client")
    if shutil.which(program, path=environment.get("PATH")) is None:
        raise EnvironmentProblem(f"{program} is not installed", hint=f"apt-get install {package}")


def connect(
    nodes: Sequence[Node], environment: Mapping[str, str], python_path: str, *, by_srun: bool = False
) -> list[Channel]:
    """Opens the connections to the agents of some nodes; srun has one for all of them.

    `environment` is that of agents on this machine, `python_path` the PYTHONPATH of all others.
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
        with self._lock:
            if self.is_closed or len(self._waiting) > _MOST_BYTES:
                return
            self._waiting += encode(order, node)
            with suppress(OSError):
                self._waiting = self._waiting[os.write(self._in, self._waiting) :]

    def receive(self) -> list[tuple[int, Any]]:
        """Returns the agents' events, with the node of each."""
        return [(node, event) for node, event in self._inbox.receive() if node is not None and node in self.nodes]

    def last_words(self) -> str:
        """Returns what ssh or srun said last, or how it ended."""
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
