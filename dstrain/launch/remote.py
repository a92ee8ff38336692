"""Runs commands on hosts: directly on this machine, over ssh, or over srun inside a SLURM allocation."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import IO

from dstrain import child_process
from dstrain.errors import EnvironmentProblem
from dstrain.facts.this_machine import is_this_machine
from dstrain.launch.timeouts import TIMEOUTS

_NO_PROGRAM = frozenset({126, 127})
_SRUN = ("srun", "--overlap", "--kill-on-bad-exit=0", "--wait=0", "--unbuffered", "--cpu-bind=none")
_NOISE = "Warning: Permanently added"
"""Text that ssh prints when it learns a host key."""


class Obstacle(Enum):
    """The kind of failure of a command on a host."""

    TIMEOUT = auto()
    NO_SSH = auto()
    """ssh is not installed on this machine."""
    ACCESS = auto()
    """ssh refused the user."""
    NAME = auto()
    """ssh could not resolve the host's name."""
    HOST_KEY = auto()
    """ssh does not know the host's key."""
    PYTHON = auto()
    """The host has no Python interpreter at the path of this one."""
    DSTRAIN = auto()
    """The host has no dstrain, or another version."""
    OTHER = auto()


_WORDS: Mapping[str, Obstacle] = MappingProxyType(
    {
        "Permission denied": Obstacle.ACCESS,
        "Could not resolve": Obstacle.NAME,
        "Host key verification": Obstacle.HOST_KEY,
        "No module named 'dstrain": Obstacle.DSTRAIN,
    }
)
"""Messages of ssh, the remote shell and Python → the failure that they report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a command failed on a host."""

    obstacle: Obstacle
    text: str
    """The reason in words, the last line of stderr if nothing better is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer of a command on a host."""

    text: str | None = None
    """The last line of its stdout; None if it failed or wrote nothing."""
    refusal: Refusal | None = None
    asked_at_s: float = 0.0
    """Halfway between question and answer, by this machine's clock, in seconds since the epoch."""


def ask(
    host: str, words: Sequence[str], own_names: Collection[str], *, timeout_s: float, stdin: str | None = None
) -> Reply:
    """Returns the last line that a command writes on a host, or on this machine if `host` is one of `own_names`."""
    is_here = is_this_machine(host, own_names)
    line = list(words) if is_here else on_host(host, words, connect_s=max(1, int(timeout_s)))
    started = time.time()
    try:
        done = child_process.run(line, os.environ, timeout_s, stdin=stdin)
    except FileNotFoundError:
        return Reply(refusal=Refusal(obstacle=Obstacle.NO_SSH, text=f"{line[0]} is not installed on this machine"))
    if done.code is None:
        return Reply(refusal=Refusal(obstacle=Obstacle.TIMEOUT, text=f"no answer within {timeout_s:g} s"))
    middle = (started + time.time()) / 2
    lines = done.out.strip().splitlines()
    if done.code != 0 or not lines:
        return Reply(refusal=refusal(done.code, done.err), asked_at_s=middle)
    return Reply(text=lines[-1], asked_at_s=middle)


def on_host(
    host: str, words: Sequence[str], *, by_srun: bool = False, connect_s: float = TIMEOUTS.connect_s
) -> list[str]:
    """Returns the command line that runs a command on another host, in `/`, with stdin and stdout of this process.

    ssh asks for no password and notices a broken session. It leaves no shared connection behind, which would hold the
    pipes open.
    """
    if by_srun:
        return srun([host], words)
    return [*shell(connect_s=connect_s), host, f"cd / && exec {shlex.join(words)}"]


def shell(*, by_srun: bool = False, connect_s: float = TIMEOUTS.connect_s) -> list[str]:
    """Returns the words before a host and a command, as rsync takes them for its remote shell."""
    if by_srun:
        return [*_SRUN, "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--chdir=/", "--nodelist"]
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": f"{connect_s:.0f}",
        "ControlMaster": "no",
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": str(int(TIMEOUTS.silence_s / 5)),
    }
    flags = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", "-T", *flags]


def srun(hosts: Sequence[str], words: Sequence[str]) -> list[str]:
    """Returns the command line that runs a command once on each of some nodes of a SLURM allocation, in `/`.

    The step may overlap others and binds no cores, so that all GPUs and cores are left to the ranks; a task that ends
    does not end the others.
    """
    line = [*_SRUN, f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", "--ntasks-per-node=1"]
    return [*line, f"--nodelist={','.join(hosts)}", "--chdir=/", *words]


def start(
    line: Sequence[str], errors: IO[bytes], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a command with pipes on stdin and stdout, in a session of its own: Ctrl-C is for `run` to handle.

    Raises EnvironmentProblem if ssh or srun cannot be started.
    """
    try:
        return subprocess.Popen(
            line,
            env=None if environment is None else dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    except OSError as error:
        errors.close()
        hint = "apt-get install openssh-client" if line[0] == "ssh" else None
        raise EnvironmentProblem(f"cannot start {line[0]}: {error.strerror}", hint=hint) from error


def refusal(code: int, errors: str) -> Refusal:
    """Returns why a command failed, from its exit code and what ssh, the remote shell or Python wrote to stderr."""
    text = last_line(errors) or f"ended with code {code}"
    known = next((obstacle for words, obstacle in _WORDS.items() if words in text), Obstacle.OTHER)
    obstacle = Obstacle.PYTHON if code in _NO_PROGRAM else known
    if obstacle is Obstacle.PYTHON:
        text = f"{sys.executable} does not exist there; ranks start with the same Python as here"
    elif obstacle is Obstacle.DSTRAIN:
        text = f"dstrain, or this version of it, is not installed there for {sys.executable}"
    return Refusal(obstacle=obstacle, text=text)


def last_line(text: str) -> str:
    """Returns the last line of stderr, without ssh's notes about host keys; empty if there is none.

    >>> last_line("Warning: Permanently added 'b' to the list of known hosts.")
    ''
    """
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(_NOISE)]
    return lines[-1] if lines else ""
