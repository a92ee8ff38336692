"""Chooses the run that would tell the most about the constants of step times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from dstrain.choices import Offload
from dstrain.plan.calibration import (
    TEN_PERCENT_TAILS,
    TIME_ERROR,
    Fit,
    Observed,
    bounded,
    planned_s,
    prior_width,
    rates_in_use,
)
from dstrain.plan.configuration import changed
from dstrain.plan.estimate import assess
from dstrain.plan.search.rules import broken

LENGTHS = (1024, 2048, 4096, 8192)
"""Sequence lengths of the runs that are considered: short rows wait for kernel launches, long ones for attention."""
MICRO_BATCHES = (1, 4)
STRATEGIES = ((1, Offload.NONE), (3, Offload.NONE), (2, Offload.OPTIMIZER))
"""ZeRO stages with what they offload: stage 2 without offload sends what stage 1 sends."""
MODELS = 2
"""Models of the given runs whose other runs are considered: each takes about half a second."""

_SPAN = 0.3
"""Half the range over which a slope is taken, over how far the constant may be off: wide enough to see kernel launches
for which the GPU nearly waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRun:
    """The run that tells the most."""

    run: Observed
    """The configuration to run; unchanged fields are the given run's."""
    now: float
    """Half the range in which the step times of all runs that were considered are with the next calibration, for 9 of
    10, over themselves: the errors of the constants."""
    after: float
    """The same after this run."""


def next_run(runs: Sequence[Observed], found: Fit) -> NextRun | None:
    """Returns the run that narrows the step times of all runs like it the most; None if no run has a step time.

    The runs that are considered have the model of a given run and another length, micro-batch, ZeRO stage, offload or
    checkpointing; the one that is chosen fits. A run with slopes g (of log step time over log constants) and error e
    changes the covariance C of the constants to C - (C g)(C g)ᵀ / (e² + gᵀ C g); the one that makes the mean of gᵀ C g
    over all of them the least is chosen (the I-optimal design). Source: Fedorov, Theory of Optimal Experiments, 1972.
    """
    import numpy as np  # here: plans need none of it

    timed = [run for run in runs if run.step_s is not None]
    if not timed:
        return None
    at, widths = _constants(timed, found)
    considered = [other for run in _by_model(timed) for other in _other_runs(run)]
    slopes = np.array([_slopes(other, at, widths) for other in considered])
    known = np.array([_slopes(run, at, widths) for run in timed])
    prior = np.diag([width**-2 for width in widths.values()])
    covariance = np.linalg.inv(known.T @ known / TIME_ERROR**2 + prior)
    shared = slopes @ covariance @ slopes.T
    variances = shared.diagonal()
    left = variances.sum() - (shared**2).sum(axis=0) / (TIME_ERROR**2 + variances)
    for index in np.argsort(left, kind="stable").tolist():
        # memory takes far longer to estimate than this order: the first that fits ends the search
        if _fits(considered[index]):
            now, after = TEN_PERCENT_TAILS * np.sqrt([variances.mean(), left[index] / len(considered)])
            return NextRun(run=considered[index], now=float(now), after=float(after))
    return None


def _constants(timed: Sequence[Observed], found: Fit) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the constants of the next calibration, and how far each may be off before the runs, as logarithms."""
    workload = max((run.workload for run in timed), key=lambda one: one.cluster.num_gpus)
    at = rates_in_use(workload.cluster, workload.measured)
    at |= {item.name: item.new for item in found.changed if item.new is not None and item.name in at}
    return at, {name: prior_width(workload.measured, name) for name in at}


def _by_model(timed: Sequence[Observed]) -> list[Observed]:
    """Returns one run of each model, that on the most GPUs."""
    by_model: dict[str, Observed] = {}
    for run in sorted(timed, key=lambda one: -one.workload.cluster.num_gpus):
        by_model.setdefault(run.workload.model.name, run)
    return [*by_model.values()][:MODELS]


def _other_runs(run: Observed) -> Iterator[Observed]:
    """Yields other runs of the same model that break no rule."""
    model = run.workload.model
    chosen = changed(run.configuration, grad_accum=1, grad_ckpt_every_n_layers=1, torch_compile=False, hpz=1)
    workload = replace(run.workload, contents=None)
    strategies = STRATEGIES if run.workload.cluster.num_gpus > 1 else STRATEGIES[2:]
    stages = [*strategies, *([] if len(strategies) > 1 else [(2, Offload.NONE)])]
    lengths = [length for length in LENGTHS if length <= model.max_position_embeddings]
    for length, rows, (stage, offload), enabled in product(lengths, MICRO_BATCHES, stages, (False, True)):
        other = changed(
            chosen,
            seq_len=length,
            micro_batch=rows,
            zero_stage=stage,
            offload=offload,
            grad_ckpt=enabled,
        )
        if not broken(workload, other):
            yield Observed(name=run.name, workload=workload, configuration=other)


def _fits(run: Observed) -> bool:
    estimate = assess(run.workload, run.configuration)
    return estimate.fits and not estimate.memory.retries_per_step


def _slopes(run: Observed, at: Mapping[str, float], widths: Mapping[str, float]) -> list[float]:
    """Returns the derivatives of the logarithm of a step time over the logarithms of the constants."""
    slopes = []
    for name, width in widths.items():
        ends = [bounded(name, at[name] * math.exp(sign * _SPAN * width)) for sign in (-1, 1)]
        times = [planned_s(run, {**at, name: end}) for end in ends]
        slopes.append(math.log(times[1] / times[0]) / (2 * _SPAN * width))
    return slopes
