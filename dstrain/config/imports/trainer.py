"""Options of a script that trains with Transformers' Trainer or TRL's, and the literals of its DeepSpeed configuration.

Source: Transformers 5.23 training_args.py and examples/pytorch/language-modeling/run_clm.py, TRL's ModelConfig,
SFTConfig and DPOConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrain.choices import Task
from dstrain.config.imports import converters as convert
from dstrain.config.imports import datasets, huggingface, preferences
from dstrain.config.imports.accelerate import ROWS as ACCELERATE
from dstrain.config.imports.environment import LAUNCHERS
from dstrain.config.imports.rows import (
    ABSENT,
    READ,
    Convert,
    Converted,
    OtherTraining,
    Unmatched,
    lacks,
    needless,
    read_with,
    stops,
    table,
    to,
)
from dstrain.config.imports.source import Source, Tool
from dstrain.job.model_changes import ALL_LINEAR

_SWITCHES = ("use_peft", "use_lora", "lora_enable", "enable_lora")
_FOUR_BITS = ("load_in_4bit", "use_qlora", "q_lora", "qlora")
_RANKS = ("lora_r", "lora_rank")


def _is_on(source: Source, *keys: str) -> bool:
    return any(str(source.value(key)).lower() == "true" for key in keys)


def is_adapter(source: Source) -> bool:
    """Returns whether a script trains an adapter: by a switch, or by a rank without any switch."""
    if _is_on(source, *_SWITCHES, *_FOUR_BITS[1:]):
        return True
    has_switch = any(source.given(key) is not ABSENT for key in _SWITCHES)
    return not has_switch and any(source.given(key) is not ABSENT for key in _RANKS)


def _is_trl(source: Source) -> bool:
    """Returns whether an adapter has the options, and so the defaults, of TRL."""
    return _is_on(source, "use_peft") and source.given("lora_rank") is ABSENT


def method(_: Any, source: Source) -> Any:
    """Returns the method. Raises OtherTraining for an adapter whose size stands in the code of the script."""
    bits = source.value("bits") or (4 if _is_on(source, *_FOUR_BITS) else 8 if _is_on(source, "load_in_8bit") else None)
    if not is_adapter(source):
        if preferences.name_says(source, preferences.ADAPTERS):
            raise OtherTraining(f"its name says that it trains an adapter: {_SIZE}")
        return convert.method("full", bits=bits, source=source)
    has_rank = any(source.value(key) not in (None, ABSENT) for key in _RANKS)
    if not _is_trl(source) and not (has_rank and source.value("lora_alpha") is not None):
        raise OtherTraining(f"an adapter: {_SIZE}")
    return convert.method("lora", bits=bits, source=source)


_SIZE = "its size is in the code of the script; add --lora_r N --lora_alpha N to the command"


def rank(value: Any, source: Source) -> Any:
    """Returns the rank of an adapter, and the method, which it asks for where no switch does."""
    if value is None:
        return 16 if _is_trl(source) else ABSENT
    found = {"lora.rank": convert.count(value, source)}
    return Converted(values=found | ({"method": method(None, source)} if is_adapter(source) else {}))


def _alpha(value: Any, source: Source) -> Any:
    if value is None:
        return 32 if _is_trl(source) else ABSENT
    return convert.count(value, source)


def layers(value: Any, source: Source) -> Any:
    """Returns the layers that have an adapter; without a value the choice of TRL, or of the code of the script."""
    if value is not None:
        given = convert.names(value, source)
        return [ALL_LINEAR] if given in (["all"], ["all-linear"]) else convert.targets("all-linear")(value, source)
    if not is_adapter(source) or any(source.given(key) is not ABSENT for key in ("target_modules", "lora_target")):
        return ABSENT
    if _is_trl(source):
        note = "no layers are named: those that PEFT takes for most families are written"
        return Converted(values={"lora.targets": ["q_proj", "v_proj"]}, note=note)
    note = "the code of the script names the layers of the adapter; all linear layers are written"
    return Converted(values={"lora.targets": [ALL_LINEAR]}, note=note)


def _named(_: Any, source: Source) -> Any:
    """Returns the task that the names of a script and of its folders say. Raises OtherTraining for another one."""
    word = preferences.named_task(source)
    if word in (None, "sft"):
        return READ
    note = f"its name says `{word}`"
    if word == "pt":
        values = {"loss_on": "all", "data_format": "text"}
        return Converted(values=values, note=f"{note}: the loss is on every token of plain text")
    found = preferences.task(word, source)
    return Converted(values=found.values, note="; ".join(filter(None, (note, found.note))))


def _preference(convert_: Convert) -> Convert:
    """Returns a converter of a key of training on preferences, which is none of supervised training."""

    def converted(value: Any, source: Source) -> Any:
        if preferences.preference_task(source) is None and value is not None:
            raise OtherTraining(f"`{value}`: it is for training on preferences, and no name here says which")
        return convert_(value, source)

    return converted


def _sft_weight(value: Any, source: Source) -> Any:
    return ABSENT if value is None else convert.number(value, source)


def _loss_type(value: Any, source: Source) -> Any:
    if value in ("nll", "causal_lm") and preferences.preference_task(source) is None:
        return READ
    return _preference(preferences.of_dpo(preferences.dpo_loss))(value, source)


def _mixed(value: Any, source: Source) -> Any:
    """Returns the precision of a script, which follows accelerate's unless its own options say otherwise."""
    return ABSENT if source.given("bf16") is not ABSENT else value


