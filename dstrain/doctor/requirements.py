"""Derives the needs of a run on its machines, from the estimate that lint and run make."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.choices import Hub, Interval, SinkName
from dstrain.config import jsonc
from dstrain.doctor.facts import Question
from dstrain.errors import DstrainError, InvalidConfig
from dstrain.facts import probe
from dstrain.facts.cluster.hostfile import Host, Hosts
from dstrain.facts.cluster.machines import hosts_of, placeholders
from dstrain.facts.data.datafile import found
from dstrain.facts.deepspeed_ops import needed_ops
from dstrain.facts.ds_config import nvme_path
from dstrain.facts.network import DEFAULT_PORT
from dstrain.facts.this_machine import trains_on_cpu
from dstrain.findings import Finding, Notes, errors
from dstrain.job.file import JobFile, is_local
from dstrain.job.schema import Job
from dstrain.launch.environment import is_forwarded, is_secret
from dstrain.paths import shown
from dstrain.rundir import RunDir
from dstrain.units import counted

if TYPE_CHECKING:
    from dstrain.config.lint.rule import Subject
    from dstrain.launch.prepare.attention import Wish
    from dstrain.launch.prepare.prepare import PreparedRun
    from dstrain.plan.estimate_records import Estimate

_URLS = {
    "Hugging Face": ("HF_ENDPOINT", "https://huggingface.co"),
    "ModelScope": ("MODELSCOPE_ENDPOINT", "https://modelscope.cn"),
    "SwanLab": ("SWANLAB_API_HOST", "https://api.swanlab.cn"),
}
"""Name → the variable that names a mirror, and the address without one."""
_PASSWORD = re.compile(r"://[^/@\s]*@")
HUBS = {Hub.HF: "Hugging Face", Hub.MODELSCOPE: "ModelScope"}
"""Name of a hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The needs of a run; without a job those that every run has."""

    has_job: bool = False
    is_quick: bool = False
    """Whether only the checks before a launch are made."""
    on_cpu: bool = False
    hosts: Hosts | None = None
    """The hosts of the run; None if none are given."""
    slots: int | None = None
    """Ranks of the checked host; None if unknown."""
    is_first: bool = True
    """Whether the checked host has rank 0."""
    workers: int = 0
    """Data loader processes of each rank."""
    ops: tuple[str, ...] = ()
    model_type: str | None = None
    """The family of the model; None if unknown."""
    wish: Wish | None = None
    """Attention that the job asks for; None if unknown, or decided already."""
    packs_rows: bool = False
    """Whether samples share rows."""
    host_bytes: int | None = None
    """RAM that one host needs; None if unknown."""
    checkpoint_bytes: int | None = None
    """Size of one checkpoint of all ranks together."""
    num_checkpoints: int | None = None
    """Checkpoints that will be written beside the existing ones; None if all are kept and their number is unknown.
    """
    nvme_bytes: int = 0
    """Bytes that one host writes to NVMe."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """Folders that the run writes: `output`, `nvme`."""
    paths: tuple[str, ...] = ()
    hubs: tuple[str, ...] = tuple(HUBS.values())
    """Hubs of model or data; all of them without a job."""
    wants_swanlab: bool = True
    swanlab_mode: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the ranks: this shell's, extended by the job's. Secrets are blanked."""

    @property
    def num_hosts(self) -> int:
        """How many hosts train."""
        return len(self.hosts.hosts) if self.hosts else 1

    @property
    def port(self) -> int:
        """The port on which rank 0 will listen."""
        named = self.environment.get("MASTER_PORT", "")
        return int(named) if named.isascii() and named.isdigit() else DEFAULT_PORT


def bare(environment: Mapping[str, str], hosts: Hosts | None = None, *, is_quick: bool = False) -> Needs:
    """Returns the needs of every run."""
    return Needs(
        is_quick=is_quick,
        on_cpu=trains_on_cpu(environment),
        hosts=hosts,
        environment=_without_secrets(environment),
    )


