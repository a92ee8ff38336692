"""Options of a script that trains with Transformers' Trainer or TRL's, and the literals of its DeepSpeed configuration.

Source: Transformers 5.23 training_args.py and examples/pytorch/language-modeling/run_clm.py, TRL's ModelConfig and
SFTConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrain.config.imports import converters as convert
from dstrain.config.imports import huggingface
from dstrain.config.imports.accelerate import ROWS as ACCELERATE
from dstrain.config.imports.environment import LAUNCHERS, RANKS
from dstrain.config.imports.rows import ABSENT, Converted, Unmatched, lacks, needless, read_with, stops, table, to
from dstrain.config.imports.source import Source, Tool


def _method(value: Any, source: Source) -> Any:
    bits = 4 if source.value("load_in_4bit") is True else 8 if source.value("load_in_8bit") is True else None
    return convert.method("lora" if convert.flag(value, source) else "full", bits=bits, source=source)


def _mixed(value: Any, source: Source) -> Any:
    """Returns the precision of a script, which follows accelerate's unless its own options say otherwise."""
    return ABSENT if source.given("bf16") is not ABSENT else value


ROWS = table(
    tuple(ACCELERATE.values()),
    tuple(LAUNCHERS.values()),
    tuple(huggingface.ROWS.values()),
    to("model_name_or_path", "model"),
    to("model", "model"),
    to("base_model", "model"),
    to("trust_remote_code", "trust_remote_code", convert.flag),
    to("dataset_name", "data"),
    to("dataset", "data"),
    to("train_file", "data", convert.file),
    to("validation_file", "eval_data", convert.file),
    to("max_seq_length", "seq_len", convert.count),
    to("max_length", "seq_len", convert.count),
    to("block_size", "seq_len", convert.count),
    to("packing", "packing", convert.flag),
    to("attn_implementation", "attn", convert.attention),
    to("use_peft", "method", _method, default=False),
    read_with("load_in_4bit load_in_8bit", "use_peft"),
    to("lora_r", "lora.rank", convert.count, default=16),
    to("lora_alpha", "lora.alpha", convert.count, default=32),
    to("lora_dropout", "lora.dropout", convert.number, default=0.05),
    to("lora_target_modules", "lora.targets", convert.targets("all-linear")),
    to("mixed_precision", "precision", _mixed),
    needless(
        """
        tokenizer_name config_name use_fast_tokenizer cache_dir overwrite_cache preprocessing_num_workers
        dataset_num_proc dtype torch_dtype low_cpu_mem_usage dataset_config dataset_config_name
        model_revision
        """,
        "read from the model's own files, or chosen by dstrain",
    ),
    lacks(
        """
        dataset_split dataset_text_field max_train_samples max_eval_samples validation_split_percentage
        chat_template_path
        """,
        "choose and rename rows and columns in the file",
        unless=(False,),
    ),
    to("streaming", "streaming", convert.set_flag, note="it needs max_steps"),
    to("lora_target_parameters", "lora.target_parameters", convert.names),
    to("lora_modules_to_save", "lora.modules_to_save", convert.names),
    stops("use_dora use_rslora", "another adapter", unless=(False, None)),
)
"""Options of launchers, of Transformers and of its usual scripts."""

TOOL = Tool(name="trainer", title="a Trainer script", rows=ROWS, environment=RANKS)


def _of_section(key: str) -> Any:
    """Returns the converter of `bf16` or `fp16`."""

    def converted(value: Any, _: Source) -> Any:
        return key if isinstance(value, Mapping) and value.get("enabled") is True else ABSENT

    return converted


def _betas(value: Any, _: Source) -> Any:
    if not (isinstance(value, list) and len(value) == 2):
        return ABSENT
    return Converted(values={"adam_beta1": value[0], "adam_beta2": value[1]})


def _optimizer(value: Any, source: Source) -> Any:
    name = str(value).lower()
    if name not in ("adam", "adamw"):
        raise Unmatched(f"`{value}` stays in ds_config.json, and dstrain's figures are for AdamW")
    return ABSENT


DEEPSPEED_ROWS = table(
    to("train_micro_batch_size_per_gpu", "micro_batch", convert.number_unless_auto),
    to("gradient_accumulation_steps", "grad_accum", convert.number_unless_auto),
    to("gradient_clipping", "max_grad_norm", convert.number_unless_auto),
    to("bf16", "precision", _of_section("bf16")),
    to("fp16", "precision", _of_section("fp16")),
    to("optimizer.type", "", _optimizer),
    to("optimizer.params.lr", "learning_rate", convert.number_unless_auto),
    to("optimizer.params.betas", "", _betas),
    to("optimizer.params.eps", "adam_epsilon", convert.number_unless_auto),
    to("optimizer.params.weight_decay", "weight_decay", convert.number_unless_auto),
)
"""The literals of a DeepSpeed configuration that belong into job.yaml; every other key stays where it is."""

DEEPSPEED = Tool(name="deepspeed", title="DeepSpeed", rows=DEEPSPEED_ROWS, sections=("optimizer",))
