"""Lints a configuration in the context of its job, with all rules and the planner."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.config.edits.lock import planned_cluster
from dstrain.config.jsonc import Document, Pointer
from dstrain.config.keys import key_of
from dstrain.config.lint import engine
from dstrain.config.lint.rule import JobContext, Subject
from dstrain.config.lint.rules.key_names import NO_OBJECT, SYNTAX
from dstrain.errors import DstrainError, InvalidConfig, did_you_mean
from dstrain.facts.ds_config import nvme_path
from dstrain.facts.this_machine import versions
from dstrain.findings import Finding, errors, lines
from dstrain.job.file import JobFile
from dstrain.launch.prepare import checks
from dstrain.launch.prepare.job_context import counted_steps, job_context, request_of, workload_of
from dstrain.paths import existing, shown
from dstrain.plan.estimate import estimate
from dstrain.plan.estimate_records import Estimate

OUTSIDE = MappingProxyType(
    {
        SYNTAX: "a file that cannot be parsed",
        NO_OBJECT: "a file that is not a JSON object",
        checks.HOSTFILE: "an invalid line of the hostfile, or a placeholder",
        checks.SLOTS: "slots of the hostfile that differ from the GPUs of the machine or of the plan",
        checks.DATA: "data of the job that cannot be read, trained on or held out, keys of evaluations which it lacks, "
        "or keys that do not go together",
        checks.ABSENT: "an input of the job (model, adapter, data, checkpoint) that is not set or not whole on this "
        "machine, or a package that is not installed on it",
    }
)
"""Rules that apply without a parsable ds_config.json: id → title."""


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
    Trainer reads a configuration that has a job or an "auto". Known faults are a `deepspeed`'s, by default the
    installed one's. Raises InvalidConfig if the configuration does not exist.
    """
    context = JobContext() if file is None else job_context(file, planned_cluster(path.parent))
    options: dict[str, Any] = {"is_trainers": is_trainers, "ignored": ignored, "fix": fix, "deepspeed": deepspeed}
    result = lint_text(context, read_text(path), shown(str(path)), **options)
    if result.subject is None or file is None:
        return result
    subject = replace(result.subject, opens_images=opens_images)
    beside = [*checks.findings(checks.OF_HOSTFILE, subject), *checks.findings(checks.OF_LINT, subject)]
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
    subject = subject_of(context, document, deepspeed=deepspeed)
    if is_trainers is not None:
        subject = replace(subject, is_trainers=is_trainers)
    elif context.job is None:
        subject = replace(subject, is_trainers=any(_is_filled(*item) for item in subject.walk()))
    mended: list[Finding] = []
    if fix:
        subject, mended = engine.fixed(subject, ignored=ignored)
    found = engine.check(subject, ignored=ignored)
    if not errors(found):
        # again: the planner cannot read a configuration with errors, and rules about memory need its estimate
        subject = estimated(subject)
        found = engine.check(subject, ignored=ignored) if subject.estimate is not None else found
    return LintResult(subject=subject, findings=found, mended=mended)


def subject_of(context: JobContext, document: Document, *, deepspeed: str | None = None) -> Subject:
    """Returns a configuration that the Trainer reads in the context of its job, without an estimate."""
    return Subject(
        document=document,
        is_trainers=True,
        versions={name: version for name, version in versions().items() if version is not None}
        | ({"deepspeed": deepspeed} if deepspeed is not None else {}),
        job=context.job,
        hosts=context.hosts,
        model=context.model,
        cluster=context.cluster,
        planned=context.planned,
        counted_steps=counted_steps(context) if "scheduler" in document.value else None,
    )


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
        document, _ = engine.read(read_text(path), path.name)
        if document is not None:
            return estimated(subject_of(job_context(file, planned_cluster(path.parent)), document)).estimate
    return None


def estimated(subject: Subject) -> Subject:
    """Returns a configuration without errors with its estimate and the free bytes of the folders it writes to, if its
    model and cluster are known and the job breaks no rule with them."""
    if (
        subject.job is None
        or (workload := workload_of(subject)) is None
        or checks.findings(checks.COMBINATIONS, subject)
    ):
        return subject
    needs = estimate(workload, request_of(subject.job.job), subject.config)
    output = subject.asked.output_dir if subject.asked is not None else None
    free, free_nvme = _free_bytes(subject, output), _free_bytes(subject, nvme_path(subject.config))
    return replace(subject, estimate=needs, free_disk_bytes=free, free_nvme_bytes=free_nvme)


def _free_bytes(subject: Subject, name: str | None) -> int | None:
    """Returns the free bytes on the disk of a folder, which may not exist yet; None unless this machine trains."""
    if name is None or subject.cluster is None or subject.cluster.gpu_origin != "measured":
        return None
    try:
        return shutil.disk_usage(existing(Path(name))).free
    except OSError:
        return None


def refused(findings: Sequence[Finding]) -> InvalidConfig:
    """Returns one error for all errors among the findings."""
    text = [line for finding in errors(findings) for line in lines(finding, with_severity=False)]
    is_fixable = any(finding.changes for finding in errors(findings))
    return InvalidConfig("\n".join(text), hint="dstrain lint --fix corrects misspelt keys." if is_fixable else None)
