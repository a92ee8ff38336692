"""Applies all rules to one configuration, and safe fixes to its text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dstrain.config import jsonc
from dstrain.config.edits import edit_json
from dstrain.config.jsonc import Document, Pointer, SyntaxProblem, json_pointer
from dstrain.config.lint.rule import Fault, Rule, Subject
from dstrain.config.lint.rules import (
    batch,
    conflicts,
    jobs,
    key_names,
    machines,
    models,
    no_effect,
    optimizers,
    parallelism,
    releases,
    values,
)
from dstrain.errors import Place
from dstrain.findings import Finding, Severity, errors

if TYPE_CHECKING:
    from dstrain.facts.workload import Workload

_MODULES = (
    key_names,
    values,
    no_effect,
    conflicts,
    parallelism,
    batch,
    optimizers,
    jobs,
    models,
    machines,
    releases,
)
RULES: tuple[Rule, ...] = tuple(rule for module in _MODULES for rule in module.RULES)
"""Every rule, by id."""


def read(text: str, name: str) -> tuple[Document | None, list[Finding]]:
    """Returns the configuration in a text, or None and a finding with the reason."""
    try:
        document = jsonc.read(text, name)
    except SyntaxProblem as error:
        return None, [_unreadable(key_names.SYNTAX, error.place or Place(file=name), error.text)]
    if isinstance(document.value, dict):
        return document, []
    problem = "a DeepSpeed configuration must be an object in braces"
    fix = 'write an object: {"zero_optimization": {"stage": 2}, …}'
    return None, [_unreadable(key_names.NO_OBJECT, document.place(()), problem, fix)]


_CORRECT = "correct this place: JSON has double quotes, true, false, null, and commas between values"


def _unreadable(rule: str, place: Place, problem: str, fix: str = _CORRECT) -> Finding:
    return Finding(
        rule=rule,
        severity=Severity.ERROR,
        place=place,
        problem=problem,
        effect="the Trainer stops at it; DeepSpeed's own reader may misread it without a warning",
        fix=fix,
    )


def check(subject: Subject, *, ignored: Sequence[str] = ()) -> list[Finding]:
    """Returns the findings of a configuration, in the order of the file; `ignored` are ids of rules."""
    rules = [rule for rule in RULES if rule.id not in ignored]
    findings = [_placed(subject, rule, fault) for rule in rules for fault in rule.find(subject)]
    return sorted(findings, key=lambda finding: (finding.place.line or 1, finding.place.column or 1, finding.rule))


def _placed(subject: Subject, rule: Rule, fault: Fault) -> Finding:
    document = subject.document
    at = fault.at
    here = document.place(fault.pointer) if at is None else jsonc.place_of(document.text, at, document.name)
    return Finding(
        rule=rule.id,
        severity=fault.severity or rule.severity,
        pointer=json_pointer(fault.pointer),
        place=fault.place or here,
        problem=fault.problem,
        effect=fault.effect,
        fix=fault.fix,
        changes=fault.changes,
    )


def errors_of_settings(findings: Sequence[Finding]) -> list[Finding]:
    """Returns errors in the settings themselves, without those that find a run too large for its machines."""
    return [finding for finding in errors(findings) if finding.rule not in machines.FITS]


def fixed(subject: Subject, *, ignored: Sequence[str] = ()) -> tuple[Subject, list[Finding]]:
    """Returns the configuration with every safe fix applied, and the findings that were fixed.

    Fixes are applied one at a time, because a renamed key may have another fault; a fix that makes the file worse (more
    errors, or unreadable) is skipped.
    """
    done: list[Finding] = []
    before = check(subject, ignored=ignored)
    first = {(finding.rule, finding.pointer): finding for finding in before}
    while (step := next(_steps(subject, before, ignored), None)) is not None:
        subject, finding = step
        before = check(subject, ignored=ignored)
        done.append(first.get((finding.rule, finding.pointer), finding))  # with its place before other fixes
    return subject, done


def _steps(subject: Subject, before: list[Finding], ignored: Sequence[str]) -> Iterator[tuple[Subject, Finding]]:
    """Yields the fixes that improve the file, each with the resulting configuration."""
    name = subject.document.name
    for finding in sorted(before, key=_order):
        if not finding.changes:
            continue
        document, _ = read(edit_json.apply(subject.document.text, name, finding.changes), name)
        if document is None:
            continue
        after = replace(subject, document=document)
        if _score(check(after, ignored=ignored)) < _score(before):
            yield after, finding


def _order(finding: Finding) -> tuple[bool, bool]:
    """Returns the priority of a fix: a name is fixed before its value, and before a key is added as missing."""
    return not any(change.renamed for change in finding.changes), not finding.pointer


def _score(findings: Sequence[Finding]) -> tuple[int, int, int]:
    """Returns the numbers of errors, warnings and notes; fewer errors outweigh the others."""
    counts = [sum(finding.severity is severity for finding in findings) for severity in Severity]
    return counts[0], counts[1], counts[2]


def remarks(config: Mapping[str, Any], pointer: Pointer, workload: Workload) -> list[Finding]:
    """Returns the findings about one key of a configuration or its contents, errors first."""
    document, findings = read(json.dumps(config), "ds_config.json")
    if document is not None:
        findings = check(Subject(document=document, is_trainers=True, model=workload.model, cluster=workload.cluster))
    place = json_pointer(pointer)
    return sorted(
        (finding for finding in findings if f"{finding.pointer}/".startswith(f"{place}/")),
        key=lambda finding: list(Severity).index(finding.severity),
    )
