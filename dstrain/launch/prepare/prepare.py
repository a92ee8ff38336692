"""Prepares a run from a job file: checks the job, its machines and its configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dstrain.config.document import Change
from dstrain.config.edits import edit_json
from dstrain.config.edits.lock import planned_cluster
from dstrain.config.lint.engine import errors
from dstrain.config.lint.finding import Severity
from dstrain.config.lint.subject import JobContext, Subject
from dstrain.config.resolve_auto import for_trainer
from dstrain.errors import DstrainError
from dstrain.facts.caches import hub_variables
from dstrain.facts.cluster import machines
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.data.row_contents import RowContents
from dstrain.facts.model import hub_config
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.this_machine import trains_on_cpu, versions, visible_devices
from dstrain.facts.workload import Workload, measured_workload
from dstrain.job.file import JobFile
from dstrain.job.schema import Job
from dstrain.launch.prepare import attention, inputs, job_checks, packages, resize_checkpoint, resume
from dstrain.launch.prepare.attention import Choice
from dstrain.launch.prepare.job_context import contents_of, describe, given_link, hosts_of, model_of
from dstrain.launch.prepare.lint_job import lint_text, read_text, refused
from dstrain.launch.prepare.resize_checkpoint import Resize
from dstrain.launch.prepare.resume import Resuming
from dstrain.paths import shown
from dstrain.plan.configuration import changed
from dstrain.plan.estimate import assess
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.freezing import unplanned_parts
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
    is_local: bool
    """Whether all ranks run on this machine."""
    on_cpu: bool
    """Whether ranks train on the CPU."""
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
    """What rows of the data held when the configuration was generated; None if unknown."""

    @property
    def workload(self) -> Workload | None:
        """What trains where, with what was measured; None if the model is unknown."""
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
    made to its configuration for this run, not in the file. With `opens_images`, all images are read. Raises
    InvalidConfig or EnvironmentProblem, with the line to edit, before anything is written or started.
    """
    os.environ.update(hub_variables(file.job.env))  # hubs are asked as the ranks will ask them
    on_cpu = trains_on_cpu(environment, file.job.env)
    data_notes = job_checks.check(file, on_cpu=on_cpu, opens_images=opens_images)
    hosts = machines.named(hosts or hosts_of(file))
    resuming = resume.resuming(file.job, num_ranks=hosts.num_slots)
    file, model, cluster, machine_notes = _known(replace(file, job=resuming.job), hosts, on_cpu=on_cpu)
    is_local = machines.is_local(hosts)
    kept = resuming.saved.attn if resuming.saved else None
    file, choice = attention.decide(file, model, cluster, environment, on_cpu=on_cpu, is_local=is_local, kept=kept)
    context = JobContext(job=file, hosts=hosts, model=model, cluster=cluster)
    subject, lint_notes, text = _linted(context, file, resuming, ignored, changes)
    ds_config = for_trainer(subject.config, file.job, model, num_ranks=hosts.num_slots)
    devices, device_notes = _devices(environment, file.job, is_local=is_local, on_cpu=on_cpu)
    return PreparedRun(
        job=file.job,
        ds_text=text,
        hosts=hosts,
        is_local=is_local,
        on_cpu=on_cpu,
        devices=devices,
        ds_config=ds_config,
        model=model,
        cluster=cluster,
        estimate=subject.estimate,
        attention=choice,
        contents=contents_of(file),
        notes=(*resuming.notes, *lint_notes, *device_notes, *machine_notes, *data_notes),
        elastic=resize_checkpoint.decide(resuming.saved, ds_config, num_ranks=hosts.num_slots),
    )


def with_attention(prepared: PreparedRun, choice: Choice) -> PreparedRun:
    """Returns the run with the attention that its nodes have, and the estimate of that."""
    job, estimate = replace(prepared.job, attn=choice.attn), prepared.estimate
    workload = prepared.workload
    if choice.attn is not prepared.job.attn and estimate is not None and workload is not None:
        estimate = assess(workload, changed(estimate.configuration, attn=choice.attn))
    return replace(prepared, job=job, estimate=estimate, attention=choice)


def _known(file: JobFile, hosts: Hosts, *, on_cpu: bool) -> tuple[JobFile, ModelFacts | None, Cluster, list[str]]:
    """Returns the job, its model, its machines, and notes. Raises InvalidConfig or EnvironmentProblem for a job that
    they cannot run."""
    is_local = machines.is_local(hosts)
    cluster, link_notes = _cluster(file, hosts, on_cpu=on_cpu)
    job_checks.check_machines(file, hosts, cluster, needs_gpus=is_local and not on_cpu)
    file, hub_notes = _offline(file) if is_local else (file, [])
    model, notes = _model_of(file.job)
    job_checks.check_combinations(file, model, cluster)
    return file, model, cluster, [*notes, *hub_notes, *link_notes]


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
    """Returns the machines, and a note if the file of measured links cannot be read.

    A link between nodes that was given to the plan of the job's configuration stays.
    """
    planned = None
    with suppress(DstrainError):  # a damaged lock is reported where it is needed
        planned = planned_cluster(Path(file.job.ds_config).parent)
    cluster, problem = describe(hosts, on_cpu=on_cpu, inter_link=given_link(planned))
    return cluster, [problem] if problem is not None else []


def _model_of(job: Job) -> tuple[ModelFacts | None, list[str]]:
    """Returns the facts of the model, or None, and a line that says why there is no estimate."""
    model, notes = model_of(job)
    reason = unplanned_parts(job, model) if model is not None else None
    return model, [*notes, reason] if reason is not None else notes


def _linted(
    context: JobContext,
    file: JobFile,
    resuming: Resuming,
    ignored: Sequence[str],
    changes: Sequence[Change],
) -> tuple[Subject, list[str], str]:
    """Returns the configuration of a job, lint's warnings, one line each, and its text. Raises InvalidConfig for
    errors."""
    path = file.job.ds_config
    text = read_text(Path(path))
    changed_text = edit_json.apply(text, shown(path), changes)
    result = lint_text(context, changed_text, shown(path), ignored=ignored)
    if result.subject is None or errors(result.findings):
        raise resuming.explained(refused(result.findings))
    packages.check_engine_packages(result.subject.config, shown(path))
    warnings = (finding for finding in result.findings if finding.severity is Severity.WARNING)
    return result.subject, [f"{item.place}: {item.rule}: {item.problem}; {item.fix}" for item in warnings], text


def _devices(
    environment: Mapping[str, str], job: Job, *, is_local: bool, on_cpu: bool
) -> tuple[tuple[int, ...] | None, list[str]]:
    """Returns the GPUs in CUDA_VISIBLE_DEVICES, and a note if the variable has no effect."""
    name = "CUDA_VISIBLE_DEVICES"
    if is_local:
        return None if on_cpu else visible_devices({**environment, **job.env}.get(name)), []
    note = f"{name} has no effect on several nodes: the slots of the hostfile count from GPU 0"
    return None, [note] if name in environment else []


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
