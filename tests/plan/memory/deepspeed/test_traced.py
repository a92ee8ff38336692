"""Models whose layers were traced, of which the engine knows moments alone, against the same ones on the tape."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from benchmarks.named_peaks import of_variant, variant_of
from dstrain.choices import Hub, Method, Offload, Optimizer, Precision
from dstrain.facts import probe
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.model.traces import ActivationProfile, Course, Plane, Traced
from dstrain.plan.configuration import DEFAULTS, Configuration, changed
from dstrain.plan.memory.deepspeed import engine
from dstrain.plan.memory.layers.tape import GradRelease

pytestmark = pytest.mark.sweep

ERROR_RATIO = 0.05
"""Allowed error of a traced model's peak."""
WAYS: tuple[dict[str, Any], ...] = (
    {"zero_stage": 0},
    {"zero_stage": 1, "offload": Offload.OPTIMIZER},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"zero_stage": 3, "hpz": 4},
    {"zero_stage": 3, "offload": Offload.OPTIMIZER, "offload_ratio": 0.75},
    {"zero_stage": 3, "offload": Offload.OPTIMIZER, "offload_ratio": 0.25},
    {"zero_stage": 3, "offload": Offload.OPTIMIZER, "hpz": 2},
    {"zero_stage": 3, "offload": Offload.PARAMS},
    {"zero_stage": 2, "tp": 2},
    {"zero_stage": 3, "tp": 4},
    {"zero_stage": 0, "precision": Precision.FP32},
    {"zero_stage": 2, "precision": Precision.FP32},
    {"zero_stage": 0, "optimizer": Optimizer.ADAMW_8BIT},
    {"zero_stage": 2, "optimizer": Optimizer.LION},
    {"zero_stage": 3, "optimizer": Optimizer.ADAMW_8BIT},
    {"zero_stage": 3, "optimizer": Optimizer.SGD},
    {"zero_stage": 2, "optimizer": Optimizer.ADAMW_BF16},
    {"zero_stage": 3, "optimizer": Optimizer.ADAMW_BF16},
    {"zero_stage": 3, "optimizer": Optimizer.ADAMW_BF16, "offload": Offload.OPTIMIZER, "offload_ratio": 0.5},
)


def shown(way: object) -> str | None:
    return "-".join(map(str, way.values())) if isinstance(way, dict) else None


BUCKETS = {
    "roomy": {"reduce_bucket_size": 200_000_000, "prefetch_bucket_size": 100_000_000},
    "tight": {
        "reduce_bucket_size": 20_000_000,
        "prefetch_bucket_size": 5_000_000,
        "max_reuse_distance": 0,
        "max_live_parameters": 100_000_000,
    },
}


def traced(model: ModelFacts, configuration: Configuration) -> ModelFacts:
    """Returns a model with the peaks of its tape as a trace has them, for one micro-batch: gradients add up."""
    variant = replace(variant_of(configuration), release=GradRelease.AT_STEP, gathers=False, keeps_inputs=False)
    courses = tuple(
        Course(name=peak.name, activations=flat(peak.activations), logits=flat(peak.logits), grads=flat(peak.grads))
        for peak in of_variant(model, variant)
    )
    profile = ActivationProfile(
        num_layers=model.num_hidden_layers, is_for_any_depth=False, kept=courses, recomputed=courses
    )
    return replace(model, traced=Traced(note="", profile=profile))


def flat(count: int) -> Plane:
    return Plane(base=count, per_layer=0, per_sample=0, per_both=0)


@pytest.mark.sweep
@pytest.mark.parametrize("buckets", BUCKETS)
@pytest.mark.parametrize("way", WAYS, ids=shown)
@pytest.mark.parametrize(("name", "ranks"), [("qwen3-0.6b", 4), ("qwen3-8b", 8)])
def test_it_is_near_the_tape(name: str, ranks: int, way: dict[str, Any], buckets: str) -> None:
    model = probe.read_model(name, hub=Hub.HF)
    methods = (Method.FULL, Method.LORA) if "tp" not in way else (Method.FULL,)
    variants = product((True, False), (1, 4), methods)
    for grad_ckpt, grad_accum, method in variants:
        configuration = changed(
            DEFAULTS,
            micro_batch=1,
            seq_len=4096,
            grad_ckpt=grad_ckpt,
            grad_accum=grad_accum,
            **way,
            overlap_comm=True,
            sub_group_size=2**27,
            method=method,
            **BUCKETS[buckets],  # type: ignore[arg-type]  # four fields of int
        )
        groups = ranks // configuration.parallel.tp
        played = engine.peak(model, configuration, groups).total
        found = engine.brief_peak(traced(model, configuration), configuration, groups).total
        assert found / played == pytest.approx(1, abs=ERROR_RATIO), configuration


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_parameter_has_its_states(stage: int) -> None:
    model = probe.read_model("qwen3-30b-a3b", hub=Hub.HF)
    way = changed(DEFAULTS, zero_stage=stage, offload=Offload.OPTIMIZER, seq_len=1024, grad_accum=4)
    own = traced(model, way)
    assert engine.host_of(own, way, 8) == engine.host_of(model, way, 8)
    assert engine.resident_of(own, way, 8) == engine.resident_of(model, way, 8)
