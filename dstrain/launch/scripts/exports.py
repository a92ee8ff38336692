"""Renders a job as a script with Transformers' Trainer alone, which `accelerate launch` starts without dstrain."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from inspect import getsource
from pathlib import Path
from typing import Any

from dstrain.choices import Attention, Interval, LossKernel, LossOn, Method, Optimizer, Precision, SinkName, Task
from dstrain.config.files import config_text
from dstrain.config.resolve_auto import with_bf16_states
from dstrain.config.schema import SCHEMA_KEY
from dstrain.config.templates import render_script, render_yaml
from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.data import best_fit
from dstrain.facts.data.media import named_in
from dstrain.facts.data.rows import entries
from dstrain.facts.ds_config import ZERO, section, zero_stage
from dstrain.job.schema import Job
from dstrain.launch.prepare.inputs import CHECKED_DATA_BYTES, SET_DATA
from dstrain.plan.training_code import needs_reentrant


class ExportEngine(StrEnum):
    """The engine that shards the training of an exported job."""

    DEEPSPEED = "deepspeed"
    """DeepSpeed, with the job's own ds_config.json."""
    FSDP2 = "fsdp2"
    """PyTorch's FSDP2."""
    DDP = "ddp"
    """PyTorch's DDP, which shards nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The files of an export."""

    files: Mapping[str, str]
    """File name → text."""
    notes: tuple[str, ...]
    """Keys of the job that the export lacks, and what to do."""


COMMAND = "accelerate launch --config_file accelerate.yaml train.py"
"""The command that starts the training, in the folder of the files."""
_SAME = (
    *("num_train_epochs", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "eval_on_start"),
    *("max_grad_norm", "seed", "logging_steps", "save_steps", "save_total_limit", "dataloader_num_workers"),
)
"""Keys that Transformers has, too."""
_WRITTEN = frozenset(
    {
        *_SAME,
        *("model", "output_dir", "data", "eval_data", "hostfile", "ds_config", "trust_remote_code", "monitor"),
        *("method", "lora", "precision", "attn", "seq_len", "packing", "loss_on", "micro_batch", "grad_accum"),
        *("loss", "liger", "grad_ckpt", "max_steps", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio"),
        *("warmup_steps", "optimizer", "full_determinism", "tf32", "eval_strategy", "eval_steps", "eval_micro_batch"),
        *("save_strategy", "save_only_model"),
    }
)
"""Keys that the files have, or of which a note tells how they differ there."""
_LEFT_OUT = {
    "data_format": "train.py tells it by the columns of each row",
    "on_bad_row": "train.py stops at an unusable row",
    "hub": "train.py asks the one of Hugging Face",
    "torch_compile": "Transformers' own key compiles the whole model, not its layers",
    "stop_on_nonfinite": "train.py goes on",
    "preflight": "train.py checks nothing before its first step",
    "load_best": "train.py keeps no best checkpoint",
    "early_stopping": "train.py does all steps",
    "resume": "train.py starts anew",
    "samples": "train.py generates no texts",
    "health": "train.py has no such rules",
    "env": "set its variables yourself",
}
"""Keys without which the training is the same, and what is there in their place."""
_DETAILS = frozenset(
    {
        *("dpo", "stopping_strategy", "shuffle_buffer", "muon_learning_rate", "torch_compile_backend"),
        *("early_stopping_threshold", "image_patches"),
    }
)
"""Keys that say nothing without another one, which is refused or left out."""
_MASK_NOTE = (
    "attention over packed rows gets a mask of seq_len × seq_len, which dstrain run does without: it is slower, and "
    "needs more memory; attn: flash_attention_2 needs none"
)
_DTYPES = {Precision.BF16: "bfloat16", Precision.FP16: "float16", Precision.FP32: "float32"}


def export(job: Job, config: Mapping[str, Any], hosts: Hosts, engine: ExportEngine) -> Export:
    """Returns the files of a job for accelerate; `config` is its DeepSpeed configuration.

    Raises InvalidConfig with every key of the job without which a plain Trainer would train something else.
    """
    _require_counterparts(job, engine)
    stage = zero_stage(config) if engine is ExportEngine.DEEPSPEED else None
    values = {
        "engine": engine.value,
        "ranks": hosts.num_slots,
        "nodes": len(hosts.hosts),
        "first_host": hosts.hosts[0].name,
        "zero3": zero_stage(config) == 3,
        "offloads": section(section(config, ZERO), "offload_param").get("device", "none") != "none",
        "mixed_precision": "no" if job.precision is Precision.FP32 else job.precision.value,
    }
    files = {
        "train.py": render_script("train.py.j2", {}),
        "train.json": _json({key: value for key, value in _arguments(job, stage).items() if value is not None}),
        "accelerate.yaml": render_yaml("accelerate.yaml.j2", values),
    }
    if job.packing:
        files["packing.py"] = getsource(best_fit)
    if engine is ExportEngine.DEEPSPEED:
        own = {key: value for key, value in config.items() if key != SCHEMA_KEY}  # the schema is for editors
        files["ds_config.json"] = config_text(with_bf16_states(own, job))
    return Export(files=files, notes=_notes(job, hosts))


def _require_counterparts(job: Job, engine: ExportEngine) -> None:
    """Raises InvalidConfig for what a plain Trainer with that engine does not have."""
    keys = [key for key in _changed(job) if key not in _WRITTEN | _DETAILS | _LEFT_OUT.keys()]
    if job.task is Task.PRETRAIN:
        keys.remove("task")  # texts are trained on whole in any case
    if job.optimizer is Optimizer.MUON or (
        job.optimizer is Optimizer.ADAMW_BF16 and engine is not ExportEngine.DEEPSPEED
    ):
        keys.append("optimizer")
    if job.method is Method.QLORA:
        keys.append("method")
    if job.method is not Method.FULL and job.lora.target_parameters:
        raise InvalidConfig(
            f"{engine} has no counterpart of lora: target_parameters: {_shown(job.lora.target_parameters)}",
            hint="Remove it first, so that experts get no adapters.",
        )
    if keys:
        named = ", ".join(f"{key}: {_shown(getattr(job, key))}" for key in keys)
        raise InvalidConfig(f"{engine} has no counterpart of {named}", hint="Set these keys to their defaults first.")
    if job.loss_on is LossOn.LAST:
        raise InvalidConfig(f"{engine} has no counterpart of loss_on: last", hint="Set loss_on to answer or all.")
    for key, sources in (("data", job.data), ("eval_data", job.eval_data)):
        if sources is not None and not isinstance(sources, str):
            raise InvalidConfig(f"{engine} has no counterpart of several data sets in {key}", hint="Join their files.")
    if job.data is None:
        raise InvalidConfig("data is not set", hint=SET_DATA)
    if _has_media(job.data) or _has_media(job.eval_data):
        raise InvalidConfig(f"{engine} has no counterpart of images or videos in the data")


def _changed(job: Job) -> list[str]:
    """Returns the keys of a job that are not at their defaults."""
    default = Job(model="", output_dir="")
    return [field.name for field in fields(Job) if getattr(job, field.name) != getattr(default, field.name)]


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | int | tuple) else str(value)


