"""The memory of the loss that balances experts: the tape against Transformers' own code, and against arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from benchmarks.named_peaks import of_variant, variant_of
from dstrain.choices import Attention, LossKernel, Method, Precision
from dstrain.facts.model.families import from_config
from dstrain.facts.model.traces import Question
from dstrain.job.model_changes import Lora
from dstrain.job.schema import Job
from dstrain.launch.prepare.job_context import request_of
from dstrain.plan.configuration import DEFAULTS, Configuration, changed
from dstrain.plan.memory.deepspeed.engine import brief_peak
from dstrain.plan.memory.deepspeed.engine import peak as engine_peak
from dstrain.plan.training_code import TrainingCode
from dstrain.train.tracing import passes
from tests.plan.memory.layers.shapes import question_of

T, E, LAYERS = 1024, 128, 4
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": LAYERS, "head_dim": 64,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": E, "num_local_experts": E,
    "num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "dtype": "bfloat16",
    "sliding_window": None, "pad_token_id": 0,
}  # fmt: skip
LORA = Lora(rank=4, dropout=0.0, targets=("q_proj",))


def highest(phases: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Returns the largest number of each name."""
    found: dict[str, int] = {}
    for name, size in phases:
        found[name] = max(found.get(name, 0), size)
    return found


@dataclass(frozen=True)
class Case:
    """A family, and how it trains."""

    family: str
    configuration: Configuration

    def config(self, *, balances: bool) -> dict[str, Any]:
        """Its config.json, which asks for the loss or not."""
        sizes = {name: value for name, value in SIZES.items() if self.family != "qwen2_moe" or name != "head_dim"}
        return {"model_type": self.family, **sizes, "output_router_logits": balances}

    def planned(self, *, balances: bool) -> dict[str, int]:
        """Peaks of the tape by phase, in bytes."""
        model = from_config(self.config(balances=balances), name=self.family, source=self.family)
        variant = replace(variant_of(changed(self.configuration, router_loss=balances)), kernel_workspaces=False)
        return highest((one.name.removeprefix("router "), one.total) for one in of_variant(model, variant))

    def question(self) -> Question:
        """What the tracer is asked."""
        return question_of(self.config(balances=True), self.configuration)


WAY = changed(DEFAULTS, seq_len=T, method=Method.LORA, lora=LORA, loss=LossKernel.FUSED)
PADDED = changed(WAY, micro_batch=2, code=TrainingCode(masks_padding=True))
CASES = {
    "kept": Case("qwen3_moe", WAY),
    "recomputed": Case("qwen3_moe", changed(WAY, grad_ckpt=True)),
    "padded": Case("qwen3_moe", changed(PADDED, grad_ckpt=True)),
    "fp32, padded": Case("qwen3_moe", changed(PADDED, grad_ckpt=True, precision=Precision.FP32)),
    "all weights": Case("qwen3_moe", changed(WAY, grad_ckpt=True, method=Method.FULL)),
    "mixtral": Case("mixtral", changed(WAY, grad_ckpt=True)),
    "qwen2_moe": Case("qwen2_moe", changed(WAY, grad_ckpt=True)),
}


@pytest.fixture(scope="module")
def traced() -> dict[str, dict[str, int]]:
    """Peaks of Transformers' own code by phase, in bytes."""
    traces = {name: passes.trace(case.question()) for name, case in CASES.items()}
    return {name: highest((one.name, one.highest.total) for one in trace.segments) for name, trace in traces.items()}


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT 0.21 asks for it
@pytest.mark.parametrize("name", CASES)
def test_the_loss_takes_what_the_model_allocates_for_it(name: str, traced: dict[str, dict[str, int]]) -> None:
    case = CASES[name]
    on = traced[name]
    planned = case.planned(balances=True)
    for phase in ("loss forward", "loss backward"):
        assert planned[phase] == pytest.approx(on[phase], rel=0.003), phase
        assert case.planned(balances=False).get(phase, 0) < 0.96 * on[phase], phase
    assert max(planned.values()) == pytest.approx(max(on.values()), rel=0.04)  # that of a layer is 2 % off by itself


def test_a_layer_keeps_its_logits_until_the_loss_and_its_softmax_to_the_backward_pass() -> None:
    def per_token_and_layer(instant: str) -> float:
        variant = variant_of(changed(CASES["recomputed"].configuration, router_loss=True))
        models = [
            from_config({**SIZES, "model_type": "qwen3_moe", "num_hidden_layers": n}, name="", source="")
            for n in (4, 48)
        ]
        few, many = (max(one.total for one in of_variant(model, variant) if one.name == instant) for model in models)
        return (many - few) / 44 / T - 2 * float(SIZES["hidden_size"])  # the input of the layer

    assert per_token_and_layer("loss forward") == 2 * E  # logits in bf16
    assert per_token_and_layer("router loss forward") == pytest.approx(4 * E, rel=0.005)  # and their softmax
    assert per_token_and_layer("loss backward") == pytest.approx(2 * E, rel=0.005)  # softmax, then its gradient


def test_moments_of_some_layers_are_those_of_the_whole_depth() -> None:
    model = from_config({**SIZES, "model_type": "qwen3_moe", "num_hidden_layers": 12}, name="", source="")
    way = changed(WAY, grad_ckpt=True, router_loss=True, zero_stage=3)
    assert brief_peak(model, way, 4).total == engine_peak(model, way, 4).total


@pytest.mark.parametrize(
    ("coefficient", "asks", "counts"),
    [(None, False, False), (None, True, True), (0.0, True, False), (0.1, False, True)],
)
def test_the_plan_counts_it_as_the_job_or_the_model_asks(coefficient: float | None, asks: bool, counts: bool) -> None:
    model = from_config(CASES["kept"].config(balances=asks), name="", source="")
    job = Job(model="", output_dir="", router_aux_loss_coef=coefficient, attn=Attention.SDPA)
    assert request_of(job).of_model(model).kernels.router_loss is counts
