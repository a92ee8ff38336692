"""Derives what a job needs of its machines from the same estimate that lint and run make."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.config import jsonc
from dstrain.doctor import requirements as wanted
from dstrain.doctor.finding import Finding, Notes
from dstrain.doctor.requirements import Needs
from dstrain.errors import DstrainError, InvalidConfig
from dstrain.facts import probe
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.cluster.machines import resolve_hosts
from dstrain.facts.this_machine import trains_on_cpu
from dstrain.job.file import JobFile
from dstrain.paths import shown
from dstrain.units import counted

if TYPE_CHECKING:
    from dstrain.config.lint.subject import Subject
    from dstrain.facts.model.model_facts import ModelFacts
    from dstrain.launch.prepare.attention import Wish
    from dstrain.plan.estimate_records import Estimate


def hosts_of(file: JobFile) -> tuple[Hosts | None, list[Finding]]:
    """Returns the hosts of a job; None if it names none, or if they cannot be queried yet."""
    notes, name = Notes("job"), file.job.hostfile
    if name is None:
        return None, []
    try:
        hosts = resolve_hosts(Path(name), place=file.locate(("hostfile",)))
    except InvalidConfig as error:
        notes.bad(error.problem.replace("\n", "; "), error.hint)
        return None, notes.findings
    if hosts.placeholder_lines:
        what = f"{shown(name)}: {hosts.hosts[0].name} is a placeholder, so only this machine is checked"
        notes.warn(what, "dstrain hostfile write 'gpu[01-02]:8'")
        return None, notes.findings
    return hosts, []


def first_needs(file: JobFile, hosts: Hosts | None, *, is_quick: bool = False) -> Needs:
    """Returns the needs of a job that are known without its model: enough to query the machines."""
    config: dict[str, Any] = {}
    with suppress(DstrainError):
        value = jsonc.read(probe.read_text(Path(file.job.ds_config)), file.job.ds_config).value
        config = value if isinstance(value, dict) else {}
    return replace(_for(file, hosts, config, None), is_quick=is_quick)


def _for(
    file: JobFile,
    hosts: Hosts | None,
    config: Mapping[str, Any],
    estimate: Estimate | None,
    model: ModelFacts | None = None,
    wish: Wish | None = None,
) -> Needs:
    """Returns the needs of a job, without RAM and disk if its hosts are not known yet."""
    family = model.model_type if model else None
    needs = wanted.of_job(file.job, os.environ, hosts, config, estimate, model_type=family, wish=wish)
    if file.job.hostfile is None or hosts is not None:
        return needs
    return replace(needs, host_bytes=None, checkpoint_bytes=None, nvme_bytes=0, folders={}, paths=())


def all_needs(file: JobFile, hosts: Hosts | None) -> tuple[Needs, list[Finding]]:
    """Returns the needs of a job with its estimate, and findings that say why there is none.

    May query the hub for the model, without a time limit.
    """
    from dstrain.config.lint import engine
    from dstrain.launch.prepare.lint_job import lint_job  # brings the planner, a quarter of a second

    notes, name = Notes("job"), shown(file.job.ds_config)
    try:
        linted = lint_job(file, Path(file.job.ds_config))
    except DstrainError as error:
        notes.bad(error.problem.replace("\n", "; "), error.hint)
        return first_needs(file, hosts), notes.findings
    count = len(engine.errors(linted.findings))
    if count or linted.subject is None:
        notes.bad(f"{name} has {counted(count, 'error')}", f"dstrain lint {name}")
        return first_needs(file, hosts), notes.findings
    estimate, config = linted.subject.estimate, linted.subject.config
    if estimate is None:
        notes.warn(f"no estimate of RAM and disk: the model {shown(file.job.model)} is not known", no_estimate(file))
    return _for(file, hosts, config, estimate, linted.subject.model, _wish(file, linted.subject)), notes.findings


def _wish(file: JobFile, subject: Subject) -> Wish | None:
    """Returns the attention that a job asks for; None if its machines are unknown."""
    from dstrain.launch.prepare.attention import wish_of

    if subject.cluster is None:
        return None
    on_cpu = trains_on_cpu(os.environ, file.job.env)
    return wish_of(file, subject.model, subject.cluster, on_cpu=on_cpu)


def no_estimate(file: JobFile) -> str:
    """Returns the fix for an unknown model."""
    return f"hf download {file.job.model} config.json; or name a local folder"


def late(file: JobFile, limit_s: float) -> list[Finding]:
    """Returns the finding for an estimate that took longer than `limit_s`."""
    notes = Notes("job")
    notes.warn(f"no estimate of RAM and disk within {limit_s:g} s: the hub does not answer", no_estimate(file))
    return notes.findings
