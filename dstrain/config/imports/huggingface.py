"""Keys of Transformers' TrainingArguments, which several tools pass on.

Source: Transformers 5.23 training_args.py: TrainingArguments.
"""

from __future__ import annotations

from typing import Any

from dstrain.config.imports import converters as convert
from dstrain.config.imports.rows import ABSENT, Converted, lacks, needless, read_with, stops, table, to
from dstrain.config.imports.source import Source
from dstrain.config.imports.strategy import ds_config, fsdp


def _max_steps(value: Any, source: Source) -> Any:
    return ABSENT if convert.number(value, source) < 1 else convert.count(value, source)


def _run_name(value: Any, _: Source) -> Any:
    return str(value) if value else ABSENT


def _kwargs(value: Any, _: Source) -> Any:
    return value or ABSENT


def _checkpointing_kwargs(value: Any, _: Source) -> Any:
    return Converted(values={}, note="chosen by the method: non-reentrant, except for adapters under ZeRO-3")


_MONITORING = "`metrics.jsonl` and the sinks have it"
_LOADER = "the ranks' own loader; dataloader_num_workers is its one setting"
_DDP = "DeepSpeed in place of DDP has no such setting"

ROWS = table(
    to("output_dir", "output_dir", default="trainer_output"),
    to("per_device_train_batch_size", "micro_batch", convert.count, default=8),
    to("gradient_accumulation_steps", "grad_accum", convert.count, default=1),
    to("gradient_checkpointing", "grad_ckpt", convert.flag, default=False),
    to("activation_checkpointing", "grad_ckpt", convert.flag),
    to("gradient_checkpointing_kwargs", "", _checkpointing_kwargs),
    to("num_train_epochs", "num_train_epochs", convert.number, default=3.0),
    to("max_steps", "max_steps", _max_steps, default=-1),
    to("learning_rate", "learning_rate", convert.number, default=5e-5),
    to("lr_scheduler_type", "lr_scheduler_type", convert.schedule, default="linear"),
    to("warmup_ratio", "warmup_ratio", convert.number),
    to("warmup_steps", "warmup_ratio", convert.warmup_steps, default=0),
    to("weight_decay", "weight_decay", convert.number, default=0.0),
    to("adam_beta1", "adam_beta1", convert.number, default=0.9),
    to("adam_beta2", "adam_beta2", convert.number, default=0.999),
    to("adam_epsilon", "adam_epsilon", convert.number, default=1e-8),
    to("optim", "optimizer", convert.optimizer, default="adamw_torch"),
    to("max_grad_norm", "max_grad_norm", convert.number, default=1.0),
    to("seed", "seed", default=42),
    to("full_determinism", "full_determinism", convert.flag),
    to("bf16", "precision", convert.precision, default=False),
    read_with("fp16", "bf16"),
    to("logging_steps", "logging_steps", convert.count, default=500),
    to("save_steps", "save_steps", convert.interval, default=500),
    to("save_only_model", "save_only_model", convert.flag),
    to("save_total_limit", "save_total_limit", convert.limit, default=-1),
    to("save_strategy", "save_strategy", convert.strategy("save_strategy"), default="steps"),
    to("eval_strategy", "eval_strategy", convert.strategy("eval_strategy")),
    to("evaluation_strategy", "eval_strategy", convert.strategy("eval_strategy")),
    to("eval_on_start", "eval_on_start", convert.flag),
    to("per_device_eval_batch_size", "eval_micro_batch", convert.count),
    to("lr_scheduler_kwargs", "lr_scheduler_kwargs", _kwargs),
    to("tf32", "tf32", convert.flag_unless_auto),
    to("eval_steps", "eval_steps", convert.eval_steps),
    to("resume_from_checkpoint", "resume", convert.resume),
    to("dataloader_num_workers", "dataloader_num_workers", default=0),
    to("report_to", "monitor.sinks", convert.sinks, default="none"),
    to("run_name", "monitor.name", _run_name),
    to("deepspeed", "plan.ds_config", ds_config),
    to("fsdp", "plan.zero_stage", fsdp),
    needless("fsdp_config fsdp_transformer_layer_cls_to_wrap fsdp_version", "ZeRO takes the place of FSDP"),
    needless(
        """
        do_train do_eval overwrite_output_dir ddp_timeout push_to_hub_token
        """,
        "`dstrain run` trains and evaluates",
    ),
    needless("logging_first_step logging_strategy logging_dir disable_tqdm log_level plot_loss", _MONITORING),
    needless("include_num_input_tokens_seen include_tokens_per_second", _MONITORING),
    needless("eval_delay eval_accumulation_steps", "eval_data and eval_steps decide"),
    needless("remove_unused_columns save_safetensors dataloader_pin_memory label_names", "always as it should be"),
    needless("dataloader_prefetch_factor dataloader_persistent_workers", _LOADER),
    needless("ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_backend ddp", _DDP),
    needless("local_rank torch_empty_cache_steps auto_find_batch_size", "the plan says what fits"),
    lacks("dataloader_drop_last", "the last step of an epoch is filled with samples that are drawn again"),
    lacks("save_on_each_node", "each rank writes its part of a checkpoint, as DeepSpeed does"),
    to("load_best_model_at_end", "load_best", convert.set_flag),
    lacks("metric_for_best_model", "the lowest evaluation loss is best", unless=("loss", "eval_loss")),
    lacks("greater_is_better", "the lowest evaluation loss is best"),
    lacks("push_to_hub hub_model_id hub_strategy hub_private_repo", "upload output/final when the run has ended"),
    to(
        "torch_compile",
        "torch_compile",
        convert.flag_unless_auto,
        note="layers are compiled, not the whole model",
    ),
    lacks(
        "torch_compile_backend torch_compile_mode", "torch_compile: true compiles with inductor", unless=("inductor",)
    ),
    lacks("group_by_length", "packing: true wastes no padding either"),
    to("use_liger_kernel", "liger", convert.flag),
    lacks("liger_kernel_config", "liger: true replaces all parts that Liger knows, except the loss", unless=(None,)),
    lacks("dataloader_shuffle_seed data_seed", "seed shuffles the data, too", unless=()),
    stops("neftune_noise_alpha", "noise in the embeddings", unless=(None, 0)),
    stops("label_smoothing_factor", "another loss", unless=(0, 0.0)),
    stops("optim_target_modules", "GaLore and its like", unless=(None,)),
)
"""The keys with Transformers' defaults."""
