"""Checks the hosts of a run: queries them over ssh in parallel, then compares them."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType

from dstrain.doctor.checks import findings, interface
from dstrain.doctor.facts import Facts
from dstrain.doctor.probes import all_at_once
from dstrain.doctor.requirements import Needs, on_host, question
from dstrain.doctor.software_checks import chosen
from dstrain.errors import InvalidConfig
from dstrain.facts import network
from dstrain.facts.cluster.hostfile import Host, Hosts
from dstrain.facts.this_machine import names as machine_names
from dstrain.facts.this_machine import usual_versions, version_problems
from dstrain.findings import Finding, Notes
from dstrain.launch import remote
from dstrain.launch.environment import python_path
from dstrain.launch.remote import Obstacle, Refusal
from dstrain.paths import python
from dstrain.records import from_data, to_data

TIMEOUT_S = 7.0
"""Time limit for a host's answer in seconds; its probes take at most 3.6 s, so the whole ends within 10 s."""
MAX_SKEW_S = 5.0
"""Difference between clocks above which logs of several hosts are unreadable and certificates fail."""
_GATHER = "dstrain.doctor.gather"
_MAX_CONNECTIONS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of one host."""

    host: Host
    facts: Facts | None = None
    refusal: Refusal | None = None
    """Why there are no facts."""
    skew_s: float = 0.0
    """Its clock minus this machine's, in seconds."""


def ask(needs: Needs, hosts: Hosts, names: Collection[str], *, timeout_s: float = TIMEOUT_S) -> list[Answer]:
    """Returns every host's answer within about `timeout_s`; `names` are this machine's."""
    path = python_path(os.environ)
    words = [*(["env", f"PYTHONPATH={path}"] if path else []), *python("-m", _GATHER)]

    def ask_host(host: Host) -> Answer:
        text = json.dumps(to_data(question(on_host(needs, host), host.name)))
        reply = remote.ask(host.name, words, names, timeout_s=timeout_s, stdin=text)
        try:
            facts = from_data(Facts, json.loads(reply.text or ""), locate=lambda place: ".".join(map(str, place)))
        except (ValueError, RecursionError, InvalidConfig):
            other = f"unreadable answer, perhaps from another dstrain: {(reply.text or '')[:60]}"
            return Answer(host=host, refusal=reply.refusal or Refusal(obstacle=Obstacle.DSTRAIN, text=other))
        return Answer(host=host, facts=facts, skew_s=facts.time_s - reply.asked_at_s)

    with ThreadPoolExecutor(max_workers=min(_MAX_CONNECTIONS, len(hosts.hosts))) as pool:
        return list(pool.map(ask_host, hosts.hosts))


def own_names(limit_s: float = 1.5) -> frozenset[str]:
    """Returns the names of this machine, within `limit_s` even if its name server does not answer."""
    names = all_at_once({"names": machine_names}, limit_s)["names"].value
    if isinstance(names, frozenset):
        return names
    addresses = [address for card in network.interfaces() for address in card.addresses]
    return frozenset([socket.gethostname(), socket.gethostname().partition(".")[0], *addresses])


def judged(answers: Sequence[Answer], needs: Needs) -> dict[str, list[Finding]]:
    """Returns the findings of every host, including how it differs from most of them."""
    known = [answer.facts for answer in answers if answer.facts is not None]
    usual = usual_versions([facts.software.same for facts in known if facts.software is not None])
    common = {what: _most_common([value(facts) for facts in known]) for what, value in _ALIKE.items()}
    by_host: dict[str, list[Finding]] = {}
    for answer in answers:
        notes, name = Notes("hosts"), answer.host.name
        if answer.facts is None:
            refusal = answer.refusal or Refusal(obstacle=Obstacle.TIMEOUT, text="no answer")
            fix = _FIXES.get(refusal.obstacle, _FIXES[Obstacle.OTHER])
            notes.bad(refusal.text, fix.format(host=name, name=name.rpartition("@")[2]), is_unfit=True)
            by_host[name] = notes.findings
            continue
        _differences(answer.facts, answer.skew_s, usual, common, notes)
        by_host[name] = notes.findings + findings(answer.facts, on_host(needs, answer.host))
    kernels = {answer.host.name: answer.facts.attention for answer in answers if answer.facts is not None}
    known_kernels = {host: found for host, found in kernels.items() if found is not None}
    by_host[answers[0].host.name] += _interface_findings(answers, needs) + chosen(needs, known_kernels)
    return by_host


