"""Checks over ssh whether the hosts of a hostfile can train together, all in parallel, with a time limit."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dstrain.facts.cluster.hostfile import Host, Hosts
from dstrain.facts.this_machine import is_this_machine
from dstrain.paths import python
from dstrain.units import format_bytes

TIMEOUT_S = 8.0
"""How long a host may take to answer; a host that drops every packet is known as soon."""
PACKAGES = ("torch", "deepspeed", "transformers", "dstrain", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
"""What must be the same on every host."""
MAX_SKEW_S = 5.0
"""Clocks that differ by more make logs of several hosts unreadable, and certificates fail."""
BUSY_BYTES = 500 * 2**20
"""Memory in use on a GPU from which somebody is at work there; an idle one holds less."""
LEAST_FREE_BYTES = 10 * 2**30
"""Free space below which a run directory is likely to fill up."""

_PROGRAM = """
import json, os, shutil, subprocess, sys, time
from importlib import metadata
def version(name):
    try: return metadata.version(name)
    except Exception: return None
def gpus():
    ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try: return [int(line) for line in subprocess.run(ask, capture_output=True, text=True, timeout=5).stdout.split()]
    except Exception: return []
def free(path):
    while not os.path.exists(path) and path != os.path.dirname(path): path = os.path.dirname(path)
    try: return shutil.disk_usage(path).free
    except OSError: return None
wanted = json.loads(sys.argv[1])
print(json.dumps({
    "python": sys.version.split()[0], "time": time.time(), "gpu_used_mib": gpus(),
    "versions": {name: version(name) for name in wanted["packages"]},
    "unreadable": [path for path in wanted["paths"] if not os.access(path, os.R_OK)],
    "free": free(wanted["output"]) if wanted["output"] else None,
}))
"""
"""What runs on each host, with the Python that runs here: the launcher starts the ranks with the same one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a run needs on every host."""

    paths: tuple[str, ...] = ()
    """Files and folders that every rank reads."""
    output: str | None = None
    """Folder that the run writes into."""
    on_cpu: bool = False
    """Whether ranks train on the CPU: then nobody asks for GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a command on a host wrote."""

    text: str | None = None
    """The last line of its stdout; None where there is none."""
    problem: str | None = None
    """Why not."""
    asked_at_s: float = 0.0
    """Halfway between question and answer, by this machine's clock, in seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one host says."""

    host: Host
    facts: Mapping[str, Any] | None = None
    """What its Python found; None where it did not come to that."""
    problem: str | None = None
    """Why not."""
    skew_s: float = 0.0
    """Its clock less this one's, in seconds; half the time of the question is taken off."""


def ask(hosts: Hosts, wanted: Wanted, local_names: Collection[str], *, timeout_s: float = TIMEOUT_S) -> list[Answer]:
    """Returns what every host says, in the order of the hostfile, within about `timeout_s`."""
    with ThreadPoolExecutor(max_workers=min(64, len(hosts.hosts))) as pool:
        return list(pool.map(lambda host: _ask(host, wanted, local_names, timeout_s), hosts.hosts))


def _ask(host: Host, wanted: Wanted, local_names: Collection[str], timeout_s: float) -> Answer:
    question = json.dumps({"packages": PACKAGES, "paths": wanted.paths, "output": wanted.output})
    reply = send(host.name, python("-c", _PROGRAM, question), local_names, timeout_s=timeout_s)
    try:
        facts = json.loads(reply.text or "")
        skew_s = facts["time"] - reply.asked_at_s
    except (ValueError, TypeError, KeyError, RecursionError):
        return Answer(host=host, problem=reply.problem or f"said {reply.text}")
    return Answer(host=host, facts=facts, skew_s=skew_s)


