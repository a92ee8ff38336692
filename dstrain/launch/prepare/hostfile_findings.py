"""Lint findings about hostfiles and jobs."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from dstrain.config.lint.finding import Finding, Severity
from dstrain.config.lint.rules.key_names import NO_OBJECT, SYNTAX
from dstrain.errors import DstrainError, InvalidConfig, Place
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.cluster.machines import placeholders, shortage
from dstrain.facts.this_machine import is_this_machine
from dstrain.facts.this_machine import names as machine_names
from dstrain.job.file import JobFile
from dstrain.launch.prepare.job_context import hosts_of
from dstrain.units import counted

HOSTFILE = "DS805"
"""The rule about hostfiles."""
SLOTS = "DS806"
"""The rule about the slots of a hostfile."""
DATA = "DS808"
"""The rule about the data of a job."""
ABSENT = "DS812"
"""The rule about inputs and packages of a job that are not on this machine."""
OUTSIDE = MappingProxyType(
    {
        SYNTAX: "a file that cannot be parsed",
        NO_OBJECT: "a file that is not a JSON object",
        HOSTFILE: "an invalid line of the hostfile, or a placeholder",
        SLOTS: "slots of the hostfile that differ from the GPUs of the machine or of the plan",
        DATA: "data of the job that cannot be read, trained on or held out, or keys of evaluations which it lacks",
        ABSENT: "an input of the job (model, adapter, data, checkpoint) that is not set or not whole on this "
        "machine, or a package that is not installed on it",
    }
)
"""Rules that apply without a parsable ds_config.json: id → title."""


def findings(file: JobFile, planned: Cluster | None) -> list[Finding]:
    """Returns the findings about the hostfile of a job; `planned` is the cluster of its plan."""
    if file.job.hostfile is None:
        return []
    try:
        hosts = hosts_of(file)
    except InvalidConfig as error:
        return of_hostfile(error)
    return of_hosts(hosts, planned.num_gpus if planned else None)


def of_hostfile(error: InvalidConfig) -> list[Finding]:
    """Returns the problems of a hostfile as findings, one for each line."""
    return [
        Finding(
            rule=HOSTFILE,
            severity=Severity.ERROR,
            place=part.place or Place(file="hostfile", line=1, column=1),
            problem=part.text,
            effect="DeepSpeed stops, or trains on other machines than intended",
            fix=part.hint or "write lines such as `node1 slots=8`",
        )
        for part in error.parts or (error,)
    ]


def of_job(error: DstrainError, place: Place) -> Finding:
    """Returns a problem with a key of the job as a finding; `place` is where the key is written, if it has none."""
    return Finding(
        rule=DATA,
        severity=Severity.ERROR,
        place=error.place or place,
        problem=error.text.replace("\n", "; "),
        effect="dstrain run refuses it",
        fix=error.hint or "correct the file",
    )


def of_unset(error: DstrainError, place: Place) -> Finding:
    """Returns a key that a job needs and does not have yet as a finding."""
    return replace(of_job(error, place), rule=ABSENT, severity=Severity.WARNING)


def of_absent(error: DstrainError, place: Place) -> Finding:
    """Returns an input or package that this machine lacks, or has not whole, as a finding: another one may train."""
    effect = "dstrain run refuses it, unless the machine that starts the run has it"
    return replace(of_job(error, place), rule=ABSENT, severity=Severity.WARNING, effect=effect)


def of_hosts(hosts: Hosts, num_planned: int | None) -> list[Finding]:
    """Returns the findings about the hosts and slots of a hostfile; `num_planned` is the GPUs of the plan."""
    findings = []
    if unnamed := placeholders(hosts):
        line, effect = hosts.placeholder_lines[0], "dstrain run refuses it"
        findings.append(_of_line(HOSTFILE, hosts, line, unnamed[0].text, effect, "write your nodes there"))
    elif num_planned is not None and hosts.num_slots != num_planned:
        problem = f"{counted(hosts.num_slots, 'slot')} in total, but the plan is for {counted(num_planned, 'GPU')}"
        effect = "the global batch changes with the number of ranks"
        fix = f"dstrain gen-config --gpus {hosts.num_slots} plans for these"
        findings.append(_of_line(SLOTS, hosts, 1, problem, effect, fix))
    if (lack := shortage(hosts)) is not None:
        effect = "dstrain run refuses it; DeepSpeed would start ranks without a GPU"
        findings.append(_of_line(SLOTS, hosts, hosts.hosts[0].line or 1, lack.text, effect, lack.hint or ""))
    return [*findings, *_same_machines(hosts)]


def _of_line(rule: str, hosts: Hosts, line: int, problem: str, effect: str, fix: str) -> Finding:
    """Returns a warning about a line of a hostfile."""
    place = Place(file=hosts.name, line=line, column=1)
    return Finding(rule=rule, severity=Severity.WARNING, place=place, problem=problem, effect=effect, fix=fix)


def _same_machines(hosts: Hosts) -> list[Finding]:
    """Returns a finding for each host that, by its name, is the machine of an earlier host."""
    here, names, findings = machine_names(), dict[str, str](), list[Finding]()
    for order, host in enumerate(hosts.hosts, start=1):
        name = host.name.rpartition("@")[2].lower()
        is_address = ":" in name or name.replace(".", "").isdigit()
        is_here = is_this_machine(name, here) and not (name.startswith("127.") and name != "127.0.0.1")
        machine = "" if is_here else name if is_address else name.partition(".")[0]
        first = names.setdefault(machine, name)
        if first != name and (is_here or first.startswith(f"{name}.") or name.startswith(f"{first}.")):
            problem = f"{host.name} and {first} are two names of one machine"
            effect = "two sets of ranks share its GPUs: the run stops, or each set has half of the memory"
            finding = _of_line(HOSTFILE, hosts, host.line or order, problem, effect, "remove one of the two lines")
            findings.append(replace(finding, severity=Severity.ERROR))
    return findings
