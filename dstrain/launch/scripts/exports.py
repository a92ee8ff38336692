"""Renders a job for those who train without dstrain: accelerate, FSDP2, torchrun, and LLaMA-Factory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from inspect import getsource
from typing import Any

from dstrain.choices import (
    Attention,
    DataFormat,
    LossKernel,
    LossOn,
    Method,
    Optimizer,
    Precision,
    Task,
    Thinking,
)
from dstrain.config.resolve_auto import with_bf16_states
from dstrain.config.schema import SCHEMA_KEY
from dstrain.config.templates.files import config_text
from dstrain.config.templates.templates import render_script, render_yaml
from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.data import best_fit
from dstrain.facts.ds_config import ZERO, section, zero_stage
from dstrain.job.schema import Job
from dstrain.launch.scripts.dataset_info import EVALUATION, TRAINING, dataset_info
from dstrain.launch.scripts.exported_media import THEIR_LIMITS, has_media, media_columns, media_notes, media_settings
from dstrain.launch.scripts.trainer_arguments import (
    llamafactory_swanlab,
    swanlab_arguments,
    tracker_notes,
    trainer_arguments,
    without_key,
)
from dstrain.plan.training_code import needs_reentrant


class Target(StrEnum):
    """Who trains the exported job."""

    ACCELERATE = "accelerate"
    """accelerate with DeepSpeed and the job's own ds_config.json."""
    FSDP2 = "fsdp2"
    """accelerate with PyTorch's FSDP2."""
    TORCHRUN = "torchrun"
    """torchrun with PyTorch's DDP."""
    LLAMAFACTORY = "llamafactory"
    """LLaMA-Factory with the job's own ds_config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The files of an export."""

    files: Mapping[str, str]
    """File name → text."""
    command: str
    """What starts the training, in the folder of the files."""
    notes: tuple[str, ...]
    """Keys of the job that the export lacks, and what to do."""


_PLAIN = (
    *("sp", "tp", "ep", "streaming", "tiled_mlp", "activation_offload", "rope_scaling", "chat_template", "thinking"),
    *("task", "grad_ckpt_every_n_layers", "val_split", "columns", "system", "max_samples", "on_long_sample"),
    *("adapter", "freeze", "train_only", "new_tokens"),
    *("max_pixels", "min_pixels", "video_fps", "video_maxlen", "video_max_pixels"),
    *("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"),
)
"""Keys that change the training or its memory, and that Transformers' Trainer alone does not have."""


def export(job: Job, config: Mapping[str, Any], hosts: Hosts, target: Target) -> Export:
    """Returns the files of a job for another tool; `config` is its DeepSpeed configuration.

    Raises InvalidConfig with every key of the job without which the other tool would train something else.
    """
    _require_counterparts(job, target)
    if target is Target.LLAMAFACTORY:
        return _llamafactory(job, config, hosts)
    if target is Target.TORCHRUN:
        return _torchrun(job, hosts)
    return _accelerate(job, config, hosts, is_deepspeed=target is Target.ACCELERATE)


def _require_counterparts(job: Job, target: Target) -> None:
    own = set()
    if target is Target.LLAMAFACTORY and job.thinking is Thinking.OFF:
        own.add("thinking")
    if job.task is Task.PRETRAIN:
        own.add("task")  # texts are trained on whole in any case
    default = Job(model="", output_dir="")
    if target is Target.LLAMAFACTORY:
        own |= {"val_split", "system", "max_samples", "adapter"}
        own |= THEIR_LIMITS.keys()
    keys = [key for key in _PLAIN if getattr(job, key) != getattr(default, key) and key not in own]
    if job.optimizer is Optimizer.MUON or (job.optimizer is Optimizer.ADAMW_BF16 and target in _WITHOUT_DEEPSPEED):
        keys.append("optimizer")
    if job.method is Method.QLORA and target is not Target.LLAMAFACTORY:
        keys.append("method")
    if job.method is not Method.FULL and job.lora.target_parameters:
        raise InvalidConfig(
            f"{target} has no counterpart of lora: target_parameters: {_shown(job.lora.target_parameters)}",
            hint="Remove it first, so that experts get no adapters.",
        )
    if keys:
        named = ", ".join(f"{key}: {_shown(getattr(job, key))}" for key in keys)
        hint = "Export it to llamafactory." if keys == ["method"] else None
        hint = hint or "Set these keys to their defaults first."
        raise InvalidConfig(f"{target} has no counterpart of {named}", hint=hint)
    if job.loss_on is LossOn.LAST and target is not Target.LLAMAFACTORY:
        raise InvalidConfig(f"{target} has no counterpart of loss_on: last", hint="Set loss_on to answer or all.")
    for key, sources in (("data", job.data), ("eval_data", job.eval_data)):
        if sources is not None and not isinstance(sources, str):
            raise InvalidConfig(f"{target} has no counterpart of several data sets in {key}", hint="Join their files.")
    if job.data is None:
        hint = "Set data to a .jsonl, .json, .parquet or .arrow file, or a data set id."
        raise InvalidConfig("data is not set", hint=hint)
    if target is not Target.LLAMAFACTORY and (has_media(job.data) or has_media(job.eval_data)):
        raise InvalidConfig(
            f"{target} has no counterpart of images or videos in the data", hint="Export it to llamafactory."
        )


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | int | tuple) else str(value)


