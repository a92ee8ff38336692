"""The connection to a node's agent (with srun, to all agents): a process with stdin and stdout."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dstrain.errors import EnvironmentProblem
from dstrain.launch.nodes.protocol import Lines, Order, decode, encode
from dstrain.launch.timeouts import TIMEOUTS
from dstrain.paths import python

_AGENT = "dstrain.launch.nodes.agent"
_MOST_BYTES = 2**20


def here(node: int) -> list[str]:
    """Returns the command of the agent on this machine."""
    return python("-m", _AGENT, str(node))


def by_ssh(host: str, node: int, python_path: str) -> list[str]:
    """Returns the command that starts the agent on a host. A session that breaks is noticed by both ends."""
    return [*ssh(host), f"cd / && PYTHONPATH={shlex.quote(python_path)} exec {shlex.join(here(node))}"]


def ssh(host: str) -> list[str]:
    """Returns the words before a command for a host: no password is asked for, and a silent host is given up."""
    alive = ("-o", "ServerAliveInterval=5", "-o", f"ServerAliveCountMax={int(TIMEOUTS.silence_s / 5)}")
    return ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={TIMEOUTS.connect_s:.0f}", *alive, host]


def by_srun(hosts: Mapping[str, int], python_path: str) -> list[str]:
    """Returns the command that starts an agent on nodes of a SLURM allocation (name → number); all get every order.

    An agent ends its ranks itself, and the node's GPUs and cores are all for the ranks; a step may overlap another one.
    """
    count = len(hosts)
    srun = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(hosts)}"]
    srun += ["--overlap", "--kill-on-bad-exit=0", "--wait=0", "--unbuffered", "--cpu-bind=none", "--chdir=/"]
    numbers = ",".join(f"{host}={number}" for host, number in hosts.items())
    return [*srun, "env", f"PYTHONPATH={python_path}", *python("-m", _AGENT, numbers)]


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
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            hint = "apt-get install openssh-client" if command[0] == "ssh" else None
            raise EnvironmentProblem(f"cannot start {command[0]}: {error.strerror}", hint=hint) from error
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
        said = self._errors.read().decode(errors="replace").strip().splitlines() or self._noise
        lines = [line.strip() for line in said if line.strip() and not line.startswith("Warning: Permanently added")]
        if lines:
            return lines[-1]
        code = self._process.poll()
        return "no answer" if code is None else f"the connection ended with code {code}"

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
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
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
