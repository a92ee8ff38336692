"""DeepSpeed's Muon on two CPU ranks: chosen by the job, resumed, with the states that the plan counts."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup

from dstrain.choices import Optimizer, Precision
from dstrain.config.lint.rule import JobContext
from dstrain.config.resolve_auto import for_trainer
from dstrain.errors import Place
from dstrain.job.file import JobFile
from dstrain.job.schema import Job
from dstrain.job.yaml_source import parse_yaml
from dstrain.launch.prepare.lint_job import lint_text
from tests.cases import files
from tests.train.engine import Engine
from tests.train.engine_cases import case, predicted, run
from tests.train.launching import codes, lines, losses, make_run, said, tensors

pytestmark = pytest.mark.parts(6, at=2)

JOB: dict[str, Any] = {
    "optimizer": "muon",
    "max_grad_norm": 0.0,
    "muon_learning_rate": 1e-3,
    "max_steps": 4,
    "save_steps": 2,
    "resume": "auto",
}


ONE: dict[str, Any] = {"offload": "none", "micro_batch": 1, "grad_ckpt": True, "sp": 1}
"""Options of gen-config that leave the search little to compare."""


def made(folder: Path, demo: Path, stage: int) -> Path:
    """Returns a run directory as `dstrain run` would write it."""
    zero = {"stage": stage, **({"reduce_scatter": False} if stage == 3 else {})}
    made_run = make_run(folder, demo, zero=zero, **JOB)
    path = made_run / "ds_config.resolved.json"
    job = Job(
        model="m", output_dir=str(folder), micro_batch=2, learning_rate=1e-3, **{**JOB, "optimizer": Optimizer.MUON}
    )
    path.write_text(json.dumps(for_trainer(json.loads(path.read_text()), job, None, num_ranks=2)))
    return made_run


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, engine: Engine) -> Path:
    """A run under ZeRO-2, and under ZeRO-3 one that is killed and goes on."""
    folder = root / "muon"
    engine.train(made(folder / "whole", demo, 2))
    cut = made(folder / "cut", demo, 3)
    engine.train(cut, kill_at=3)
    engine.train(cut)
    return folder


def test_a_killed_run_under_zero_3_ends_as_an_undisturbed_one_under_zero_2(runs: Path) -> None:
    whole, cut = runs / "whole", runs / "cut"
    assert codes(whole) == [[0, 0]], said(whole)[-2000:]
    assert codes(cut)[0][0] == -signal.SIGKILL
    assert codes(cut)[1] == [0, 0], said(cut)[-2000:]
    assert losses(cut) == pytest.approx(losses(whole), rel=1e-3)
    final, expected = tensors(cut / "final"), tensors(whole / "final")
    assert all(torch.allclose(final[key].float(), expected[key].float(), atol=2e-3) for key in expected)


def test_the_rate_in_the_log_is_the_one_that_the_step_used(runs: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    schedule = get_cosine_schedule_with_warmup(torch.optim.SGD([parameter], lr=1e-3), 1, 4)
    used = []
    for _ in range(4):
        used.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    logged = [line["learning_rate"] for line in lines(runs / "whole")]
    assert logged == pytest.approx(used)
    assert (used[0], used[1]) == (0.0, 1e-3)


def test_matrices_of_layers_have_one_moment_and_the_rest_two(runs: Path) -> None:
    shard = next((runs / "whole" / "checkpoint-4").glob("global_step*/*zero_pp_rank_0_*optim_states.pt"))
    saved = torch.load(shard, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]
    kept = [
        {name for name, value in state.items() if hasattr(value, "numel") and value.numel() > 1}
        for state in saved["state"].values()
    ]
    assert kept == [{"momentum_buffer"}, {"exp_avg", "exp_avg_sq"}]


def test_the_plan_counts_what_lives_between_steps(engine: Engine, tmp_path: Path) -> None:
    cases = [case("Muon", stage, optimizer=Optimizer.MUON) for stage in (1, 2, 3)]
    cases += [case("Muon in fp32", stage, optimizer=Optimizer.MUON, precision=Precision.FP32) for stage in (1, 2)]
    for tried, measured in zip(cases, run(engine, cases, tmp_path / "cases", timeout_s=120), strict=True):
        planned, stage = predicted(tried), tried.configuration.zero.stage
        buffers = 0 if stage < 3 else 0.15  # as large as they may become
        assert measured.steady * (1 - 0.002) <= planned.steady <= measured.steady * (1.002 + buffers)
        if tried.configuration.model.precision is Precision.BF16:
            assert measured.peak * (1 - 0.002) <= planned.peak <= measured.peak * (1.002 + buffers)
        if stage < 3:  # the updates are beside the gradients
            assert planned.phases["step"] == pytest.approx(measured.phases["step"], rel=0.002)


def test_a_job_with_muon_gets_the_engines_section_with_its_learning_rates() -> None:
    job = Job(model="m", output_dir="o", optimizer=Optimizer.MUON, learning_rate=2e-6, muon_learning_rate=1e-4)
    config = for_trainer({"zero_optimization": {"stage": 2}}, job, None, num_ranks=2)
    params = {"lr": 2e-6, "muon_lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    assert config["optimizer"] == {"type": "Muon", "params": params}
    own = {"type": "Adam", "params": {"lr": 1e-5}}
    assert for_trainer({"optimizer": own}, job, None, num_ranks=2)["optimizer"] == own
    assert job.precision is Precision.BF16


def test_gen_config_writes_what_muon_needs() -> None:
    written = files(model="qwen3-8b", gpus=8, gpu="h100", zero_stage=3, optimizer=Optimizer.MUON, **ONE)
    assert json.loads(written["ds_config.json"])["zero_optimization"]["reduce_scatter"] is False
    job = parse_yaml(written["job.yaml"], "job.yaml")[0]
    assert (job["optimizer"], job["max_grad_norm"]) == ("muon", 0)
    plain = files(model="qwen3-8b", gpus=8, gpu="h100", zero_stage=3, **ONE)
    assert "reduce_scatter" not in plain["ds_config.json"]


@pytest.mark.parametrize(("reduce_scatter", "norm", "expected"), [(False, 0.0, []), (True, 1.0, ["DS303", "DS331"])])
def test_lint_knows_the_muon_of_a_job(reduce_scatter: bool, norm: float, expected: list[str]) -> None:
    job = Job(model="m", output_dir="o", optimizer=Optimizer.MUON, max_grad_norm=norm)
    file = JobFile(job=job, locate=lambda keys: Place(file="job.yaml", line=1, column=1))
    text = json.dumps(
        {
            **dict.fromkeys(
                ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
            ),
            "bf16": {"enabled": "auto"},
            "zero_optimization": {
                "stage": 3,
                "reduce_scatter": reduce_scatter,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
        }
    )
    found = lint_text(JobContext(job=file), text, "ds_config.json").findings
    assert sorted(finding.rule for finding in found) == expected
