"""axolotl's keys. Source: axolotl 0.16, utils/schemas/*.py, utils/config and core/builders/base.py."""

from __future__ import annotations

from dstrain.choices import Task
from dstrain.config.imports import axolotl_values as values
from dstrain.config.imports import converters as convert
from dstrain.config.imports import datasets, huggingface, preferences
from dstrain.config.imports.environment import RANKS
from dstrain.config.imports.rows import ABSENT, inside, lacks, needless, read_with, stops, table, to
from dstrain.config.imports.source import Tool
from dstrain.config.imports.strategy import fsdp, sharding

_SCHEDULES = "set lr_scheduler_type to one of dstrain's own"
_FSDP = """
version offload_params auto_wrap_policy transformer_layer_cls_to_wrap state_dict_type final_state_dict_type
cpu_ram_efficient_loading sync_module_states limit_all_gathers use_orig_params activation_checkpointing
backward_prefetch mixed_precision_policy
"""
_ONE = (False, None, 1, "")

ROWS = table(
    tuple(row for row in huggingface.ROWS.values() if row.default is ABSENT),
    to("base_model", "model"),
    to("trust_remote_code", "trust_remote_code", convert.flag, default=False),
    to("datasets", "data", datasets.axolotl("data")),
    to("pretraining_dataset", "data", datasets.axolotl("data")),
    to("test_datasets", "eval_data", datasets.axolotl("eval_data")),
    to("val_set_size", "val_split", convert.split),
    to("adapter", "method", values.method, default=""),
    read_with("load_in_4bit load_in_8bit", "adapter"),
    to("lora_r", "lora.rank", convert.count),
    to("lora_alpha", "lora.alpha", convert.count),
    to("lora_dropout", "lora.dropout", convert.number, default=0.0),
    to("lora_target_modules", "lora.targets", values.targets),
    to("lora_target_linear", "lora.targets", values.linear),
    to("sequence_len", "seq_len", convert.count, default=512),
    to("excess_length_strategy", "on_long_sample", convert.drops, default="drop"),
    to("sample_packing", "packing", convert.flag, default=False),
    to("train_on_inputs", "loss_on", convert.always("all")),
    to("attn_implementation", "attn", convert.attention),
    to("flash_attention", "attn", convert.always("flash_attention_2")),
    to("sdp_attention", "attn", convert.always("sdpa")),
    to("eager_attention", "attn", convert.always("eager")),
    to("micro_batch_size", "micro_batch", convert.count, default=1),
    to("gradient_accumulation_steps", "grad_accum", convert.count, default=1),
    to("gradient_checkpointing", "grad_ckpt", values.checkpointing, default=False),
    to("activation_offloading", "activation_offload", values.truth),
    to("num_epochs", "num_train_epochs", convert.number, default=1.0),
    to("learning_rate", "learning_rate", convert.number),
    to("lr_scheduler", "lr_scheduler_type", convert.schedule, default="cosine"),
    to("warmup_ratio", "warmup_ratio", values.warmup_ratio, default=0.03),
    to("warmup_steps", "warmup_ratio", convert.warmup_steps),
    to("weight_decay", "weight_decay", convert.number, default=0.0),
    to("adam_beta1", "adam_beta1", convert.number, default=0.9),
    to("adam_beta2", "adam_beta2", convert.number, default=0.999),
    to("adam_epsilon", "adam_epsilon", convert.number, default=1e-8),
    to("adam_eps", "adam_epsilon", convert.number),
    to("optimizer", "optimizer", convert.optimizer, default="adamw_torch_fused"),
    to("max_grad_norm", "max_grad_norm", convert.number, default=1.0),
    to("bf16", "precision", convert.precision, default="auto"),
    to("bfloat16", "precision", convert.always("bf16")),
    to("float16", "precision", convert.always("fp16")),
    to("seed", "seed", default=42),
    to("output_dir", "output_dir", default="model-out"),
    to("logging_steps", "logging_steps", convert.count),
    to("save_steps", "save_steps", convert.interval),
    to("saves_per_epoch", "save_strategy", values.per_epoch("save_steps")),
    to("save_strategy", "save_strategy", values.saves, default="epoch"),
    to("save_total_limit", "save_total_limit", convert.limit, default=4),
    to("evals_per_epoch", "eval_strategy", values.evaluations),
    to("early_stopping_patience", "early_stopping", convert.optional_count),
    to("eval_table_size", "samples.eval_prompts", convert.optional_count),
    to("eval_max_new_tokens", "samples.max_new_tokens", values.new_tokens),
    to("auto_resume_from_checkpoints", "resume", convert.resume),
    to("use_wandb", "monitor.sinks", values.sinks("wandb")),
    to("wandb_project", "monitor.project"),
    to("wandb_name", "monitor.name"),
    to("use_tensorboard", "monitor.sinks", values.sinks("tensorboard")),
    to("use_swanlab", "monitor.sinks", values.sinks("swanlab")),
    to("swanlab_project", "monitor.project"),
    to("swanlab_experiment_name", "monitor.name"),
    to("swanlab_mode", "monitor.mode", convert.swanlab_mode),
    to("context_parallel_size", "sp", convert.count),
    to("sequence_parallel_degree", "sp", convert.count),
    to("tensor_parallel_size", "tp", convert.count),
    to("expert_parallel_size", "ep", convert.count),
    to("tiled_mlp", "tiled_mlp", convert.flag),
    to("liger_rope", "liger", values.liger),
    to("liger_rms_norm", "liger", values.liger),
    to("liger_glu_activation", "liger", values.liger),
    to("max_steps", "max_steps", convert.limit),
    to("dataloader_num_workers", "dataloader_num_workers", default=0),
    to("fp16", "", values.fp16),
    to("deepspeed", "plan.ds_config", values.ds_config),
    to("fsdp", "plan.zero_stage", fsdp),
    to("fsdp_config.reshard_after_forward", "plan.zero_stage", sharding),
    to("fsdp_config.fsdp_reshard_after_forward", "plan.zero_stage", sharding),
    to("fsdp_config.fsdp_sharding_strategy", "plan.zero_stage", sharding),
    to("fsdp_config.sharding_strategy", "plan.zero_stage", sharding),
    needless(
        inside("fsdp_config", f"{_FSDP} {' '.join(f'fsdp_{key}' for key in _FSDP.split())}"),
        "ZeRO takes the place of FSDP",
    ),
    needless("fsdp_version fsdp_final_state_dict_type dp_shard_size dp_replicate_size", "ZeRO takes the place of FSDP"),
    needless(
        """
        base_model_config tokenizer_config model_type tokenizer_type processor_type tokenizer_use_fast
        tokenizer_legacy tokenizer_use_mistral_common revision_of_model base_model_ignore_patterns
        is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model
        special_tokens
        """,
        "read from the model's own files",
    ),
    needless(
        """
        dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory
        shuffle_merged_datasets push_dataset_to_hub hf_use_auth_token skip_prepare_dataset total_num_tokens
        sample_packing_eff_est sample_packing_group_size sample_packing_bin_size pad_to_sequence_len
        sample_packing_seq_len_multiplier max_packed_sequence_len
        """,
        "dstrain prepares, caches and packs the data by itself",
    ),
    needless(
        """
        eval_sample_packing wandb_entity wandb_watch wandb_log_model
        wandb_run_id swanlab_description swanlab_workspace swanlab_log_model swanlab_log_completions
        swanlab_completion_log_interval swanlab_completion_max_buffer trackio_project_name trackio_run_name
        trackio_space_id use_otel_metrics otel_metrics_host otel_metrics_port project_name
        """,
        "`metrics.jsonl` and the sinks have it",
    ),
    needless(
        """
        plugins liger_rms_norm_gated liger_layer_norm
        liger_fused_linear_cross_entropy liger_cross_entropy cut_cross_entropy lora_mlp_kernel
        lora_qkv_kernel lora_o_kernel lora_embedding_kernel fused_attn_kernel flash_attn_cross_entropy
        flash_attn_rms_norm flash_attn_fuse_mlp flash_optimum use_kernels use_scattermoe use_sonicmoe
        experts_implementation flex_attn_compile_kwargs gemma4_hybrid_attn_impl
        experimental_skip_move_to_device chunked_cross_entropy llama4_linearized_experts
        """,
        "kernels of the same results; loss: fused spares the logits",
    ),
    needless(
        """
        strict debug device device_map low_cpu_mem_usage gc_steps torchdistx_path accelerator_config
        full_finetune lora_fan_in_fan_out lora_on_cpu gptq_groupsize gptq_model_v1 gptq_disable_exllama
        bnb_config_kwargs model_quantization_config model_quantization_config_kwargs secrets provider
        gpu gpu_count node_count memory volumes timeout branch dockerfile_commands memory_preprocess
        timeout_preprocess use_ray ray_num_workers profiler_steps
        """,
        "`dstrain run` decides it",
    ),
    lacks(
        """
        chat_template chat_template_jinja
        """,
        "the model's own chat template is used, not `{value}`; chat_template takes another one",
        unless=("tokenizer_default",),
    ),
    lacks(
        """
        eot_tokens added_tokens_overrides resize_token_embeddings_to_32x
        """,
        "the tokenizer is used as it is saved",
        unless=(False,),
    ),
    to("default_system_message", "system"),
    to("tokens", "new_tokens", convert.names),
    lacks("batch_size", "set grad_accum to {value} / micro_batch", unless=()),
    to("eval_batch_size", "eval_micro_batch", convert.count),
    lacks(
        """
        loss_watchdog_threshold loss_watchdog_patience min_sample_len
        dataset_exact_deduplication generate_samples eval_causal_lm_metrics do_causal_lm_eval
        """,
        "not in a job",
        unless=_ONE,
    ),
    to("streaming", "streaming", convert.set_flag, note="it needs max_steps"),
    to("streaming_multipack_buffer_size", "shuffle_buffer", convert.of_streaming),
    lacks("pretrain_multipack_attn pretrain_multipack_buffer_size", "`packing: true` keeps samples apart", unless=_ONE),
    lacks("model_config overrides_of_model_config", "write it into the model's config.json", unless=()),
    lacks("freeze_mm_modules", "vision towers are frozen unless freeze_vision_tower is false", unless=(True,)),
    stops(
        """
        trl vllm ebft process_reward_model num_labels orpo_alpha diffusion
        """,
        "dstrain trains on text with the loss of the next token",
        unless=_ONE,
    ),
    to("rl", "", values.task),
    to("reward_model", "", values.task),
    to("rl_beta", "", preferences.of_task("beta", Task.DPO, Task.KTO)),
    to("dpo_beta", "", preferences.of_task("beta", Task.DPO)),
    to("rpo_alpha", "", preferences.of_task("sft_weight", Task.DPO)),
    to("kto_desirable_weight", "", preferences.of_task("desirable_weight", Task.KTO)),
    to("kto_undesirable_weight", "", preferences.of_task("undesirable_weight", Task.KTO)),
    to("center_rewards_coefficient", "", preferences.of_task("center_rewards_coefficient", Task.REWARD)),
    stops("dpo_label_smoothing dpo_use_weighting", "another loss of preferences", unless=(None, False, 0, 0.0)),
    to("unfrozen_parameters", "train_only", values.unfrozen),
    to("lora_model_dir", "adapter", convert.adapter),
    to("lora_target_parameters", "lora.target_parameters", values.experts),
    to("lora_modules_to_save", "lora.modules_to_save", convert.names),
    stops(
        """
        lisa_n_layers lisa_step_interval lisa_layers_attribute
        """,
        "other weights are trained",
        unless=_ONE,
    ),
    stops(
        """
        peft_use_dora peft_use_rslora peft_init_lora_weights loraplus_lr_ratio peft relora
        relora_prune_ratio relora_cpu_offload jagged_restart_steps
        """,
        "another adapter",
        unless=_ONE,
    ),
    stops(
        """
        qat quantization fp8 gptq use_onebitllms llmcompressor
        """,
        "other number formats",
        unless=_ONE,
    ),
    stops(
        """
        use_eaft use_pose curriculum_sampling reinit_weights lr_groups embedding_lr embedding_lr_scale
        lr_quadratic_warmup
        """,
        "another training",
        unless=_ONE,
    ),
    lacks(
        "quantize_moe_experts",
        "experts stay in the dtype of the checkpoint: in 16 bits four times the bytes of 4, which the memory counts",
        unless=_ONE,
    ),
    lacks("cosine_min_lr_ratio cosine_constant_lr_ratio eta_min", _SCHEDULES, unless=_ONE),
)
"""Its own keys, and those of Transformers that it passes on."""

TOOL = Tool(name="axolotl", title="axolotl", rows=ROWS, environment=RANKS, sections=("fsdp_config",))
