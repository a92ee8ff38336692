"""Offloading: `offload_param`, `offload_optimizer`, `zenflow`, and `aio` for NVMe."""

from __future__ import annotations

from dstrain.config.keys.key import Key, Kind, Names

PARAM = "runtime/zero/offload_config.py: DeepSpeedZeroOffloadParamConfig"
OPTIMIZER = "runtime/zero/offload_config.py: DeepSpeedZeroOffloadOptimizerConfig"
ZENFLOW = "runtime/zenflow/zenflow_config.py: ZenFlowConfig"
AIO = "runtime/swap_tensor/aio_config.py: get_aio_config"
ZERO_CONFIG = "runtime/zero/config.py: DeepSpeedZeroConfig"

# fmt: off
OFFLOAD: tuple[Key, ...] = (
    Key(path="zero_optimization.offload_param", kind=Kind.OBJECT, is_nullable=True, source=ZERO_CONFIG,
        meaning="Stage 3: keeps parameters in host memory or on NVMe between uses. Without effect below stage 3."),
    Key(path="zero_optimization.offload_param.device", kind=Kind.TEXT, default="none", words=("none", "cpu", "nvme"),
        source=PARAM, meaning="Where parameters live."),
    Key(path="zero_optimization.offload_param.nvme_path", kind=Kind.TEXT, is_nullable=True, source=PARAM,
        meaning="Folder on a local NVMe disk; needed with device nvme."),
    Key(path="zero_optimization.offload_param.buffer_count", kind=Kind.INT, default=5, least=0, source=PARAM,
        meaning="Buffers for swapping parameters to NVMe."),
    Key(path="zero_optimization.offload_param.buffer_size", kind=Kind.INT, default=100_000_000, least=0, source=PARAM,
        meaning="Elements of each swap buffer; must hold the largest parameter's part."),
    Key(path="zero_optimization.offload_param.max_in_cpu", kind=Kind.INT, default=1_000_000_000, least=0, source=PARAM,
        meaning="Elements kept in host memory when parameters live on NVMe."),
    Key(path="zero_optimization.offload_param.pin_memory", kind=Kind.BOOL, default=True,
        default_note="true since 0.19.5; false before", source=PARAM,
        meaning="Page-locks the host memory: full-speed, overlapped copies, but the memory cannot be swapped out."),
    Key(path="zero_optimization.offload_optimizer", kind=Kind.OBJECT, is_nullable=True, source=ZERO_CONFIG,
        meaning="Keeps optimizer states and master weights in host memory (or NVMe with stage 3) and steps on the "
        "CPU."),
    Key(path="zero_optimization.offload_optimizer.device", kind=Kind.TEXT, default="none",
        words=("none", "cpu", "nvme"), source=OPTIMIZER,
        meaning="Where optimizer states live; nvme works with stage 3 only, below it means cpu."),
    Key(path="zero_optimization.offload_optimizer.nvme_path", kind=Kind.TEXT, is_nullable=True, source=OPTIMIZER,
        meaning="Folder on a local NVMe disk; needed with device nvme."),
    Key(path="zero_optimization.offload_optimizer.buffer_count", kind=Kind.INT, default=4, least=0, source=OPTIMIZER,
        meaning="Buffers for swapping states to NVMe: at least the states a parameter has (Adam: 4)."),
    Key(path="zero_optimization.offload_optimizer.pin_memory", kind=Kind.BOOL, default=True,
        default_note="true since 0.19.5; false before", source=OPTIMIZER,
        meaning="Page-locks the host memory: full-speed, overlapped copies, but the memory cannot be swapped out."),
    Key(path="zero_optimization.offload_optimizer.pipeline_read", kind=Kind.BOOL, default=False, source=OPTIMIZER,
        meaning="NVMe: reads the next tile while the current one is updated."),
    Key(path="zero_optimization.offload_optimizer.pipeline_write", kind=Kind.BOOL, default=False, source=OPTIMIZER,
        meaning="NVMe: writes the last tile while the current one is updated."),
    Key(path="zero_optimization.offload_optimizer.fast_init", kind=Kind.BOOL, default=False, source=OPTIMIZER,
        meaning="NVMe: faster first write of the states."),
    Key(path="zero_optimization.offload_optimizer.ratio", kind=Kind.NUMBER, default=1.0, least=0, most=1,
        source=OPTIMIZER,
        meaning="Stage 3: share of the optimizer states that is offloaded and updated on the CPU; the rest stays on "
        "the GPU."),
    Key(path="zero_optimization.offload_optimizer.super_offload", kind=Kind.BOOL, default=False, since="0.18.0",
        source=OPTIMIZER, meaning="Stage 3: a CPU step that overlaps with the GPU, made for GH200 and GB200."),
    Key(path="zero_optimization.offload_optimizer.cpuadam_cores_perc", kind=Kind.NUMBER, default=0.8, least=0, most=1,
        since="0.18.0", source=OPTIMIZER,
        meaning="With super_offload: share (0 to 1) of the CPU cores that the CPU Adam gets."),
    Key(path="zero_optimization.zenflow", kind=Kind.OBJECT, is_nullable=True, since="0.17.5", source=ZERO_CONFIG,
        meaning="ZenFlow: the GPU updates the gradients that matter most, the CPU the rest later. Its presence, even "
        "{}, turns it on."),
    Key(path="zero_optimization.zenflow.topk_ratio", kind=Kind.NUMBER, default=0.1, least=0, most=1, since="0.17.5",
        source=ZENFLOW, meaning="Share of gradient columns updated at once on the GPU; above 0 and below 1."),
    Key(path="zero_optimization.zenflow.select_strategy", kind=Kind.TEXT, default="auto",
        words=("auto", "step", "epoch"), since="0.17.5", source=ZENFLOW,
        meaning="What select_interval counts: steps, epochs, or decided by the engine."),
    Key(path="zero_optimization.zenflow.select_interval", kind=Kind.INT, default="auto", words=("auto",),
        since="0.17.5", source=ZENFLOW, meaning="Steps or epochs after which the important columns are chosen anew."),
    Key(path="zero_optimization.zenflow.update_interval", kind=Kind.INT, default="auto", least=1, words=("auto",),
        since="0.17.5", source=ZENFLOW, meaning="Steps after which the gathered rest is applied by the CPU."),
    Key(path="zero_optimization.zenflow.overlap_step", kind=Kind.BOOL, default=False, since="0.17.5", source=ZENFLOW,
        meaning="Runs the CPU step in its own process beside forward and backward."),
    Key(path="zero_optimization.zenflow.offload", kind=Kind.BOOL, default=False, since="0.17.5", source=ZENFLOW,
        meaning="Keeps the states of the important columns in host memory too; slower, less GPU memory."),
    Key(path="zero_optimization.zenflow.auto_ratio", kind=Kind.NUMBER, default=0.99, least=0, most=1, since="0.17.5",
        source=ZENFLOW, meaning="Threshold at which the automatic update_interval triggers."),
    Key(path="zero_optimization.zenflow.full_warm_up_rounds", kind=Kind.INT, default=0, since="0.17.5", source=ZENFLOW,
        meaning="First rounds in which every gradient is applied at once."),
    Key(path="zero_optimization.zenflow.pt_reserved_cores_perc", kind=Kind.NUMBER, default=0.5, least=0, most=1,
        since="0.17.6", source=ZENFLOW,
        meaning="Share (0 to 1) of the CPU cores left to PyTorch; ZenFlow's workers get the others."),
    Key(path="zero_optimization.zenflow.steps_per_epoch", kind=Kind.INT, is_nullable=True, since="0.17.5",
        source=ZENFLOW, meaning="Optimizer steps per epoch; set by the engine itself, not to be written."),
    Key(path="aio", kind=Kind.OBJECT, is_nullable=True, names=Names.IGNORED, source=AIO,
        meaning="Asynchronous disk access for NVMe offload and the fast checkpoint writer."),
    Key(path="aio.block_size", kind=Kind.INT, least=1, default=1_048_576, source=AIO,
        meaning="Bytes of one I/O request."),
    Key(path="aio.queue_depth", kind=Kind.INT, least=1, default=8, source=AIO,
        meaning="Requests in flight per thread."),
    Key(path="aio.intra_op_parallelism", kind=Kind.INT, least=1, default=1, since="0.16.4", source=AIO,
        meaning="Threads that share one tensor's transfer."),
    Key(path="aio.single_submit", kind=Kind.BOOL, default=False, source=AIO,
        meaning="Submits requests one by one, not as a batch."),
    Key(path="aio.overlap_events", kind=Kind.BOOL, default=True, source=AIO,
        meaning="Submits new requests before earlier ones have ended."),
    Key(path="aio.use_gds", kind=Kind.BOOL, default=False, source=AIO,
        meaning="GPUDirect Storage: NVMe to GPU without host memory; CUDA only."),
)
# fmt: on
