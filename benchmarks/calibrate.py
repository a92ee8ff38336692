"""How close the next plan is after a calibration: simulated machines with hidden constants.

`python benchmarks/calibrate.py [--machines 50] [--runs 5] [--seed 0] [--choice next|differ|any]`

A machine is a GPU, a number of GPUs and constants of its own, drawn around the planner's priors as far as these may be
off (`plan.calibration.WIDTHS`). It "runs" configurations: the planner's own model with the hidden constants, and
noise (`--noise`, 1 %). The first two are drawn, of different models, and the others are those that `calibrate` names as
the next run, each of one of these models (`--choice next`). For comparison, each has a model and a sequence length of
its own, as far as there are others, and one offloads its optimizer (`differ`); or they are drawn without regard to each
other (`any`). `calibrate` sees the runs and the priors alone; then a configuration that was not among the runs is
drawn, of any model, planned and compared. This is an exam of the fit, not of the planner: whether the planner's form is
that of a real machine is what `benchmarks/predict.py` asks.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dstrain.choices import Attention, Offload
from dstrain.facts import probe
from dstrain.facts.cluster import cluster as clusters
from dstrain.facts.cluster import gpus
from dstrain.facts.cluster.calibration import Calibration, Measured
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.workload import Workload
from dstrain.plan.calibration import WIDTHS, Fit, Observed, fit, rates_in_use
from dstrain.plan.configuration import DEFAULTS, Configuration, changed
from dstrain.plan.estimate import assess
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.next_run import next_run
from dstrain.units import MIB

NOISE = 0.01
"""Standard deviation of what a machine measures, over it, unless another one is asked for."""
CHOICES = ("next", "differ", "any")
"""How the runs are chosen."""
GPUS = ("a100-80g", "h100-sxm", "h200", "a800-80g", "h800")
COUNTS = (1, 4, 8, 16)
LENGTHS = (1024, 2048, 4096, 8192)
MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "llama-3.2-3b")
SMALL = 0.03
"""Share of a step that a new part may have."""
HIGHEST_RATIO = 0.99
"""No hidden share of a peak is more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine and what plans do not know about it."""

    cluster: Cluster
    hidden: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One machine: errors of the plan of the unseen configuration, over what it takes."""

    machine: str
    memory_before: float
    memory_after: float
    time_before: float
    time_after: float
    changed: int
    """Constants that the runs told."""
    is_known: bool
    """Whether a run had at least half of each part's share of the unseen step: no part is new."""
    inside: int
    """Those of them whose hidden value is in the 90 % interval."""


def machine(draw: random.Random) -> Machine:
    """Returns a machine with hidden constants."""
    gpu = gpus.gpu(draw.choice(GPUS))
    cluster = clusters.describe(gpu=gpu, gpu_origin=Origin.GIVEN, gpus=draw.choice(COUNTS))
    rates: dict[str, Any] = {}
    for name, prior in rates_in_use(cluster, Measured()).items():
        value = prior * math.exp(draw.uniform(-WIDTHS[name], WIDTHS[name]))
        rates[name] = min(value, HIGHEST_RATIO) if name.endswith("_ratio") else value
    hidden = Measured(
        **rates,
        context_bytes=round(draw.uniform(450, 1700) * MIB),
        nccl_bytes=round(draw.uniform(200, 3000) * MIB),
        reserved_ratio=draw.uniform(1.0, 1.25),
    )
    return Machine(cluster=cluster, hidden=hidden)


def differing(draw: random.Random, cluster: Cluster, count: int) -> list[tuple[str, Configuration]]:
    """Returns runs that differ: each model and sequence length once before one repeats, and one with offload."""
    models, lengths = [*MODELS], [*LENGTHS]
    draw.shuffle(models)
    draw.shuffle(lengths)
    offloaded = draw.randrange(count)
    chosen = []
    for number in range(count):
        fixed = {
            "seq_len": lengths[number % len(lengths)],
            "offload": Offload.OPTIMIZER if number == offloaded else Offload.NONE,
        }
        chosen.append(drawn(draw, cluster, [models[number % len(models)], *models], fixed))
    return chosen