def _has_media(data: object) -> bool:
    """Returns whether a row of a data file that is here has images or videos, of the rows that lint reads."""
    rows = entries(Path(data), CHECKED_DATA_BYTES) if isinstance(data, str) and Path(data).is_file() else ()
    return any(not isinstance(sample, InvalidConfig) and named_in(sample.row) for sample in rows)


def _arguments(job: Job, stage: int | None) -> dict[str, Any]:
    """Returns the arguments of train.py and of Transformers; `stage` is the ZeRO stage, None without DeepSpeed."""
    is_reentrant = stage is not None and needs_reentrant(job.method, stage)
    return {
        "model_name_or_path": job.model,
        "train_file": job.data,
        "validation_file": job.eval_data,
        "max_length": job.seq_len,
        "loss_on": job.loss_on.value,
        "packing": job.packing or None,
        "dtype": "float32" if stage is None else _DTYPES[job.precision],
        "attn_implementation": (Attention.SDPA if job.attn is Attention.AUTO else job.attn).value,
        "trust_remote_code": job.trust_remote_code,
        "lora": None if job.method is Method.FULL else _lora(job),
        "swanlab": _swanlab(job),
        **_trainer_arguments(job),
        "gradient_checkpointing": job.grad_ckpt,
        "gradient_checkpointing_kwargs": {"use_reentrant": is_reentrant} if job.grad_ckpt else None,
    }


