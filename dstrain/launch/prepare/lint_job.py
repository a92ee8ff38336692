"""Lints a configuration in the context of its job, with all rules and the planner."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.config import jsonc
from dstrain.config.edits.lock import planned_cluster
from dstrain.config.jsonc import Pointer
from dstrain.config.keys.table import key_of
from dstrain.config.lint import engine
from dstrain.config.lint.finding import Finding, lines
from dstrain.config.lint.subject import JobContext, Subject
from dstrain.errors import DstrainError, InvalidConfig, did_you_mean
from dstrain.facts.this_machine import versions
from dstrain.job.file import JobFile
from dstrain.launch.prepare import hostfile_findings, job_checks
from dstrain.launch.prepare.hostfile_findings import OUTSIDE
from dstrain.launch.prepare.job_context import counted_steps, job_context, request_of, workload_of
from dstrain.launch.prepare.preflight import existing
from dstrain.paths import shown

if TYPE_CHECKING:
    from dstrain.plan.estimate_records import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class LintResult:
    """A configuration and its findings."""

    subject: Subject | None
    """The configuration; None if it cannot be read."""
    findings: list[Finding]
    """In the order of the file, then those about the job."""
    mended: list[Finding]
    """The findings that safe fixes have removed."""


def lint_job(
    file: JobFile | None,
    path: Path,
    *,
    is_trainers: bool | None = None,
    ignored: Sequence[str] = (),
    fix: bool = False,
    deepspeed: str | None = None,
    opens_images: bool = False,
) -> LintResult:
    """Lints a configuration with its job, if it has one: the hostfile and the data of the job too.

    With `opens_images`, all images of the data are read.

    With `fix`, applies every safe fix to the text that is returned; nothing is written. If `is_trainers` is None, the
    Trainer reads a configuration that has a job or an "auto". Known faults are those of a `deepspeed`, by default of
    the installed one. Raises InvalidConfig if the configuration does not exist.
    """
    context, beside = JobContext(), list[Finding]()
    if file is not None:
        planned = planned_cluster(path.parent)
        context = job_context(file, planned)
        beside += hostfile_findings.findings(file, planned)
        beside += job_checks.findings(file, context, opens_images=opens_images)
    options: dict[str, Any] = {"is_trainers": is_trainers, "ignored": ignored, "fix": fix, "deepspeed": deepspeed}
    result = lint_text(context, read_text(path), shown(str(path)), **options)
    if result.subject is None:
        return result
    return replace(result, findings=[*result.findings, *(f for f in beside if f.rule not in ignored)])


def lint_text(
    context: JobContext,
    text: str,
    name: str,
    *,
    is_trainers: bool | None = None,
    ignored: Sequence[str] = (),
    fix: bool = False,
    deepspeed: str | None = None,
) -> LintResult:
    """Lints the text of a configuration as `lint_job` does, without the hostfile and the data of the job.

    `name` is its name in messages.
    """
    document, problems = engine.read(text, name)
    if document is None:
        return LintResult(subject=None, findings=problems, mended=[])
    subject = Subject(
        document=document,
        is_trainers=True if is_trainers is None else is_trainers,
        versions={name: version for name, version in versions().items() if version is not None}
        | ({"deepspeed": deepspeed} if deepspeed is not None else {}),
        job=context.job,
        hosts=context.hosts,
        model=context.model,
        cluster=context.cluster,
        counted_steps=counted_steps(context) if "scheduler" in document.value else None,
    )
    if is_trainers is None and context.job is None:
        subject = replace(subject, is_trainers=any(_is_filled(*item) for item in subject.walk()))
    mended: list[Finding] = []
    if fix:
        subject, mended = engine.fixed(subject, ignored=ignored)
    findings = engine.check(subject, ignored=ignored)
    if not engine.errors(findings) and (estimate := _estimate(subject)) is not None:
        subject = _with_estimate(subject, estimate)
        findings = engine.check(subject, ignored=ignored)
    return LintResult(subject=subject, findings=findings, mended=mended)


def _is_filled(pointer: Pointer, value: Any) -> bool:
    """Returns whether a value is an "auto" that only the Trainer understands."""
    row = key_of(pointer)
    return value == "auto" and row is not None and row.filled is not None


def check_rules(ignored: Sequence[str]) -> None:
    """Raises InvalidConfig if a rule does not exist."""
    legal = [*OUTSIDE, *(rule.id for rule in engine.RULES)]
    for name in ignored:
        if name not in legal:
            raise InvalidConfig(f'--ignore "{name}": unknown rule', hint=did_you_mean(name, sorted(legal)))


def read_text(path: Path) -> str:
    """Returns the text of a configuration. Raises InvalidConfig if it cannot be read."""
    try:
        with path.open(encoding="utf-8", newline="") as file:  # line ends as they are
            return file.read()
    except FileNotFoundError:
        raise InvalidConfig(f"{shown(str(path))}: no such file", hint="dstrain gen-config writes one.") from None
    except UnicodeDecodeError as error:
        raise InvalidConfig(
            f"{shown(str(path))}: byte {error.start} is not UTF-8", hint="Save the file as UTF-8."
        ) from None
    except OSError as error:
        raise InvalidConfig(f"{shown(str(path))}: cannot be read: {error.strerror}") from None


def planned(file: JobFile) -> Estimate | None:
    """Returns the estimate of a job and its configuration; None if a part of them is unknown or wrong."""
    path = Path(file.job.ds_config)
    with suppress(DstrainError):
        config = jsonc.parse(read_text(path), path.name).value
        workload = workload_of(job_context(file, planned_cluster(path.parent)))
        if workload is not None and isinstance(config, dict):
            from dstrain.plan.estimate import estimate  # as below

            return estimate(workload, request_of(file.job), config)
    return None


def _estimate(subject: Subject) -> Estimate | None:
    """Returns the estimate of a configuration without errors; None if its job, model or cluster is unknown."""
    if subject.job is None or (workload := workload_of(subject)) is None:
        return None
    from dstrain.plan.estimate import estimate  # the planner takes a quarter of a second to import

    return estimate(workload, request_of(subject.job.job), subject.config)


def _with_estimate(subject: Subject, estimate: Estimate) -> Subject:
    """Returns the subject with its estimate and the free bytes of the folders it writes to."""
    output = subject.asked.output_dir if subject.asked is not None else None
    nvme = subject.at("zero_optimization.offload_optimizer.nvme_path", None)
    free, free_nvme = _free_bytes(subject, output), _free_bytes(subject, nvme)
    return replace(subject, estimate=estimate, free_disk_bytes=free, free_nvme_bytes=free_nvme)


def _free_bytes(subject: Subject, name: str | None) -> int | None:
    """Returns the free bytes on the disk of a folder, which may not exist yet; None unless this machine trains."""
    if not isinstance(name, str) or subject.cluster is None or subject.cluster.gpu_origin != "measured":
        return None
    try:
        return shutil.disk_usage(existing(Path(name))).free
    except OSError:
        return None


def refused(findings: Sequence[Finding]) -> InvalidConfig:
    """Returns one error for all errors among the findings."""
    text = [line for finding in engine.errors(findings) for line in lines(finding, with_severity=False)]
    is_fixable = any(finding.changes for finding in engine.errors(findings))
    return InvalidConfig("\n".join(text), hint="dstrain lint --fix corrects misspelt keys." if is_fixable else None)