def drawn(
    draw: random.Random, cluster: Cluster, models: Sequence[str], fixed: Mapping[str, Any] | None = None
) -> tuple[str, Configuration]:
    """Returns a configuration that fits the machine by the priors, of the first of the models that one was found for
    in a few draws."""
    for attempt in range(10 * len(models)):
        name = models[attempt // 10]
        stage = draw.choice((1, 2, 3)) if cluster.num_gpus > 1 else 2
        offloads = draw.random() < 0.2
        choices = {
            "seq_len": draw.choice(LENGTHS),
            "offload": Offload.OPTIMIZER if offloads else Offload.NONE,
            **(fixed or {}),
        }
        configuration = changed(
            DEFAULTS,
            zero_stage=max(stage, 2) if choices["offload"] is Offload.OPTIMIZER else stage,
            overlap_comm=stage == 3 or draw.random() < 0.5,
            grad_ckpt=draw.random() < 0.7,
            micro_batch=draw.choice((1, 2, 4)),
            grad_accum=draw.choice((1, 4)),
            attn=Attention.FLASH_ATTENTION_2,
            **choices,
        )
        estimate = assess(Workload(model=probe.read_model(name), cluster=cluster), configuration)
        if estimate.fits and not estimate.memory.retries_per_step:
            return name, configuration
    raise ValueError("nothing fits")


def advised(draw: random.Random, one: Machine, count: int, noise: float) -> list[Observed]:
    """Returns runs of a machine: two of different models that are drawn, then those that `calibrate` names."""
    runs: list[Observed] = []
    models = draw.sample(MODELS, len(MODELS))
    while len(runs) < min(2, count):
        name, configuration = drawn(draw, one.cluster, models)
        models.remove(name)
        runs.append(ran(one, name, configuration, draw, noise))
    while len(runs) < count:
        advice = next_run(runs, fit(runs))
        assert advice is not None
        runs.append(ran(one, advice.run.workload.model.name, advice.run.configuration, draw, noise))
    return runs


def ran(
    machine: Machine, name: str, configuration: Configuration, draw: random.Random, noise: float = NOISE
) -> Observed:
    """Returns the measurements of a configuration on a machine."""
    workload = Workload(model=probe.read_model(name), cluster=machine.cluster)
    truth = true(machine, workload, configuration)
    assert truth.speed is not None
    needs = truth.memory
    return Observed(
        name=f"{name} ZeRO-{configuration.zero.stage}",
        workload=workload,
        configuration=configuration,
        step_s=truth.speed.step_s * draw.gauss(1, noise),
        reserved_bytes=round(needs.reserved_bytes_per_gpu * draw.gauss(1, noise)),
        outside_bytes=round(needs.breakdown_bytes.context * draw.gauss(1, noise)),
    )


def true(machine: Machine, workload: Workload, configuration: Configuration) -> Estimate:
    """Returns the memory and time of a configuration on a machine, without noise."""
    hidden = Calibration(gpus={machine.cluster.gpu.name: machine.hidden})
    return assess(replace(workload, calibration=hidden), configuration)


def chosen_runs(draw: random.Random, one: Machine, count: int, choice: str, noise: float) -> list[Observed]:
    """Returns the measurements of runs that are chosen in one of the ways `CHOICES`."""
    if choice == "next":
        return advised(draw, one, count, noise)
    chosen = differing(draw, one.cluster, count)
    if choice == "any":
        chosen = [drawn(draw, one.cluster, draw.sample(MODELS, len(MODELS))) for _ in range(count)]
    return [ran(one, name, configuration, draw, noise) for name, configuration in chosen]


def examine(draw: random.Random, num_runs: int, *, choice: str = "next", noise: float = NOISE) -> Result:
    """Returns the errors of the next plan of one machine."""
    one = machine(draw)
    runs = chosen_runs(draw, one, num_runs, choice, noise)
    found = fit(runs)
    known = {(run.workload.model.name, run.configuration) for run in runs}
    name, configuration = drawn(draw, one.cluster, draw.sample(MODELS, len(MODELS)))
    while (name, configuration) in known:
        name, configuration = drawn(draw, one.cluster, draw.sample(MODELS, len(MODELS)))
    workload = Workload(model=probe.read_model(name), cluster=one.cluster)
    truth, before = true(one, workload, configuration), assess(workload, configuration)
    after = assess(found.applied_to(workload), configuration)
    return Result(
        machine=f"{one.cluster.num_gpus}x{one.cluster.gpu.name}",
        memory_before=_memory_error(before, truth),
        memory_after=_memory_error(after, truth),
        time_before=_time_error(before, truth),
        time_after=_time_error(after, truth),
        changed=len(found.changed),
        is_known=_is_known(truth, [true(one, run.workload, run.configuration) for run in runs]),
        inside=_inside(found, one.hidden),
    )


def _is_known(unseen: Estimate, runs: Sequence[Estimate]) -> bool:
    shares = [_shares(estimate) for estimate in (unseen, *runs)]
    return all(share < SMALL or any(run[part] > share / 2 for run in shares[1:]) for part, share in shares[0].items())


def _shares(estimate: Estimate) -> dict[str, float]:
    assert estimate.speed is not None
    return {part: seconds / estimate.speed.step_s for part, seconds in estimate.speed.parts_s.items()}


def _memory_error(plan: Estimate, truth: Estimate) -> float:
    return plan.memory.device_bytes_per_gpu / truth.memory.device_bytes_per_gpu - 1


def _time_error(plan: Estimate, truth: Estimate) -> float:
    assert plan.speed is not None
    assert truth.speed is not None
    return plan.speed.step_s / truth.speed.step_s - 1


def _inside(found: Fit, hidden: Measured) -> int:
    """Returns how many constants' intervals hold the hidden value."""
    return sum(
        abs(math.log(getattr(hidden, item.name) / item.new)) <= (item.error_ratio or 0.0)
        for item in found.changed
        if item.new
    )


def table(results: Sequence[Result]) -> str:
    """Returns the errors of all machines, and how many are within the bounds of 3 and 5 %."""
    lines = []
    for what, bound in (("memory", 0.03), ("time", 0.05)):
        for when in ("before", "after"):
            errors = sorted(abs(getattr(result, f"{what}_{when}")) for result in results)
            within = sum(error < bound for error in errors) / len(errors)
            high = errors[min(len(errors) - 1, round(0.9 * len(errors)))]
            lines.append(
                f"| {what} | {when} | {statistics.median(errors):.1%} | {high:.1%} | {errors[-1]:.1%} |"
                f" {within:.0%} below {bound:.0%} |"
            )
    known = [abs(result.time_after) for result in results if result.is_known]
    good = sum(error < 0.05 for error in known)
    told = sum(result.changed for result in results)
    inside = sum(result.inside for result in results) / max(1, told)
    head = ["| error of the next plan | | median | 90 % | worst | |", "|---|---|---|---|---|---|"]
    plain = f"{good} of {len(known)} times are below 5% where no part of the step is new; worst {max(known):.1%}"
    return "\n".join(
        [*head, *lines, "", plain, f"{told} constants told, {inside:.0%} of them within their 90 % interval"]
    )


def main() -> None:
    """Prints the table, and writes JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=50)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--choice", choices=CHOICES, default="next", help="how the runs are chosen")
    parser.add_argument("--noise", type=float, default=NOISE, help="standard deviation of what is measured, over it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = [
        examine(random.Random(f"{options.seed} {number}"), options.runs, choice=options.choice, noise=options.noise)
        for number in range(options.machines)
    ]
    for result in results:
        print(
            f"{result.machine:<14} memory {result.memory_before:+7.1%} -> {result.memory_after:+6.1%}"
            f"   time {result.time_before:+7.1%} -> {result.time_after:+6.1%}   {result.changed} told"
        )
    print(table(results))
    if options.json:
        rows = [{name: getattr(result, name) for name in Result.__slots__} for result in results]
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
