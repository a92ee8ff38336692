"""Names of keys in other tools."""

from __future__ import annotations

from types import MappingProxyType

SYNONYMS = MappingProxyType(
    {
        "per_device_train_batch_size": "micro_batch",
        "train_micro_batch_size_per_gpu": "micro_batch",
        "gradient_accumulation_steps": "grad_accum",
        "sequence_parallel_size": "sp",
        "sp_size": "sp",
        "tensor_parallel_size": "tp",
        "tp_size": "tp",
        "autotp_size": "tp",
        "expert_parallel_size": "ep",
        "ep_size": "ep",
        "autoep_size": "ep",
        "gradient_checkpointing": "grad_ckpt",
        "optim": "optimizer",
        "model_name_or_path": "model",
        "model_path": "model",
        "dataset": "data",
        "train_data": "data",
        "train_file": "data",
        "cutoff_len": "seq_len",
        "max_seq_length": "seq_len",
        "max_length": "seq_len",
        "rope_parameters": "rope_scaling",
        "finetuning_type": "method",
        "template": "chat_template",
        "chat_template_path": "chat_template",
        "enable_thinking": "thinking",
        "flash_attn": "attn",
        "attn_implementation": "attn",
        "epochs": "num_train_epochs",
        "lr": "learning_rate",
        "resume_from_checkpoint": "resume",
        "deepspeed": "ds_config",
        "lora_rank": "lora: rank",
        "lora_alpha": "lora: alpha",
        "lora_dropout": "lora: dropout",
        "lora_target": "lora: targets",
        "bf16": "precision",
        "fp16": "precision",
        "report_to": "monitor: sinks",
        "swanlab": "monitor",
    }
)
"""Names of keys in other tools (Transformers, LLaMA-Factory, TRL) → ours."""
