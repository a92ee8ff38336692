"""Sequence, tensor and expert parallelism on ranks: losses, norms, evaluations, weights, resumes are one rank's."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from dstrain.config.resolve_auto import GATHERS
from dstrain.monitor.metrics import current_steps, read_jsonl
from dstrain.train.demo import make_model
from tests.train.engine import Engine
from tests.train.launching import change_job, codes, losses, make_run, said, tensors

STEPS = 4
EXPERTS = "steady experts"
TILED = {"tiled_mlp": True, "micro_batch": 8, "grad_accum": 1}
"""Tiles of 128 tokens, of 384 if two ranks share rows."""
PACKED = {"packing": True}
"""A row of 96 tokens holds three samples, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Ranks of which `sp` share each row, `tp` each weight or `ep` each layer's experts.

    `job` and `zero` change the job and ZeRO's section.
    """

    ranks: int
    sp: int = 1
    tp: int = 1
    ep: int = 1
    model: str = "steady"
    job: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)


CASES = {
    "two ranks, ZeRO-0": Case(ranks=2, sp=2, zero={"stage": 0}),
    "two ranks, ZeRO-1, checkpoints": Case(ranks=2, sp=2, zero={"stage": 1}, job={"grad_ckpt": True}),
    "two groups, ZeRO-2": Case(ranks=4, sp=2, zero={"stage": 2}),
    "two groups, ZeRO-3": Case(ranks=4, sp=2, zero={"stage": 3}),
    "four ranks share two key-value heads": Case(ranks=4, sp=4, zero={"stage": 2}),
    "adapters, ZeRO-3": Case(ranks=2, sp=2, zero={"stage": 3}, job={"method": "lora"}),
    "packed rows, ZeRO-1": Case(ranks=2, sp=2, zero={"stage": 1}, job=PACKED),
    "packed rows, four ranks, ZeRO-3, checkpoints": Case(
        ranks=4, sp=4, zero={"stage": 3}, job=PACKED | {"grad_ckpt": True, "micro_batch": 1, "grad_accum": 8}
    ),
    "tiled MLPs, ZeRO-0": Case(ranks=2, sp=2, zero={"stage": 0}, job=TILED | {"grad_ckpt": True}),
    "tiled MLPs, ZeRO-1": Case(ranks=2, zero={"stage": 1}, job=TILED | {"micro_batch": 2, "grad_accum": 2}),
    "tiled MLPs, two groups, ZeRO-2, checkpoints": Case(
        ranks=4, sp=2, zero={"stage": 2}, job=TILED | {"micro_batch": 4, "grad_ckpt": True}
    ),
    "tiled MLPs, two groups, ZeRO-3": Case(ranks=4, sp=2, zero={"stage": 3}, job=TILED | {"micro_batch": 4}),
    "tiled MLPs, ZeRO-3, checkpoints, offloaded": Case(
        ranks=2, sp=2, zero={"stage": 3, "offload_optimizer": {"device": "cpu"}}, job=TILED | {"grad_ckpt": True}
    ),
    "tiled MLPs, adapters, ZeRO-3, checkpoints": Case(
        ranks=2, sp=2, zero={"stage": 3}, job=TILED | {"grad_ckpt": True, "method": "lora"}
    ),
    "two tensor-parallel ranks, ZeRO-1": Case(ranks=2, tp=2, zero={"stage": 1}),
    "two tensor-parallel groups, ZeRO-2, checkpoints": Case(ranks=4, tp=2, zero={"stage": 2}, job={"grad_ckpt": True}),
    "two tensor-parallel groups, ZeRO-3": Case(ranks=4, tp=2, zero={"stage": 3}),
    "two tensor-parallel ranks, ZeRO-3, all offloaded": Case(
        ranks=2, tp=2, zero={"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    ),
    "two expert-parallel ranks, ZeRO-1, checkpoints": Case(
        ranks=2, ep=2, model=EXPERTS, zero={"stage": 1}, job={"grad_ckpt": True, "loss": "fused"}
    ),
    "two expert-parallel groups, ZeRO-2": Case(ranks=4, ep=2, model=EXPERTS, zero={"stage": 2}),
    "two expert-parallel groups, ZeRO-3": Case(ranks=4, ep=2, model=EXPERTS, zero={"stage": 3}),
    "two expert-parallel ranks, ZeRO-2, optimizer offloaded": Case(
        ranks=2, ep=2, model=EXPERTS, zero={"stage": 2, "offload_optimizer": {"device": "cpu"}}
    ),
    "two expert-parallel ranks, ZeRO-3, all offloaded": Case(
        ranks=2,
        ep=2,
        model=EXPERTS,
        zero={"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    ),
}


def start(folder: Path, demo: Path, engine: Engine, case: Case) -> Path:
    """Trains `STEPS` steps of 8 samples, evaluates and saves after the second."""
    batch = {
        "micro_batch": 2,
        "grad_accum": 4 * case.sp * case.tp // case.ranks,
        "sp": case.sp,
        "tp": case.tp,
        "ep": case.ep,
    }
    checks = {"preflight": case.zero["stage"] == 3}
    shape = {**checks, "seq_len": 96, "max_steps": STEPS, "eval_steps": 2, "save_steps": 2, "precision": "fp32"}
    data = {"eval_data": str(demo / "eval.jsonl"), "model": str(demo.parent / case.model)}
    shared: dict[str, Any] = {"tensor_parallel": {"autotp_size": case.tp}} if case.tp > 1 else {}
    shared |= {"expert_parallel": {"enabled": True, "autoep_size": case.ep}} if case.ep > 1 else {}
    zero = {**case.zero, **({GATHERS: True} if shared else {})}
    make_run(folder, demo, zero=zero, engine=shared, **{"grad_ckpt": False, **batch, **shape, **data, **case.job})
    engine.train(folder, ranks=case.ranks)
    return folder


@pytest.fixture(scope="module")
def steady(root: Path, demo: Path) -> Path:
    """A model of four query heads and two key-value heads, whose losses do not depend on random states."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo / "model")
    shutil.copytree(demo / "model", root / "steady")
    dense = make_model(tokenizer, hidden_size=128, num_hidden_layers=2)
    dense.save_pretrained(root / "steady")
    shutil.copytree(demo / "model", root / EXPERTS)
    kept = ("hidden_size", "head_dim", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes: dict[str, Any] = {key: getattr(dense.config, key) for key in kept}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**sizes, tie_word_embeddings=True)
    Qwen3MoeForCausalLM(config).save_pretrained(root / EXPERTS)
    return root / "steady"


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, root: Path, demo: Path, engine: Engine, steady: Path) -> tuple[Path, Path]:
    """The run directories of a case, and of one rank that does the same."""
    case = CASES[request.param]
    shared: dict[str, Any] = {
        "method": "full",
        **{key: case.job[key] for key in ("method", "packing") if key in case.job},
    }
    alone = root / f"alone {' '.join(map(str, shared.values()))} {case.model}"
    if not alone.exists():
        start(alone, demo, engine, Case(ranks=1, model=case.model, zero={"stage": 2}, job=shared))
    return start(root / request.param, demo, engine, case), alone


