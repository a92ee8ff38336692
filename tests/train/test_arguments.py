"""A job as TrainingArguments."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from dstrain.choices import Interval, Method, Precision, Schedule
from dstrain.job.schema import Job
from dstrain.train.arguments import checkpointing_kwargs, training_arguments

DS_CONFIG: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
}
ZERO3: dict[str, Any] = {"zero_optimization": {"stage": 3}}


def made(folder: Path, **fields: Any) -> Any:
    job = Job(model="m", output_dir=str(folder), data="d", **fields)
    return training_arguments(job, DS_CONFIG, num_ranks=2, on_gpu=False)


def test_a_nan_loss_is_not_filtered(tmp_path: Path) -> None:
    assert made(tmp_path).logging_nan_inf_filter is False


def test_transformers_reports_to_nobody(tmp_path: Path) -> None:
    assert made(tmp_path).report_to == []


def test_without_a_gpu_it_asks_for_the_cpu(tmp_path: Path) -> None:
    assert made(tmp_path).use_cpu is True


def test_determinism_is_asked_for_only_when_the_job_says_so(tmp_path: Path) -> None:
    assert made(tmp_path).full_determinism is False


def test_auto_values_are_filled_from_the_job(tmp_path: Path) -> None:
    config = made(tmp_path, micro_batch=3, grad_accum=4, max_grad_norm=0.3).hf_deepspeed_config.config
    assert config["train_micro_batch_size_per_gpu"] == 3
    assert config["gradient_accumulation_steps"] == 4
    assert config["gradient_clipping"] == 0.3
    assert config["bf16"]["enabled"] is True


def test_the_given_configuration_is_not_changed(tmp_path: Path) -> None:
    before = copy.deepcopy(DS_CONFIG)
    made(tmp_path)
    assert before == DS_CONFIG


def test_warmup_is_a_share_of_the_steps(tmp_path: Path) -> None:
    arguments = made(tmp_path, warmup_ratio=0.1)
    assert arguments.get_warmup_steps(200) == 20
    assert made(tmp_path, warmup_ratio=1.0).get_warmup_steps(200) == 200


def test_max_steps_ends_the_run_only_when_given(tmp_path: Path) -> None:
    assert made(tmp_path).max_steps == -1
    assert made(tmp_path, max_steps=7).max_steps == 7


@pytest.mark.parametrize(
    ("precision", "bf16", "fp16"),
    [(Precision.BF16, True, False), (Precision.FP16, False, True), (Precision.FP32, False, False)],
)
def test_precision_is_one_of_three(tmp_path: Path, precision: Precision, bf16: bool, fp16: bool) -> None:
    arguments = made(tmp_path, precision=precision)
    assert (arguments.bf16, arguments.fp16) == (bf16, fp16)


def test_an_evaluation_needs_both_data_and_an_interval(tmp_path: Path) -> None:
    assert made(tmp_path, eval_data="e", eval_steps=5).eval_strategy == "steps"
    assert made(tmp_path, val_split=0.1, eval_steps=5).eval_strategy == "steps"
    assert made(tmp_path, eval_data="e").eval_strategy == "no"
    assert made(tmp_path, eval_steps=5).eval_strategy == "no"


def test_the_model_is_evaluated_and_saved_after_steps_or_epochs(tmp_path: Path) -> None:
    by_epoch = made(tmp_path, eval_data="e", eval_strategy=Interval.EPOCH, save_strategy=Interval.EPOCH)
    assert (by_epoch.eval_strategy, by_epoch.save_strategy) == ("epoch", "epoch")
    assert made(tmp_path).save_strategy == "steps"
    assert made(tmp_path, eval_strategy=Interval.EPOCH).eval_strategy == "no"
    assert made(tmp_path, eval_data="e", eval_on_start=True).eval_on_start


def test_intervals_may_be_shares_of_the_run(tmp_path: Path) -> None:
    arguments = made(tmp_path, save_steps=0.25, eval_data="d", eval_steps=0.1)
    assert (arguments.save_steps, arguments.eval_steps) == (0.25, 0.1)


def test_evaluation_may_have_a_micro_batch_of_its_own(tmp_path: Path) -> None:
    assert made(tmp_path, micro_batch=2).per_device_eval_batch_size == 2
    assert made(tmp_path, micro_batch=2, eval_micro_batch=8).per_device_eval_batch_size == 8


def test_the_schedule_has_its_own_parameters_and_a_warmup_in_steps(tmp_path: Path) -> None:
    arguments = made(tmp_path, lr_scheduler_type=Schedule.COSINE_WITH_MIN_LR, lr_scheduler_kwargs={"min_lr_rate": 0.1},
                     warmup_steps=2)  # fmt: skip
    assert arguments.warmup_steps == 2
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    name, kwargs = arguments.lr_scheduler_type, arguments.lr_scheduler_kwargs
    schedule = get_scheduler(
        name, optimizer, num_warmup_steps=2, num_training_steps=10, scheduler_specific_kwargs=kwargs
    )
    rates = []
    for _ in range(11):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[:3] == [0.0, 0.5, 1.0]
    assert rates[-1] == pytest.approx(0.1)


def test_tf32_is_asked_for_only_where_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstrain.train.arguments.is_torch_tf32_available", lambda: False)
    assert made(tmp_path, tf32=True).tf32 is None


def test_recomputation_enters_again_only_for_adapters_under_zero_3() -> None:
    full, lora = (Job(model="m", output_dir="o", method=method) for method in (Method.FULL, Method.LORA))
    assert checkpointing_kwargs(full, ZERO3) == {"use_reentrant": False}
    assert checkpointing_kwargs(lora, ZERO3) == {"use_reentrant": True}
    assert checkpointing_kwargs(lora, DS_CONFIG) == {"use_reentrant": False}


def test_the_layers_to_recompute_reach_the_trainer(tmp_path: Path) -> None:
    kwargs = made(tmp_path, grad_ckpt_every_n_layers=2, activation_offload=True).activation_checkpointing_kwargs
    assert kwargs == {"use_reentrant": False, "every_n_layers": 2, "offload": True}


def test_recomputation_is_off_when_the_job_says_so(tmp_path: Path) -> None:
    assert made(tmp_path, grad_ckpt=False).activation_checkpointing is False
    assert made(tmp_path).activation_checkpointing is True
