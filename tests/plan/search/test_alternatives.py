"""Which configurations are worth measuring: the present one and the plan's best, which differ in kind."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from dstrain.choices import Offload
from dstrain.plan.estimate import assess
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.search.alternatives import contenders, with_fastest_batch
from dstrain.plan.search.decide import survey
from dstrain.plan.search.search import TIE_RATIO
from dstrain.plan.search.search_space import global_batch, strategy_key, with_batch
from tests.cases import ask

pytestmark = pytest.mark.commands

QUESTION = ask(model="qwen3-0.6b", gpus=8, gpu="h100-sxm", seq_len=2048, global_batch=64)


@cache
def best() -> Estimate:
    return survey(QUESTION.workload, QUESTION.request).first


@cache
def compared() -> tuple[Estimate, ...]:
    return contenders(QUESTION.workload, QUESTION.request, best(), 5)


def test_the_present_one_is_first_and_all_fit_and_have_its_global_batch() -> None:
    assert compared()[0] is best()
    assert len(compared()) == 5
    assert all(estimate.fits for estimate in compared())
    assert {global_batch(QUESTION.workload.cluster, estimate.configuration) for estimate in compared()} == {64}


def test_they_differ_in_strategy_or_in_micro_batch_and_both_occur() -> None:
    kinds = {(strategy_key(one.configuration), one.configuration.batch.micro_batch) for one in compared()}
    assert len(kinds) == 5
    strategy = strategy_key(best().configuration)
    assert {strategy_key(one.configuration) == strategy for one in compared()[1:]} == {True, False}


def test_strategies_are_in_the_order_of_the_plan() -> None:
    times = [
        one.speed.step_s
        for one in compared()
        if one.speed and strategy_key(one.configuration) != strategy_key(best().configuration)
    ]
    assert all(one <= (1 + TIE_RATIO) * other for one, other in pairwise(times))


def test_another_strategy_takes_over_the_micro_batch_that_was_the_fastest() -> None:
    alike = [one for one in compared() if strategy_key(one.configuration) == strategy_key(best().configuration)]
    other = next(one for one in compared() if strategy_key(one.configuration) != strategy_key(best().configuration))
    fastest, faster = alike[:2]
    found = with_fastest_batch(QUESTION.workload, other, [(fastest, 2.0), (faster, 1.0)])
    assert strategy_key(found.configuration) == strategy_key(other.configuration)
    assert found.configuration.batch.micro_batch == faster.configuration.batch.micro_batch
    assert global_batch(QUESTION.workload.cluster, found.configuration) == 64
    for measured in ([], [(faster, 1.0)], [(other, 1.0), (faster, 2.0)]):  # no other micro-batch was compared
        assert with_fastest_batch(QUESTION.workload, other, measured) is other


def test_one_that_does_not_fit_is_measured_if_it_is_the_present_one() -> None:
    large = assess(QUESTION.workload, with_batch(best().configuration, 4096, 1))
    assert not large.fits
    found = contenders(QUESTION.workload, QUESTION.request, large, 3)
    assert found[0] is large
    assert all(one.fits for one in found[1:])


def test_what_the_request_fixes_does_not_vary() -> None:
    fixed = replace(
        QUESTION.request, zero_stage=2, offload=Offload.NONE, micro_batch=best().configuration.batch.micro_batch
    )
    found = contenders(QUESTION.workload, fixed, best(), 5)
    assert {(one.configuration.zero.stage, one.configuration.zero.offload) for one in found[1:]} <= {(2, Offload.NONE)}
    assert {one.configuration.batch.micro_batch for one in found} == {best().configuration.batch.micro_batch}