def _accelerate(job: Job, config: Mapping[str, Any], hosts: Hosts, *, is_deepspeed: bool) -> Export:
    command = "accelerate launch --config_file accelerate.yaml train.py"
    values = {
        "deepspeed": is_deepspeed,
        "ranks": hosts.num_slots,
        "nodes": len(hosts.hosts),
        "first_host": hosts.hosts[0].name,
        "zero3": zero_stage(config) == 3,
        "offloads": section(section(config, ZERO), "offload_param").get("device", "none") != "none",
        "mixed_precision": "no" if job.precision is Precision.FP32 else job.precision.value,
    }
    files = _script(job, zero_stage(config) if is_deepspeed else None)
    files["accelerate.yaml"] = render_yaml("accelerate.yaml.j2", values)
    if is_deepspeed:
        files["ds_config.json"] = _config(job, config)
    return Export(files=files, command=command, notes=_notes(job, hosts))


def _config(job: Job, config: Mapping[str, Any]) -> str:
    """Returns a DeepSpeed configuration as strict JSON, without the schema for editors, with the keys of the job."""
    return config_text(with_bf16_states({key: value for key, value in config.items() if key != SCHEMA_KEY}, job))


def _torchrun(job: Job, hosts: Hosts) -> Export:
    slots = hosts.num_slots // len(hosts.hosts)
    rendezvous = f" --nnodes {len(hosts.hosts)} --rdzv_backend c10d --rdzv_endpoint {hosts.hosts[0].name}:29500"
    command = f"torchrun{rendezvous if len(hosts.hosts) > 1 else ''} --nproc_per_node {slots} train.py"
    return Export(files=_script(job, None), command=command, notes=_notes(job, hosts))


def _notes(job: Job, hosts: Hosts, *, names_auto: bool = False) -> tuple[str, ...]:
    many = f"start it on each of the {len(hosts.hosts)} nodes; machine_rank differs from node to node"
    own = f"Liger's own loss takes the place of loss: {job.loss}"
    loss_note = own if job.liger else f"loss: {job.loss} has no counterpart; whole logits are made, which need memory"
    notes = {
        many: len(hosts.hosts) > 1,
        "attn: auto is written as sdpa, which every machine has": job.attn is Attention.AUTO and not names_auto,
        loss_note: job.liger or job.loss is not LossKernel.FULL,
        _MASK_NOTE: job.packing and not job.attn.is_flash and not names_auto,
        "torch_compile is left out: Transformers' own key compiles the whole model, not its layers": job.torch_compile,
        "early_stopping, load_best and samples are left out": job.keeps_best or job.samples is not None,
    }
    told = (note for note, holds in notes.items() if holds)
    return (*told, *tracker_notes(job, for_llamafactory=names_auto))


def _script(job: Job, stage: int | None) -> dict[str, str]:
    """Returns train.py, which is the same for all jobs, its arguments, and for packed rows the module that packs.

    `stage` is DeepSpeed's; None without DeepSpeed.
    """
    lora: dict[str, Any] = {
        "r": job.lora.rank,
        "lora_alpha": job.lora.alpha,
        "lora_dropout": job.lora.dropout,
        "target_modules": _targets(job),
    }
    if job.lora.modules_to_save:
        lora |= {"modules_to_save": list(job.lora.modules_to_save), "ensure_weight_tying": True}
    is_reentrant = stage is not None and needs_reentrant(job.method, stage)
    arguments = {
        "model_name_or_path": job.model,
        "train_file": job.data,
        "validation_file": job.eval_data,
        "max_length": job.seq_len,
        "loss_on": job.loss_on.value,
        "packing": job.packing or None,
        "dtype": "float32" if stage is None else _DTYPES[job.precision],
        "attn_implementation": (Attention.SDPA if job.attn is Attention.AUTO else job.attn).value,
        "trust_remote_code": job.trust_remote_code,
        "lora": None if job.method is Method.FULL else lora,
        "swanlab": swanlab_arguments(job),
        **trainer_arguments(job),
        "gradient_checkpointing": job.grad_ckpt,
        "gradient_checkpointing_kwargs": {"use_reentrant": is_reentrant} if job.grad_ckpt else None,
        "warmup_steps": job.warmup_ratio if job.warmup_steps is None else job.warmup_steps,
        "use_liger_kernel": job.liger or None,
        "data_seed": job.seed,
        "average_tokens_across_devices": True,
        "use_cpu": job.env.get("DS_ACCELERATOR") == "cpu",
    }
    return {
        "train.py": render_script("train.py.j2", {}),
        "train.json": _json({key: value for key, value in arguments.items() if value is not None}),
        **({"packing.py": getsource(best_fit)} if job.packing else {}),
    }


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


