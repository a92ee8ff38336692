"""Every mistake of the corpus is found: the right rule, line and column, and what to write."""

from __future__ import annotations

import pytest

from dstrain.config import jsonc
from dstrain.config.lint.advisories import ADVISORIES
from dstrain.config.lint.engine import RULES, check, read
from dstrain.config.lint.finding import Finding, Severity
from dstrain.config.lint.subject import Subject
from dstrain.facts.ds_config import zero_stage
from dstrain.launch.prepare.hostfile_findings import OUTSIDE
from tests.config.lint.case import Becomes, Case, Raises, Says
from tests.config.lint.cases_engine import ENGINE_CASES
from tests.config.lint.cases_text import TEXT_CASES

CASES = (*TEXT_CASES, *ENGINE_CASES)
KNOWLEDGE = ("DS210", "DS221", "DS223", "DS224", "DS225", "DS226", "DS227", "DS348", "DS410", "DS421", "DS506", "DS511",
             "DS602", "DS603", "DS604", "DS605", "DS606", "DS607", "DS608", "DS801", "DS802", "DS803", "DS804", "DS807",
             "DS809", "DS810", "DS811", "DS901", "DS902", "DS903", "DS904", "DS905", "DS906", "DS907", "DS908", "DS909",
             "DS910",
             "DS911", "DS912", *(row.id for row in ADVISORIES))  # fmt: skip
"""Rules that ask for a job, a model, machines or a version: test_known.py and test_releases.py here."""


def findings(case: Case) -> list[Finding]:
    """Returns what lint says of a case."""
    document, found = read(case.source, "x.json")
    return found if document is None else check(Subject(document=document, is_trainers=case.is_trainers))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_found_in_its_place_with_its_fix(case: Case) -> None:
    said = [finding for finding in findings(case) if finding.rule == case.rule]
    assert [(each.place.line, each.place.column) for each in said] == [case.place], findings(case)
    assert case.fix in said[0].fix


def test_rules_see_the_stage_that_the_engine_runs() -> None:
    stages = {case.source: case.proof.facts for case in CASES if isinstance(case.proof, Becomes)}
    read_by_engine = {source: facts["stage"] for source, facts in stages.items() if "stage" in facts}
    assert len(read_by_engine) > 1
    assert {source: zero_stage(jsonc.read(source, "x").value) for source in read_by_engine} == read_by_engine


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_else_is_called_an_error(case: Case) -> None:
    others = [each for each in findings(case) if each.severity is Severity.ERROR and each.rule != case.rule]
    assert others == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_error_has_a_proof(case: Case) -> None:
    (said,) = [finding for finding in findings(case) if finding.rule == case.rule]
    if said.severity is Severity.ERROR and case.rule not in ("DS001", "DS003"):
        assert case.proof is not None
    assert said.severity is Severity.ERROR or not isinstance(case.proof, Raises | Says)


def test_every_rule_has_a_case() -> None:
    assert {rule.id for rule in RULES} - {case.rule for case in CASES} == set(KNOWLEDGE)


def test_ids_are_not_used_twice() -> None:
    assert len({*OUTSIDE, *(rule.id for rule in RULES)}) == len(OUTSIDE) + len(RULES)
