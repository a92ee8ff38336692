"""Converts a job and its DeepSpeed configuration to the TrainingArguments of the installed Transformers.

Releases differ in names and features, which this module looks for; it compares no version numbers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import accelerate  # type: ignore[import-untyped]
import transformers
from accelerate import ParallelismConfig
from transformers import PreTrainedModel, TrainingArguments
from transformers.utils.import_utils import is_torch_tf32_available

from dstrain.choices import Interval, Optimizer, Precision
from dstrain.errors import InvalidConfig
from dstrain.facts.ds_config import section, zero_stage
from dstrain.job.schema import Job
from dstrain.plan.training_code import needs_reentrant

_RENAMED = "activation_checkpointing"
_BEFORE = "gradient_checkpointing"
CHECKPOINTING = _RENAMED if _RENAMED in TrainingArguments.__dataclass_fields__ else _BEFORE
"""Transformers' name of activation checkpointing: of the argument, of its `_kwargs`, and of the `_enable` method."""

_FORMS = {"every_n_layers": "grad_ckpt_every_n_layers", "offload": "activation_offload"}
"""Parameter of the `_enable` method → the job key that sets it."""


def checkpointing_arguments(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the TrainingArguments that recompute activations with these `kwargs`; None recomputes nothing.

    Raises InvalidConfig for a form that this release lacks.
    """
    known = inspect.signature(getattr(PreTrainedModel, f"{CHECKPOINTING}_enable")).parameters
    for name, key in _FORMS.items():
        if kwargs is not None and name in kwargs and name not in known:
            problem = f"{key} needs a newer Transformers than {transformers.__version__}"
            raise InvalidConfig(problem, hint=f"pip install -U transformers, or leave {key} out of job.yaml.")
    return {CHECKPOINTING: kwargs is not None, f"{CHECKPOINTING}_kwargs": None if kwargs is None else dict(kwargs)}


def recompute(model: Any, kwargs: Mapping[str, Any], **options: Any) -> None:
    """Recomputes the activations of a model; PyTorch takes `kwargs`, Transformers `options`."""
    enable = getattr(model, f"{CHECKPOINTING}_enable")
    enable(**{f"{CHECKPOINTING}_kwargs": dict(kwargs)}, **options)


def is_deepcompile(ds_config: Mapping[str, Any]) -> bool:
    """Returns whether a configuration has DeepSpeed compile the whole model, with ZeRO's communication."""
    return bool(section(ds_config, "compile").get("deepcompile"))


def checkpointing_kwargs(job: Job, ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the form of activation checkpointing: non-reentrant, except for adapters under ZeRO-3."""
    kwargs: dict[str, Any] = {"use_reentrant": needs_reentrant(job.method, zero_stage(ds_config))}
    if job.grad_ckpt_every_n_layers > 1:
        kwargs["every_n_layers"] = job.grad_ckpt_every_n_layers
    if job.activation_offload:
        kwargs["offload"] = True
    return kwargs


def training_arguments(job: Job, ds_config: Mapping[str, Any], *, num_ranks: int, on_gpu: bool) -> TrainingArguments:
    """Returns the arguments of this run. They must outlive the model: ZeRO-3 reads them through a weak reference."""
    return TrainingArguments(
        parallelism_config=_parallelism(job, num_ranks),
        **_from_job(job),
        **_fixed(on_gpu=on_gpu),
        deepspeed=copy.deepcopy(dict(ds_config)),
        lr_scheduler_type=str(job.lr_scheduler_type),
        bf16=job.precision is Precision.BF16,
        fp16=job.precision is Precision.FP16,
        **checkpointing_arguments(checkpointing_kwargs(job, ds_config) if job.grad_ckpt else None),
        eval_strategy=_eval_strategy(job),
        eval_steps=job.eval_steps if job.has_eval else None,
        eval_on_start=job.has_eval and job.eval_on_start,
        torch_compile=job.torch_compile and is_deepcompile(ds_config),  # otherwise `load_model` compiles layers
        tf32=True if job.tf32 and is_torch_tf32_available() else None,  # True is an error on other devices
    )


def _eval_strategy(job: Job) -> str:
    """Returns when Transformers evaluates; the evaluation at the end is dstrain's."""
    if not job.has_eval or (job.eval_strategy is Interval.STEPS and job.eval_steps is None):
        return "no"
    return job.eval_strategy.value


def _warmup(job: Job) -> float:
    """Returns the steps of the warmup; Transformers takes a value below 1 for a share of all steps."""
    if job.warmup_steps is not None:
        return job.warmup_steps
    return job.warmup_ratio if job.warmup_ratio < 1 else 0.999999


def _parallelism(job: Job, num_ranks: int) -> ParallelismConfig | None:
    """Returns accelerate's configuration of the ranks; None without sequence parallelism.

    Raises InvalidConfig for sequence parallelism that this release lacks.
    """
    if job.sp == 1:
        return None
    try:
        # accelerate has it since 1.12; all else works with older ones
        from accelerate.utils import DeepSpeedSequenceParallelConfig  # type: ignore[import-untyped]
    except ImportError as error:
        problem = f"sp: {job.sp} needs accelerate 1.12 or newer, not {accelerate.__version__}"
        raise InvalidConfig(problem, hint="pip install -U accelerate, or sp: 1.") from error
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation=str(job.attn))
    return ParallelismConfig(
        sp_backend="deepspeed",
        sp_size=job.sp,
        sp_handler=handler,
        dp_replicate_size=job.data_parallel(num_ranks),
    )


_OPTIM = {
    Optimizer.ADAMW: "adamw_torch_fused",
    Optimizer.ADAMW_8BIT: "adamw_8bit",
    Optimizer.ADAMW_BF16: "adamw_torch_fused",  # of bf16 master weights
    Optimizer.MUON: "adamw_torch_fused",  # not used: the engine makes its own
}
"""Transformers' name of each optimizer of a job."""


def _from_job(job: Job) -> dict[str, Any]:
    """Returns the settings of the job under their Transformers names."""
    return {
        "output_dir": job.output_dir,
        "per_device_train_batch_size": job.micro_batch,
        "per_device_eval_batch_size": job.eval_micro_batch or job.micro_batch,
        "gradient_accumulation_steps": job.grad_accum,
        "num_train_epochs": job.num_train_epochs,
        "max_steps": job.max_steps if job.max_steps is not None else -1,
        "learning_rate": job.learning_rate,
        "warmup_steps": _warmup(job),
        "lr_scheduler_kwargs": dict(job.lr_scheduler_kwargs),
        "weight_decay": job.weight_decay,
        "adam_beta1": job.adam_beta1,
        "adam_beta2": job.adam_beta2,
        "adam_epsilon": job.adam_epsilon,
        "optim": _OPTIM[job.optimizer],
        "max_grad_norm": job.max_grad_norm,
        "seed": job.seed,
        "data_seed": job.seed,
        "full_determinism": job.full_determinism,
        "logging_steps": job.logging_steps,
        "save_strategy": job.save_strategy.value,
        "save_steps": job.save_steps,
        "save_only_model": job.save_only_model,
        "metric_for_best_model": "loss" if job.keeps_best else None,
        "ignore_data_skip": job.streaming,  # a stream goes on by itself
        "dataloader_num_workers": job.dataloader_num_workers,
    }


def _fixed(*, on_gpu: bool) -> dict[str, Any]:
    """Returns the settings that are the same for every job, each with its reason."""
    return {
        "use_cpu": not on_gpu,  # otherwise accelerate finds no backend for gloo and sees one process
        "report_to": "none",  # Transformers' SwanLab callback fails with SwanLab 0.8; MetricsCallback has sinks
        "logging_nan_inf_filter": False,  # True logs a NaN loss as 0.0 and waits for the device in every micro-batch
        "logging_first_step": True,
        "save_total_limit": None,  # Transformers' rotation does not know which checkpoints are complete
        "average_tokens_across_devices": True,  # the loss is a mean over the tokens of all ranks
        "remove_unused_columns": False,
        "prediction_loss_only": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": on_gpu,
        "log_level": "warning",
    }