_WITHOUT_DEEPSPEED = (Target.FSDP2, Target.TORCHRUN)
_MASK_NOTE = (
    "attention over packed rows gets a mask of seq_len × seq_len, which dstrain run does without: it is slower, and "
    "needs more memory; attn: flash_attention_2 needs none"
)
_DTYPES = {Precision.BF16: "bfloat16", Precision.FP16: "float16", Precision.FP32: "float32"}


def _targets(job: Job) -> Any:
    return "all-linear" if job.lora.targets == ("all-linear",) else list(job.lora.targets)


_ATTENTION = {Attention.FLASH_ATTENTION_3: "fa3", Attention.FLASH_ATTENTION_2: "fa2", Attention.EAGER: "disabled"}


def _llamafactory(job: Job, config: Mapping[str, Any], hosts: Hosts) -> Export:
    """Returns a YAML of LLaMA-Factory, with dataset_info.json, in which it looks up the names of its data."""
    media = {TRAINING: media_columns(job.data), EVALUATION: media_columns(job.eval_data)}
    columns = media[TRAINING] | media[EVALUATION]
    form, data = dataset_info(job, media)
    settings = _llamafactory_settings(job, is_text=form is DataFormat.TEXT) | media_settings(job, columns)
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in settings.items() if value is not None]
    command = "FORCE_TORCHRUN=1 llamafactory-cli train train.yaml"
    if len(hosts.hosts) > 1:
        command = f"NNODES={len(hosts.hosts)} MASTER_ADDR={hosts.hosts[0].name} NODE_RANK=0 {command}"
    own = ("no `template` is written, so LLaMA-Factory takes the model's own; name one if it has it by name",)
    notes = tuple(media_notes(job, columns)) if columns else own
    return Export(
        files={
            "train.yaml": "\n".join([f"# {command}", *lines, ""]),
            "dataset_info.json": _json(data),
            "ds_config.json": _config(job, config),
        },
        command=command,
        notes=(*_notes(job, hosts, names_auto=True), *notes, *without_key(job)),
    )


def _llamafactory_settings(job: Job, *, is_text: bool) -> dict[str, Any]:
    return {
        "model_name_or_path": job.model,
        "trust_remote_code": job.trust_remote_code,
        "stage": "pt" if is_text else "sft",
        "do_train": True,
        "finetuning_type": "full" if job.method is Method.FULL else "lora",
        **_adapter(job),
        "dataset_dir": ".",
        "dataset": TRAINING,
        "eval_dataset": None if job.eval_data is None else EVALUATION,
        "do_eval": True if job.has_eval else None,
        "cutoff_len": job.seq_len,
        "packing": job.packing,
        "neat_packing": job.packing and not is_text,
        "train_on_prompt": job.loss_on is LossOn.ALL,
        "enable_thinking": False if job.thinking is Thinking.OFF else None,
        "flash_attn": "sdpa" if job.attn is Attention.SDPA else _ATTENTION.get(job.attn, "auto"),
        "disable_gradient_checkpointing": not job.grad_ckpt,
        **trainer_arguments(job),
        **({"warmup_ratio": job.warmup_ratio} if job.warmup_steps is None else {"warmup_steps": job.warmup_steps}),
        "val_size": job.val_split,
        "max_samples": job.max_samples,
        "default_system": job.system,
        "mask_history": job.loss_on is LossOn.LAST,
        "enable_liger_kernel": job.liger or None,
        **llamafactory_swanlab(job),
        "deepspeed": "ds_config.json",
    }


def _adapter(job: Job) -> dict[str, Any]:
    if job.method is Method.FULL:
        return {}
    lora = job.lora
    names = "all" if lora.targets == ("all-linear",) else ",".join(lora.targets)
    adapter = {"lora_rank": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "lora_target": names}
    adapter |= {"adapter_name_or_path": job.adapter, "additional_target": ",".join(lora.modules_to_save) or None}
    return adapter | ({"quantization_bit": 4, "quantization_method": "bnb"} if job.method is Method.QLORA else {})
