"""Requests: one default for a choice wherever it is asked for, and the range of numbers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from dstrain.choices import Attention
from dstrain.errors import InvalidConfig
from dstrain.job.schema import Job
from dstrain.plan.configuration import DEFAULTS, flat
from dstrain.plan.request import Request

DEFAULT_OF_JOB = {each.name: each.default for each in fields(Job)}
DEFAULT_OF_REQUEST = {each.name: each.default for each in fields(Request)}
NEUTRAL = {"lora", "grad_ckpt"}
"""A record, and a choice that a job makes by default, while an engine without settings does not."""


@pytest.mark.parametrize("name", sorted({*DEFAULT_OF_JOB} & {*flat(DEFAULTS)} - NEUTRAL))
def test_a_job_that_leaves_a_choice_out_has_the_planners_default(name: str) -> None:
    assert DEFAULT_OF_JOB[name] == flat(DEFAULTS)[name]


@pytest.mark.parametrize("name", sorted({*DEFAULT_OF_JOB} & {*DEFAULT_OF_REQUEST} - NEUTRAL))
def test_a_request_has_the_default_of_the_job_or_leaves_the_choice_to_the_planner(name: str) -> None:
    assert DEFAULT_OF_REQUEST[name] in (None, DEFAULT_OF_JOB[name])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"seq_len": 0}, "--seq-len is 0\nWrite --seq-len with a number above 0."),
        ({"zero_stage": 4}, "--zero-stage is 4\nWrite --zero-stage with a number of at least 0 and of at most 3."),
        (
            {"offload_ratio": 1.5},
            "--offload-ratio is 1.5\nWrite --offload-ratio with a number above 0 and of at most 1.",
        ),
        ({"image_patches": -1}, "--image-patches is -1\nWrite --image-patches with a number of at least 0."),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_legal_ones(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        Request(**asked)
    assert str(refused.value) == words


def test_an_attention_that_is_open_is_planned_as_every_machine_has_it() -> None:
    assert Request().has_open_attention
    assert Request(attn=Attention.AUTO).configuration.kernels.attn is Attention.SDPA