def _bf16(value: Any, source: Source) -> Any:
    is_elsewhere = all(source.given(key) is ABSENT for key in ("bf16", "fp16"))
    return (
        ABSENT if is_elsewhere and source.given("mixed_precision") is not ABSENT else convert.precision(value, source)
    )


ROWS = table(
    tuple(ACCELERATE.values()),
    tuple(LAUNCHERS.values()),
    tuple(huggingface.ROWS.values()),
    to("model_name_or_path", "model"),
    to("model", "model"),
    to("base_model", "model"),
    to("trust_remote_code", "trust_remote_code", convert.flag),
    to("dataset_name", "data", datasets.on_hub),
    read_with(
        "dataset_config dataset_config_name dataset_train_split dataset_train_name dataset_split", "dataset_name"
    ),
    to("dataset", "data"),
    to("train_file", "data", convert.file),
    to("validation_file", "eval_data", convert.file),
    to("max_seq_length", "seq_len", convert.count),
    to("max_length", "seq_len", convert.count),
    to("block_size", "seq_len", convert.count),
    to("packing", "packing", convert.flag),
    to("attn_implementation", "attn", convert.attention),
    to("use_peft", "method", method, default=False),
    read_with("load_in_4bit load_in_8bit", "use_peft"),
    to("lora_r", "lora.rank", rank, default=None),
    to("lora_alpha", "lora.alpha", _alpha, default=None),
    to("lora_dropout", "lora.dropout", convert.number, default=0.05),
    to("lora_target_modules", "lora.targets", layers, default=None),
    to("mixed_precision", "precision", _mixed),
    to("bf16", "precision", _bf16, default=False),
    needless(
        """
        tokenizer_name config_name use_fast_tokenizer cache_dir overwrite_cache preprocessing_num_workers
        dataset_num_proc dtype torch_dtype low_cpu_mem_usage model_revision
        """,
        "read from the model's own files, or chosen by dstrain",
    ),
    lacks(
        """
        dataset_text_field max_train_samples max_eval_samples validation_split_percentage
        chat_template_path
        """,
        "choose and rename rows and columns in the file",
        unless=(False,),
    ),
    to("streaming", "streaming", convert.set_flag, note="it needs max_steps"),
    to("lora_target_parameters", "lora.target_parameters", convert.names),
    to("lora_modules_to_save", "lora.modules_to_save", convert.names),
    stops("use_dora use_rslora", "another adapter", unless=(False, None)),
    to("script_name", "", _named),
    to("beta", "", _preference(preferences.of_task("beta", Task.DPO, Task.KTO))),
    to("desirable_weight", "", _preference(preferences.of_task("desirable_weight", Task.KTO))),
    to("undesirable_weight", "", _preference(preferences.of_task("undesirable_weight", Task.KTO))),
    to("center_rewards_coefficient", "", preferences.of_task("center_rewards_coefficient", Task.REWARD)),
    to("loss_type", "dpo.loss_type", _loss_type),
    to("rpo_alpha", "dpo.sft_weight", preferences.of_dpo(_sft_weight)),
    stops("label_smoothing ld_alpha loss_weights f_divergence_type", "another loss", unless=(0, 0.0, None)),
    stops("ref_model_init_kwargs ref_model reference_free sync_ref_model", "another reference", unless=(False, None)),
)
"""Options of launchers, of Transformers and of its usual scripts."""


def _of_section(key: str) -> Any:
    """Returns the converter of `bf16` or `fp16`."""

    def converted(value: Any, _: Source) -> Any:
        return key if isinstance(value, Mapping) and value.get("enabled") is True else READ

    return converted


def _betas(value: Any, _: Source) -> Any:
    if not (isinstance(value, list) and len(value) == 2):
        return ABSENT
    return Converted(values={"adam_beta1": value[0], "adam_beta2": value[1]})


def _optimizer(value: Any, source: Source) -> Any:
    name = str(value).lower()
    if name not in ("adam", "adamw"):
        raise Unmatched(f"`{value}` stays in ds_config.json, and dstrain's figures are for AdamW")
    return READ


DEEPSPEED_ROWS = table(
    to("train_micro_batch_size_per_gpu", "micro_batch", convert.number_unless_auto),
    to("gradient_accumulation_steps", "grad_accum", convert.number_unless_auto),
    to("gradient_clipping", "max_grad_norm", convert.number_unless_auto),
    to("bf16", "precision", _of_section("bf16")),
    to("fp16", "precision", _of_section("fp16")),
    to("optimizer.type", "", _optimizer),
    to("scheduler.params.warmup_num_steps", "warmup_steps", convert.number_unless_auto),
    to("scheduler.params.warmup_max_lr", "learning_rate", convert.number_unless_auto),
    to(
        "scheduler.params.total_num_steps",
        "max_steps",
        convert.number_unless_auto,
        note="the run has the length of its schedule, as the Trainer asks for",
    ),
    to("optimizer.params.lr", "learning_rate", convert.number_unless_auto),
    to("optimizer.params.betas", "", _betas),
    to("optimizer.params.eps", "adam_epsilon", convert.number_unless_auto),
    to("optimizer.params.weight_decay", "weight_decay", convert.number_unless_auto),
)
"""The literals of a DeepSpeed configuration that belong into job.yaml; every other key stays where it is."""

DEEPSPEED = Tool(name="deepspeed", title="DeepSpeed", rows=DEEPSPEED_ROWS, sections=("optimizer",))
