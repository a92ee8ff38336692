"""`dstrain doctor`: checks this machine or every host, and prints the command that fixes each problem."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from dstrain.cli.console import answer, answer_json, say, talk
from dstrain.cli.options.typed import TRUST
from dstrain.cli.output.doctor import document, grouped, of_hosts, printable, problem_text
from dstrain.doctor import hosts as hosts_
from dstrain.doctor import requirements
from dstrain.doctor.checks import findings
from dstrain.doctor.gather import LIMIT_S, gather
from dstrain.doctor.probes import all_at_once
from dstrain.doctor.requirements import Needs
from dstrain.errors import EnvironmentProblem
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.cluster.machines import resolve_hosts
from dstrain.facts.network import environment_of
from dstrain.facts.this_machine import is_this_machine
from dstrain.findings import Finding, errors, signs_text
from dstrain.job.file import JobFile, read_job
from dstrain.rundir import run_line

JOB = Path("job.yaml")


@click.command("doctor")
@click.argument("job", type=click.Path(path_type=Path), required=False)
@click.option("--hostfile", type=click.Path(path_type=Path), help="Look at every host of it, over ssh, all at once.")
@click.option("--network", is_flag=True, help="Measure an all-reduce over all hosts and GPUs instead.")
@click.option("--no-save", is_flag=True, help="With --network: do not keep the figures for the next plan.")
@TRUST
@click.option("-v", "--verbose", is_flag=True, help="Print what is fine (✓), too.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON to stdout.")
def command(
    job: Path | None, hostfile: Path | None, network: bool, no_save: bool, verbose: bool, as_json: bool
) -> None:
    """Find what blocks training, with the command that fixes it. Exits with 5 for a ✗.

    Checks versions and CUDA, DeepSpeed's extensions, GPUs and their errors, NVLink and PCIe, network interfaces and
    RDMA, limits, hubs and SwanLab; with a JOB (job.yaml, if there is one) also RAM and disk for it, and every host of
    its hostfile. Changes nothing; ends within 5 s, with several hosts within 10 s.

    With --network it measures instead: the time of all-reduces over all GPUs of all hosts, against the figure of the
    link. ~/.dstrain/links.json keeps the bandwidth for the next plan of the same hosts.

    \b
    Example:
      dstrain doctor
      dstrain doctor --hostfile hostfile
      dstrain doctor --hostfile hostfile --network
      dstrain doctor job.yaml --json
    """
    file = _job(job, hostfile)
    if no_save and not network:
        raise click.UsageError("--no-save goes with --network; without it nothing is kept.")
    if network:
        from dstrain.cli.doctor_network import examine  # it brings the planner's facts with it

        examine(file, hostfile, saves=not no_save, as_json=as_json)
        return
    hosts, before = _hosts(file, hostfile)
    names = hosts_.own_names() if hosts is not None else frozenset()
    is_local = hosts is None or (len(hosts.hosts) == 1 and is_this_machine(hosts.hosts[0].name, names))
    with talk.status(f"looking at {'this machine' if hosts is None else f'{len(hosts.hosts)} hosts'}"):
        by_host, variables = _answers(file, hosts, names, is_local=is_local)
    host = next(iter(by_host))
    by_host[host] = before + by_host[host]
    if as_json:
        answer_json(document(by_host, variables))
    else:
        rows = grouped(by_host[host], verbose=verbose) if is_local else of_hosts(by_host, variables, verbose=verbose)
        answer(printable("\n".join(rows)))
    _conclude(by_host, None if file is None else job or JOB)


def _job(job: Path | None, hostfile: Path | None) -> JobFile | None:
    """Returns the named job, or job.yaml of this folder if it exists."""
    path = job or (JOB if JOB.is_file() else None)
    if path is None:
        return None
    return read_job(path, [f"hostfile={hostfile.resolve()}"] if hostfile else [])


def _hosts(file: JobFile | None, hostfile: Path | None) -> tuple[Hosts | None, list[Finding]]:
    """Returns the hosts to look at; None is this machine."""
    if hostfile is not None:
        return resolve_hosts(hostfile), []
    return requirements.queried_hosts(file) if file is not None else (None, [])


def _answers(
    file: JobFile | None, hosts: Hosts | None, names: frozenset[str], *, is_local: bool
) -> tuple[dict[str, list[Finding]], dict[str, str]]:
    """Returns the findings of every host, and the variables that a run sets; estimates the job meanwhile."""
    first = requirements.bare(os.environ, hosts) if file is None else requirements.first_needs(file, hosts)
    ask: Callable[[], Any] = partial(gather, requirements.question(_on_first(first)))
    limit_s = LIMIT_S + 0.2
    if hosts is not None and not is_local:
        ask, limit_s = partial(hosts_.ask, first, hosts, names), hosts_.TIMEOUT_S + 1

    def all_needs() -> tuple[Needs, list[Finding]]:
        return (first, []) if file is None else requirements.all_needs(file, first.hosts)

    # the estimate may ask a hub, which may not answer; the machines answer within time limits of their own
    seen = all_at_once({"job": all_needs, "facts": ask}, limit_s, awaited=["facts"])
    facts = seen["facts"].value
    if facts is None:
        raise EnvironmentProblem(f"the machines cannot be checked: {seen['facts'].problem}")
    needs, job_findings = seen["job"].value or (first, requirements.late(file, LIMIT_S) if file is not None else [])
    variables: dict[str, str] = {}
    if is_local:
        by_host = {socket.gethostname(): findings(facts, _on_first(needs))}
    else:
        by_host = hosts_.judged(facts, needs)
        variables = environment_of(hosts_.interfaces(facts), needs.environment)
    host = next(iter(by_host))
    by_host[host] = job_findings + by_host[host]
    return by_host, variables


def _on_first(needs: Needs) -> Needs:
    """Returns the needs on the first host, if hosts are known."""
    return needs if needs.hosts is None else requirements.on_host(needs, needs.hosts.hosts[0])


def _conclude(by_host: dict[str, list[Finding]], job: Path | None) -> None:
    """Prints the number of findings and the next command. Raises EnvironmentProblem for errors."""
    everything = [finding for host_findings in by_host.values() for finding in host_findings]
    if errors(everything):
        raise EnvironmentProblem(
            f"{problem_text(by_host)} ({signs_text(everything)})",
            hint="Type the command after → for each ✗, then run `dstrain doctor` again.",
        )
    say(signs_text(everything))
    say(f"next: {'dstrain gen-config --model MODEL --data DATA' if job is None else run_line(job)}")
