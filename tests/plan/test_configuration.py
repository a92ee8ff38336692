"""The schema of choices: neighbours of a configuration, and what stays when a choice changes."""

from __future__ import annotations

from typing import Any

import pytest

from dstrain.choices import LossKernel, Offload
from dstrain.plan.configuration import DEFAULTS, changed, changes, choices, flat

RICH = changed(
    DEFAULTS,
    zero_stage=3,
    hpz=8,
    offload=Offload.OPTIMIZER,
    offload_ratio=0.5,
    grad_ckpt=True,
    grad_ckpt_every_n_layers=2,
    micro_batch=2,
    grad_accum=6,
)


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        ("zero_stage", 2, {"hpz": 1, "offload_ratio": 1.0}),
        ("offload", Offload.PARAMS, {"offload_ratio": 1.0}),
        ("grad_ckpt", False, {"grad_ckpt_every_n_layers": 1}),
        ("micro_batch", 4, {"grad_accum": 3}),
        ("loss", LossKernel.FUSED, {}),
    ],
)
def test_details_of_a_changed_choice_are_neutral_and_the_samples_stay(
    name: str, value: Any, others: dict[str, Any]
) -> None:
    [other] = changes(RICH, name, [value])
    assert flat(other) == flat(RICH) | {name: value} | others


def test_a_micro_batch_that_does_not_divide_the_samples_is_no_neighbour() -> None:
    assert list(changes(RICH, "micro_batch", [5])) == []
    assert [other.batch.micro_batch for other in changes(RICH, "micro_batch")] == [1, 3, 4, 6, 12]


@pytest.mark.parametrize("name", [name for name, choice in choices().items() if choice.values])
def test_the_neutral_value_of_a_choice_is_among_those_that_plans_compare(name: str) -> None:
    choice = choices()[name]
    assert choice.of(DEFAULTS) in choice.values
    assert len([*changes(DEFAULTS, name)]) == len(choice.values) - 1


@pytest.mark.parametrize("name", [name for name, choice in choices().items() if choice.follows])
def test_a_detail_follows_a_choice(name: str) -> None:
    assert choices()[name].follows in choices()
