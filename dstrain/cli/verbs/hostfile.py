"""`dstrain hostfile`: writes, checks and shows hostfiles in DeepSpeed's format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from dstrain.cli.console import answer, answer_json, say
from dstrain.cli.group import Group
from dstrain.cli.options.typed import TRUST
from dstrain.cli.types import Named
from dstrain.config.edits import edit
from dstrain.config.jsonc import REMOVED, Change
from dstrain.errors import EnvironmentProblem, InvalidConfig, did_you_mean
from dstrain.facts import probe
from dstrain.facts.cluster import host_sources, hostfile
from dstrain.facts.cluster.host_sources import SOURCES, HostQuery
from dstrain.facts.cluster.hostfile import MAX_SLOTS, Hosts
from dstrain.facts.cluster.machines import placeholders, resolve_hosts
from dstrain.paths import write_atomic
from dstrain.units import counted

DEFAULT = Path("hostfile")
SLOTS_OF_JOBS = ("pbs", "lsf")
"""Sources that count the processes of a job, which may differ from its GPUs."""


@click.group("hostfile", cls=Group)
def command() -> None:
    """Write, check or show the hosts of a run, in DeepSpeed's format.

    \b
    Example:
      dstrain hostfile write 'gpu[01-16]:8'
      dstrain hostfile check
    """


@command.command("write", short_help="Write a hostfile from names, a scheduler or a file.")
@click.argument("names", required=False)
@click.option(
    "--from",
    "source",
    type=Named(lambda: SOURCES),
    metavar="SOURCE",
    help=f"Source of the hosts: {', '.join(SOURCES)}.",
)
@click.option(
    "--from-file", type=click.Path(path_type=Path), help="File to read hosts from: one of --from, or a hostfile."
)
@click.option("--slots", type=click.IntRange(1, MAX_SLOTS), help="GPUs per host.  [default: as the source says]")
@click.option("--match", metavar="PATTERN", help="With ssh-config: take only hosts such as 'gpu*'.")
@click.option("-o", "--out", type=click.Path(path_type=Path), default=DEFAULT, show_default=True, help="File to write.")
@click.option("-n", "--dry-run", is_flag=True, help="Print the file and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the hosts as JSON to stdout.")
def write(
    names: str | None,
    source: str | None,
    from_file: Path | None,
    slots: int | None,
    match: str | None,
    out: Path,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write a hostfile from names and ranges, a scheduler, or another tool's file.

    An existing hostfile keeps its comments and the order of its hosts.

    \b
    Example:
      dstrain hostfile write 'gpu[01-16]:8'
      dstrain hostfile write 10.0.0.1,10.0.0.2 --slots 4
      dstrain hostfile write --from slurm
    """
    hosts = _asked_for(names, source, from_file, slots, match)
    hostfile.parse(hostfile.render(hosts), hosts.name)  # checks that ssh can take the names
    text = _merged(out, hosts)
    changed = False if dry_run else write_atomic(out, text)
    if as_json:
        answer_json(_document(hosts))
    elif dry_run:
        answer(text)
    if source in SLOTS_OF_JOBS and slots is None:
        say(f"note: {source} counts the processes of the job; add --slots if a host has another number of GPUs")
    if not dry_run:
        say(f"{'wrote' if changed else 'nothing changed in'} {out}: {_total(hosts)}")


def _asked_for(
    names: str | None, source: str | None, from_file: Path | None, slots: int | None, match: str | None
) -> Hosts:
    """Returns the hosts of the options."""
    if names is not None and (source is not None or from_file is not None):
        raise click.UsageError("NAMES excludes --from and --from-file; give one of them.")
    if names is not None:
        return hostfile.expand(names, slots, "NAMES")
    files: dict[str, Any] = {"read": probe.read_text, "file": from_file, "details": probe.slurm_job}
    query = HostQuery(environment=os.environ, slots=slots, match=match, **files)
    if source is not None:
        if source not in SOURCES:
            raise click.UsageError(f'--from "{source}": {did_you_mean(source, list(SOURCES))}')
        return SOURCES[source](query)
    if from_file is None:
        raise click.UsageError("Give the hosts: names such as 'gpu[01-16]:8', --from slurm, or --from-file FILE.")
    return host_sources.openmpi(query)


def _merged(out: Path, hosts: Hosts) -> str:
    """Returns the text to write: existing hosts keep their lines and comments."""
    if not out.is_file():
        return hostfile.render(hosts)
    text = probe.read_text(out)
    try:
        present = {host.name for host in hostfile.parse(text, str(out)).hosts}
    except InvalidConfig:
        raise InvalidConfig(
            f"{out} exists and is not a valid hostfile",
            hint=f"dstrain hostfile check {out} says why; or move it: mv {out} {out}.old",
        ) from None
    gone = sorted(present - {host.name for host in hosts.hosts})
    changes = [Change(pointer=(name,), value=REMOVED) for name in gone]
    changes += [Change(pointer=(host.name,), value=host.slots) for host in hosts.hosts]
    return edit.apply(text, "hostfile", changes)


