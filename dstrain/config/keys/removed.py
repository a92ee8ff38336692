"""Keys of DeepSpeed 0.16 to 0.19 that 0.19.8 no longer reads, and their replacements."""

from __future__ import annotations

from dstrain.config.keys.key import BOOL, INT, NUMBER, OBJECT, TEXT, Key, Names, row, within

CONFIG = "runtime/config.py: _REMOVED_TOP_LEVEL_CONFIG_KEYS"
ZERO_CONFIG = "runtime/config.py: _REMOVED_ZERO_CONFIG_KEYS"
ONEBIT = "runtime/fp16/onebit"
CONSTANTS = "runtime/constants.py"

# fmt: off
REMOVED: tuple[Key, ...] = (
    *within("", CONFIG, removed="0.19.8", instead="remove it")(
        row("nebula", OBJECT, "Checkpoints through Azure Nebula.", names=Names.FREE, removed="0.19.7",
            instead="remove it, or use checkpoint.writer for faster saving"),
        row("compression_training", OBJECT, "Pruning and quantization-aware training.", names=Names.FREE,
            removed="0.19.7", instead="remove it; compress with another package"),
        row("amp", OBJECT, "Mixed precision by NVIDIA Apex.", names=Names.FREE,
            instead="write bf16, fp16 or torch_autocast"),
        row("quantize_training", OBJECT, "Mixture of quantization during training.", names=Names.FREE,
            removed="0.19.7"),
        row("sparse_gradients", BOOL, "Sparse reduction of the gradients of embeddings.",
            instead="remove it; embeddings made with sparse=True need no key"),
        row("eigenvalue", OBJECT, "Eigenvalues for the mixture of quantization.", names=Names.FREE),
        row("sparse_attention", OBJECT, "DeepSpeed's block-sparse attention.", names=Names.FREE, removed="0.19.7",
            instead="remove it; choose attention in the model, as with attn_implementation"),
        row("elasticity", OBJECT, "Batch sizes that suit several numbers of GPUs.", names=Names.FREE,
            instead="write train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps"),
        row("graph_harvesting", BOOL, "Recorded bf16 steps as CUDA graphs."),
        row("curriculum_learning", OBJECT, "The old curriculum by sequence length.", names=Names.FREE,
            instead="write data_efficiency.data_sampling.curriculum_learning"),
        row("progressive_layer_drop", OBJECT, "Dropped layers at random, increasingly over time.", names=Names.FREE),
    ),
    *within("zero_optimization", ZERO_CONFIG, removed="0.19.7",
        instead="write hpZ: zero_optimization.zero_hpz_partition_size")(
        row("mics_shard_size", INT, "MiCS: number of GPUs over which parameters were partitioned.", is_nullable=True),
        row("mics_hierarchical_params_gather", BOOL, "MiCS: gathered inside nodes first.", is_nullable=True),
        row("zeropp_loco_param", OBJECT, "LoCo: error feedback for quantized gradients.", is_nullable=True,
            names=Names.FREE, since="0.16.2", removed="0.19.8",
            instead="remove it; zero_optimization.zero_quantized_gradients works without"),
    ),
    *within("", CONSTANTS)(
        row("seq_parallel_comm_data_type", TEXT, "Earlier name of seq_parallel_communication_data_type.",
            is_nullable=True, removed="0.16.5", instead="write seq_parallel_communication_data_type"),
    ),
    *within("aio", "runtime/swap_tensor/constants.py")(
        row("thread_count", INT, "Earlier name of aio.intra_op_parallelism.", removed="0.16.4",
            instead="write aio.intra_op_parallelism"),
    ),
    *within("optimizer.params", ONEBIT, removed="0.19.7", instead="choose another optimizer; the 1-bit ones are gone")(
        row("freeze_step", INT, "OneBitAdam, OneBitLamb: steps before compression."),
        row("var_freeze_step", INT, "ZeroOneAdam: steps before the variance froze."),
        row("var_update_scaler", INT, "ZeroOneAdam: growth of the interval between variance updates."),
        row("local_step_scaler", INT, "ZeroOneAdam: growth of the interval between synchronizations."),
        row("local_step_clipper", INT, "ZeroOneAdam: maximum interval between synchronizations."),
        row("cuda_aware", BOOL, "1-bit optimizers: CUDA-aware MPI."),
        row("comm_backend_name", TEXT, "1-bit optimizers: communication backend."),
        row("coeff_beta", NUMBER, "OneBitLamb: decay of the coefficient."),
        row("factor_max", NUMBER, "OneBitLamb: upper bound of the factor."),
        row("factor_min", NUMBER, "OneBitLamb: lower bound of the factor."),
        row("factor_threshold", NUMBER, "OneBitLamb: change of the factor between steps."),
    ),
)
# fmt: on