def of_job(
    job: Job,
    environment: Mapping[str, str],
    hosts: Hosts | None,
    ds_config: Mapping[str, Any],
    estimate: Estimate | None,
    *,
    model_type: str | None = None,
    wish: Wish | None = None,
    is_quick: bool = False,
) -> Needs:
    """Returns the needs of a job, without RAM and disk if its hosts are not known yet; `estimate` belongs to its
    configuration, if it has one."""
    on_cpu, has_hosts = trains_on_cpu(environment, job.env), hosts is not None or job.hostfile is None
    # an estimate without the hosts is one for another number of ranks
    estimate = estimate if has_hosts else None
    memory = estimate.memory if estimate else None
    folders = {"output": job.output_dir, "nvme": nvme_path(ds_config)}
    return Needs(
        has_job=True,
        is_quick=is_quick,
        on_cpu=on_cpu,
        hosts=hosts,
        workers=job.dataloader_num_workers,
        ops=tuple(needed_ops(ds_config, on_gpu=not on_cpu)),
        model_type=model_type,
        wish=wish,
        packs_rows=job.packing,
        host_bytes=memory.host_bytes_per_node if memory else None,
        checkpoint_bytes=estimate.saved_bytes(only_model=job.save_only_model) if estimate else None,
        num_checkpoints=_num_checkpoints(job),
        nvme_bytes=memory.nvme_bytes_per_node if memory else 0,
        folders={name: folder for name, folder in folders.items() if folder is not None and has_hosts},
        paths=tuple(name for name in _read_by_ranks(job) if is_local(name) and has_hosts),
        hubs=() if all(map(is_local, _read_by_ranks(job))) else (HUBS[job.hub],),
        wants_swanlab=SinkName.SWANLAB in job.monitor.sinks,
        swanlab_mode=job.monitor.mode,
        environment=_without_secrets({**environment, **job.env}),
    )


def on_host(needs: Needs, host: Host) -> Needs:
    """Returns the needs of the run on one host."""
    first = needs.hosts.hosts[0].name if needs.hosts else host.name
    return replace(needs, slots=host.slots, is_first=host.name == first)


def of_prepared(prepared: PreparedRun, environment: Mapping[str, str], host: Host) -> Needs:
    """Returns the needs of a checked run on one host, for the quick checks before its launch."""
    job, config, estimate = prepared.job, prepared.ds_config, prepared.estimate
    family = prepared.model.model_type if prepared.model else None
    needs = of_job(job, environment, prepared.hosts, config, estimate, model_type=family, is_quick=True)
    return on_host(needs, host)


def question(needs: Needs, host: str | None = None) -> Question:
    """Returns the query to a host; None is this machine alone."""
    names = [other.name for other in needs.hosts.hosts] if needs.hosts and host is not None else []
    asked = [*needs.hubs, *(["SwanLab"] if needs.wants_swanlab and needs.is_first else [])]  # SwanLab is rank 0's alone
    sent = {name: value for name, value in needs.environment.items() if is_forwarded(name) and not is_secret(name)}
    return Question(
        is_quick=needs.is_quick,
        environment=sent,
        others=tuple(name for name in names if name != host),
        master=names[0] if len(names) > 1 else None,
        port=needs.port if needs.is_first else None,
        folders=needs.folders,
        paths=needs.paths,
        endpoints={name: _url(needs.environment, *_URLS[name]) for name in asked},
    )


def _url(environment: Mapping[str, str], variable: str, otherwise: str) -> str:
    named = environment.get(variable, "").strip().rstrip("/")
    return otherwise if not named else named if "://" in named else f"https://{named}"


