"""The connection to a node's agent (with srun, to all agents): a process with stdin and stdout."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dstrain import child_process
from dstrain.launch import remote
from dstrain.launch.nodes.protocol import Lines, Order, decode, encode
from dstrain.launch.timeouts import TIMEOUTS
from dstrain.paths import python

_AGENT = "dstrain.launch.nodes.agent"
_MOST_BYTES = 2**20


def agent(word: str, python_path: str) -> list[str]:
    """Returns the command of the agent on another host; `word` says which node it is (`agent.node_number`)."""
    return ["env", f"PYTHONPATH={python_path}", *python("-m", _AGENT, word)]


def here(node: int) -> list[str]:
    """Returns the command of the agent on this machine."""
    return python("-m", _AGENT, str(node))


class Channel:
    """Orders go in, events come out; nothing here waits."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], nodes: Sequence[int]) -> None:
        """Starts the process, in a session of its own: Ctrl-C is for `run`, which decides what to do."""
        self.nodes = tuple(nodes)
        """The nodes it leads to."""
        self.is_closed = False
        """Whether nothing will come any more."""
        self._lines = Lines()
        self._waiting = b""
        self._lock = threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the channel
        self._noise: list[str] = []
        self._process = remote.start(command, self._errors, env)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)

    @property
    def handle(self) -> int:
        """The file descriptor on which events come."""
        return self._out

    def send(self, order: Order, node: int | None = None) -> None:
        """Sends an order to one of the nodes, or to all."""
        with self._lock:
            if self.is_closed or len(self._waiting) > _MOST_BYTES:
                return
            self._waiting += encode(order, node)
            with suppress(OSError):
                self._waiting = self._waiting[os.write(self._in, self._waiting) :]

    def receive(self) -> list[tuple[int, Any]]:
        """Returns what the agents said, as node and event."""
        found: list[tuple[int, Any]] = []
        while not self.is_closed:
            try:
                raw = os.read(self._out, 2**16)
            except BlockingIOError:
                break
            if not raw:
                self.is_closed = True
            for line in self._lines.feed(raw):
                message = decode(line)
                if message is None:
                    self._noise = [*self._noise[-9:], line.decode(errors="replace")]
                elif message[0] in self.nodes:
                    found.append((int(message[0]), message[1]))
        return found

    def last_words(self) -> str:
        """Returns what ssh or srun said last, or how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5 if self.is_closed else 0)
        self._errors.seek(0)
        errors = self._errors.read().decode(errors="replace")
        code = self._process.poll()
        ending = "no answer" if code is None else f"the connection ended with code {code}"
        return remote.last_line(errors) or remote.last_line("\n".join(self._noise)) or ending

    def close(self) -> None:
        """Ends the connection, which ends what the agents still have, and the process."""
        self.is_closed = True
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        give_up = time.monotonic() + TIMEOUTS.close_s
        while self._process.poll() is None and time.monotonic() < give_up:
            with suppress(OSError):  # an agent with much to say could not end otherwise
                os.read(self._out, 2**20)
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
