"""Recomputing one layer of every n: the plan's bytes against those of Transformers' own code, traced without data."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partialmethod
from typing import Any

import pytest
from transformers import PreTrainedModel

from benchmarks.named_peaks import of_variant, profile, variant_of
from dstrain.choices import Attention, Method
from dstrain.facts.model.families import from_config
from dstrain.facts.workload import Workload
from dstrain.job.model_changes import Lora
from dstrain.plan.configuration import DEFAULTS, Configuration, changed
from dstrain.plan.memory.deepspeed import engine
from dstrain.plan.memory.layers.tape import GradRelease
from dstrain.plan.speed.step_time import speed
from dstrain.train.arguments import CHECKPOINTING
from dstrain.train.tracing import passes
from tests.plan.machines import cluster
from tests.plan.memory.layers.comparing import highest
from tests.plan.memory.layers.shapes import config_of, question_of

CONFIG = config_of("qwen3", random.Random(5)) | {"num_hidden_layers": 8}
MODEL = from_config(CONFIG, name="model", source="model")


def configuration(**changes: Any) -> Configuration:
    ways = {"seq_len": 512, "micro_batch": 1, "grad_ckpt": True, "attn": Attention.FLASH_ATTENTION_2}
    return changed(DEFAULTS, **(ways | changes), lora=Lora(rank=8, dropout=0.0))


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT 0.21 asks for it
@pytest.mark.parametrize("method", [Method.FULL, Method.LORA])
@pytest.mark.parametrize("every", [2, 3, 5])
def test_the_peak_is_that_of_transformers(method: Method, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{CHECKPOINTING}_enable"
    enable = getattr(PreTrainedModel, name)
    monkeypatch.setattr(PreTrainedModel, name, partialmethod(enable, every_n_layers=every))
    way = configuration(method=method, grad_ckpt_every_n_layers=every)
    trace = passes.trace(question_of(CONFIG, way))
    assert highest(MODEL, way).total == pytest.approx(trace.peak_bytes, rel=0.001)


def test_the_more_layers_are_kept_the_more_memory_is_needed_and_the_less_is_computed() -> None:
    ways = [configuration(grad_ckpt_every_n_layers=every) for every in (1, 2, 4)] + [configuration(grad_ckpt=False)]
    kept = [max(instant.activations for instant in profile(MODEL, way)) for way in ways]
    assert kept == sorted(set(kept))
    assert [way.checkpointing.share(8) for way in ways] == [1.0, 0.5, 0.25, 0.0]
    speeds = [speed(Workload(model=MODEL, cluster=cluster(1)), way) for way in ways]
    times = [found.step_s for found in speeds if found is not None]
    assert times == sorted(set(times), reverse=True)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_engine_is_replayed_over_the_layers_that_a_longer_tape_has(stage: int, every: int) -> None:
    deep = from_config(CONFIG | {"num_hidden_layers": 25}, name="deep", source="deep")
    way = configuration(grad_ckpt_every_n_layers=every, zero_stage=stage)
    variant = replace(variant_of(way), release=GradRelease.AT_ONCE, gathers=False)
    extrapolated = max(instant.total for instant in of_variant(deep, variant))
    assert max(sum(instant.tape) for instant in engine.instants(deep, way, 2)) == extrapolated
