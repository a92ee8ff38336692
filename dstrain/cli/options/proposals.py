"""Other options with which a command would find a plan that fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrain.cli.options.data_lengths import TrainingData
from dstrain.cli.options.question import PlanInputs, plan_inputs
from dstrain.facts.cluster.cluster import Cluster
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.search.decide import choice
from dstrain.plan.search.infeasible import Way, ways_that_fit


def ways(
    options: Mapping[str, Any], inputs: PlanInputs, data: TrainingData, *, last: Cluster | None = None
) -> tuple[Way, ...]:
    """Returns changes of a command's options that fit; each is asked and answered as if it were typed.

    `last` is the cluster of the last run (`plan_inputs`).
    """

    def judge(changes: Mapping[str, Any], *_: object) -> Estimate:
        again = data.decide(plan_inputs({**options, **changes}, last=last, is_first=False))
        return choice(again.workload, again.request)

    hosts = {name: options[name] for name in ("hosts", "hostfile") if options[name]}
    return ways_that_fit(inputs.workload, inputs.request, judge, hosts=hosts)