def _without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment with secrets blanked and passwords removed from addresses."""
    return {
        name: "***" if is_secret(name) else _PASSWORD.sub("://", value) if is_secret(name, value) else value
        for name, value in environment.items()
    }


def _num_checkpoints(job: Job) -> int | None:
    """Returns how many checkpoints a job writes beside the existing ones: one more than are kept at the end, since the
    oldest is removed after the newest was written."""
    is_by_steps = job.save_strategy is Interval.STEPS
    run = 1 if job.save_steps < 1 else job.max_steps
    ever = math.ceil(run / job.save_steps) if run and is_by_steps else None
    there = len(RunDir(Path(job.output_dir)).checkpoints())
    kept = None if job.save_total_limit is None else max(1, job.save_total_limit + 1 + job.keeps_best - there)
    counts = [count for count in (ever, kept) if count is not None]
    return min(counts) if counts else None


def _read_by_ranks(job: Job) -> list[str]:
    return [job.model, *(path for data in job.data_paths for path in found(data))]


def queried_hosts(file: JobFile) -> tuple[Hosts | None, list[Finding]]:
    """Returns the hosts of a job; None if it names none, or if they cannot be queried yet."""
    notes, name = Notes("job"), file.job.hostfile
    if name is None:
        return None, []
    try:
        hosts = hosts_of(file)
    except InvalidConfig as error:
        notes.bad(error.problem.replace("\n", "; "), error.hint)
        return None, notes.findings
    if unnamed := placeholders(hosts):
        notes.warn(f"{unnamed[0].problem}, so only this machine is checked", "dstrain hostfile write 'gpu[01-02]:8'")
        return None, notes.findings
    return hosts, []


def first_needs(file: JobFile, hosts: Hosts | None, *, is_quick: bool = False) -> Needs:
    """Returns the needs of a job that are known without its model: enough to query the machines."""
    config: dict[str, Any] = {}
    with suppress(DstrainError):
        value = jsonc.read(probe.read_text(Path(file.job.ds_config)), file.job.ds_config).value
        config = value if isinstance(value, dict) else {}
    return of_job(file.job, os.environ, hosts, config, None, is_quick=is_quick)


def all_needs(file: JobFile, hosts: Hosts | None) -> tuple[Needs, list[Finding]]:
    """Returns the needs of a job with its estimate, and findings that say why there is none.

    May query the hub for the model, without a time limit.
    """
    from dstrain.launch.prepare.lint_job import lint_job  # brings the planner, a quarter of a second

    notes, name = Notes("job"), shown(file.job.ds_config)
    try:
        linted = lint_job(file, Path(file.job.ds_config))
    except DstrainError as error:
        notes.bad(error.problem.replace("\n", "; "), error.hint)
        return first_needs(file, hosts), notes.findings
    count = len(errors(linted.findings))
    if count or linted.subject is None:
        notes.bad(f"{name} has {counted(count, 'error')}", f"dstrain lint {name}")
        return first_needs(file, hosts), notes.findings
    estimate, config = linted.subject.estimate, linted.subject.config
    if estimate is None:
        notes.warn(f"no estimate of RAM and disk: the model {shown(file.job.model)} is not known", no_estimate(file))
    family = linted.subject.model.model_type if linted.subject.model else None
    wish = _wish(linted.subject)
    return of_job(file.job, os.environ, hosts, config, estimate, model_type=family, wish=wish), notes.findings


def _wish(subject: Subject) -> Wish | None:
    """Returns the attention that a job asks for; None if its machines are unknown."""
    from dstrain.launch.prepare.attention import wish_of

    if subject.cluster is None:
        return None
    return wish_of(subject)


def no_estimate(file: JobFile) -> str:
    """Returns the fix for an unknown model."""
    return f"hf download {file.job.model} config.json; or name a local folder"


def late(file: JobFile, limit_s: float) -> list[Finding]:
    """Returns the finding for an estimate that took longer than `limit_s`."""
    notes = Notes("job")
    notes.warn(f"no estimate of RAM and disk within {limit_s:g} s: the hub does not answer", no_estimate(file))
    return notes.findings
