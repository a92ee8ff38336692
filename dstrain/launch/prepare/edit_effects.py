"""Estimates what hand edits do to memory and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dstrain.choices import Attention, Hub
from dstrain.config.edits.edit import read
from dstrain.config.edits.lock import Lock
from dstrain.config.edits.regenerate import Edit
from dstrain.config.explain import remark_text
from dstrain.config.jsonc import REMOVED, Change, applied, json_pointer
from dstrain.errors import DstrainError, InvalidConfig
from dstrain.facts import probe
from dstrain.facts.cluster import hostfile
from dstrain.facts.workload import Workload, measured_cluster, measured_workload
from dstrain.findings import Finding, errors
from dstrain.job.file import JobFile, looks_local, read_job
from dstrain.job.schema import Job
from dstrain.launch.prepare.job_context import request_of, trace_question
from dstrain.launch.prepare.lint_job import lint_job
from dstrain.plan.configuration import BF16_STATES
from dstrain.plan.estimate import effective, estimate, unplanned_optimizer
from dstrain.plan.estimate_records import Effect, Estimate, effect
from dstrain.plan.named_parts import frozen_parts, with_frozen
from dstrain.plan.search.rules import broken
from dstrain.records import from_data

CONFIG, JOB = "ds_config.json", "job.yaml"
_WITHOUT_EFFECT = {
    CONFIG: "no effect that the planner estimates",
    JOB: "no effect on memory or speed",
    "hostfile": "changes the machines: run dstrain gen-config to plan for them",
}

_BF16_KEYS = tuple(("bf16", key) for key in BF16_STATES)
_TOGETHER = "both keys of bf16 states together, as neither works alone"
_PACKED = "a packed row holds several samples, so an epoch has fewer steps"
_MASKED = "; the time includes sdpa's mask, which flash_attention_2 does not need"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """An edit and its effect alone."""

    edit: Edit
    effect: Effect | None
    """Its effect compared with the generated files; None without an effect or an estimate."""
    note: str | None
    """Lint's remark about it beside the other edits, why it has no effect, or how to read the effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """All edits."""

    edits: tuple[Measured, ...]
    """One after another, by file."""
    together: Effect | None
    """The effect of all edits; None without an effect or an estimate."""
    reason: str | None
    """Why nothing can be estimated, if so."""
    num_errors: int
    """Errors that lint finds in the files with all edits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """The workload and the values that were generated for it."""

    workload: Workload
    values: Mapping[str, Any]
    """File name → generated value."""

    def estimate(self, edits: Sequence[Edit]) -> Estimate | None:
        """Returns the estimate of the generated files with some edits; None if the configuration stays the same.

        Raises InvalidConfig if the edits cannot be estimated.
        """
        if not edits:
            return self.estimate_files(self.values)
        changed = {
            name: applied(
                value, [Change(pointer=edit.pointer, value=edit.yours) for edit in edits if edit.file == name]
            )
            for name, value in self.values.items()
        }
        if self.configuration(changed) == self.configuration(self.values):
            return None
        return self.estimate_files(changed)

    def configuration(self, values: Mapping[str, Any]) -> object:
        """Returns the part of the values of files that the planner sees."""
        job = _job(values[JOB])
        return (
            effective(self.workload.model, request_of(job), values[CONFIG]),
            job.freeze,
            job.train_only,
            frozen_parts(job),
        )

    def estimate_files(self, values: Mapping[str, Any]) -> Estimate:
        """Returns the estimate of the values of files. Raises InvalidConfig if ranks cannot share the model so."""
        job, config = _job(values[JOB]), values[CONFIG]
        workload = replace(self.workload, model=with_frozen(self.workload.model, job))
        rules = broken(workload, effective(workload.model, request_of(job), config))
        if wrong := [rule.says for rule in rules if rule.is_of_parallelism]:
            raise InvalidConfig("; ".join(wrong))
        return estimate(workload, request_of(job), config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edited:
    """Generated files with the edits that stay in them."""

    job: Job
    estimate: Estimate
    effect: Effect
    """The change by the edits."""


def edited(workload: Workload, generated: Mapping[str, str], files: Mapping[str, str]) -> Edited | None:
    """Returns the training by files that were edited since they were generated; None if the configuration is the same.

    Raises DstrainError if they cannot be estimated.
    """
    before, after = ({name: read(texts[name], name) for name in (CONFIG, JOB)} for texts in (generated, files))
    subject = _Subject(workload=workload, values=before)
    if subject.configuration(after) == subject.configuration(before):
        return None
    estimates = [subject.estimate_files(values) for values in (before, after)]
    return Edited(job=_job(after[JOB]), estimate=estimates[1], effect=effect(*estimates))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Linted:
    """Lint's findings about the files with all edits."""

    job: JobFile | None = None
    findings: tuple[Finding, ...] = ()

    def of(self, edit: Edit) -> list[Finding]:
        """Returns the findings at the place of an edit, errors first."""
        if edit.file == CONFIG:
            at = f"{json_pointer(edit.pointer)}/"
            findings = [finding for finding in self.findings if f"{finding.pointer}/".startswith(at)]
        elif edit.file == JOB and self.job is not None and edit.yours is not REMOVED:
            at_job = self.job.locate(edit.pointer)
            findings = [finding for finding in self.findings if not finding.pointer and finding.place == at_job]
        else:
            return []
        return [*errors(findings), *(finding for finding in findings if finding not in errors(findings))]


