"""Lints a configuration in the context of its job, with all rules and the planner."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.config.jsonc import Pointer
from dstrain.config.keys.table import key_of
from dstrain.config.lint import engine
from dstrain.config.lint.finding import Finding, lines
from dstrain.config.lint.subject import Subject
from dstrain.errors import InvalidConfig, did_you_mean
from dstrain.launch.prepare.hostfile_findings import OUTSIDE
from dstrain.launch.prepare.job_context import JobContext
from dstrain.paths import shown

if TYPE_CHECKING:
    from dstrain.plan.estimate_records import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class LintResult:
    """A configuration with what is wrong with it."""

    subject: Subject | None
    """The configuration; None where it cannot be read."""
    findings: list[Finding]
    """What is wrong, in the order of the file."""
    mended: list[Finding]
    """What safe fixes have mended."""


def lint_job(
    known: JobContext,
    path: Path,
    *,
    is_trainers: bool | None = None,
    ignored: Sequence[str] = (),
    fix: bool = False,
) -> LintResult:
    """Returns what is wrong with a file, and with `fix` its text after every safe fix; nothing is written.

    Raises InvalidConfig where there is no such file. `is_trainers` None: the Trainer reads it where there is a job or
    an "auto" in it.
    """
    document, found = engine.read(read_text(path), shown(str(path)))
    if document is None:
        return LintResult(subject=None, findings=found, mended=[])
    subject = Subject(
        document=document,
        is_trainers=True if is_trainers is None else is_trainers,
        job=known.job,
        hosts=known.hosts,
        model=known.model,
        cluster=known.cluster,
    )
    if is_trainers is None and known.job is None:
        subject = replace(subject, is_trainers=any(_is_filled(*each) for each in subject.walk()))
    mended: list[Finding] = []
    if fix:
        subject, mended = engine.fixed(subject, ignored=ignored)
    findings = engine.check(subject, ignored=ignored)
    if not engine.errors(findings) and (needs := _estimate(subject)) is not None:
        subject = _with_estimate(subject, needs)
        findings = engine.check(subject, ignored=ignored)
    findings += [each for each in known.findings if each.rule not in ignored]
    return LintResult(subject=subject, findings=findings, mended=mended)


def _is_filled(pointer: Pointer, value: Any) -> bool:
    """Returns whether an "auto" is one that only the Trainer understands."""
    row = key_of(pointer)
    return value == "auto" and row is not None and row.filled is not None


def check_rules(ignored: Sequence[str]) -> None:
    """Raises InvalidConfig for a rule that there is not."""
    legal = [*OUTSIDE, *(rule.id for rule in engine.RULES)]
    for name in ignored:
        if name not in legal:
            raise InvalidConfig(f'--ignore "{name}" is no rule', hint=did_you_mean(name, sorted(legal)))


def read_text(path: Path) -> str:
    """Returns the text of a configuration. Raises InvalidConfig where there is none."""
    try:
        with path.open(encoding="utf-8", newline="") as file:  # line ends as they are
            return file.read()
    except FileNotFoundError:
        raise InvalidConfig(f"{shown(str(path))}: no such file", hint="dstrain gen-config writes one.") from None
    except UnicodeDecodeError as error:
        raise InvalidConfig(
            f"{shown(str(path))}: byte {error.start} is no UTF-8", hint="Save the file as UTF-8."
        ) from None
    except OSError as error:
        raise InvalidConfig(f"{shown(str(path))}: cannot be read: {error.strerror}") from None


def _estimate(subject: Subject) -> Estimate | None:
    """Returns what a sound configuration needs, where model and machines are known."""
    if subject.job is None or subject.model is None or subject.cluster is None:
        return None
    from dstrain.facts.cluster import calibration
    from dstrain.facts.workload import Workload
    from dstrain.launch.prepare.job_context import request_of
    from dstrain.plan.estimate import estimate

    workload = Workload(model=subject.model, cluster=subject.cluster, calibration=calibration.read())
    return estimate(workload, request_of(subject.job.job), subject.config)


def _with_estimate(subject: Subject, needs: Estimate) -> Subject:
    """Returns the subject with what it needs, and what is free where it writes."""
    output = subject.job.job.output_dir if subject.job is not None else None
    nvme = subject.at("zero_optimization.offload_optimizer.nvme_path", None)
    free, free_nvme = _free_bytes(subject, output), _free_bytes(subject, nvme)
    return replace(subject, estimate=needs, free_disk_bytes=free, free_nvme_bytes=free_nvme)


def _free_bytes(subject: Subject, name: str | None) -> int | None:
    """Returns what is free where a folder is, or will be, when it is this machine that trains."""
    if not isinstance(name, str) or subject.cluster is None or subject.cluster.gpu_origin != "measured":
        return None
    folder = Path(name)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def refused(findings: Sequence[Finding]) -> InvalidConfig:
    """Returns the error that says every error of lint."""
    said = [line for finding in engine.errors(findings) for line in lines(finding, with_severity=False)]
    can_mend = any(finding.changes for finding in engine.errors(findings))
    return InvalidConfig("\n".join(said), hint="dstrain lint --fix mends slips of a letter." if can_mend else None)
