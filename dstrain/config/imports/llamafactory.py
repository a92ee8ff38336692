"""LLaMA-Factory's keys. Source: LLaMA-Factory of August 2026, hparams/*.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dstrain.choices import Task
from dstrain.config.imports import converters as convert
from dstrain.config.imports import datasets, huggingface, preferences
from dstrain.config.imports.environment import RANKS
from dstrain.config.imports.rows import (
    ABSENT,
    READ,
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


def _stage(value: Any, source: Source) -> Any:
    if value == "pt":
        return Converted(values={"loss_on": "all", "data_format": "text"})
    return ABSENT if value == "sft" else preferences.task(value, source)


def _sft_weight(value: Any, source: Source) -> Any:
    preferences.zero_for(Task.KTO)(value, source)
    return preferences.of_task("sft_weight", Task.DPO)(value, source)


def _method(value: Any, source: Source) -> Any:
    if (
        value == "lora"
        and source.value("quantization_bit") == 4
        and source.value("quantization_method", "bnb") != "bnb"
    ):
        raise OtherTraining(f"`{source.value('quantization_method')}`: dstrain quantizes with bitsandbytes")
    return convert.method(str(value), bits=source.value("quantization_bit"), source=source)


def _precision(value: Any, source: Source) -> Any:
    """Source: model/adapter.py: init_adapter, which casts what trains to fp32, whatever computes."""
    halves = any(source.value(key) not in (None, False, "false") for key in ("bf16", "fp16", "pure_bf16"))
    if halves or source.value("finetuning_type", "lora") in ("lora", "qlora"):
        return convert.precision(value, source)
    note = (
        "neither bf16 nor fp16 is on, so LLaMA-Factory trains all weights in fp32, as this job does; `precision: bf16`"
        " halves activations and what GPUs exchange, and computes faster"
    )
    return Converted(values={"precision": "fp32"}, note=note)


def _resized(value: Any, source: Source) -> Any:
    if not convert.flag(value, source) or source.given("add_tokens") is not ABSENT:
        return READ
    raise Unmatched("it adds rows for tokens that the checkpoint lacks: name these in new_tokens")


def _alpha(value: Any, source: Source) -> Any:
    return value if value is not None else 2 * convert.count(source.value("lora_rank"), source)


def _neat_packing(value: Any, source: Source) -> Any:
    return convert.flag(value, source) or convert.flag(source.value("packing", False), source)


def _packing(value: Any, source: Source) -> Any:
    if not convert.flag(value, source) or source.value("neat_packing") is True:
        return READ
    note = "`packing` lets samples of a row see each other; dstrain keeps them apart, as `neat_packing` does"
    return Converted(values={"packing": True}, note=note)


def _template(value: Any, _: Source) -> Any:
    note = f"the model's own chat template is used, not LLaMA-Factory's `{value}`; chat_template takes another one"
    return Converted(values={}, note=note)


def _pixels(value: Any, source: Source) -> Any:
    return READ if convert.count(value, source) == NO_LIMIT else value


def _least_pixels(value: Any, source: Source) -> Any:
    return READ if convert.count(value, source) == 1 else value


def _sinks(value: Any, source: Source) -> Any:
    """Returns the sinks of `report_to`, and SwanLab, which has a switch of its own."""
    converted = convert.sinks(value, source)
    if str(source.value("use_swanlab")).lower() != "true":
        return converted
    names = [*converted.values["monitor.sinks"], "swanlab"]
    return replace(converted, values={"monitor.sinks": list(dict.fromkeys(names))})


def _history(value: Any, source: Source) -> Any:
    """Returns that the last answer is learned; LLaMA-Factory then drops the thoughts of earlier ones, too."""
    if not convert.flag(value, source):
        return ABSENT
    keeps = convert.flag(source.value("preserve_thinking", False), source)
    thinks = convert.flag(source.value("enable_thinking", True), source)
    return Converted(values={"loss_on": "last"} | ({"thinking": "last"} if thinks and not keeps else {}))


NO_LIMIT = 2**63 - 1
"""As LLaMA-Factory itself leaves the size of an image to the processor. Source: data/mm_plugin.py."""

ROWS = table(
    tuple(huggingface.ROWS.values()),
    to("model_name_or_path", "model"),
    to("trust_remote_code", "trust_remote_code", convert.flag, default=False),
    to("stage", "", _stage, default="sft"),
    to("dataset", "data", datasets.llamafactory("data")),
    read_with("dataset_dir", "dataset"),
    to("eval_dataset", "eval_data", datasets.llamafactory("eval_data")),
    to("val_size", "val_split", convert.split),
    to("finetuning_type", "method", _method, default="lora"),
    read_with("quantization_bit", "finetuning_type"),
    read_with("quantization_method", "quantization_bit"),
    to("bf16", "precision", _precision, default=False),
    to("lora_rank", "lora.rank", convert.count, default=8),
    to("lora_alpha", "lora.alpha", _alpha, default=None),
    to("lora_dropout", "lora.dropout", convert.number, default=0.0),
    to("lora_target", "lora.targets", convert.targets("all"), default="all"),
    to("moe_aux_loss_coef", "router_aux_loss_coef", convert.number),
    to("cutoff_len", "seq_len", convert.count, default=2048),
    to("neat_packing", "packing", _neat_packing, default=False),
    to("packing", "packing", _packing),
    to("train_on_prompt", "loss_on", convert.always("all")),
    to("template", "", _template),
    to("enable_thinking", "thinking", convert.thinking),
    to("enable_liger_kernel", "liger", convert.flag),
    to("flash_attn", "attn", convert.attention, default="auto"),
    to("rope_scaling", "", convert.rope_scaling),
    to("disable_gradient_checkpointing", "grad_ckpt", convert.opposite, default=False),
    needless("gradient_checkpointing", "LLaMA-Factory recomputes unless disable_gradient_checkpointing is on"),
    to(
        "pure_bf16",
        "precision",
        convert.always("bf16"),
        note="beside `adamw` without DeepSpeed, `adamw_bf16` too",
    ),
    to("report_to", "monitor.sinks", _sinks, default="none"),
    to("use_swanlab", "", convert.always(READ)),
    to("swanlab_project", "monitor.project"),
    to("swanlab_run_name", "monitor.name"),
    to("swanlab_mode", "monitor.mode", convert.swanlab_mode),
    needless(
        """
        overwrite_cache tokenized_path data_shared_file_system preprocessing_batch_size
        """,
        "dstrain's cache of tokens is made anew when data or settings change",
    ),
    needless("preprocessing_num_workers", "dstrain chooses the processes that tokenize"),
    needless("cache_dir model_revision use_fast_tokenizer low_cpu_mem_usage", "set HF_HOME for the place of downloads"),
    needless(
        """
        use_kv_cache infer_backend infer_dtype print_param_status predict_with_generate do_predict do_sample
        max_new_tokens temperature top_p
        """,
        "it is for inference",
    ),
    needless("use_reentrant_gc kt_cpu_activation ignore_pad_token_for_loss", "as it must be"),
    needless(
        """
        compute_accuracy include_effective_tokens_per_second ray_run_name ray_storage_path ray_num_workers
        resources_per_worker placement_strategy use_v1_kernels
        """,
        "`dstrain run` starts and watches the ranks",
    ),
    needless("double_quantization quantization_type", "QLoRA is nf4 with double quantization"),
    to("max_samples", "max_samples", convert.count),
    lacks("preserve_thinking", "thinking: all keeps them"),
    to("mask_history", "loss_on", _history),
    to("default_system", "system"),
    lacks("tool_format", "the model's own chat template is used", unless=()),
    to("freeze_vision_tower", "freeze_vision_tower", convert.flag),
    to("freeze_multi_modal_projector", "freeze_multi_modal_projector", convert.flag),
    to("freeze_language_model", "freeze_language_model", convert.flag),
    to("image_max_pixels", "max_pixels", _pixels),
    to("image_min_pixels", "min_pixels", _least_pixels),
    to("video_max_pixels", "video_max_pixels", _pixels),
    to("video_fps", "video_fps", convert.number),
    to("video_maxlen", "video_maxlen", convert.count),
    lacks("video_min_pixels", "the model's processor has its own", unless=()),
    needless("audio_sampling_rate", "audios are resampled to the rate of the model's processor"),
    lacks("use_audio_in_video", "videos train without their sound"),
    to("media_dir", "", datasets.media_dir),
    lacks(
        """
        use_unsloth use_unsloth_gc upcast_layernorm upcast_lmhead_output
        """,
        "loss: fused spares the logits",
    ),
    to("early_stopping_steps", "early_stopping", convert.optional_count),
    lacks("disable_shuffling eval_on_each_dataset", "not in a job"),
    lacks(
        """
        add_special_tokens new_special_tokens_config init_special_tokens
        """,
        "add the tokens to the saved model first",
        unless=(False, None),
    ),
    to("add_tokens", "new_tokens", convert.names),
    to("resize_vocab", "", _resized),
    to("streaming", "streaming", convert.set_flag, note="it needs max_steps"),
    to("buffer_size", "shuffle_buffer", convert.of_streaming),
    lacks("mix_strategy interleave_probs", "give each data set of `data` a weight", unless=("concat",)),
    to("adapter_name_or_path", "adapter", convert.adapter),
    to("additional_target", "lora.modules_to_save", convert.names),
    stops(
        """
        use_dora use_rslora pissa_init loraplus_lr_ratio create_new_adapter
        """,
        "another adapter",
        unless=(False, None),
    ),
    stops("use_galore use_apollo use_badam use_adam_mini use_muon optim_config", "another optimizer"),
    stops("use_dft_loss use_asft_loss use_eaft_loss", "another loss"),
    stops(
        """
        use_llama_pro mixture_of_depths shift_attn train_from_scratch freeze_trainable_layers
        freeze_trainable_modules
        """,
        "other weights are trained",
    ),
    stops("fp8 fp8_backend fp8_enable_fsdp_float8_all_gather", "fp8", unless=(False, "auto")),
    to("pref_beta", "", preferences.of_task("beta", Task.DPO, Task.KTO)),
    to("pref_loss", "dpo.loss_type", preferences.of_dpo(preferences.dpo_loss)),
    to("pref_ftx", "", _sft_weight),
    to("kto_chosen_weight", "", preferences.of_task("desirable_weight", Task.KTO)),
    to("kto_rejected_weight", "", preferences.of_task("undesirable_weight", Task.KTO)),
    stops("pref_bco_weight dpo_label_smoothing", "another loss of preferences", unless=(0, 0.0)),
    stops(
        """
        ref_model ref_model_adapters ref_model_quantization_bit
        """,
        "the reference is another model than the one before training",
        unless=(None,),
    ),
    stops("reward_model ppo_epochs", "preference training"),
    stops(
        """
        use_kt use_mca use_megatron_bridge use_hyper_parallel export_dir
        """,
        "LLaMA-Factory itself runs something else than training with Transformers",
    ),
)
"""Its own keys, and those of Transformers, which it passes on."""

TOOL = Tool(name="llamafactory", title="LLaMA-Factory", rows=ROWS, environment=RANKS)