@command.command("check", short_help="Find all errors of a hostfile.")
@click.argument("path", metavar="[HOSTFILE]", type=click.Path(path_type=Path), default=DEFAULT)
@click.option("--equal", is_flag=True, help="Require the same slots on every host, as `--gpus-per-node` of SLURM does.")
@click.option("--reach", is_flag=True, help="Ask every host over ssh: versions, GPUs, clock, paths, disk.")
@click.option("--job", type=click.Path(path_type=Path), help="With --reach: the job whose paths the hosts must read.")
@TRUST
@click.option("--timeout", type=click.FloatRange(1, 600), default=8.0, show_default=True, help="Seconds a host.")
@click.option("--json", "as_json", is_flag=True, help="Print the hosts as JSON to stdout.")
def check(path: Path, equal: bool, reach: bool, job: Path | None, timeout: float, as_json: bool) -> None:
    """Find all errors of a hostfile, including those that DeepSpeed ignores. Exits with 3 on errors.

    With --reach every host is asked over ssh, all at once: whether it answers, has the same versions, as many idle GPUs
    as slots, this clock, and can read what the job reads. Exits with 5 when one is not fit.

    \b
    Example:
      dstrain hostfile check
      dstrain hostfile check --reach --job job.yaml
    """
    hosts = resolve_hosts(path)
    problems = [placeholder.problem for placeholder in placeholders(hosts)]
    counts = {host.slots for host in hosts.hosts}
    if equal and len(counts) > 1:
        # the rarer number is taken for the mistake
        most = max(counts, key=lambda count: sum(host.slots == count for host in hosts.hosts))
        problems += [
            f"{path}:{host.line}:1: {host.name} has {counted(host.slots, 'slot')}, but most hosts have {most}"
            for host in hosts.hosts
            if host.slots != most
        ]
    if problems:
        raise InvalidConfig("\n".join(problems), hint="Correct these lines.")
    problems_by_host = _reached(hosts, job, timeout) if reach else {}
    if as_json:
        answer_json(_document(hosts) | ({"problems": problems_by_host} if reach else {}))
    elif reach:
        answer("\n".join(_reach_lines(problems_by_host)))
    say(f"{path}: {_total(hosts)}")
    unfit = [name for name, host_problems in problems_by_host.items() if host_problems]
    if unfit:
        problem = f"{len(unfit)} of {len(problems_by_host)} hosts not fit: {', '.join(unfit)}"
        raise EnvironmentProblem(problem, hint="Repair them, or remove their lines.")


def _reached(hosts: Hosts, job: Path | None, timeout_s: float) -> dict[str, list[str]]:
    """Returns by host what makes it unfit: the doctor's quick checks of all hosts."""
    from dstrain.doctor import hosts as doctor  # these bring the probes with them, which the other commands do not need
    from dstrain.doctor import requirements
    from dstrain.job.file import read_job

    if job is None:
        needs = requirements.bare(os.environ, hosts, is_quick=True)
    else:
        needs = requirements.first_needs(read_job(job), hosts, is_quick=True)
    return doctor.unfit(doctor.ask(needs, hosts, doctor.own_names(), timeout_s=timeout_s), needs)


def _reach_lines(problems_by_host: dict[str, list[str]]) -> list[str]:
    width = max(len(name) for name in problems_by_host)
    lines = []
    for name, problems in problems_by_host.items():
        lines.append(f"{'✗' if problems else '✓'} {name:<{width}}  {problems[0] if problems else 'fit'}")
        lines += [f"  {'':<{width}}  {problem}" for problem in problems[1:]]
    return lines


@command.command("show", short_help="Print the hosts and ranks of a hostfile.")
@click.argument("path", metavar="[HOSTFILE]", type=click.Path(path_type=Path), default=DEFAULT)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(path: Path, as_json: bool) -> None:
    """Print which ranks run on which host.

    \b
    Example:
      dstrain hostfile show
    """
    hosts = resolve_hosts(path)
    if as_json:
        answer_json(_document(hosts))
        return
    width = max(len(host.name) for host in hosts.hosts)
    first = 0
    for host in hosts.hosts:
        last = first + host.slots - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        answer(f"{host.name:<{width}}  {host.slots} slots  {ranks}{'  (master)' if first == 0 else ''}")
        first = last + 1
    say(_total(hosts))


def _document(hosts: Hosts) -> dict[str, object]:
    listed = [{"name": host.name, "slots": host.slots} for host in hosts.hosts]
    return {"schema": 1, "hosts": listed, "num_slots": hosts.num_slots}


def _total(hosts: Hosts) -> str:
    count = len(hosts.hosts)
    return f"{counted(count, 'host')}, {counted(hosts.num_slots, 'slot')}"
