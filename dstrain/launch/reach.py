"""Whether the hosts of a hostfile are fit to train together: each asked over ssh, all at once, with a time limit."""

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

from dstrain.facts.hostfile import Host, Hosts
from dstrain.launch.command import is_this_machine
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
class Answer:
    """What one host says."""

    host: Host
    """Which host."""
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
    line = [sys.executable, "-c", _PROGRAM, question]
    if not is_this_machine(host.name, local_names):
        options = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, int(timeout_s))}")
        line = ["ssh", *options, host.name, shlex.join(line)]
    started = time.time()
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return Answer(host=host, problem=f"no answer within {timeout_s:g} s")
    except FileNotFoundError:
        return Answer(host=host, problem="ssh is not installed here")
    ended = time.time()
    try:
        facts = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return Answer(host=host, problem=_refusal(done))
    return Answer(host=host, facts=facts, skew_s=facts["time"] - (started + ended) / 2)


def _refusal(done: subprocess.CompletedProcess[str]) -> str:
    """Returns what ssh or the remote shell said last."""
    said = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
    if done.returncode == 127 or "No such file" in said:
        return f"{sys.executable} is not there: the ranks start with the same Python as here"
    return said


def judged(answers: Sequence[Answer], wanted: Wanted) -> dict[str, list[str]]:
    """Returns what is wrong, by host; versions that most hosts have are right."""
    usual = _usual([answer.facts for answer in answers if answer.facts is not None])
    return {answer.host.name: _problems(answer, usual, wanted) for answer in answers}


def _usual(facts: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    """Returns the version of each thing that most hosts have; of equals, the first host's."""
    named = [{"Python": each["python"], **each["versions"]} for each in facts]
    names = list(named[0]) if named else []
    return {name: Counter(each[name] for each in named).most_common(1)[0][0] for name in names}


def _problems(answer: Answer, usual: Mapping[str, str | None], wanted: Wanted) -> list[str]:
    facts = answer.facts
    if facts is None:
        return [answer.problem or "no answer"]
    found = [] if wanted.on_cpu else _gpu_problems(answer.host, facts["gpu_used_mib"])
    for name, version in {"Python": facts["python"], **facts["versions"]}.items():
        if version != usual[name]:
            found.append(f"{name} is {version or 'missing'}; most hosts have {usual[name] or 'none'}")
    if abs(answer.skew_s) > MAX_SKEW_S:
        found.append(f"its clock is {answer.skew_s:+.0f} s off")
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
