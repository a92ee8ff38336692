"""Prepares a run from a job file: checks the job, its machines and its configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dstrain.config.edits import edit_json
from dstrain.config.edits.lock import planned_cluster
from dstrain.config.jsonc import Change
from dstrain.config.lint import engine
from dstrain.config.lint.rule import JobContext, Subject
from dstrain.config.resolve_auto import for_trainer
from dstrain.errors import DstrainError
from dstrain.facts.cluster import machines
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.model import hub_config
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.this_machine import hub_variables, trains_on_cpu, versions, visible_devices
from dstrain.facts.workload import RowContents, Workload, measured_workload
from dstrain.findings import Finding, Severity, errors
from dstrain.job.file import JobFile
from dstrain.job.schema import Job
from dstrain.launch.prepare import attention, inputs, resume
from dstrain.launch.prepare.attention import Choice
from dstrain.launch.prepare.checks import BEFORE_HUBS, OF_CONFIGURATION, OF_MACHINES, require
from dstrain.launch.prepare.job_context import contents_of, describe, model_of
from dstrain.launch.prepare.lint_job import estimated, read_text, refused, subject_of
from dstrain.launch.prepare.resume import Resize, Resuming
from dstrain.paths import shown
from dstrain.plan.configuration import changed
from dstrain.plan.estimate import assess
from dstrain.plan.estimate_records import Estimate
from dstrain.records import to_data
from dstrain.rundir import RunDir

_RETRIES = "each rank asks for minutes before it gives up"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A checked run, ready to launch. Nothing is written yet."""

    job: Job
    ds_text: str
    """The text of the configuration as it was read."""
    hosts: Hosts
    devices: tuple[int, ...] | None
    """The GPUs in CUDA_VISIBLE_DEVICES, or None for all."""
    ds_config: dict[str, Any]
    """The configuration that the Trainer gets."""
    model: ModelFacts | None
    """None if its family is unknown."""
    cluster: Cluster
    estimate: Estimate | None
    """None if the model is unknown."""
    attention: Choice
    """The attention of the ranks; of several nodes what `auto` is before they answer."""
    notes: tuple[str, ...]
    """Lines to print before the launch."""
    elastic: Resize | None = None
    """The checkpoint to convert before the launch, for another number of ranks."""
    contents: RowContents | None = None
    """The contents of rows when the configuration was generated; None if unknown."""

    @property
    def is_local(self) -> bool:
        """Whether all ranks run on this machine."""
        return machines.is_local(self.hosts)

    @property
    def on_cpu(self) -> bool:
        """Whether ranks train on the CPU."""
        return self.cluster.gpu.is_cpu

    @property
    def workload(self) -> Workload | None:
        """The model on its machines, with measured figures; None if the model is unknown."""
        return None if self.model is None else measured_workload(self.model, self.cluster, self.contents)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint; 0 if unknown."""
        return self.estimate.saved_bytes(only_model=self.job.save_only_model) if self.estimate else 0

    @property
    def run_dir(self) -> RunDir:
        """The run directory."""
        return RunDir(Path(self.job.output_dir))


def prepare(
    file: JobFile,
    environment: Mapping[str, str],
    *,
    ignored: Sequence[str] = (),
    hosts: Hosts | None = None,
    changes: Sequence[Change] = (),
    opens_images: bool = False,
) -> PreparedRun:
    """Returns the checked run; `ignored` are ids of lint rules, `hosts` replace the job's hostfile, and `changes` are
    made to its configuration for this run, not in the file. With `opens_images`, all images are read.

    Raises InvalidConfig or EnvironmentProblem, with the line to edit.
    """
    os.environ.update(hub_variables(file.job.env))  # hubs are asked as the ranks will ask them

    # facts; what the job's own files tell is checked first, as a hub may take minutes to answer
    data_notes = require(BEFORE_HUBS, JobContext(job=file, opens_images=opens_images))
    context, resuming, fact_notes = _facts(file, environment, hosts)
    subject, text = _configuration(context, changes)

    # checks
    require(OF_CONFIGURATION, subject)
    _refuse(engine.check(subject, ignored=ignored), resuming)

    # plan: the attention, on which the estimate depends, and whether it fits
    choice = attention.decide(context, environment, kept=resuming.saved.attn if resuming.saved else None)
    subject = estimated(_with_attention(subject, choice))
    findings = engine.check(subject, ignored=ignored)
    _refuse(findings, resuming)
    warnings = [finding.line for finding in findings if finding.severity is Severity.WARNING]

    devices, device_notes = _devices(environment, context)
    notes = (*resuming.notes, *warnings, *device_notes, *fact_notes, *data_notes, *unplanned(file.job))
    return _prepared(subject, text, choice, resuming, devices, notes)


def _facts(
    file: JobFile, environment: Mapping[str, str], hosts: Hosts | None
) -> tuple[JobContext, Resuming, list[str]]:
    """Returns a job as it goes on from its checkpoint, with its machines and its model; and notes about these.

    Raises InvalidConfig or EnvironmentProblem if the machines are not there, before a hub is asked.
    """
    hosts = machines.named(hosts or machines.hosts_of(file))
    resuming = resume.resuming(file.job, num_ranks=hosts.num_slots)
    file = replace(file, job=resuming.job)
    cluster, link_notes = _cluster(file, hosts, on_cpu=trains_on_cpu(environment, file.job.env))
    require(OF_MACHINES, JobContext(job=file, hosts=hosts, cluster=cluster))
    file, hub_notes = _offline(file) if machines.is_local(hosts) else (file, [])
    model, model_notes = model_of(file.job)
    context = JobContext(job=file, hosts=hosts, model=model, cluster=cluster)
    return context, resuming, [*model_notes, *hub_notes, *link_notes]


def _prepared(
    subject: Subject,
    text: str,
    choice: Choice,
    resuming: Resuming,
    devices: tuple[int, ...] | None,
    notes: tuple[str, ...],
) -> PreparedRun:
    """Returns the run of a checked configuration."""
    file, hosts, cluster = subject.job, subject.hosts, subject.cluster
    assert file is not None
    assert hosts is not None
    assert cluster is not None
    ds_config = for_trainer(subject.config, file.job, subject.model, num_ranks=hosts.num_slots)
    return PreparedRun(
        job=file.job,
        ds_text=text,
        hosts=hosts,
        devices=devices,
        ds_config=ds_config,
        model=subject.model,
        cluster=cluster,
        estimate=subject.estimate,
        attention=choice,
        contents=contents_of(file),
        notes=notes,
        elastic=resume.decide(resuming.saved, ds_config, num_ranks=hosts.num_slots),
    )


def _with_attention(subject: Subject, choice: Choice) -> Subject:
    """Returns the configuration beside its job with the attention of the ranks."""
    assert subject.job is not None
    return replace(subject, job=replace(subject.job, job=replace(subject.job.job, attn=choice.attn)))


def with_attention(prepared: PreparedRun, choice: Choice) -> PreparedRun:
    """Returns the run with the attention that its nodes have, and the estimate of that."""
    job, estimate = replace(prepared.job, attn=choice.attn), prepared.estimate
    workload = prepared.workload
    if choice.attn is not prepared.job.attn and estimate is not None and workload is not None:
        estimate = assess(workload, changed(estimate.configuration, attn=choice.attn))
    return replace(prepared, job=job, estimate=estimate, attention=choice)


def _offline(file: JobFile) -> tuple[JobFile, list[str]]:
    """Returns the job whose ranks read the cache alone if the hub does not answer and all they need is there.

    Transformers would ask for each file again and again: 4 minutes on two ranks. Raises as `is_reached` does.
    """
    job = file.job
    if hub_config.OFFLINE in job.env or hub_config.is_reached(job.model, job.hub):
        return file, []
    note, missing = hub_config.offline_note(job.model), inputs.missing_in_cache(job)
    if missing is not None:
        return file, [f"{note}, which lacks {missing}; {_RETRIES}"]
    env = {**job.env, hub_config.OFFLINE: "1"}
    return replace(file, job=replace(job, env=env)), [f"{note} alone, by ranks with {hub_config.OFFLINE}=1"]


def _cluster(file: JobFile, hosts: Hosts, *, on_cpu: bool) -> tuple[Cluster, list[str]]:
    """Returns the machines, and a note if the file of measured links cannot be read."""
    planned = None
    with suppress(DstrainError):  # a damaged lock is reported where it is needed
        planned = planned_cluster(Path(file.job.ds_config).parent)
    cluster, problem = describe(hosts, planned, on_cpu=on_cpu, is_run=True)
    return cluster, [problem] if problem is not None else []


def _configuration(context: JobContext, changes: Sequence[Change]) -> tuple[Subject, str]:
    """Returns the configuration of a job with changes, and its text without. Raises InvalidConfig if it cannot be
    read."""
    assert context.job is not None
    path = context.job.job.ds_config
    text = read_text(Path(path))
    document, problems = engine.read(edit_json.apply(text, shown(path), changes), shown(path))
    if document is None:
        raise refused(problems)
    return subject_of(context, document), text


def _refuse(findings: Sequence[Finding], resuming: Resuming) -> None:
    """Raises InvalidConfig for errors among the findings."""
    if errors(findings):
        raise resuming.explained(refused(findings))


def _devices(environment: Mapping[str, str], context: JobContext) -> tuple[tuple[int, ...] | None, list[str]]:
    """Returns the GPUs in CUDA_VISIBLE_DEVICES, and a note if the variable has no effect."""
    job, hosts, cluster, name = context.asked, context.hosts, context.cluster, "CUDA_VISIBLE_DEVICES"
    assert job is not None
    assert hosts is not None
    assert cluster is not None
    if machines.is_local(hosts):
        return None if cluster.gpu.is_cpu else visible_devices({**environment, **job.env}.get(name)), []
    note = f"{name} has no effect on several nodes: the slots of the hostfile count from GPU 0"
    return None, [note] if name in environment else []


def unplanned(job: Job) -> list[str]:
    """Returns notes about what the planned time of a run does not know."""
    notes = []
    if job.early_stopping is not None:
        notes.append(
            "early_stopping may end the run before its last step: planned times are those of all steps, "
            f"for which the learning rate ({job.lr_scheduler_type}) is scheduled, too"
        )
    if job.samples is not None:
        notes.append("the time of generated samples is not planned; the log has what they take")
    return notes


def facts_text(prepared: PreparedRun) -> str:
    """Returns the text of facts.json, with the versions of this machine, which all nodes of a run share. Leaves out an
    assumed GPU: the ranks must not compute MFU from it."""
    is_known = prepared.cluster.gpu_origin is not Origin.ASSUMED
    facts = {
        "attention": prepared.attention.says,
        "model": to_data(prepared.model) if prepared.model else None,
        "cluster": to_data(prepared.cluster) if is_known else None,
        "versions": versions(("accelerate", "peft")),
    }
    return json.dumps(facts, indent=2) + "\n"


def cpu_threads(num_ranks: int) -> int:
    """Returns the threads of one rank when ranks share this machine's cores."""
    return max(1, (os.cpu_count() or 1) // num_ranks)
