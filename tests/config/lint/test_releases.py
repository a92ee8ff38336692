"""Known faults of releases: found in the releases that have them, and shown by the engine where a CPU can."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from benchmarks.advisories.report import results
from benchmarks.advisories.run import CASES_IN_ORDER, Case
from dstrain.config.lint.engine import check, read
from dstrain.config.lint.rule import Subject
from dstrain.config.lint.rules.releases import ADVISORIES, Advisory, Effect
from dstrain.facts.cluster import cluster as clusters
from dstrain.facts.cluster import gpus
from dstrain.facts.cluster.cluster import Origin
from dstrain.findings import Finding, Severity
from dstrain.job.file import JobFile, read_job

OFFLOADED: Mapping[str, Any] = MappingProxyType({"stage": 2, "offload_optimizer": {"device": "cpu"}})
AFFECTED: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "DS951": {"gradient_accumulation_steps": 4, "zero_optimization": OFFLOADED},
        "DS952": {"gradient_accumulation_steps": 1, "zero_optimization": OFFLOADED},
        "DS953": {"zero_optimization": {"stage": 1, "overlap_comm": True}},
        "DS954": {"zero_optimization": {"stage": 2, "overlap_comm": True}, "compile": {"deepcompile": True}},
        "DS955": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}},
        "DS956": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}},
        "DS957": {
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": 1},
        },
        "DS968": {
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": 1},
        },
        "DS958": {"fp16": {"enabled": True}},
        "DS959": {"zero_optimization": {"stage": 1}},
        "DS960": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
        "DS961": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
        "DS962": {"sequence_parallel_size": 2},
        "DS963": {"expert_parallel": {"enabled": True}},
        "DS964": {},
        "DS965": {"bf16": {"enabled": True}},
        "DS966": {},
        "DS967": {"zero_optimization": OFFLOADED},
    }
)
"""A configuration with the settings of each advisory, as `deepspeed.initialize` reads it."""


def subject(config: Mapping[str, Any], **versions: str) -> Subject:
    document, problems = read(json.dumps(config, default=dict), "x.json")
    assert document is not None, problems
    return Subject(document=document, is_trainers=False, versions=versions)


def rules(asked: Subject) -> dict[str, Finding]:
    """Returns the findings of advisories, by rule."""
    return {each.rule: each for each in check(asked) if each.rule in AFFECTED}


def before(release: str) -> str:
    """Returns a version before a release: 0.19.0 gives 0.18.99."""
    major, minor, patch = map(int, release.split("."))
    return f"{major}.{minor}.{patch - 1}" if patch else f"{major}.{minor - 1}.99"


@pytest.mark.parametrize("row", ADVISORIES, ids=lambda row: row.id)
def test_settings_are_reported_for_the_releases_with_the_fault_only(row: Advisory) -> None:
    config = AFFECTED[row.id]
    last = before(row.fixed)
    said = rules(subject(config, deepspeed=last, torch="2.13.0"))[row.id]
    assert said.problem.startswith(f"deepspeed {last}: {row.settings}")
    assert f"DeepSpeed#{row.pull}" in said.effect and row.otherwise in said.fix
    assert (f"pip install 'deepspeed>={row.fixed}'" in said.fix) == (row.kind is not Effect.DEFAULT)
    for sound in (row.fixed, *([before(row.since)] if row.since else [])):
        assert row.id not in rules(subject(config, deepspeed=sound, torch="2.13.0"))
    plain = {"gradient_clipping": 1.0, "bf16": {"enabled": False}, "zero_optimization": {"stage": 0}}
    others = replace(subject(plain, deepspeed=last, torch="2.13.0"), is_trainers=True)
    assert row.id not in rules(others)


def test_nothing_is_said_of_a_version_that_is_not_known() -> None:
    for config in AFFECTED.values():
        assert rules(subject(config)) == {}


def test_what_rests_on_something_unknown_is_a_warning(tmp_path: Path) -> None:
    config = AFFECTED["DS951"] | {"gradient_accumulation_steps": "auto"}
    asked = replace(subject(config, deepspeed="0.18.9"), is_trainers=True)
    said = rules(asked)["DS951"]
    assert (said.severity, "not in this file" in said.problem) == (Severity.WARNING, True)
    assert rules(replace(asked, job=job(tmp_path, 4)))["DS951"].severity is Severity.ERROR
    assert "DS951" not in rules(replace(asked, job=job(tmp_path, 2)))


def job(folder: Path, grad_accum: int) -> JobFile:
    (folder / "job.yaml").write_text(f"model: m\noutput_dir: o\ngrad_accum: {grad_accum}\n")
    return read_job(folder / "job.yaml")


def test_a_race_of_streams_is_one_of_a_gpu_and_of_its_torch() -> None:
    asked = subject(AFFECTED["DS955"], deepspeed="0.18.6", torch="2.13.0")
    assert rules(asked)["DS955"].severity is Severity.ERROR
    assert "DS955" not in rules(replace(asked, versions={"deepspeed": "0.18.6", "torch": "2.9.1+cu128"}))
    assert rules(replace(asked, versions={"deepspeed": "0.18.6"}))["DS955"].severity is Severity.WARNING
    cpu = clusters.describe(gpu=gpus.gpu("cpu"), gpu_origin=Origin.GIVEN, gpus=2, host_memory_bytes=2**38)
    assert "DS955" not in rules(replace(asked, cluster=cpu))


@pytest.mark.parametrize("case", CASES_IN_ORDER, ids=lambda case: case.name)
def test_the_engine_showed_each_advisory_with_a_script(case: Case) -> None:
    """The release with the fault gave another answer than the one without, and both are on the right side."""
    shown_by = results()[case.name]
    (old, new), (before_it, after) = shown_by.versions, shown_by.answers
    assert before_it != after and "outcome" not in (*before_it, *after)
    shown = [row for row in ADVISORIES if row.script == case.name]
    assert sorted(row.pull for row in shown) == sorted(case.pulls)
    for row in shown:
        assert (row.affects({"deepspeed": old, "torch": "2.13.0"}), row.affects({"deepspeed": new})) == (True, False)
