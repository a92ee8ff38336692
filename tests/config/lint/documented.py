"""The example configurations of the documentation of Transformers, Accelerate and DeepSpeed, as these pages had them.

Sources: Transformers' guide "DeepSpeed" (ZeRO-1, 2, 3, NVMe, fp16), Accelerate's usage guide "DeepSpeed" (ZeRO-2 and 3,
with and without offload), DeepSpeed's pages "Getting started", "CIFAR-10", "Zero Redundancy Optimizer" and
"ZeRO-Offload".
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

_FILLED: Config = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
_FP16: Config = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_ADAMW: Config = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
_WARMUP: Config = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
_DECAY: Config = {"type": "WarmupDecayLR", "params": {**_WARMUP["params"], "total_num_steps": "auto"}}
_PINNED: Config = {"device": "cpu", "pin_memory": True}
_ZERO3: Config = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
_ZERO2: Config = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
}
_NVME: Config = {
    "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 4,
                          "fast_init": False},
    "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 5,
                      "buffer_size": 1e8, "max_in_cpu": 1e9},
}  # fmt: skip
_TORCH_ADAM: Config = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True,
                                                   "adam_w_mode": True}}  # fmt: skip

TRAINERS: dict[str, Config] = {
    "Transformers, ZeRO-1": {**_FILLED, "zero_optimization": {"stage": 1}},
    "Transformers, ZeRO-2": {
        **_FILLED,
        "fp16": _FP16,
        "optimizer": _ADAMW,
        "scheduler": _WARMUP,
        "zero_optimization": {**_ZERO2, "offload_optimizer": _PINNED, "round_robin_gradients": True},
    },
    "Transformers, ZeRO-3": {
        **_FILLED,
        "fp16": _FP16,
        "optimizer": _ADAMW,
        "scheduler": _WARMUP,
        "zero_optimization": {**_ZERO3, "offload_optimizer": _PINNED, "offload_param": _PINNED},
    },
    "Transformers, NVMe": {
        **_FILLED,
        "fp16": _FP16,
        "optimizer": _ADAMW,
        "scheduler": _WARMUP,
        "zero_optimization": {**_ZERO3, **_NVME},
        "aio": {
            "block_size": 262144,
            "queue_depth": 32,
            "thread_count": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    },
    "Accelerate, ZeRO-2": {
        **_FILLED,
        "fp16": {**_FP16, "enabled": True},
        "optimizer": _TORCH_ADAM,
        "scheduler": _DECAY,
        "zero_optimization": {**_ZERO2, "allgather_bucket_size": 2e8, "reduce_bucket_size": "auto"},
        "gradient_accumulation_steps": 1,
    },
    "Accelerate, ZeRO-3 with offload": {
        **_FILLED,
        "fp16": {**_FP16, "enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": _DECAY,
        "zero_optimization": {
            **_ZERO3,
            "offload_optimizer": _PINNED,
            "offload_param": _PINNED,
            "stage3_gather_16bit_weights_on_model_save": "auto",
        },
    },
}
"""For the Trainer and Accelerate."""

RAW: dict[str, Config] = {
    "DeepSpeed, Getting started": {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
        "fp16": {"enabled": True},
        "zero_optimization": True,
    },
    "DeepSpeed, CIFAR-10": {
        "train_batch_size": 4,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        },
        "wall_clock_breakdown": False,
    },
    "DeepSpeed, ZeRO-2 of the tutorial": {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {
            "stage": 2,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 5e8,
            "allgather_bucket_size": 5e8,
        },
    },
    "DeepSpeed, ZeRO-3 of the tutorial": {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {
            "stage": 3,
            "contiguous_gradients": True,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_prefetch_bucket_size": 1e7,
            "stage3_param_persistence_threshold": 1e5,
            "reduce_bucket_size": 1e7,
            "sub_group_size": 1e9,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
    },
    "DeepSpeed, ZeRO-Offload": {
        "train_micro_batch_size_per_gpu": 4,
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "contiguous_gradients": True,
            "overlap_comm": True,
        },
    },
    "DeepSpeed, the profilers": {
        "train_micro_batch_size_per_gpu": 4,
        "flops_profiler": {
            "enabled": True,
            "profile_step": 1,
            "module_depth": -1,
            "top_modules": 1,
            "detailed": True,
            "output_file": None,
        },
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False},
        "tensorboard": {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train_bert"},
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "number_checkpoints": None,
            "synchronize_checkpoint_boundary": False,
            "profile": False,
        },
    },
}
"""For `deepspeed.initialize`."""
