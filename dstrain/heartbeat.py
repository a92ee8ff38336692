"""Heartbeats: small messages in which ranks tell their node's agent how far they are.

A rank that cannot send goes on: nobody may be listening, as when `start.sh` was run by hand.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from types import MappingProxyType

MARK = "DSTRAIN_RUN_ID"
"""The environment variable that every process of a run inherits; its value is different for each start."""


def mark_on(run: str, node: int) -> str:
    """Returns the mark of a run's processes on one of its nodes."""
    return f"{run}-{node}"


def run_of(mark: str) -> str:
    """Returns the run of a mark, which is the same on all nodes.

    >>> run_of(mark_on("4fa0", 1)), run_of("4fa0")
    ('4fa0', '4fa0')
    """
    return mark.partition("-")[0]


SAVE_ON_TERM = "DSTRAIN_SAVE_ON_TERM"
"""The environment variable that makes ranks save a checkpoint and leave at SIGTERM, in place of leaving at once."""
NO_VERIFY = "DSTRAIN_NO_VERIFY"
"""The environment variable of `run --no-verify`: ranks do not compare the files of a checkpoint with checksums."""
NO_RESUME_CHECK = "DSTRAIN_NO_RESUME_CHECK"
"""The environment variable of `run --no-resume-check`: ranks do not compare the loss of a checkpoint."""


_TOO_LARGE = 2**63
_SENDER = struct.Struct("3i")
"""Process, user and group of a sender. Source: unix(7): struct ucred"""


COUNT_S = 0.5
"""Seconds between two messages of a phase that counts something."""


class Phase(StrEnum):
    """Phase of a rank."""

    START = "start"
    """Importing what it needs; from here on it heeds signals."""
    CONNECTING = "connecting"
    """Waiting for the other ranks."""
    LOADING = "loading"
    """Connected to all others; loading model and data, up to the first step."""
    PORT_TAKEN = "port taken"
    """Rank 0 could not listen on its port, which another process has; it ends."""
    TOKENIZING = "tokenizing"
    """Turning data into tokens, for all ranks of its node; the step it names are samples."""
    VERIFYING = "verifying the checkpoint"
    """Comparing files with their checksums; the step it names are MiB of this rank."""
    WEIGHTS = "loading weights"
    """Loading the model; the step it names are tensors."""
    REFERENCE = "computing the reference"
    """Evaluating the model before training, once, on all samples; the step it names are micro-batches."""
    STEP = "step"
    """Training; the step it names is done."""
    SAVING = "saving"
    """Writing a checkpoint."""
    EVALUATING = "evaluating"
    """Evaluating; each message is progress."""
    BUSY = "busy"
    """All steps are done; it evaluates and saves for the last time."""
    LEFT = "left"
    """Ended early, with a checkpoint, because somebody asked for that."""
    DONE = "done"
    """Ended well."""


COUNTED = MappingProxyType(
    {
        Phase.TOKENIZING: "samples",
        Phase.VERIFYING: "MiB",
        Phase.WEIGHTS: "tensors",
        Phase.REFERENCE: "micro-batches",
    }
)
"""The phases that count something else than optimizer steps → what."""
STARTING = frozenset({Phase.START, Phase.CONNECTING, Phase.LOADING, *COUNTED, Phase.PORT_TAKEN})
"""The phases before the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """One message of a rank."""

    rank: int
    step: int
    """Optimizer steps done, or what the phase counts."""
    phase: Phase
    """Its phase."""
    total: int = 0
    """All of them, of the whole run or the phase; 0 where that is not known."""


def address(mark: str) -> str:
    """Returns the name of the socket, in Linux's abstract namespace: no file is made and none is left behind."""
    return f"\0dstrain-{mark}"


class Sender:
    """The rank's end."""

    def __init__(self, environment: Mapping[str, str], rank: int) -> None:
        """Sends to the agent of the run whose mark is in the environment; without a mark, sends nothing."""
        mark = environment.get(MARK)
        self._address = address(mark) if mark else None
        self._rank = rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._next = 0.0

    def count(self, phase: Phase, done: int, total: int) -> None:
        """Reports the progress of a counted phase, at most a few times a second."""
        if time.monotonic() >= self._next:
            self.send(done, phase, total)

    def send(self, step: int, phase: Phase, total: int = 0) -> None:
        """Says where this rank is; never waits."""
        self._next = time.monotonic() + COUNT_S
        if self._address is not None:
            heartbeat = Heartbeat(rank=self._rank, step=step, phase=phase, total=total)
            with suppress(OSError):
                self._socket.sendto(json.dumps(asdict(heartbeat)).encode(), self._address)


def decode(raw: bytes) -> Heartbeat | None:
    """Returns the message in a datagram; None for anything else."""
    try:
        data = json.loads(raw)
        heartbeat = Heartbeat(**{**data, "phase": Phase(data["phase"])})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    numbers = (heartbeat.rank, heartbeat.step, heartbeat.total)
    return heartbeat if all(type(number) is int and 0 <= number < _TOO_LARGE for number in numbers) else None


class Receiver:
    """The agent's end. Everybody on the machine can see the socket's name, so the kernel says who sent what."""

    def __init__(self, mark: str, ranks: Container[int]) -> None:
        """Listens for these ranks of a run, which are on this node and belong to this user."""
        self._ranks = ranks
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with suppress(OSError):  # two agents of one start on one machine: the first one listens
            self._socket.bind(address(mark))

    def receive(self) -> list[Heartbeat]:
        """Returns the messages since the last call."""
        heartbeats: list[Heartbeat] = []
        while True:
            try:
                raw, said, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(_SENDER.size))
            except OSError:
                return heartbeats
            heartbeat = decode(raw) if _is_own(said) else None
            if heartbeat is not None and heartbeat.rank in self._ranks:
                heartbeats.append(heartbeat)

    def close(self) -> None:
        """Stops listening."""
        self._socket.close()


def _is_own(said: Sequence[tuple[int, int, bytes]]) -> bool:
    """Returns whether the kernel says that this process's user sent a datagram."""
    return any(
        (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and _SENDER.unpack(data)[1] == os.geteuid()
        for level, kind, data in said
    )