def unfit(answers: Sequence[Answer], needs: Needs) -> dict[str, list[str]]:
    """Returns by host what makes it unfit for a run with the others, in words."""
    by_host = judged(answers, needs)
    return {host: [finding.problem for finding in own if finding.is_unfit] for host, own in by_host.items()}


def interfaces(answers: Sequence[Answer]) -> dict[str, str | None]:
    """Returns for each host that answered the name of the interface through which it reaches the others."""
    cards = {
        answer.host.name: interface(answer.facts.network)
        for answer in answers
        if answer.facts is not None and answer.facts.network is not None
    }
    return {host: card.name if card else None for host, card in cards.items()}


def _interface_findings(answers: Sequence[Answer], needs: Needs) -> list[Finding]:
    """Returns the interface that `dstrain run` selects for NCCL and Gloo, or why it selects none."""
    notes, names = Notes("network"), interfaces(answers)
    problem = network.disagreement(names)
    if problem is not None and not {network.NCCL, network.GLOO} <= needs.environment.keys():
        notes.warn(*problem)
    variables = network.environment_of(names, needs.environment)
    if variables:
        notes.ok("dstrain run sets " + " ".join(f"{name}={value}" for name, value in variables.items()))
    return notes.findings


def _differences(
    facts: Facts, skew_s: float, usual: Mapping[str, str | None], common: Mapping[str, str | None], notes: Notes
) -> None:
    if facts.software is not None:
        for problem in version_problems(facts.software.same, usual):
            notes.bad(problem, f"install the same versions there, with {sys.executable} -m pip", is_unfit=True)
    if abs(skew_s) > MAX_SKEW_S:
        notes.warn(f"its clock is {skew_s:+.0f} s off", "sudo timedatectl set-ntp true  (on that host)", is_unfit=True)
    for what, value in _ALIKE.items():
        own = value(facts)
        if own is not None and common[what] is not None and own != common[what]:
            notes.warn(f"{what} {own}; most hosts have {common[what]}", "make them equal, or leave this host out")


def _mtu(facts: Facts) -> str | None:
    chosen = interface(facts.network) if facts.network else None
    return str(chosen.mtu) if chosen else None


def _rdma(facts: Facts) -> str | None:
    if facts.network is None:
        return None
    rates = [port.gbits_per_s for port in facts.network.active_ports]
    return f"{len(rates)} ports, {sum(rates):g} Gb/s together"


_ALIKE: Mapping[str, Callable[[Facts], str | None]] = {
    "driver": lambda facts: facts.gpus.driver if facts.gpus else None,
    "GPUs:": lambda facts: facts.gpus.kinds if facts.gpus and facts.gpus.gpus else None,
    "MTU": _mtu,
    "RDMA:": _rdma,
}
"""Facts that should be equal on all hosts, by their label in findings."""


def _most_common(values: Sequence[str | None]) -> str | None:
    """Returns the value of most hosts; in a tie, the first one's."""
    counts = Counter(value for value in values if value is not None)
    return counts.most_common(1)[0][0] if counts else None


_FIXES: Mapping[Obstacle, str] = MappingProxyType(
    {
        Obstacle.ACCESS: "ssh-copy-id {host}",
        Obstacle.NAME: "write {host} into /etc/hosts or ~/.ssh/config, or its address into the hostfile",
        Obstacle.HOST_KEY: "ssh-keyscan -H {name} >> ~/.ssh/known_hosts",
        Obstacle.NO_SSH: "apt-get install openssh-client",
        Obstacle.DSTRAIN: "install the same dstrain there, in the same place",
        Obstacle.OTHER: "ssh {host} true  shows what is wrong; or remove its line from the hostfile",
    }
)
"""Why a host did not answer → what to type; `{name}` is the host without a user."""
