"""AdamW with states in bf16 on CPU ranks: chosen by the job, resumed to the last bit, of the planned size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.choices import Optimizer
from dstrain.config.resolve_auto import for_trainer, with_bf16_states
from dstrain.job.schema import Job
from dstrain.job.yaml_source import parse_yaml
from dstrain.plan.configuration import BF16_STATES, DEFAULTS, changed
from dstrain.plan.memory.memory import shard_bytes
from tests.cases import files
from tests.train.engine import Engine
from tests.train.launching import codes, losses, make_run, said, tensors, without_dropout
from tests.train.test_elastic import go_on
from tests.train.test_muon import ONE

pytestmark = pytest.mark.parts(6, at=1)

RANKS = {2: 2, 3: 1}
"""ZeRO stage → ranks that go on with a checkpoint of two."""
ASKED = Job(model="m", output_dir="o", optimizer=Optimizer.ADAMW_BF16)
CONFIGURATION = changed(DEFAULTS, optimizer=Optimizer.ADAMW_BF16)
JOB: dict[str, Any] = {"max_steps": 4, "save_steps": 2, "resume": "auto", "precision": "bf16", "adam_beta2": 0.95}


def made(folder: Path, model: Path, demo: Path, stage: int) -> Path:
    """Returns a run directory as `dstrain run` would write it."""
    job = {**JOB, "model": str(model), "data": str(demo / "few.jsonl"), "optimizer": "adamw_bf16"}
    run = make_run(folder, demo, zero={"stage": stage}, **job)
    path = run / "ds_config.resolved.json"
    path.write_text(json.dumps(with_bf16_states(json.loads(path.read_text()), ASKED)))
    return run


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, engine: Engine) -> Path:
    """For each stage a run that nothing disturbs, and one that goes on from its first checkpoint."""
    folder = root / "bf16-states"
    model = without_dropout(demo / "model", folder / "model")
    for stage, ranks in RANKS.items():
        whole, resumed = (made(folder / f"{kind}-{stage}", model, demo, stage) for kind in ("whole", "resumed"))
        engine.train(whole)
        shutil.copytree(whole / "checkpoint-2", resumed / "checkpoint-2")
        if ranks != 2:
            go_on(resumed, engine, ranks=ranks)
        engine.train(resumed, ranks=ranks)
    return folder


@pytest.mark.parametrize("stage", RANKS)
def test_a_resumed_run_ends_as_an_undisturbed_one(runs: Path, stage: int) -> None:
    whole, resumed = runs / f"whole-{stage}", runs / f"resumed-{stage}"
    assert codes(whole) == [[0, 0]], said(whole)[-2000:]
    assert codes(resumed) == [[0] * RANKS[stage]], said(resumed)[-2000:]
    expected = losses(whole)
    assert losses(resumed) == {step: expected[step] for step in (3, 4)}
    final, weights = tensors(resumed / "final"), tensors(whole / "final")
    assert all(final[key].equal(weights[key]) for key in weights)


@pytest.mark.parametrize("stage", RANKS)
def test_what_is_saved_of_master_weights_and_moments_is_planned_and_bf16(runs: Path, stage: int) -> None:
    num_params = sum(tensor.numel() for tensor in tensors(runs / f"whole-{stage}" / "final").values())
    folder = next((runs / f"whole-{stage}" / "checkpoint-4").glob("global_step*"))
    planned = shard_bytes(changed(CONFIGURATION, zero_stage=stage), trainable=num_params, frozen=0)
    assert sum(shard.stat().st_size for shard in folder.glob("*.pt")) == pytest.approx(planned, rel=0.03)
    saved = torch.load(next(folder.glob("*optim_states.pt")), weights_only=False)["optimizer_state_dict"]
    assert {tensor.dtype for tensor in _tensors(saved) if tensor.numel() > 1} == {torch.bfloat16}


def _tensors(node: Any) -> list[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        return [node]
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()
    return [tensor for value in inner for tensor in _tensors(value)]


def test_a_job_fills_the_keys_of_the_engine_that_are_missing() -> None:
    keys = dict.fromkeys(BF16_STATES, True)
    config = {"zero_optimization": {"stage": 2}}
    assert for_trainer(config, ASKED, None, num_ranks=2)["bf16"] == {"enabled": True, **keys}
    off = {**config, "bf16": {"bf16_optimizer_states": False}}
    assert for_trainer(off, ASKED, None, num_ranks=2)["bf16"]["bf16_optimizer_states"] is False
    assert for_trainer(config, Job(model="m", output_dir="o"), None, num_ranks=2)["bf16"] == {"enabled": True}


def test_gen_config_writes_second_moments_that_fall() -> None:
    written = files(model="qwen3-8b", gpus=8, gpu="h100", zero_stage=3, optimizer=Optimizer.ADAMW_BF16, **ONE)
    job = parse_yaml(written["job.yaml"], "job.yaml")[0]
    assert (job["optimizer"], job["adam_beta2"]) == ("adamw_bf16", 0.95)
    assert not set(BF16_STATES) & json.loads(written["ds_config.json"])["bf16"].keys()


@pytest.mark.parametrize(("beta2", "falls"), [(0.999, False), (0.996, True), (0.95, True)])
def test_second_moments_in_bf16_fall_from_the_beta_on_that_the_plan_names(beta2: float, falls: bool) -> None:
    weights, moments = _stepped(1e-5, beta2)
    assert bool((moments < 1).all()) == falls
    assert weights[weights > 512 * 1e-5].equal(_WEIGHTS[_WEIGHTS > 512 * 1e-5])
    assert (weights != _WEIGHTS)[_WEIGHTS < 128 * 1e-5].all()


_WEIGHTS = torch.logspace(-4, 0, 200).bfloat16()


def _stepped(learning_rate: float, beta2: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights after a first step, and second moments that were 1 after steps without gradient."""
    weights = _WEIGHTS.clone().requires_grad_()
    optimizer = torch.optim.AdamW([weights], lr=learning_rate, betas=(0.9, beta2), weight_decay=0.0, fused=True)
    weights.grad = torch.ones_like(weights)
    optimizer.step()
    stepped, moments = weights.detach().clone(), optimizer.state[weights]["exp_avg_sq"]
    moments.fill_(1)
    weights.grad.zero_()
    for _ in range(20):
        optimizer.step()
    return stepped, moments
