"""What the allocator holds, and the recordings that the replay is made of."""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.named_peaks import variant_of
from dstrain.choices import Attention, LossKernel, Method, Offload, Optimizer, Task
from dstrain.facts import probe
from dstrain.facts.model import families
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.job.model_changes import Lora
from dstrain.plan.configuration import DEFAULTS, Configuration, changed
from dstrain.plan.memory.deepspeed import engine
from dstrain.plan.memory.layers import recording
from dstrain.plan.memory.layers.recording import Recording, record
from dstrain.plan.memory.layers.tape import GradRelease
from dstrain.plan.memory.reserved import AMPERE_WORKSPACE_BYTES, HOPPER_WORKSPACE_BYTES, reserved
from dstrain.units import GIB


def shaped(model_type: str, vocabulary: int, **shape: int) -> ModelFacts:
    """Returns a model of Mistral-7B's or Llama-3-8B's shape, whose vocabulary the trainer has padded."""
    config = {
        "model_type": model_type,
        "vocab_size": vocabulary,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        **shape,
    }
    return families.from_config(config, name=model_type, source=model_type)


MISTRAL = shaped("mistral", 32001)
"""With the padding token that fms-hf-tuning adds: tokenizer_data_utils.py: tokenizer_and_embedding_resize."""
ADAPTER = Lora(rank=16, dropout=0.1, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
ONE_GPU = changed(
    DEFAULTS,
    method=Method.LORA,
    lora=ADAPTER,
    grad_ckpt=True,
    attn=Attention.FLASH_ATTENTION_2,
    packing=True,
)


def live(recording: Recording) -> tuple[int, int]:
    """Returns the most that is live in a recording, and what is when it is over."""
    sizes: dict[Hashable, int] = {}
    now = most = 0
    for key, size in (*recording.events, *recording.freed):
        now += size or -sizes.pop(key)
        if size:
            sizes[key] = size
        most = max(most, now)
    return most, now


def _without_places(recording: Recording) -> list[tuple[object, ...]]:
    return [(moment.key, moment.begin, moment.peak) for moment in recording.moments]


@pytest.mark.parametrize("period", [0, 1, 2], ids=["saved", "checkpointed", "every second"])
@pytest.mark.parametrize("release", list(GradRelease))
@pytest.mark.parametrize("method", list(Method))
def test_repeated_layers_have_the_peak_of_played_ones_and_leave_nothing(
    method: Method, release: GradRelease, period: int
) -> None:
    layers = 12 * max(1, period) + (period > 1)
    model = replace(MISTRAL, num_hidden_layers=layers)
    recomputed = {"grad_ckpt": period > 0, "grad_ckpt_every_n_layers": max(1, period)}
    configuration = changed(ONE_GPU, method=method, **recomputed)
    variant = replace(variant_of(configuration), release=release, gathers=False, keeps_inputs=False)
    played = recording._played(model, variant, {"dense": layers})
    repeated = record(model, variant)
    assert live(repeated) == live(played)
    assert live(played)[1] == 0
    assert [size for _, size in repeated.events] == [size for _, size in played.events]
    assert [moment.place for moment in repeated.moments] == [moment.place for moment in played.moments]
    assert _without_places(repeated) == _without_places(played)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("method", [Method.FULL, Method.LORA])
def test_under_deepspeed_more_is_held_than_lives(method: Method, zero_stage: int) -> None:
    configuration = changed(
        DEFAULTS, method=method, lora=ADAPTER, grad_ckpt=True, zero_stage=zero_stage, overlap_comm=zero_stage == 3
    )
    peak = engine.peak(MISTRAL, configuration, 8).total
    found = reserved(MISTRAL, configuration, 8, capacity_bytes=None, expandable_segments=True)
    assert 0.99 * peak <= found.reserved_bytes <= 1.4 * peak


def test_what_the_gpu_does_not_see_is_replayed_once() -> None:
    limits: dict[str, Any] = {"capacity_bytes": None, "expandable_segments": True}
    asked = changed(ONE_GPU, zero_stage=2, offload=Offload.OPTIMIZER, grad_accum=2)
    found = reserved(MISTRAL, asked, 8, **limits)
    assert reserved(MISTRAL, changed(asked, pin_memory=False, grad_accum=16), 8, **limits) is found
    assert reserved(MISTRAL, changed(asked, grad_accum=1), 8, **limits) is not found
    sharded = changed(asked, zero_stage=3)
    assert reserved(MISTRAL, sharded, 8, **limits) is reserved(MISTRAL, changed(sharded, grad_accum=1), 8, **limits)


def test_a_replay_ends_where_more_is_taken_than_may_be() -> None:
    limits: dict[str, Any] = {"capacity_bytes": 80 * GIB, "expandable_segments": True}
    asked = changed(ONE_GPU, zero_stage=2, overlap_comm=True, grad_accum=2)
    found = reserved(MISTRAL, asked, 8, **limits)
    assert reserved(MISTRAL, asked, 8, most_bytes=found.reserved_bytes, **limits) == found
    ended = reserved(MISTRAL, asked, 8, most_bytes=found.reserved_bytes - 1, **limits)
    assert ended.out_of_memory
    assert (ended.retries, ended.reserved_bytes < found.reserved_bytes) == (0, True)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_each_stream_keeps_its_own_peak(stage: int) -> None:
    asked = changed(ONE_GPU, zero_stage=stage, overlap_comm=True, grad_accum=2)
    peak = engine.peak(MISTRAL, asked, 8)
    held = reserved(MISTRAL, asked, 8, capacity_bytes=None, expandable_segments=True).settled_bytes
    assert peak.apart > 0
    assert peak.total + peak.apart + 2 * AMPERE_WORKSPACE_BYTES <= held


_ALIKE: dict[str, Any] = {
    "micro_batch": 2,
    "task": Task.PRETRAIN,
    "zero_stage": 2,
    "loss": LossKernel.FUSED,
    "reduce_bucket_size": 61_449_106,
}
_ON_H200: dict[str, dict[str, Any]] = {
    "no-grad-ckpt": {},
    "no-grad-ckpt liger": {"liger": True},
    "no-grad-ckpt optimizer adamw_8bit": {"optimizer": Optimizer.ADAMW_8BIT},
    "no-grad-ckpt optimizer muon": {"optimizer": Optimizer.MUON},
    "grad-ckpt activation-offload": {"grad_ckpt": True, "activation_offload": True},
    "grad-ckpt offload optimizer": {
        "grad_ckpt": True,
        "offload": Offload.OPTIMIZER,
        "reduce_bucket_size": 4_194_304,
    },
}
"""Runs of Qwen3-1.7B under ZeRO-2 in benchmarks/results/recipes-h200.json, whose states the first step made."""


def on_h200(configuration: Configuration, *, has_early_states: bool) -> int:
    """Returns what is reserved of one H200 for Qwen3-1.7B."""
    model = probe.read_model("qwen3-1.7b")
    chosen = replace(configuration, code=replace(configuration.code, has_early_states=has_early_states))
    return reserved(
        model, chosen, 1, capacity_bytes=None, expandable_segments=True, workspace_bytes=HOPPER_WORKSPACE_BYTES
    ).reserved_bytes


@pytest.mark.parametrize("words", _ON_H200)
def test_under_deepspeed_the_allocator_holds_what_was_measured_on_a_gpu(words: str) -> None:
    results = json.loads((Path(__file__).parents[3] / "benchmarks/results/recipes-h200.json").read_text())["results"]
    ((_, measured),) = (
        one["reserved_bytes_per_gpu"] for one in results if one["name"] == f"qwen3-1.7b zero-stage 2 {words}"
    )
    chosen = changed(DEFAULTS, **_ALIKE | _ON_H200[words])
    assert on_h200(chosen, has_early_states=False) == pytest.approx(measured, rel=0.015)


def test_states_that_are_there_before_the_first_step_leave_the_free_memory_in_one_piece() -> None:
    chosen = changed(DEFAULTS, **_ALIKE, liger=True)
    assert on_h200(chosen, has_early_states=True) < 0.95 * on_h200(chosen, has_early_states=False)
