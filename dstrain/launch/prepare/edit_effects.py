"""Estimates what hand edits do to memory and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dstrain.choices import Attention, Hub
from dstrain.config.document import Change, applied
from dstrain.config.edits.edit import read
from dstrain.config.edits.lock import Lock
from dstrain.config.edits.manual_edits import Edit
from dstrain.config.explain.key import remark_text
from dstrain.config.lint.engine import remarks
from dstrain.errors import DstrainError, InvalidConfig
from dstrain.facts import probe
from dstrain.facts.cluster import hostfile
from dstrain.facts.model.model_facts import with_head_of
from dstrain.facts.workload import Workload, measured_cluster, measured_workload
from dstrain.job.file import looks_local
from dstrain.job.schema import Job
from dstrain.launch.prepare.job_context import request_of, trace_question
from dstrain.plan.effect import Effect, effect
from dstrain.plan.estimate import BF16_STATES, effective, estimate, unplanned_optimizer
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.freezing import frozen_parts, with_frozen
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
    """Why it has no effect, or how to read the effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """All edits."""

    edits: tuple[Measured, ...]
    """One after another, by file."""
    together: Effect | None
    """The effect of all edits; None without an effect or an estimate."""
    reason: str | None
    """Why nothing can be estimated, if so."""


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
            return self._estimate(self.values)
        changed = {
            name: applied(
                value, [Change(pointer=edit.pointer, value=edit.yours) for edit in edits if edit.file == name]
            )
            for name, value in self.values.items()
        }
        if self._configuration(changed) == self._configuration(self.values):
            return None
        return self._estimate(changed)

    def remark(self, edit: Edit, judged: Sequence[Edit]) -> str | None:
        """Returns the remark of lint about an edit of ds_config.json, made with others, that is not planned."""
        if edit.file != CONFIG:
            return None
        config = applied(self.values[CONFIG], [Change(pointer=each.pointer, value=each.yours) for each in judged])
        findings = remarks(config, edit.pointer, self.workload, job=_job(self.values[JOB]))
        return remark_text(findings[0]) if findings else None

    def _configuration(self, values: Mapping[str, Any]) -> object:
        job = _job(values[JOB])
        return (
            effective(self.workload.model, request_of(job), values[CONFIG]),
            job.freeze,
            job.train_only,
            frozen_parts(job),
        )

    def _estimate(self, values: Mapping[str, Any]) -> Estimate:
        job = _job(values[JOB])
        model = with_frozen(self.workload.model, job)
        return estimate(replace(self.workload, model=model), request_of(job), values[CONFIG])


def effects(folder: Path, lock: Lock, edits: Sequence[Edit]) -> Effects:
    """Returns the effect of each edit alone and of all together, for the model and the machines of the lock."""
    try:
        subject = _subject(folder, lock)
        before = subject.estimate([])
    except DstrainError as error:
        bare = tuple(Measured(edit=edit, effect=None, note=None) for edit in edits)
        return Effects(edits=bare, together=None, reason=error.problem)
    assert before is not None, "what was generated is always estimated"
    pair = [edit for edit in edits if edit.file == CONFIG and edit.pointer in _BF16_KEYS]
    measured = tuple(_measured(subject, before, edit, pair if edit in pair else [edit]) for edit in edits)
    counted = [row.edit for row in measured if row.effect is not None]
    after = subject.estimate(counted) if counted else None
    return Effects(edits=measured, together=None if after is None else effect(before, after), reason=None)


def _measured(subject: _Subject, before: Estimate, edit: Edit, judged: Sequence[Edit]) -> Measured:
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
        said = filter(None, (subject.remark(edit, judged), as_adamw))
        why = "; ".join(said) or _WITHOUT_EFFECT[edit.file]
        return Measured(edit=edit, effect=None, note=why)
    note = _TOGETHER if len(judged) > 1 else as_adamw
    if edit.file == JOB and edit.pointer == ("packing",) and edit.yours is True:
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
    model = with_head_of(probe.read_model(name, hub=job.hub or Hub.HF, way=trace_question(job)), job.task)
    text = lock.base.get("hostfile")
    cluster, _ = measured_cluster(lock.cluster, None if text is None else hostfile.parse(text, "hostfile"))
    return _Subject(workload=measured_workload(model, cluster, lock.contents), values=values)


def _job(values: Mapping[str, Any]) -> Job:
    return from_data(Job, values, locate=lambda place: JOB)
