"""Checks all hosts of a run: queries them over ssh in parallel, then compares them."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dstrain.doctor.checks.all import findings
from dstrain.doctor.checks.network import interface
from dstrain.doctor.facts import Facts
from dstrain.doctor.finding import Finding, Notes
from dstrain.doctor.reach import clock_problems, send, usual_versions, version_problems
from dstrain.doctor.requirements import Needs, on_host, question
from dstrain.doctor.run_probes import all_at_once
from dstrain.errors import InvalidConfig
from dstrain.facts import network_interface
from dstrain.facts.cluster.hostfile import Host, Hosts
from dstrain.facts.this_machine import names as machine_names
from dstrain.launch.environment import python_path
from dstrain.paths import python
from dstrain.records import from_data, to_data

TIMEOUT_S = 7.0
"""Time limit for a host's answer in seconds; its probes take at most 3.6 s, so the whole ends within 10 s."""
_GATHER = "dstrain.doctor.gather"
_MOST_AT_ONCE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one host says."""

    host: Host
    facts: Facts | None = None
    """What was found there; None where it did not come to that."""
    problem: str | None = None
    """Why not."""
    skew_s: float = 0.0
    """Its clock less this one's."""


def ask(needs: Needs, hosts: Hosts, names: Collection[str], *, timeout_s: float = TIMEOUT_S) -> list[Answer]:
    """Returns what every host says, within about `timeout_s`; `names` are those of this machine."""
    path = python_path(os.environ)
    words = [*(["env", f"PYTHONPATH={path}"] if path else []), *python("-m", _GATHER)]

    def one(host: Host) -> Answer:
        asked = json.dumps(to_data(question(on_host(needs, host), host.name)))
        reply = send(host.name, words, names, timeout_s=timeout_s, stdin=asked)
        try:
            facts = from_data(Facts, json.loads(reply.text or ""), locate=lambda place: ".".join(map(str, place)))
        except (ValueError, RecursionError, InvalidConfig):
            other = f"its answer cannot be read, as of another dstrain: {(reply.text or '')[:60]}"
            return Answer(host=host, problem=reply.problem or other)
        return Answer(host=host, facts=facts, skew_s=facts.time_s - reply.asked_at_s)

    with ThreadPoolExecutor(max_workers=min(_MOST_AT_ONCE, len(hosts.hosts))) as pool:
        return list(pool.map(one, hosts.hosts))


def own_names(limit_s: float = 1.5) -> frozenset[str]:
    """Returns the names of this machine; without the one that only a name server that is silent could tell."""
    seen = all_at_once({"names": machine_names}, limit_s)["names"].value
    if isinstance(seen, frozenset):
        return seen
    addresses = [address for each in network_interface.interfaces() for address in each.addresses]
    return frozenset([socket.gethostname(), socket.gethostname().partition(".")[0], *addresses])


def judged(answers: Sequence[Answer], needs: Needs) -> dict[str, list[Finding]]:
    """Returns what is to be said of every host, and in what it differs from most of them."""
    known = [answer.facts for answer in answers if answer.facts is not None]
    usual = usual_versions([facts.software.same for facts in known if facts.software is not None])
    common = {what: _most_common([value(facts) for facts in known]) for what, value in _ALIKE.items()}
    found: dict[str, list[Finding]] = {}
    for answer in answers:
        notes = Notes("hosts")
        if answer.facts is None:
            problem = answer.problem or "no answer"
            notes.bad(problem, _cure(answer.host.name, problem))
            found[answer.host.name] = notes.findings
            continue
        _differences(answer, usual, common, notes)
        found[answer.host.name] = notes.findings + findings(answer.facts, on_host(needs, answer.host))
    first = answers[0].host.name
    found[first] = found[first] + _interface_findings(answers, needs)
    return found


def interfaces(answers: Sequence[Answer]) -> dict[str, str | None]:
    """Returns for each host that answered the interface through which it reaches the others."""
    chosen = {
        answer.host.name: interface(answer.facts.network)
        for answer in answers
        if answer.facts is not None and answer.facts.network is not None
    }
    return {host: each.name if each else None for host, each in chosen.items()}


def _interface_findings(answers: Sequence[Answer], needs: Needs) -> list[Finding]:
    """Returns what `dstrain run` will make NCCL and Gloo use, or why it leaves that to them."""
    notes, names = Notes("network"), interfaces(answers)
    problem = network_interface.disagreement(names)
    if problem is not None and not {network_interface.NCCL, network_interface.GLOO} <= needs.environment.keys():
        notes.warn(*problem)
    variables = network_interface.environment_of(names, needs.environment)
    if variables:
        notes.ok("dstrain run sets " + " ".join(f"{name}={value}" for name, value in variables.items()))
    return notes.findings


def _differences(
    answer: Answer, usual: Mapping[str, str | None], common: Mapping[str, str | None], notes: Notes
) -> None:
    facts = answer.facts
    if facts is None:
        return
    if facts.software is not None:
        for problem in version_problems(facts.software.same, usual):
            notes.bad(problem, f"install the same there, with {sys.executable} -m pip")
    for problem in clock_problems(answer.skew_s):
        notes.warn(problem, "sudo timedatectl set-ntp true  (on that host)")
    for what, value in _ALIKE.items():
        own = value(facts)
        if own is not None and common[what] is not None and own != common[what]:
            notes.warn(f"{what} {own}; most hosts have {common[what]}", "make them alike, or leave this host out")


def _driver(facts: Facts) -> str | None:
    return facts.gpus.driver if facts.gpus else None


def _gpu_kinds(facts: Facts) -> str | None:
    if facts.gpus is None or not facts.gpus.gpus:
        return None
    counts = Counter(gpu.name for gpu in facts.gpus.gpus)
    return ", ".join(f"{count} × {name}" for name, count in counts.items())


def _mtu(facts: Facts) -> str | None:
    chosen = interface(facts.network) if facts.network else None
    return str(chosen.mtu) if chosen else None


def _rdma(facts: Facts) -> str | None:
    if facts.network is None:
        return None
    rates = [port.gbits_per_s for port in facts.network.rdma if port.state == "ACTIVE"]
    return f"{len(rates)} ports, {sum(rates):g} Gb/s together"


_ALIKE: Mapping[str, Callable[[Facts], str | None]] = {
    "driver": _driver,
    "GPUs:": _gpu_kinds,
    "MTU": _mtu,
    "RDMA:": _rdma,
}
"""What should be the same on all hosts, as it is told."""


def _most_common(values: Sequence[str | None]) -> str | None:
    """Returns what most hosts have; of equals, what the first has."""
    counts = Counter(value for value in values if value is not None)
    return counts.most_common(1)[0][0] if counts else None


def _cure(host: str, problem: str) -> str:
    """Returns what to type against a host that cannot be asked."""
    if "Permission denied" in problem:
        return f"ssh-copy-id {host}"
    if "Could not resolve" in problem:
        return f"write {host} into /etc/hosts or ~/.ssh/config, or its address into the hostfile"
    if "Host key verification" in problem:
        return f"ssh-keyscan -H {host.rpartition('@')[2]} >> ~/.ssh/known_hosts"
    if "not installed there" in problem or "another dstrain" in problem:
        return "install the same dstrain there, in the same place"
    return f"ssh {host} true  shows what is wrong; or take its line out of the hostfile"
