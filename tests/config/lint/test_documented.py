"""What documentation shows is no error, and what dstrain writes has no finding at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstrain.config.lint.engine import check, read
from dstrain.config.lint.rule import Subject
from dstrain.findings import errors
from dstrain.job.file import read_job
from dstrain.launch.prepare.job_context import model_of
from tests.config.lint.documented import RAW, TRAINERS

GOLDEN = Path(__file__).parents[2] / "golden"


def subject(config: Any, *, is_trainers: bool) -> Subject:
    document, _ = read(json.dumps(config, indent=2), "x.json")
    assert document is not None
    return Subject(document=document, is_trainers=is_trainers)


@pytest.mark.parametrize("name", TRAINERS)
def test_an_example_for_the_trainer_has_no_error(name: str) -> None:
    assert errors(check(subject(TRAINERS[name], is_trainers=True))) == []


@pytest.mark.parametrize("name", RAW)
def test_an_example_for_deepspeed_has_no_error(name: str) -> None:
    assert errors(check(subject(RAW[name], is_trainers=False))) == []


@pytest.mark.parametrize(
    "folder", sorted(file.parent for file in GOLDEN.glob("*/ds_config.json")), ids=lambda folder: folder.name
)
def test_what_dstrain_writes_has_no_finding(folder: Path) -> None:
    job = read_job(folder / "job.yaml")
    model, _ = model_of(job.job)
    found = subject(json.loads((folder / "ds_config.json").read_text()), is_trainers=True)
    asked = Subject(document=found.document, is_trainers=True, job=job, model=model)
    ignored = ("DS604",) if "v100" in folder.name else ()  # a V100 has no bf16, and nobody says here that it is one
    assert check(asked, ignored=ignored) == []
    assert check(found, ignored=ignored) == []
