"""Model states against the textbook, by hand, and against the replayed engine."""

from collections.abc import Mapping
from itertools import product
from random import Random
from typing import Any

import pytest

from dstrain.choices import Hub, Method, Offload, Optimizer, Precision
from dstrain.facts import probe
from dstrain.facts.model.families import from_config
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import DEFAULTS, changed
from dstrain.plan.memory.deepspeed import engine
from dstrain.plan.memory.layers.tape import BLOCK_BYTES
from dstrain.plan.memory.memory import memory
from dstrain.plan.memory.params import Trained, trained, trained_on_rank
from dstrain.plan.memory.zero import pinned, states
from tests.plan.machines import cluster
from tests.plan.memory.deepspeed.test_brief import drawn
from tests.train.engine_cases import SPARSE

P, N = 1_000_000_000, 8
COUNTS = Trained(trainable=P, frozen=0, quantized=0, largest_trainable=50_000_000)


@pytest.mark.parametrize(
    ("stage", "bytes_per_param"), [(0, 16), (1, 2 + 14 / N), (2, 2 + 14 / N), (3, 16 / N)], ids=lambda value: str(value)
)
def test_bf16_states_are_the_textbooks(stage: int, bytes_per_param: float) -> None:
    assert states(COUNTS, changed(DEFAULTS, zero_stage=stage), N).device == round(bytes_per_param * P)


def test_fp32_keeps_a_separate_master_copy() -> None:
    found = states(COUNTS, changed(DEFAULTS, zero_stage=2, precision=Precision.FP32), N)
    assert (found.params, found.grads, found.optimizer) == (4 * P, 4 * P // N, 12 * P // N)


def test_zero_0_steps_fp32_parameters_themselves() -> None:
    found = states(COUNTS, changed(DEFAULTS, zero_stage=0, precision=Precision.FP32), N)
    assert (found.params, found.grads, found.optimizer) == (4 * P, 4 * P, 8 * P)


def test_optimizer_offload_leaves_parameters_on_the_gpu_and_18_bytes_a_parameter_on_the_host() -> None:
    found = states(COUNTS, changed(DEFAULTS, zero_stage=2, offload=Offload.OPTIMIZER), N)
    assert (found.device, found.host + found.staging) == (2 * P, 18 * P // N)


def test_accumulating_under_offload_costs_the_host_two_bytes_more() -> None:
    found = states(COUNTS, changed(DEFAULTS, zero_stage=2, offload=Offload.OPTIMIZER, grad_accum=2), N)
    assert found.host + found.staging == 20 * P // N


def test_parameter_offload_leaves_nothing_on_the_gpu() -> None:
    found = states(COUNTS, changed(DEFAULTS, zero_stage=3, offload=Offload.PARAMS), N)
    assert (found.device, found.host + found.staging) == (0, 20 * P // N)


def test_frozen_parameters_cost_two_bytes_and_no_states() -> None:
    lora = Trained(trainable=1000, frozen=P, quantized=0, largest_trainable=100)
    assert states(lora, changed(DEFAULTS, zero_stage=2), 1).device == 2 * P + 16 * 1000


def test_pinned_memory_rounds_2_25_gib_up_to_4() -> None:
    assert pinned(2.25 * 2**30) == 4 * 2**30


SHARED = {**SPARSE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 256}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("ep", "ranks"), [(1, 4), (2, 2), (2, 4), (4, 4), (2, 8), (4, 8)])
@pytest.mark.parametrize("config", [SPARSE, SHARED], ids=["experts", "shared experts"])
def test_states_under_expert_parallelism_are_the_engines(
    config: Mapping[str, Any], ep: int, ranks: int, stage: int
) -> None:
    model = from_config(dict(config), name="model", source="model")
    way = changed(DEFAULTS, zero_stage=stage, ep=ep, seq_len=64, reduce_bucket_size=1000)
    played = engine.engine_of(model, way, ranks)
    kept = played.resident.grads if stage == 3 else max(played.replay.kept)
    found = memory(Workload(model=model, cluster=cluster(ranks, gpus_per_node=ranks)), way).states
    assert found.grads == pytest.approx(kept, rel=0.005)
    assert found.device == pytest.approx(played.resident.params + played.resident.optimizer + kept, rel=0.005)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_states_are_the_engines_but_for_blocks_and_padding(seed: int, stage: int) -> None:
    name, ranks, drawn_way = drawn(Random(seed), stage)
    model = probe.read_model(name, hub=Hub.HF)
    # how many sub-groups a ratio of them leaves is the engine's
    way = changed(drawn_way, offload_ratio=1.0)
    found, played = states(trained_on_rank(model, way), way, ranks), engine.resident_of(model, way, ranks)
    least = 4 * BLOCK_BYTES * 3 * sum(group.count for group in model.tensors)
    assert 0 <= played.params - found.params <= least
    assert 0 <= played.optimizer - found.optimizer <= least


@pytest.mark.sweep
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("optimizer", [each for each in Optimizer if each is not Optimizer.ADAMW_BF16])
def test_model_states_are_those_of_the_engine(optimizer: Optimizer, zero_stage: int) -> None:
    model = probe.read_model("qwen3-0.6b", hub=Hub.HF)
    for precision, method in product(Precision, (Method.FULL, Method.LORA)):
        configuration = changed(
            DEFAULTS,
            optimizer=optimizer,
            zero_stage=zero_stage,
            precision=precision,
            method=method,
            micro_batch=1,
            seq_len=1024,
        )
        played = engine.peak(model, configuration, 4)
        found = states(trained(model, method, configuration.model.lora), configuration, 4)
        assert found.params == pytest.approx(played.params, rel=0.01), configuration
        beside = 2**28 if optimizer is Optimizer.MUON and zero_stage == 3 else 2**20  # buffers of Muon
        assert found.optimizer == pytest.approx(played.optimizer, rel=0.01, abs=beside), configuration
