"""ms-swift's keys, which are options of `swift sft` and `swift pt`. Source: ms-swift 4.4, swift/arguments/*.py and
swift/trainers/arguments.py."""

from __future__ import annotations

import re
from typing import Any

from dstrain.choices import Task
from dstrain.config.imports import converters as convert
from dstrain.config.imports import datasets, huggingface, preferences
from dstrain.config.imports.environment import RANKS
from dstrain.config.imports.rows import (
    ABSENT,
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
from dstrain.config.imports.strategy import fsdp

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_LEARNING_RATE = {"full": 1e-5}
_ADAPTER_LEARNING_RATE = 1e-4
_SAMPLES_PER_STEP = 16
"""Samples of a step from which ms-swift computes an absent gradient_accumulation_steps."""


def _method(value: Any, source: Source) -> Any:
    bits = source.value("quant_bits") if source.value("quant_method") in (None, "bnb") else "other than bitsandbytes'"
    return convert.method(str(value), bits=bits, source=source)


def _learning_rate(value: Any, source: Source) -> Any:
    if value is None:
        return _LEARNING_RATE.get(str(source.value("tuner_type")), _ADAPTER_LEARNING_RATE)
    return convert.number(value, source)


def _accumulation(value: Any, source: Source) -> Any:
    if value is None:
        return Converted(values={"plan.global_batch": _SAMPLES_PER_STEP})
    return convert.count(value, source)


def _length(value: Any, source: Source) -> Any:
    if value is None:
        raise Unmatched("without it ms-swift takes rows as long as the model can; set seq_len to your longest sample")
    return convert.count(value, source)


_LOSS_ON = {"default": "answer", "last_round": "last", "all": "all"}
_EMPTY_THINK = "ignore_empty_think"


def _loss_scale(value: Any, _: Source) -> Any:
    parts = str(value).split("+")
    base = next((part for part in parts if part in _LOSS_ON), "default")
    if others := set(parts) - {base, _EMPTY_THINK}:
        raise Unmatched(f"`{'+'.join(sorted(others))}`: the loss is on every answer, each token with weight 1")
    note = "an empty block of thoughts that the template writes carries loss; `thinking: off` moves it into the prompt"
    return Converted(values={"loss_on": _LOSS_ON[base]}, note=note if _EMPTY_THINK in parts else "")


def _hub(value: Any, source: Source) -> str:
    return "hf" if convert.flag(value, source) else "modelscope"


def _pixels(value: Any, source: Source) -> int:
    """Returns the pixels of an image or a frame of so many tokens of Qwen3-VL, of 32 × 32 pixels each."""
    return convert.count(value, source) * 32**2


def _frozen(_: Any, source: Source) -> Any:
    """Returns the patterns of frozen parameters, of which ms-swift has prefixes and one regular expression."""
    prefixes, pattern = source.value("freeze_parameters") or [], source.value("freeze_parameters_regex")
    patterns = [f"^{re.escape(prefix)}" for prefix in convert.names(prefixes, source)]
    return [*patterns, *([str(pattern)] if pattern else [])] or ABSENT


def _sft_weight(value: Any, source: Source) -> Any:
    note = "the mean per token of each answer; ms-swift's is over all tokens of a micro-batch"
    return ABSENT if value is None else Converted(values={"dpo.sft_weight": convert.number(value, source)}, note=note)


def _loss(value: Any, source: Source) -> Any:
    if preferences.is_dpo(source):
        return preferences.dpo_loss(value, source)
    if value == "kto" and preferences.preference_task(source) is Task.KTO:
        return ABSENT
    if value not in ("causal_lm", None):
        raise OtherTraining("not a causal language model's loss")
    return ABSENT


ROWS = table(
    tuple(huggingface.ROWS.values()),
    to("model", "model"),
    to("dataset", "data", datasets.swift("data")),
    to("val_dataset", "eval_data", datasets.swift("eval_data")),
    to("split_dataset_ratio", "val_split", convert.split),
    to("use_hf", "hub", _hub, default=False),
    to("tuner_type", "method", _method, default="lora"),
    to("train_type", "method", _method, note="`tuner_type` since ms-swift 4"),
    to("sft_type", "method", _method, note="`tuner_type` since ms-swift 4"),
    read_with("quant_bits quant_method", "tuner_type"),
    needless("bnb_4bit_compute_dtype", "QLoRA computes in precision"),
    to("router_aux_loss_coef", "router_aux_loss_coef", convert.number),
    to("lora_rank", "lora.rank", convert.count, default=8),
    to("lora_alpha", "lora.alpha", convert.count, default=32),
    to("lora_dropout", "lora.dropout", convert.number, default=0.05),
    to("target_modules", "lora.targets", convert.names, default="all-linear"),
    to("torch_dtype", "precision", convert.one_of(_DTYPES, "bf16 is written")),
    to("bf16", "precision", convert.always("bf16")),
    to("fp16", "precision", convert.always("fp16")),
    to("attn_impl", "attn", convert.attention),
    to("max_length", "seq_len", _length, default=None),
    to("truncation_strategy", "on_long_sample", convert.drops, default="delete"),
    to("packing", "packing", convert.flag, default=False),
    to("loss_scale", "loss_on", _loss_scale, default="default"),
    to("enable_thinking", "thinking", convert.thinking),
    to("per_device_train_batch_size", "micro_batch", convert.count, default=1),
    to("gradient_accumulation_steps", "grad_accum", _accumulation, default=None),
    to("gradient_checkpointing", "grad_ckpt", convert.flag, default=True),
    to("learning_rate", "learning_rate", _learning_rate, default=None),
    to("lr_scheduler_type", "lr_scheduler_type", convert.schedule, default="cosine"),
    to("weight_decay", "weight_decay", convert.number, default=0.1),
    to("adam_beta2", "adam_beta2", convert.number, default=0.95),
    to("logging_steps", "logging_steps", convert.count, default=5),
    to("max_epochs", "num_train_epochs", convert.number),
    to("dataloader_num_workers", "dataloader_num_workers", default=1),
    to("report_to", "monitor.sinks", convert.sinks, default="tensorboard"),
    to("swanlab_project", "monitor.project"),
    to("swanlab_exp_name", "monitor.name"),
    to(
        "swanlab_mode",
        "monitor.mode",
        convert.one_of({"cloud": "online", "local": "local"}, "its modes are cloud and local"),
    ),
    to("sequence_parallel_size", "sp", convert.count),
    to("deepspeed_autotp_size", "tp", convert.count),
    to("fsdp", "plan.zero_stage", fsdp),
    to("rope_scaling", "", convert.rope_scaling),
    needless(
        """
        dataset_num_proc load_from_cache_file lazy_tokenize download_mode dataset_shuffle
        train_dataloader_shuffle packing_num_proc
        """,
        "dstrain tokenizes with all cores, keeps a cache, and shuffles",
    ),
    needless("padding_free", "`packing: true` has no padding; without it padding is left out of attention"),
    needless(
        """
        add_version create_checkpoint_symlink check_model ignore_args_error load_args use_logits_to_keep
        acc_strategy safe_serialization max_shard_size experts_impl
        """,
        "`dstrain run` has its own run directory and checks",
    ),
    needless("model_type template template_backend use_chat_template", "read from the model's own files"),
    needless("model_author model_name", "it is for ms-swift's data set of self-cognition"),
    needless("bnb_4bit_quant_type bnb_4bit_use_double_quant", "QLoRA is nf4 with double quantization"),
    needless("max_new_tokens temperature top_k top_p stop_words", "it is for inference"),
    to("freeze_vit", "freeze_vision_tower", convert.flag),
    to("freeze_aligner", "freeze_multi_modal_projector", convert.flag),
    to("freeze_llm", "freeze_language_model", convert.flag),
    to("max_pixels", "max_pixels", convert.count),
    needless("vit_gradient_checkpointing", "grad_ckpt recomputes the tower too"),
    lacks("zero_hpz_partition_size", "write it into ds_config.json", unless=()),
    lacks("data_seed", "seed shuffles the data, too", unless=(42,)),
    to("system", "system"),
    to("streaming", "streaming", convert.set_flag, note="it needs max_steps"),
    to("shuffle_buffer_size", "shuffle_buffer", convert.of_streaming),
    lacks("interleave_prob stopping_strategy", "give each data set of `data` a weight", unless=()),
    lacks("cached_dataset cached_val_dataset", "tokens of ms-swift; name the text as data", unless=()),
    lacks("columns", "rename the columns in the file", unless=()),
    lacks(
        """
        custom_dataset_info custom_register_path external_plugins strict
        """,
        "code and tables of ms-swift are not read",
        unless=(False,),
    ),
    lacks("agent_template response_prefix", "the model's own chat template is used", unless=()),
    lacks("add_non_thinking_prefix", "the model's own chat template is used", unless=(True,)),
    lacks("preserve_thinking", "thinking: all keeps them"),
    lacks(
        """
        max_model_len eval_use_evalscope eval_dataset eval_dataset_args eval_limit
        predict_with_generate
        """,
        "not in a job",
        unless=(False,),
    ),
    to("early_stop_interval", "early_stopping", convert.optional_count),
    lacks("callbacks", "not in a job", unless=()),
    lacks("new_special_tokens", "add the tokens to the saved model first", unless=()),
    stops(
        """
        task_type num_labels problem_type
        """,
        "not a causal language model's loss",
        unless=("causal_lm", None),
    ),
    to("rlhf_type", "", preferences.task),
    to("beta", "", preferences.of_task("beta", Task.DPO, Task.KTO)),
    to("desirable_weight", "", preferences.of_task("desirable_weight", Task.KTO)),
    to("undesirable_weight", "", preferences.of_task("undesirable_weight", Task.KTO)),
    to("center_rewards_coefficient", "", preferences.of_task("center_rewards_coefficient", Task.REWARD)),
    to("loss_type", "dpo.loss_type", _loss),
    to("rpo_alpha", "dpo.sft_weight", preferences.of_dpo(_sft_weight)),
    stops("label_smoothing ld_alpha loss_weights", "another loss of preferences", unless=(0, 0.0, None)),
    stops("ref_model ref_adapters", "the reference is another model than the one before training", unless=(None,)),
    to("adapters", "adapter", convert.adapter),
    to("freeze_parameters", "freeze", _frozen),
    to("freeze_parameters_regex", "freeze", _frozen),
    to("target_parameters", "lora.target_parameters", convert.names),
    to("modules_to_save", "lora.modules_to_save", convert.names),
    stops("resume_only_model", "a checkpoint of ms-swift: name its weights as `model` or `adapter`"),
    stops(
        """
        freeze_parameters_ratio trainable_parameters trainable_parameters_regex target_regex
        """,
        "other weights are trained",
        unless=(False, 0, 0.0),
    ),
    stops("use_dora use_rslora", "another adapter"),
    stops("lorap_lr_ratio init_weights lora_bias", "another adapter", unless=(False, None, "none", "true", True)),
    stops(
        """
        use_galore galore_quantization galore_optim_per_parameter lisa_activated_layers
        llamapro_num_new_blocks reft_intervention_type optimizer optim_args vit_lr aligner_lr
        """,
        "another optimizer",
        unless=(False, 0),
    ),
    stops("enable_dft_loss enable_channel_loss", "another loss"),
    stops("tuner_backend", "unsloth", unless=("peft",)),
)
"""Its own keys, and those of Transformers, which it passes on."""

_TOKEN = "a token is counted as 32 × 32 pixels, as in Qwen3-VL; in Qwen2.5-VL it has 28 × 28"
_MEDIA = table(
    to("MAX_PIXELS", "max_pixels", convert.count),
    to("IMAGE_MAX_TOKEN_NUM", "max_pixels", _pixels, note=_TOKEN),
    to("VIDEO_MAX_PIXELS", "video_max_pixels", convert.count),
    to("VIDEO_MAX_TOKEN_NUM", "video_max_pixels", _pixels, note=_TOKEN),
    to("FPS", "video_fps", convert.number),
    to("FPS_MAX_FRAMES", "video_maxlen", convert.count),
)
"""Variables that its templates read, for qwen-vl-utils. They have no defaults of ms-swift's own: those of qwen-vl-utils
are the limits of the models' processors. Source: ms-swift 4.4 swift/model/models/qwen.py: patch_qwen_vl_utils."""

TOOL = Tool(name="swift", title="ms-swift", rows=ROWS, environment={**RANKS, **_MEDIA})