def _linted(folder: Path) -> _Linted:
    """Returns lint's findings about the files of a folder; none of files that cannot be read."""
    try:
        file = read_job(folder / JOB, is_only_read=True) if (folder / JOB).is_file() else None
        return _Linted(job=file, findings=tuple(lint_job(file, folder / CONFIG).findings))
    except DstrainError:
        return _Linted()


def effects(folder: Path, lock: Lock, edits: Sequence[Edit]) -> Effects:
    """Returns the effect of each edit alone and of all together, for the model and the machines of the lock.

    Remarks about an edit are about the files as they are, with all edits.
    """
    linted = _linted(folder) if edits else _Linted()
    num_errors = len(errors(linted.findings))
    try:
        subject = _subject(folder, lock)
        before = subject.estimate([])
    except DstrainError as error:
        bare = tuple(Measured(edit=edit, effect=None, note=_remark(linted.of(edit))) for edit in edits)
        return Effects(edits=bare, together=None, reason=error.problem, num_errors=num_errors)
    assert before is not None, "what was generated is always estimated"
    pair = [edit for edit in edits if edit.file == CONFIG and edit.pointer in _BF16_KEYS]
    measured = tuple(
        _measured(subject, before, edit, pair if edit in pair else [edit], linted.of(edit)) for edit in edits
    )
    counted = [row.edit for row in measured if row.effect is not None]
    after = subject.estimate(counted) if counted else None
    together = None if after is None else effect(before, after)
    return Effects(edits=measured, together=together, reason=None, num_errors=num_errors)


def _remark(findings: Sequence[Finding]) -> str | None:
    return remark_text(findings[0]) if findings else None


def _measured(
    subject: _Subject, before: Estimate, edit: Edit, judged: Sequence[Edit], findings: Sequence[Finding]
) -> Measured:
    """Returns an edit with its effect; `judged` are those that work only together, itself among them."""
    if edit.file == JOB and edit.pointer[:1] == ("model",):
        return Measured(edit=edit, effect=None, note="another model: dstrain plan shows its needs")
    if edit.file not in subject.values:
        return Measured(edit=edit, effect=None, note=_WITHOUT_EFFECT.get(edit.file))
    try:
        after = subject.estimate(judged)
    except DstrainError as error:
        return Measured(edit=edit, effect=None, note=f"no estimate: {error.problem}")
    as_adamw = _as_adamw(edit)
    if after is None:
        said = filter(None, (_remark(findings), as_adamw))
        return Measured(edit=edit, effect=None, note="; ".join(said) or _WITHOUT_EFFECT[edit.file])
    note = _remark(errors(findings)) or (_TOGETHER if len(judged) > 1 else as_adamw)
    if note is None and edit.file == JOB and edit.pointer == ("packing",) and edit.yours is True:
        note = _PACKED + (_MASKED if before.configuration.kernels.attn is Attention.SDPA else "")
    return Measured(edit=edit, effect=effect(before, after), note=note)


def _as_adamw(edit: Edit) -> str | None:
    """Returns as what an optimizer is planned that an edit names, if its own states are not counted."""
    if edit.file != CONFIG or edit.pointer not in (("optimizer",), ("optimizer", "type")):
        return None
    return unplanned_optimizer({"optimizer": edit.yours if len(edit.pointer) == 1 else {"type": edit.yours}})


def _subject(folder: Path, lock: Lock) -> _Subject:
    """Returns model, machines and generated values. Raises DstrainError if one of them is unknown."""
    missing = [name for name in (CONFIG, JOB) if name not in lock.base]
    if missing:
        raise InvalidConfig(f"{missing[0]} was not generated")
    values = {name: read(lock.base[name], name) for name in (CONFIG, JOB)}
    if lock.cluster is None:
        raise InvalidConfig("the files were adopted, so their machines are unknown")
    name = str(lock.inputs.get("model", values[JOB].get("model")))
    if looks_local(name) or (folder / name).exists():
        name = str(folder / name)
    job = _job(values[JOB])
    model = probe.read_model(name, hub=job.hub or Hub.HF, way=trace_question(job))
    text = lock.base.get("hostfile")
    cluster, _ = measured_cluster(lock.cluster, None if text is None else hostfile.parse(text, "hostfile"))
    return _Subject(workload=measured_workload(model, cluster, lock.contents), values=values)


def _job(values: Mapping[str, Any]) -> Job:
    return from_data(Job, values, locate=lambda place: JOB)
