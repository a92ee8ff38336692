"""Tiled MLPs: the plan's bytes against those of Transformers' own code, traced without data."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.named_peaks import by_name, variant_of
from dstrain.choices import Attention, Method
from dstrain.facts.model.families import from_config
from dstrain.facts.model.traces import Question
from dstrain.facts.workload import Workload
from dstrain.job.model_changes import Lora
from dstrain.plan.configuration import DEFAULTS, Configuration, changed
from dstrain.plan.memory.layers import recording
from dstrain.plan.speed.step_time import speed
from dstrain.train.model import tile_mlps
from dstrain.train.tracing import passes
from dstrain.train.tracing.building import prepare
from tests.plan.machines import cluster
from tests.plan.memory.layers.comparing import highest
from tests.plan.memory.layers.shapes import config_of, question_of

SHAPE = {"num_hidden_layers": 4, "vocab_size": 128, "intermediate_size": 8192, "pad_token_id": 0}
"""With the peak in the layers, not in the loss."""
FAMILIES = ("glm4", "gemma3_text", "llama", "phi3", "qwen3")
WAYS = [(method, *rest) for method in (Method.FULL, Method.LORA) for rest in ((False, 1), (True, 1), (True, 3))]
TRACED = [
    (family, *way) for row, family in enumerate(FAMILIES) for column, way in enumerate(WAYS) if (row + column) % 2 == 0
]
"""Every family in half of the ways, and every way with half of the families: a trace takes a second."""


MODEL = from_config(config_of("qwen3", random.Random(5)) | SHAPE, name="model", source="model")


def configuration(**changes: Any) -> Configuration:
    ways = {"seq_len": 8192, "attn": Attention.FLASH_ATTENTION_2, "tiled_mlp": True}
    return changed(DEFAULTS, **(ways | changes), lora=Lora(rank=8, dropout=0.0))


@pytest.mark.parametrize("method", [Method.FULL, Method.LORA])
@pytest.mark.parametrize(("stage", "seq_len", "micro_batch"), [(0, 9999, 1), (2, 8192, 3), (3, 20000, 2)])
def test_the_first_and_last_tiles_have_the_peaks_of_all(
    method: Method, stage: int, seq_len: int, micro_batch: int
) -> None:
    variant = variant_of(
        configuration(method=method, zero_stage=stage, seq_len=seq_len, micro_batch=micro_batch, grad_ckpt=True)
    )
    few, all_tiles = (
        recording._played(MODEL, variant, {"dense": 2}, all_tiles=all_tiles) for all_tiles in (False, True)
    )
    assert by_name(few.moments) == by_name(all_tiles.moments)


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT 0.21 asks for it
@pytest.mark.parametrize(("family", "method", "grad_ckpt", "micro_batch"), TRACED)
def test_the_peak_is_that_of_transformers(
    family: str, method: Method, grad_ckpt: bool, micro_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare_tiled(question: Question) -> Any:
        model = prepare(question)
        tile_mlps(model)
        return model

    monkeypatch.setattr("dstrain.train.tracing.passes.prepare", prepare_tiled)
    config = config_of(family, random.Random(5)) | SHAPE
    model = from_config(config, name="model", source="model")
    way = configuration(method=method, grad_ckpt=grad_ckpt, micro_batch=micro_batch)
    trace = passes.trace(question_of(config, way))
    tiled, whole = (highest(model, each) for each in (way, changed(way, tiled_mlp=False)))
    assert not grad_ckpt or tiled.name == "layer backward"
    assert tiled.total == pytest.approx(trace.peak_bytes, rel=0.001)
    assert tiled.activations < 0.8 * whole.activations


def test_less_memory_costs_time() -> None:
    for method in (Method.FULL, Method.QLORA):
        ways = [configuration(method=method, grad_ckpt=True, tiled_mlp=tiled) for tiled in (False, True)]
        speeds = [speed(Workload(model=MODEL, cluster=cluster(1)), way) for way in ways]
        whole, tiled = (found.step_s for found in speeds if found is not None)
        assert 1.05 * whole < tiled < 1.4 * whole
