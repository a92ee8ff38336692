"""Top-level keys: batch, clipping, communication, logging, data loading, and `checkpoint`."""

from __future__ import annotations

from dstrain.config.keys.key import BOOL, INT, NUMBER, OBJECT, TEXT, Key, Names, flag, row, section, within

CONFIG = "runtime/config.py: DeepSpeedConfig"
CHECKPOINT = "runtime/config.py: get_checkpoint_params"
WRITER = "runtime/model_checkpointing/config.py: get_checkpoint_writer_config"
CKPTCONF = "runtime/model_checkpointing/config.py: get_checkpoint_config"
_GRADIENT_DTYPES = ("fp16", "bf16", "fp32", "FP16", "BF16", "FP32")

# fmt: off
TOP: tuple[Key, ...] = (
    *within("", CONFIG)(
        row("train_batch_size", INT,
            "Samples per optimizer step over all GPUs: micro-batch × accumulation steps × data-parallel ranks.",
            default_note="the product of the other two batch keys and the data-parallel ranks", least=1,
            is_nullable=True, filled="world size × per_device_train_batch_size × gradient_accumulation_steps"),
        row("train_micro_batch_size_per_gpu", INT,
            "Samples per GPU in one forward and backward pass; determines activation memory.",
            default_note="train_batch_size divided by accumulation steps and data-parallel ranks", least=1,
            is_nullable=True, filled="per_device_train_batch_size"),
        row("gradient_accumulation_steps", INT, "Micro-batches whose gradients are summed before one optimizer step.",
            default_note="what the other two batch keys leave, else 1", least=1, is_nullable=True,
            filled="gradient_accumulation_steps"),
        row("managed_gradient_accumulation", BOOL,
            "Whether the engine counts micro-batches and steps at the boundary; false leaves this to the caller.",
            default=True, since="0.19.4"),
        row("gradient_clipping", NUMBER,
            "Maximum global L2 norm of the gradients; larger gradients are scaled down. 0 disables clipping.",
            default=1.0, default_note="1.0 since 0.19.3; 0.0 before", least=0, filled="max_grad_norm"),
        flag("prescale_gradients",
            "Divides gradients before the all-reduce instead of after it; incompatible with reduce_scatter."),
        row("gradient_predivide_factor", NUMBER,
            "Part of the averaging divisor that is applied before the all-reduce, against fp16 overflow on many GPUs.",
            default=1.0, above=0),
        row("gradient_allreduce_op", TEXT,
            "Whether ranks average or sum their gradients; sum is refused with stage 3, ZenFlow and DeepCompile.",
            default="mean", words=("mean", "sum", "MEAN", "SUM", "Mean", "Sum"), since="0.19.6"),
        row("communication_data_type", TEXT, "Data type of gradients while they are reduced between GPUs.",
            default_note="the model's own format", words=_GRADIENT_DTYPES, is_nullable=True),
        row("seq_parallel_communication_data_type", TEXT,
            "Data type of gradient reduction under sequence parallelism; replaces communication_data_type.",
            default="fp32", words=_GRADIENT_DTYPES, is_nullable=True, since="0.16.5"),
        flag("disable_allgather", "Accepted but unused."),
        flag("zero_allow_untested_optimizer",
            "Lets ZeRO wrap an optimizer that it has not been tested with; false raises. accelerate sets it to true."),
        row("zero_force_ds_cpu_optimizer", BOOL,
            "With an offloaded optimizer, refuses optimizer objects other than DeepSpeed's CPU optimizers.",
            default=True),
        row("steps_per_print", INT,
            "Optimizer steps between the engine's progress lines; null prints none. accelerate sets infinity.", least=1,
            is_nullable=True),
        flag("wall_clock_breakdown",
            "Logs the milliseconds of forward, backward, reduction and step; synchronizes the device, which slows "
            "training."),
        flag("memory_breakdown", "Logs allocated GPU memory at several points of every step."),
        flag("dump_state", "Logs the engine's resolved configuration once at startup."),
        row("log_level", TEXT, "Threshold of DeepSpeed's logger.", default_note="the logger is left as it is",
            words=("debug", "info", "warning", "error", "critical"), is_nullable=True, since="0.19.3"),
        flag("disable_python_gc",
            "Disables Python's automatic garbage collector for even step times; reference cycles are then never freed.",
            since="0.19.8"),
        row("vocabulary_size", INT, "Used only for a warning if it is not a multiple of 8.", is_nullable=True),
        flag("dataloader_drop_last",
            "Drops the last incomplete batch of the data loader of deepspeed.initialize; the Trainer has its own "
            "loader."),
    ),
    *section("checkpoint", CHECKPOINT, "How checkpoints are written and read.", names=Names.IGNORED)(
        row("tag_validation", TEXT, "What happens if ranks save under different tags.", default="WARN",
            words=("WARN", "IGNORE", "FAIL", "Warn", "Ignore", "Fail", "warn", "ignore", "fail")),
        flag("load_universal",
            "Loads a universal checkpoint (made by ds_to_universal), which fits any number of GPUs."),
        flag("use_node_local_storage",
            "Each node writes and reads its own disk, for checkpoints that are not on shared storage.",
            default_note="the Trainer sets true with save_on_each_node"),
        row("checkpoint_serialization", BOOL, "Writes the zip format of torch.save; false writes its legacy format.",
            default=True, since="0.17.1", source=CKPTCONF),
    ),
    *section("checkpoint.parallel_write", CHECKPOINT, "Which ranks share the writing of model files.",
        names=Names.IGNORED)(
        flag("pipeline_stage", "The data-parallel ranks of a pipeline stage share the writing of its layer files."),
    ),
    *section("checkpoint.writer", WRITER, "Selects and tunes a checkpoint writer; the section alone enables it.",
        is_nullable=True, names=Names.IGNORED, since="0.17.1")(
        row("type", TEXT, "FAST: asynchronous I/O for NVMe (needs libaio); PYTHON: plain files; MOCK: writes nothing.",
            default="FAST", words=("FAST", "PYTHON", "MOCK", "Fast", "Python", "Mock", "fast", "python", "mock")),
        row("io_buffer_size", INT, "Bytes of the pinned buffer that the fast writer fills before each write.",
            default=67_108_864),
        row("io_buffer_double", BOOL, "Splits the buffer in two, so that filling and writing overlap.", default=True),
        flag("show_statistics", "Prints the write speed after each file."),
        row("data_parallel", TEXT,
            "Which ranks write parts of one file in parallel: all replicas, one per CPU socket, or one per machine.",
            words=("REPLICA", "SOCKET", "MACHINE", "Replica", "Socket", "Machine", "replica", "socket", "machine"),
            is_nullable=True),
        flag("decoupled", "Writes in a separate process while training continues."),
        row("io_multiplier", INT, "Files per parallel writer.", default=1),
    ),
    *within("", "datastates/config.py: DeepSpeedDataStatesConfig")(
        row("datastates_ckpt", OBJECT,
            "Enables asynchronous checkpoints through the separate datastates package, which receives these settings.",
            default_note="off; any value except false turns it on", names=Names.FREE, since="0.18.1"),
        row("allgather_size", INT,
            "Elements gathered at a time; read only if zero_optimization is true instead of an object.",
            default=500_000_000, instead="write zero_optimization.allgather_bucket_size",
            source="runtime/zero/config.py: read_zero_config_deprecated"),
    ),
)
# fmt: on