def send(
    host: str, words: Sequence[str], local_names: Collection[str], *, timeout_s: float, stdin: str | None = None
) -> Reply:
    """Returns the last line that a command wrote on a host, or on this machine where that is what `host` means.

    ssh asks for no password and leaves no connection behind, which would hold the pipes open.
    """
    line = list(words)
    if not is_this_machine(host, local_names):
        options = ("BatchMode=yes", f"ConnectTimeout={max(1, int(timeout_s))}", "ControlMaster=no")
        line = ["ssh", "-T", *(word for option in options for word in ("-o", option)), host, shlex.join(line)]
    started = time.time()
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    try:
        done = subprocess.run(line, capture_output=True, text=True, errors="replace", timeout=timeout_s, **given)
    except subprocess.TimeoutExpired:
        return Reply(problem=f"no answer within {timeout_s:g} s")
    except FileNotFoundError:
        return Reply(problem="ssh is not installed here")
    lines = done.stdout.strip().splitlines()
    middle = (started + time.time()) / 2
    if done.returncode != 0 or not lines:
        return Reply(problem=_refusal(done), asked_at_s=middle)
    return Reply(text=lines[-1], asked_at_s=middle)


def _refusal(done: subprocess.CompletedProcess[str]) -> str:
    """Returns what ssh, the remote shell or Python said last."""
    said = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
    if done.returncode == 127 or "No such file" in said:
        return f"{sys.executable} is not there: the ranks start with the same Python as here"
    if "No module named 'dstrain" in said:
        return f"dstrain is not installed there, or another version of it, for {sys.executable}"
    return said


def judged(answers: Sequence[Answer], wanted: Wanted) -> dict[str, list[str]]:
    """Returns what is wrong, by host; versions that most hosts have are right."""
    usual = usual_versions([_versions(answer.facts) for answer in answers if answer.facts is not None])
    return {answer.host.name: _problems(answer, usual, wanted) for answer in answers}


def _versions(facts: Mapping[str, Any]) -> dict[str, str | None]:
    return {"Python": facts["python"], **facts["versions"]}


def usual_versions(found: Sequence[Mapping[str, str | None]]) -> dict[str, str | None]:
    """Returns the version of each thing that most hosts have; of equals, the first host's."""
    names = list(found[0]) if found else []
    return {name: Counter(each.get(name) for each in found).most_common(1)[0][0] for name in names}


def version_problems(found: Mapping[str, str | None], usual: Mapping[str, str | None]) -> list[str]:
    """Returns in what a host differs from most of them."""
    return [
        f"{name} is {found.get(name) or 'missing'}; most hosts have {version or 'none'}"
        for name, version in usual.items()
        if found.get(name) != version
    ]


def clock_problems(skew_s: float) -> list[str]:
    """Returns what is wrong with a clock that is `skew_s` ahead of this one."""
    return [f"its clock is {skew_s:+.0f} s off"] if abs(skew_s) > MAX_SKEW_S else []


def _problems(answer: Answer, usual: Mapping[str, str | None], wanted: Wanted) -> list[str]:
    facts = answer.facts
    if facts is None:
        return [answer.problem or "no answer"]
    found = [] if wanted.on_cpu else _gpu_problems(answer.host, facts["gpu_used_mib"])
    found += version_problems(_versions(facts), usual) + clock_problems(answer.skew_s)
    found += [f"{path} cannot be read" for path in facts["unreadable"]]
    if facts["free"] is not None and facts["free"] < LEAST_FREE_BYTES:
        found.append(f"{format_bytes(facts['free'])} are free where the run writes")
    return found


def _gpu_problems(host: Host, used_mib: Sequence[int]) -> list[str]:
    """Returns what is wrong with the GPUs of a host, given the MiB in use on each."""
    found = []
    if len(used_mib) < host.slots:
        found.append(f"{host.slots} slots, and nvidia-smi shows {len(used_mib)} GPUs")
    busy = [str(number) for number, mib in enumerate(used_mib[: host.slots]) if mib * 2**20 > BUSY_BYTES]
    return found + ([f"GPU {', '.join(busy)} in use"] if busy else [])