def _trainer_arguments(job: Job) -> dict[str, Any]:
    """Returns the job's part of Transformers' TrainingArguments."""
    evaluates = _evaluates(job)
    return {
        **{name: getattr(job, name) for name in _SAME},
        "output_dir": Path(job.output_dir).name,
        "per_device_train_batch_size": job.micro_batch,
        "gradient_accumulation_steps": job.grad_accum,
        "max_steps": -1 if job.max_steps is None else job.max_steps,
        "optim": "adamw_8bit" if job.optimizer is Optimizer.ADAMW_8BIT else "adamw_torch_fused",
        "lr_scheduler_type": job.lr_scheduler_type.value,
        "lr_scheduler_kwargs": dict(job.lr_scheduler_kwargs) or None,
        # Transformers 5 takes a number below 1 as a share of all steps
        "warmup_steps": job.warmup_ratio if job.warmup_steps is None else job.warmup_steps,
        "bf16": job.precision is Precision.BF16,
        "fp16": job.precision is Precision.FP16,
        "tf32": job.tf32 or None,
        "full_determinism": job.full_determinism or None,
        "save_only_model": job.save_only_model or None,
        "save_strategy": job.save_strategy.value,
        "eval_strategy": evaluates,
        "eval_steps": job.eval_steps if evaluates == "steps" else None,
        "per_device_eval_batch_size": job.eval_micro_batch or job.micro_batch,
        "report_to": _others(job) or "none",
        "run_name": job.monitor.name if _others(job) else None,
        "use_liger_kernel": job.liger or None,
        "data_seed": job.seed,
        "average_tokens_across_devices": True,
        "use_cpu": job.env.get("DS_ACCELERATOR") == "cpu",
    }


def _lora(job: Job) -> dict[str, Any]:
    """Returns the arguments of peft.LoraConfig."""
    lora = job.lora
    targets = "all-linear" if lora.targets == ("all-linear",) else list(lora.targets)
    values = {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "target_modules": targets}
    if lora.modules_to_save:
        values |= {"modules_to_save": list(lora.modules_to_save), "ensure_weight_tying": True}
    return values


def _swanlab(job: Job) -> dict[str, Any] | None:
    """Returns project, name and mode of a SwanLab run, if given; None if the job has no such sink.

    SwanLab's own callback takes them: the one of Transformers 5.23 asks for the active run before it starts one, which
    SwanLab 0.8 and later answer with an error (integrations/integration_utils.py: SwanLabCallback.setup).
    """
    monitor = job.monitor
    if SinkName.SWANLAB not in monitor.sinks:
        return None
    mode = None if monitor.mode is None else monitor.mode.value
    named = {"project": monitor.project, "experiment_name": monitor.name, "mode": mode}
    return {name: value for name, value in named.items() if value is not None}


def _others(job: Job) -> list[str]:
    """Returns the trackers that Transformers itself reports to."""
    return [sink.value for sink in job.monitor.sinks if sink is not SinkName.SWANLAB]


def _evaluates(job: Job) -> str:
    """Returns Transformers' strategy of evaluation."""
    if job.eval_data is None:
        return "no"
    return "epoch" if job.eval_strategy is Interval.EPOCH else "steps" if job.eval_steps else "no"


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _notes(job: Job, hosts: Hosts) -> tuple[str, ...]:
    many = f"start it on each of the {len(hosts.hosts)} nodes; machine_rank differs from node to node"
    own = f"Liger's own loss takes the place of loss: {job.loss}"
    loss_note = own if job.liger else f"loss: {job.loss} has no counterpart; whole logits are made, which need memory"
    others = _others(job)
    log_in = f"report_to names {', '.join(others)}; log in to them yourself"
    if SinkName.WANDB in others:
        log_in += f", and export WANDB_PROJECT={shlex.quote(job.monitor.project)}"
    left_out = [key for key in _changed(job) if key in _LEFT_OUT]
    if job.env.keys() == {"DS_ACCELERATOR"}:  # use_cpu says the same
        left_out.remove("env")
    is_silent = SinkName.SWANLAB in job.monitor.sinks and job.monitor.mode is None
    notes = {
        many: len(hosts.hosts) > 1,
        "attn: auto is written as sdpa, which every machine has": job.attn is Attention.AUTO,
        loss_note: job.liger or job.loss is not LossKernel.FULL,
        _MASK_NOTE: job.packing and not job.attn.is_flash,
        **{f"{key} is left out: {_LEFT_OUT[key]}": True for key in left_out},
        log_in: bool(others),
        "SwanLab records offline without SWANLAB_API_KEY or a login": is_silent,
    }
    return tuple(note for note, holds in notes.items() if holds)
