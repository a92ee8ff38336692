"""Recomputing one layer of every n: the plan's bytes against those of Transformers' own code, traced without data."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partialmethod
from typing import Any

import pytest
from transformers import PreTrainedModel

from dstrain.choices import Attention, Method
from dstrain.facts.cluster import cluster as clusters
from dstrain.facts.cluster import gpus
from dstrain.facts.cluster.cluster import Origin
from dstrain.facts.model.families import from_config
from dstrain.facts.model.trace_records import Question, Subject
from dstrain.facts.workload import Workload
from dstrain.job.model_changes import Lora
from dstrain.plan.configuration import DEFAULTS, Configuration, changed
from dstrain.plan.memory.deepspeed import engine
from dstrain.plan.memory.layers.activations import of_variant, profile
from dstrain.plan.memory.layers.context import variant_of
from dstrain.plan.memory.layers.tensor import GradRelease
from dstrain.plan.speed.step_time import speed
from dstrain.train.tracing import passes
from tests.plan.memory.layers.shapes import config_of

CONFIG = config_of("qwen3", random.Random(5)) | {"num_hidden_layers": 8}
MODEL = from_config(CONFIG, name="model", source="model")


def configuration(**changes: Any) -> Configuration:
    ways = {"seq_len": 512, "micro_batch": 1, "grad_ckpt": True, "attn": Attention.FLASH_ATTENTION_2}
    return changed(DEFAULTS, **(ways | changes), lora=Lora(rank=8, dropout=0.0))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT 0.21 asks for it
@pytest.mark.parametrize("method", [Method.FULL, Method.LORA])
@pytest.mark.parametrize("every", [2, 3, 5])
def test_the_peak_is_that_of_transformers(method: Method, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    enable = PreTrainedModel.activation_checkpointing_enable
    monkeypatch.setattr(PreTrainedModel, "activation_checkpointing_enable", partialmethod(enable, every_n_layers=every))
    way = configuration(method=method, grad_ckpt_every_n_layers=every)
    trace = passes.trace(
        Question(
            subject=Subject(config=CONFIG),
            micro_batch=1,
            seq_len=512,
            method=method,
            lora=way.model.lora,
            attn=way.kernels.attn,
            grad_ckpt=True,
        )
    )
    planned = max(of_variant(MODEL, replace(variant_of(way), kernel_workspaces=False)), key=lambda each: each.total)
    assert planned.total == pytest.approx(trace.peak_bytes, rel=0.001)


def test_the_more_layers_are_kept_the_more_memory_is_needed_and_the_less_is_computed() -> None:
    ways = [configuration(grad_ckpt_every_n_layers=every) for every in (1, 2, 4)] + [configuration(grad_ckpt=False)]
    kept = [max(instant.activations for instant in profile(MODEL, way)) for way in ways]
    assert kept == sorted(set(kept))
    assert [way.checkpointing.share(8) for way in ways] == [1.0, 0.5, 0.25, 0.0]
    gpu = clusters.describe(gpu=gpus.gpu("h100-sxm"), gpu_origin=Origin.GIVEN, gpus=1)
    speeds = [speed(Workload(model=MODEL, cluster=gpu), way) for way in ways]
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
