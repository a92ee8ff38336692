"""The settings of a job that Transformers' Trainer and LLaMA-Factory call the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.choices import Interval, LossOn, Optimizer, Precision, SinkName, SwanLabMode
from dstrain.job.schema import Job


def trainer_arguments(job: Job) -> dict[str, Any]:
    """Returns the settings that Transformers and LLaMA-Factory call the same."""
    return {
        "output_dir": Path(job.output_dir).name,
        "per_device_train_batch_size": job.micro_batch,
        "gradient_accumulation_steps": job.grad_accum,
        "num_train_epochs": job.num_train_epochs,
        "max_steps": -1 if job.max_steps is None else job.max_steps,
        "optim": "adamw_8bit" if job.optimizer is Optimizer.ADAMW_8BIT else "adamw_torch_fused",
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": job.lr_scheduler_type.value,
        "weight_decay": job.weight_decay,
        **{name: getattr(job, name) for name in ("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "seed")},
        "bf16": job.precision is Precision.BF16,
        "fp16": job.precision is Precision.FP16,
        "logging_steps": job.logging_steps,
        "save_steps": job.save_steps,
        "save_total_limit": job.save_total_limit,
        "save_only_model": job.save_only_model or None,
        "eval_strategy": _evaluates(job),
        "eval_steps": job.eval_steps if _evaluates(job) == "steps" else None,
        "eval_on_start": job.eval_on_start,
        "per_device_eval_batch_size": job.eval_micro_batch or job.micro_batch,
        "save_strategy": job.save_strategy.value,
        "lr_scheduler_kwargs": dict(job.lr_scheduler_kwargs) or None,
        "tf32": job.tf32 or None,
        "dataloader_num_workers": job.dataloader_num_workers,
        "report_to": [sink.value for sink in job.monitor.sinks if sink is not SinkName.SWANLAB] or "none",
    }


def swanlab_arguments(job: Job) -> dict[str, Any] | None:
    """Returns project, name and mode of a SwanLab run, if given; None if the job has no such sink.

    SwanLab's own callback takes them: that of Transformers 5.23 asks for the active run before it starts one, which
    SwanLab 0.8 and later answer with an error (integrations/integration_utils.py: SwanLabCallback.setup).
    """
    monitor = job.monitor
    if SinkName.SWANLAB not in monitor.sinks:
        return None
    mode = None if monitor.mode is None else monitor.mode.value
    named = {"project": monitor.project, "experiment_name": monitor.name, "mode": mode}
    return {name: value for name, value in named.items() if value is not None}


def llamafactory_swanlab(job: Job) -> dict[str, Any]:
    """Returns LLaMA-Factory's keys of SwanLab, which know two of its modes and by default need a login."""
    mode = _LLAMAFACTORY_MODES.get(job.monitor.mode) if SinkName.SWANLAB in job.monitor.sinks else None
    if mode is None:
        return {}
    names = {"swanlab_project": job.monitor.project, "swanlab_run_name": job.monitor.name}
    return {"use_swanlab": True, "swanlab_mode": mode, **names}


_LLAMAFACTORY_MODES: Mapping[SwanLabMode | None, str] = {SwanLabMode.ONLINE: "cloud", SwanLabMode.LOCAL: "local"}


def tracker_notes(job: Job, *, for_llamafactory: bool) -> list[str]:
    """Returns what the trackers of an export need."""
    others = [sink for sink in job.monitor.sinks if sink is not SinkName.SWANLAB]
    notes = [f"report_to names {', '.join(others)}; log in to them yourself"] if others else []
    if SinkName.SWANLAB not in job.monitor.sinks or job.monitor.mode in _LLAMAFACTORY_MODES:
        return notes
    if for_llamafactory:
        left_out = "SwanLab is left out: LLaMA-Factory has no offline mode; after swanlab login write use_swanlab: true"
        return [*notes, left_out]
    return notes if job.monitor.mode else [*notes, "SwanLab records offline without SWANLAB_API_KEY or a login"]


def _evaluates(job: Job) -> str:
    """Returns Transformers' strategy of evaluation."""
    if job.eval_data is None and job.val_split is None:
        return "no"
    return "epoch" if job.eval_strategy is Interval.EPOCH else "steps" if job.eval_steps else "no"


def without_key(job: Job) -> list[str]:
    """Returns what LLaMA-Factory has no key for.

    Source: LLaMA-Factory of August 2026, extras/misc.py: infer_optim_dtype; model/patcher.py: patch_config;
    data/processor/supervised.py: _encode_data_example.
    """
    dtype = (
        "precision: fp32 has no key: without bf16 and fp16 LLaMA-Factory chooses the dtype by the checkpoint and the "
        "GPU, and `dstrain import` writes bf16"
    )
    thoughts = "mask_history drops the thoughts of earlier answers, too; preserve_thinking keeps them"
    notes = {dtype: job.precision is Precision.FP32, thoughts: job.loss_on is LossOn.LAST}
    return [note for note, holds in notes.items() if holds]
