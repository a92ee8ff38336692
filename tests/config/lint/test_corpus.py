"""Every mistake of the corpus is found: the right rule, line and column, and what to write."""

from __future__ import annotations

import pytest

from dstrain.config import jsonc
from dstrain.config.lint.engine import RULES, check, read
from dstrain.config.lint.rule import Subject
from dstrain.config.lint.rules.releases import ADVISORIES
from dstrain.facts.ds_config import zero_stage
from dstrain.findings import Finding, Severity
from dstrain.launch.prepare.lint_job import OUTSIDE
from tests.config.lint.case import Becomes, Case, Raises, Says
from tests.config.lint.cases_engine import ENGINE_CASES
from tests.config.lint.cases_text import TEXT_CASES

CASES = (*TEXT_CASES, *ENGINE_CASES)
KNOWLEDGE = ("DS210", "DS221", "DS223", "DS224", "DS225", "DS226", "DS227", "DS348", "DS410", "DS421", "DS506", "DS511",
             "DS602", "DS603", "DS604", "DS605", "DS606", "DS607", "DS608", "DS801", "DS802", "DS803", "DS804", "DS807",
             "DS809", "DS810", "DS811", "DS813", "DS901", "DS902", "DS903", "DS904", "DS905", "DS906", "DS907", "DS908",
             "DS909", "DS910", "DS911", "DS912", *(row.id for row in ADVISORIES))  # fmt: skip
"""Rules that ask for a job, a model, machines or a version: test_known.py and test_releases.py here."""


def findings(case: Case) -> list[Finding]:
    """Returns lint's findings for a case."""
    document, found = read(case.source, "x.json")
    return found if document is None else check(Subject(document=document, is_trainers=case.is_trainers))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_found_in_its_place_with_its_fix_and_its_proof_and_nothing_else_is_an_error(case: Case) -> None:
    found = findings(case)
    (said,) = [finding for finding in found if finding.rule == case.rule]
    assert (said.place.line, said.place.column) == case.place, found
    assert case.fix in said.fix
    is_error = said.severity is Severity.ERROR
    assert case.proof is not None or not is_error or case.rule in ("DS001", "DS003")
    assert is_error or not isinstance(case.proof, Raises | Says)
    assert [each for each in found if each.severity is Severity.ERROR and each.rule != case.rule] == []


def test_rules_see_the_stage_that_the_engine_runs() -> None:
    stages = {case.source: case.proof.facts for case in CASES if isinstance(case.proof, Becomes)}
    read_by_engine = {source: facts["stage"] for source, facts in stages.items() if "stage" in facts}
    assert len(read_by_engine) > 1
    assert {source: zero_stage(jsonc.read(source, "x").value) for source in read_by_engine} == read_by_engine


def test_every_rule_has_a_case() -> None:
    assert {rule.id for rule in RULES} - {case.rule for case in CASES} == set(KNOWLEDGE)


def test_ids_are_not_used_twice() -> None:
    assert len({*OUTSIDE, *(rule.id for rule in RULES)}) == len(OUTSIDE) + len(RULES)
