"""Offloading: `offload_param`, `offload_optimizer`, `zenflow`, and `aio` for NVMe."""

from __future__ import annotations

from dstrain.config.keys.key import BOOL, INT, NUMBER, TEXT, Key, Names, flag, row, section

PARAM = "runtime/zero/offload_config.py: DeepSpeedZeroOffloadParamConfig"
OPTIMIZER = "runtime/zero/offload_config.py: DeepSpeedZeroOffloadOptimizerConfig"
ZENFLOW = "runtime/zenflow/zenflow_config.py: ZenFlowConfig"
AIO = "runtime/swap_tensor/aio_config.py: get_aio_config"
ZERO_CONFIG = "runtime/zero/config.py: DeepSpeedZeroConfig"

# fmt: off
OFFLOAD: tuple[Key, ...] = (
    *section("zero_optimization.offload_param", PARAM, "Keeps parameters in host memory or on NVMe between uses.",
        is_nullable=True, stages=(3,), own_source=ZERO_CONFIG)(
        row("device", TEXT, "Where parameters are kept.", default="none", words=("none", "cpu", "nvme")),
        row("nvme_path", TEXT, "Folder on a local NVMe disk; required with device nvme.", is_nullable=True),
        row("buffer_count", INT, "Buffers for swapping parameters to NVMe.", default=5, least=0),
        row("buffer_size", INT, "Elements of each swap buffer; must hold the largest parameter's partition.",
            default=100_000_000, least=0),
        row("max_in_cpu", INT, "Elements kept in host memory when parameters are on NVMe.", default=1_000_000_000,
            least=0),
        row("pin_memory", BOOL,
            "Page-locks the host memory: copies run at full speed and overlap, but the memory cannot be swapped out.",
            default=True, default_note="true since 0.19.5; false before"),
    ),
    *section("zero_optimization.offload_optimizer", OPTIMIZER,
        "Keeps optimizer states and master weights in host memory (or on NVMe with stage 3) and updates on the CPU.",
        is_nullable=True, own_source=ZERO_CONFIG)(
        row("device", TEXT, "Where optimizer states are kept; nvme needs stage 3, and means cpu below it.",
            default="none", words=("none", "cpu", "nvme")),
        row("nvme_path", TEXT, "Folder on a local NVMe disk; required with device nvme.", is_nullable=True),
        row("buffer_count", INT,
            "Buffers for swapping states to NVMe: at least the number of states per parameter (Adam: 4).", default=4,
            least=0),
        row("pin_memory", BOOL,
            "Page-locks the host memory: copies run at full speed and overlap, but the memory cannot be swapped out.",
            default=True, default_note="true since 0.19.5; false before"),
        flag("pipeline_read", "NVMe: reads the next tile during the update of the current one."),
        flag("pipeline_write", "NVMe: writes the previous tile during the update of the current one."),
        flag("fast_init", "NVMe: writes the states faster the first time."),
        row("ratio", NUMBER,
            "Fraction of the optimizer states that is offloaded and updated on the CPU; the rest stays on the GPU.",
            default=1.0, least=0, most=1, stages=(3,)),
        flag("super_offload", "A CPU step that overlaps with the GPU, made for GH200 and GB200.", since="0.18.0",
            stages=(3,)),
        row("cpuadam_cores_perc", NUMBER, "With super_offload: fraction (0 to 1) of the CPU cores for CPU Adam.",
            default=0.8, least=0, most=1, since="0.18.0"),
    ),
    *section("zero_optimization.zenflow", ZENFLOW,
        "ZenFlow: the GPU applies the most important gradients, the CPU applies the rest later. The section alone, "
        "even {}, enables it.", is_nullable=True, own_source=ZERO_CONFIG, since="0.17.5")(
        row("topk_ratio", NUMBER, "Fraction of gradient columns that the GPU applies immediately; above 0 and below 1.",
            default=0.1, least=0, most=1),
        row("select_strategy", TEXT, "What select_interval counts: steps or epochs; auto lets the engine decide.",
            default="auto", words=("auto", "step", "epoch")),
        row("select_interval", INT, "Steps or epochs between selections of the important columns.", default="auto",
            words=("auto",)),
        row("update_interval", INT, "Steps between updates of the remaining columns by the CPU.", default="auto",
            least=1, words=("auto",)),
        flag("overlap_step", "Runs the CPU step in its own process, in parallel with forward and backward."),
        flag("offload", "Also keeps the states of the important columns in host memory; slower, less GPU memory."),
        row("auto_ratio", NUMBER, "Threshold at which the automatic update_interval triggers.", default=0.99, least=0,
            most=1),
        row("full_warm_up_rounds", INT, "Number of first rounds in which every gradient is applied immediately.",
            default=0),
        row("pt_reserved_cores_perc", NUMBER,
            "Fraction (0 to 1) of the CPU cores reserved for PyTorch; ZenFlow's workers use the others.", default=0.5,
            least=0, most=1, since="0.17.6"),
        row("steps_per_epoch", INT, "Optimizer steps per epoch; set by the engine, not by users.", is_nullable=True),
    ),
    *section("aio", AIO, "Asynchronous disk access for NVMe offload and the fast checkpoint writer.", is_nullable=True,
        names=Names.IGNORED)(
        row("block_size", INT, "Bytes of one I/O request.", default=1_048_576, least=1),
        row("queue_depth", INT, "Requests in flight per thread.", default=8, least=1),
        row("intra_op_parallelism", INT, "Threads that share one tensor's transfer.", default=1, least=1,
            since="0.16.4"),
        flag("single_submit", "Submits requests one by one instead of as a batch."),
        row("overlap_events", BOOL, "Submits new requests before earlier ones complete.", default=True),
        flag("use_gds", "GPUDirect Storage: transfers between NVMe and GPU without host memory; CUDA only."),
    ),
)
# fmt: on
