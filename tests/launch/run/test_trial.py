"""When a short run ends: after its steps, when it cannot win any more, or with the budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dstrain.choices import Task
from dstrain.job.schema import Job
from dstrain.launch.run.trial import Ending, Limits, Trial, fewer_samples, judged
from dstrain.monitor.windows import measurement

NOISE = (0.0, 0.01, -0.01, 0.005, -0.005)


def lines(count: int, step_s: float, noise: tuple[float, ...] = NOISE) -> list[dict[str, Any]]:
    """Returns the logged steps of a run; the first one warms up."""
    times = [10 * step_s, *(step_s * (1 + noise[at % len(noise)]) for at in range(count - 1))]
    return [{"step": at, "tokens": 8, "tokens_per_s": 8 / s, "step_s": s} for at, s in enumerate(times, 1)]


def limits(best: list[dict[str, Any]], steps: int = 20) -> Limits:
    return Limits(steps=steps, until=100.0, best=best)


def test_it_ends_after_its_steps_without_the_first_one() -> None:
    assert judged(lines(20, 1.0), limits([]), now=0.0) is None
    assert judged(lines(21, 1.0), limits([]), now=0.0) is Ending.MEASURED


def test_steps_that_warm_up_come_on_top_up_to_as_many() -> None:
    times = [30.0, *(2.0,) * 7, *(1.0,) * 40]
    slow = [{"step": at, "tokens": 8, "tokens_per_s": 8 / s, "step_s": s} for at, s in enumerate(times, 1)]
    assert judged(slow[:27], limits([]), now=0.0) is None
    assert judged(slow[:28], limits([]), now=0.0) is Ending.MEASURED
    assert measurement(slow[:28]).step_s == 1.0
    faster = [{**line, "step_s": 2.0**-at, "tokens_per_s": 8 * 2.0**at} for at, line in enumerate(slow)]
    assert judged(faster[:40], limits([]), now=0.0) is None
    assert judged(faster[:41], limits([]), now=0.0) is Ending.MEASURED


def test_it_ends_early_only_if_it_is_slower_by_more_than_the_noise_of_both() -> None:
    best = lines(21, 1.0)
    assert judged(lines(6, 1.05), limits(best), now=0.0) is Ending.SLOWER
    assert judged(lines(5, 1.05), limits(best), now=0.0) is None, "too few steps"
    assert judged(lines(6, 1.001), limits(best), now=0.0) is None, "the noise is larger"
    assert judged(lines(6, 1.05, (0.0, 0.2, -0.2)), limits(best), now=0.0) is None, "its own noise is larger"
    assert judged(lines(6, 0.9), limits(best), now=0.0) is None, "it is faster"


def test_the_same_steps_of_both_runs_are_compared() -> None:
    slow_start = [*lines(11, 2.0), *lines(11, 1.0)[1:]]
    assert judged(lines(11, 1.5), limits(slow_start, steps=20), now=0.0) is None


def test_it_ends_with_the_budget_before_its_first_step_too() -> None:
    assert judged([], limits([]), now=100.0) is Ending.NO_TIME


@pytest.mark.parametrize(
    ("ending", "count", "is_timed"),
    [
        (Ending.MEASURED, 21, True),
        (Ending.SLOWER, 6, True),
        (Ending.NO_TIME, 6, True),
        (Ending.NO_TIME, 5, False),
        (Ending.OUT_OF_MEMORY, 21, False),
        (Ending.FAILED, 21, False),
    ],
)
def test_a_run_that_failed_or_hardly_began_has_no_time(ending: Ending, count: int, is_timed: bool) -> None:
    trial = Trial(ending=ending, key="", seconds=1.0, measured=measurement(lines(count, 1.0)))
    assert (trial.step_s is not None) is is_timed


def test_a_task_with_a_reference_gets_the_samples_of_its_steps_only() -> None:
    job = Job(model="m", output_dir="o", micro_batch=2, grad_accum=4)
    assert fewer_samples(job, 2, steps=20) == ()
    dpo = replace(job, task=Task.DPO)
    assert fewer_samples(dpo, 2, steps=20) == ("max_samples=352",)
    assert fewer_samples(replace(dpo, max_samples=100), 2, steps=20) == ("max_samples=100",)
