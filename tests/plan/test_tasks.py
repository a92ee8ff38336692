"""Plans of tasks whose samples have two sequences."""

from __future__ import annotations

from typing import Any

import pytest

from dstrain.choices import LossKernel, Method, Offload, Task
from dstrain.errors import InvalidConfig
from dstrain.facts import probe
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import DEFAULTS, changed
from dstrain.plan.estimate import assess
from dstrain.plan.request import LrScaling, Request
from dstrain.plan.search.decide import decide
from dstrain.plan.search.notes import PREFERENCE_RATES, learning_rate
from dstrain.plan.speed.step_time import forward_s, speed
from tests.plan.machines import cluster


def workload(num_gpus: int = 8) -> Workload:
    return Workload(model=probe.read_model("qwen3-8b"), cluster=cluster(num_gpus))


def test_a_pair_needs_the_memory_and_the_time_of_two_samples() -> None:
    values = {"zero_stage": 3, "seq_len": 1024, "loss": LossKernel.CHUNKED, "grad_ckpt": True}
    pairs, samples = (
        assess(workload(), changed(DEFAULTS, **values, task=task, micro_batch=count))
        for task, count in ((Task.DPO, 2), (Task.SFT, 4))
    )
    assert pairs.memory == samples.memory
    assert pairs.speed == samples.speed


def test_what_is_chosen_for_pairs_can_train_on_them() -> None:
    plan = decide(workload(), Request(task=Task.DPO, seq_len=1024))
    configuration = plan.chosen.configuration
    assert (configuration.kernels.loss, configuration.batch.task) == (LossKernel.CHUNKED, Task.DPO)
    assert plan.learning_rate == PREFERENCE_RATES[Method.FULL]
    (note,) = (note for note in plan.notes if "reference" in note)
    forward, whole = forward_s(workload(), configuration), speed(workload(), configuration)
    assert forward is not None
    assert whole is not None
    assert f"{forward * configuration.step.grad_accum / whole.step_s:.0%}".replace("%", " %") in note


def test_a_forward_pass_alone_is_a_third_of_both() -> None:
    alone = changed(DEFAULTS, zero_stage=0, seq_len=1024, task=Task.DPO)
    forward, step = forward_s(workload(1), alone), speed(workload(1), alone)
    assert forward is not None
    assert step is not None
    passes = sum(step.parts_s[part] for part in ("matrix products", "attention", "elementwise kernels"))
    assert forward == pytest.approx(passes / 3, rel=0.1)


@pytest.mark.parametrize(
    "asked", [{"loss": LossKernel.FUSED}, {"packing": True}, {"sp": 2}, {"tp": 2}], ids=lambda asked: next(iter(asked))
)
def test_what_pairs_cannot_have_contradicts_them(asked: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig, match="task dpo needs"):
        decide(workload(), Request(task=Task.DPO, seq_len=1024, **asked))  # type: ignore[arg-type]


def test_the_learning_rate_follows_the_samples_of_a_step_where_asked() -> None:
    rates = [learning_rate(Request(lr_scaling=scaling), 256) for scaling in (None, LrScaling.LINEAR, LrScaling.SQRT)]
    assert rates == pytest.approx([1e-5, 4e-5, 2e-5])
    settled: dict[str, Any] = {"zero_stage": 3, "micro_batch": 8, "offload": Offload.NONE, "grad_ckpt": True}
    plan = decide(workload(), Request(lr_scaling=LrScaling.LINEAR, global_batch=256, seq_len=512, **settled))
    assert plan.learning_rate == rates[1]
    (note,) = (note for note in plan.notes if "learning rate" in note)
    assert note.startswith("learning rate 1e-05 is meant for 64 samples a step; for 256")
