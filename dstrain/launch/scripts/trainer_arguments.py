"""The settings of a job that Transformers' Trainer and LLaMA-Factory call the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dstrain.choices import Interval, LossOn, Optimizer, Precision
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
        "report_to": [sink.value for sink in job.monitor.sinks] or "none",
    }


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
