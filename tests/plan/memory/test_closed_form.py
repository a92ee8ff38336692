"""The quick estimates of live bytes and of RAM against the engine played parameter by parameter."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from dstrain.choices import Hub, Method, Offload, Optimizer, Precision
from dstrain.facts import probe
from dstrain.plan.configuration import DEFAULTS, changed
from dstrain.plan.memory import closed_form
from dstrain.plan.memory.deepspeed import engine
from dstrain.plan.memory.params import trained
from dstrain.plan.memory.zero import pinned_waste, states
from dstrain.plan.search.evaluator import QUICK_ERROR_RATIO

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


@pytest.mark.parametrize("buckets", BUCKETS)
@pytest.mark.parametrize("way", WAYS, ids=shown)
@pytest.mark.parametrize(("name", "ranks"), [("qwen3-0.6b", 4), ("qwen3-8b", 8), ("qwen3-32b", 16)])
def test_it_is_near_the_engine(name: str, ranks: int, way: dict[str, Any], buckets: str) -> None:
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
        found = closed_form.peak(model, configuration, groups).total
        assert found / played == pytest.approx(1, abs=QUICK_ERROR_RATIO), configuration


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("way", [way for way in WAYS if "offload" in way], ids=shown)
@pytest.mark.parametrize(("name", "ranks"), [("qwen3-0.6b", 4), ("llama-3.1-70b", 8)])
def test_ram_is_not_above_the_engines(
    name: str, ranks: int, way: dict[str, Any], method: Method, pin_memory: bool
) -> None:
    """A search drops a way whose quick estimate is above the bar, so that it must not be too high."""
    model = probe.read_model(name, hub=Hub.HF)
    configuration = changed(
        DEFAULTS,
        **way,
        sub_group_size=2**27,
        method=method,
        pin_memory=pin_memory,
        grad_ckpt=True,
    )
    counts = trained(model, method, configuration.model.lora)
    quick = states(counts, configuration, ranks)
    ram = quick.host + quick.staging + pinned_waste(counts, configuration, ranks)
    assert ram <= (1 + QUICK_ERROR_RATIO) * engine.host_of(model, configuration, ranks).taken


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
