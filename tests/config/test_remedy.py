"""The proposed commands make exactly the planned configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dstrain.config.edits import edit_json
from dstrain.config.jsonc import read
from dstrain.config.remedy import changes_in, remedy
from dstrain.facts.workload import Workload
from dstrain.findings import errors
from dstrain.job.file import read_job
from dstrain.launch.prepare.job_context import request_of
from dstrain.launch.prepare.lint_job import lint_job
from dstrain.oom import Phase, ProposedChange
from dstrain.plan.configuration import Configuration
from dstrain.plan.estimate import assess, effective
from dstrain.plan.memory.peak import Detail
from dstrain.plan.search.out_of_memory import Fix, _space, levers
from tests.cases import ask, files
from tests.draws import Draw

ASKED: dict[str, Any] = {
    "model": "qwen3-8b",
    "gpus": 8,
    "gpu": "h100",
    "host_memory": 2**42,
    "method": "lora",
    "seq_len": 1024,
}
NAME = "ds_config.json"
NUM_LINTED = 2
"""Changes that are linted, each of which estimates memory."""


def configuration(folder: Path, text: str, workload: Workload, *overrides: str) -> Configuration:
    """Returns the effective configuration of a job and the text of its ds_config.json."""
    job = read_job(folder / "job.yaml", overrides).job
    return effective(workload.model, request_of(job), read(text, NAME).value)


def errors_of(folder: Path, text: str, *overrides: str) -> set[str]:
    """Returns the rules by which `dstrain run` would refuse a job and the text of its configuration."""
    (folder / NAME).write_text(text)
    return {
        finding.rule for finding in errors(lint_job(read_job(folder / "job.yaml", overrides), folder / NAME).findings)
    }


@pytest.mark.commands
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_change_as_it_is_typed_is_the_one_that_was_planned(tmp_path: Path, draw: Draw, stage: int) -> None:
    options = {
        **ASKED,
        "zero_stage": stage,
        "micro_batch": 4,
        "global_batch": 64,
        "grad_ckpt": False,
        "method": "lora",
        "seq_len": 1024,
    }
    workload, made = ask(**options).workload, files(**options)
    (tmp_path / "job.yaml").write_text(made["job.yaml"])
    text = made[NAME].replace('"train_micro_batch_size_per_gpu": "auto"', '"train_micro_batch_size_per_gpu": 4')
    assert text != made[NAME]
    current = configuration(tmp_path, text, workload)
    refused = errors_of(tmp_path, text)
    for number, candidate in enumerate(draw(list(_space(workload, current, Phase.BACKWARD, (0, 1, 2, 3))), 12)):
        planned = candidate.configuration(workload.model)
        estimate = assess(workload, planned, detail=Detail.QUICK)
        fix = Fix(estimate=estimate, levers=levers(current, candidate), step_ratio=None)
        typed = remedy(fix, current, read(text, NAME).value, moe_block=None)
        changed = edit_json.apply(text, NAME, changes_in(typed))
        assert configuration(tmp_path, changed, workload, *typed.set) == planned
        if number < NUM_LINTED:
            assert errors_of(tmp_path, changed, *typed.set) <= refused, typed
        is_literal = read(changed, NAME).value["train_micro_batch_size_per_gpu"]
        assert is_literal == planned.batch.micro_batch


def test_a_job_is_typed_and_keys_of_ds_config_are_named() -> None:
    job_alone = ProposedChange(change="", set=("micro_batch=2", "grad_accum=4"), step_ratio=0.031)
    assert job_alone.typed(resumes=True) == "dstrain run --set micro_batch=2 --set grad_accum=4 --set resume=auto"
    assert job_alone.price == "a step takes 3 % longer"
    both = ProposedChange(change="", set=(), ds_config={"zero_optimization.stage": 3}, keeps_batch=False)
    assert both.typed(resumes=False) == f"in {NAME} zero_optimization.stage: 3; then dstrain run"
    assert both.price == "samples are cut"