def metrics(folder: Path, key: str) -> dict[int, Any]:
    return {line["step"]: line[key] for line in current_steps(read_jsonl(folder / "metrics.jsonl")) if key in line}


@pytest.mark.parts(144)
def test_every_loss_norm_and_evaluation_is_that_of_one_rank(pair: tuple[Path, Path]) -> None:
    parallel, alone = pair
    assert set(codes(parallel)[0]) == {0}, said(parallel)[-3000:]
    assert losses(parallel) == pytest.approx(losses(alone), rel=1e-4)
    assert len(losses(parallel)) == STEPS
    if "ZeRO-0" not in parallel.name:  # the engine reports no norm then
        assert metrics(parallel, "grad_norm") == pytest.approx(metrics(alone, "grad_norm"), rel=1e-3)
    assert metrics(parallel, "eval_loss") == pytest.approx(metrics(alone, "eval_loss"), rel=1e-4)
    assert metrics(parallel, "eval_tokens") == metrics(alone, "eval_tokens")


@pytest.mark.parts(144)
def test_tokens_are_counted_once(pair: tuple[Path, Path]) -> None:
    parallel, alone = pair
    totals = [json.loads((folder / "summary.json").read_text())["tokens"] for folder in (parallel, alone)]
    assert totals[0] == totals[1]


@pytest.mark.parts(144)
def test_each_rank_is_timed_without_what_it_waits_for(pair: tuple[Path, Path]) -> None:
    parallel, _ = pair
    case = CASES[parallel.name]
    assert set(codes(parallel)[0]) == {0}, said(parallel)[-3000:]
    for name in ("own_s_by_rank", "comm_s_by_rank"):
        assert [len(seconds) for seconds in metrics(parallel, name).values()] == [case.ranks] * STEPS
        assert all(second > 0 for seconds in metrics(parallel, name).values() for second in seconds)
    kind = "all_to_all" if case.sp > 1 or case.ep > 1 else "all_reduce" if case.tp > 1 else "all_gather"
    assert all(metrics(parallel, f"comm/{kind}_bytes").values())


@pytest.mark.parts(144)
def test_the_final_weights_are_those_of_one_rank(pair: tuple[Path, Path]) -> None:
    whole, expected = tensors(pair[0] / "final"), tensors(pair[1] / "final")
    assert set(whole) == set(expected)
    for key, weight in whole.items():
        assert weight.allclose(expected[key], rtol=1e-2, atol=1e-4), key


@pytest.mark.parts(144)
def test_the_final_model_and_an_exported_checkpoint_have_the_logits_of_one_rank(
    pair: tuple[Path, Path], root: Path, engine: Engine
) -> None:
    parallel, alone = pair
    exported = [root / f"{folder.name} exported" for folder in pair]
    for folder, out in zip(pair, exported, strict=True):
        if not out.exists():
            assert engine.export(folder / f"checkpoint-{STEPS}", out) == 0, said(out)
    expected = logits(exported[1])
    assert logits(exported[0]).allclose(expected, atol=1e-3)
    if (alone / "final" / "config.json").exists():  # else there is an adapter
        assert logits(parallel / "final").allclose(expected, atol=1e-3)


def logits(folder: Path) -> torch.Tensor:
    """Returns the logits of some tokens, (1, 16, vocab)."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        values: torch.Tensor = model(torch.arange(16).unsqueeze(0)).logits
    return values


@pytest.mark.parts(144)
def test_a_resumed_run_has_the_same_losses(pair: tuple[Path, Path], engine: Engine) -> None:
    parallel, _ = pair
    before, number = losses(parallel), int(json.loads((parallel / "summary.json").read_text())["ranks"])
    change_job(parallel, resume=str(parallel / "checkpoint-2"))
    engine.train(parallel, ranks=number)
    assert "resuming from checkpoint-2" in said(parallel)
    assert losses(parallel) == pytest.approx(before, rel=1e-5)
