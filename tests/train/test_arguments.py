"""A job as TrainingArguments."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import accelerate.utils  # type: ignore[import-untyped]
import pytest
import torch
from transformers import PreTrainedModel, get_scheduler

from dstrain.choices import Interval, Method, Precision, Schedule
from dstrain.errors import InvalidConfig
from dstrain.job.schema import Job
from dstrain.train.arguments import CHECKPOINTING, checkpointing_arguments, checkpointing_kwargs, training_arguments

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


def test_only_sequence_parallelism_needs_a_newer_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(accelerate.utils, "DeepSpeedSequenceParallelConfig", raising=False)  # as before 1.12
    assert made(tmp_path).parallelism_config is None
    with pytest.raises(InvalidConfig, match=r"^sp: 2 needs accelerate 1\.12 or newer, not "):
        made(tmp_path, sp=2)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # a NaN loss is seen, Transformers reports to nobody, and without a GPU it asks for the CPU
        ({}, {"logging_nan_inf_filter": False, "report_to": [], "use_cpu": True, "full_determinism": False}),
        ({}, {"max_steps": -1, "save_strategy": "steps", CHECKPOINTING: True}),
        ({"max_steps": 7, "grad_ckpt": False}, {"max_steps": 7, CHECKPOINTING: False}),
        ({"precision": Precision.BF16}, {"bf16": True, "fp16": False}),
        ({"precision": Precision.FP16}, {"bf16": False, "fp16": True}),
        ({"precision": Precision.FP32}, {"bf16": False, "fp16": False}),
        # an evaluation needs both data and an interval
        ({"eval_data": "e", "eval_steps": 5}, {"eval_strategy": "steps"}),
        ({"val_split": 0.1, "eval_steps": 5}, {"eval_strategy": "steps"}),
        ({"eval_data": "e"}, {"eval_strategy": "no"}),
        ({"eval_steps": 5}, {"eval_strategy": "no"}),
        ({"eval_strategy": Interval.EPOCH}, {"eval_strategy": "no"}),
        (
            {"eval_data": "e", "eval_strategy": Interval.EPOCH, "save_strategy": Interval.EPOCH},
            {"eval_strategy": "epoch", "save_strategy": "epoch"},
        ),
        ({"eval_data": "e", "eval_on_start": True}, {"eval_on_start": True}),
        # intervals may be shares of the run
        ({"save_steps": 0.25, "eval_data": "d", "eval_steps": 0.1}, {"save_steps": 0.25, "eval_steps": 0.1}),
        ({"micro_batch": 2}, {"per_device_eval_batch_size": 2}),
        ({"micro_batch": 2, "eval_micro_batch": 8}, {"per_device_eval_batch_size": 8}),
    ],
)
def test_a_field_of_a_job_is_one_of_the_trainer(tmp_path: Path, fields: Any, expected: dict[str, Any]) -> None:
    arguments = made(tmp_path, **fields)
    assert {name: getattr(arguments, name) for name in expected} == expected


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


def test_the_layers_to_recompute_reach_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def enable(self: PreTrainedModel, kwargs: Any = None, every_n_layers: int = 1, offload: bool = False) -> None: ...

    monkeypatch.setattr(PreTrainedModel, f"{CHECKPOINTING}_enable", enable)  # older releases lack some of these
    arguments = made(tmp_path, grad_ckpt_every_n_layers=2, activation_offload=True)
    assert getattr(arguments, f"{CHECKPOINTING}_kwargs") == {
        "use_reentrant": False,
        "every_n_layers": 2,
        "offload": True,
    }


def test_a_release_without_a_form_of_recomputation_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def enable(self: PreTrainedModel, gradient_checkpointing_kwargs: Any = None) -> None: ...

    monkeypatch.setattr(PreTrainedModel, f"{CHECKPOINTING}_enable", enable)
    assert checkpointing_arguments({"use_reentrant": False})[CHECKPOINTING] is True
    with pytest.raises(InvalidConfig, match="activation_offload needs a newer Transformers than"):
        checkpointing_arguments({"use_reentrant": False, "offload": True})
