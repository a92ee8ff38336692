"""Monitoring and logging: monitors, `comms_logger`, `flops_profiler`, `timers`, and `activation_checkpointing`."""

from __future__ import annotations

from dstrain.config.keys.key import BOOL, INT, LIST, NUMBER, TEXT, Key, Names, flag, row, section, switch

TENSORBOARD = "monitor/config.py: TensorBoardConfig"
WANDB = "monitor/config.py: WandbConfig"
CSV = "monitor/config.py: CSVConfig"
COMET = "monitor/config.py: CometConfig"
COMMS = "comm/config.py: CommsLoggerConfig"
FLOPS = "profiling/config.py: DeepSpeedFlopsProfilerConfig"
TIMERS = "utils/config.py: DeepSpeedThroughputTimerConfig"
CHECKPOINTING = "runtime/activation_checkpointing/config.py: DeepSpeedActivationCheckpointingConfig"

# fmt: off
MONITORS: tuple[Key, ...] = (
    *section("tensorboard", TENSORBOARD,
        "Writes the engine's few events (learning rate, loss scale, times) to TensorBoard files.")(
        switch("Enables the section. Needs the tensorboard package."),
        row("output_path", TEXT, "Folder; if empty, one below the working directory.", default=""),
        row("job_name", TEXT, "Name of the folder inside output_path.", default="DeepSpeedJobName"),
    ),
    *section("csv_monitor", CSV, "Writes the engine's few events (learning rate, loss scale, times) to CSV files.")(
        switch(),
        row("output_path", TEXT, "Folder; if empty, one below the working directory.", default=""),
        row("job_name", TEXT, "Name of the folder inside output_path.", default="DeepSpeedJobName"),
    ),
    *section("wandb", WANDB, "Sends the engine's few events to Weights & Biases; the Trainer has its own integration.")(
        switch("Enables the section. Needs the wandb package."),
        row("group", TEXT, "Group of the run.", is_nullable=True),
        row("team", TEXT, "Team (entity) that owns the run.", is_nullable=True),
        row("project", TEXT, "Project of the run.", default="deepspeed"),
    ),
    *section("comet", COMET, "Sends the engine's few events to Comet.")(
        switch("Enables the section. Needs the comet_ml package."),
        row("samples_log_interval", INT, "Samples between two logged events.", default=100),
        row("project", TEXT, "Project of the experiment.",
            default_note="from .comet.config or the environment: COMET_PROJECT_NAME", is_nullable=True),
        row("workspace", TEXT, "Workspace of the experiment.",
            default_note="from .comet.config or the environment: COMET_WORKSPACE", is_nullable=True),
        row("api_key", TEXT, "API key of the account; better set in the environment.",
            default_note="from .comet.config or the environment: COMET_API_KEY", is_nullable=True),
        row("experiment_name", TEXT, "Name of the experiment.",
            default_note="from .comet.config or the environment: COMET_EXPERIMENT_NAME", is_nullable=True),
        row("experiment_key", TEXT, "Key of the experiment, 32 to 50 letters and digits.",
            default_note="from .comet.config or the environment: COMET_EXPERIMENT_KEY", is_nullable=True),
        row("online", BOOL, "Sends to the server; false keeps the experiment on disk.", default_note="true",
            is_nullable=True),
        row("mode", TEXT,
            "Continues an experiment (get), creates one (create), or either (get_or_create); not checked by DeepSpeed.",
            default_note="get_or_create", words=("get", "create", "get_or_create"), is_nullable=True),
    ),
    *section("comms_logger", COMMS, "Times every collective operation and counts its bytes.")(
        switch(),
        flag("verbose", "Prints a line for every operation."),
        row("prof_all", BOOL, "Records every operation; false records only those in prof_ops.", default=True),
        flag("debug", "Adds the calling function to an operation's name."),
        row("prof_ops", LIST, "Names of the operations recorded, such as all_reduce.", default=[]),
    ),
    *section("flops_profiler", FLOPS,
        "Counts FLOPs, parameters and time of each module in one step; enabling it also enables wall_clock_breakdown.",
        names=Names.IGNORED)(
        switch(),
        row("recompute_fwd_factor", NUMBER,
            "Forward passes recomputed in backward: 1.0 with full activation checkpointing.", default=0.0),
        row("profile_step", INT, "Optimizer step to profile.", default=1),
        row("module_depth", INT, "Depth to which modules are printed; -1 is the innermost.", default=-1),
        row("top_modules", INT, "Modules listed per depth.", default=1),
        row("detailed", BOOL, "Prints the profile of every module.", default=True),
        row("output_file", TEXT, "File for the profile.", default_note="standard output", is_nullable=True),
    ),
    *section("timers", TIMERS, "Timers of the engine.", names=Names.IGNORED)(),
    *section("timers.throughput", TIMERS, "The timer behind the reported samples per second.")(
        switch(default=True),
        row("synchronized", BOOL, "Waits for the GPU at each reading: exact, but slower.", default=True),
    ),
    *section("activation_checkpointing", CHECKPOINTING,
        "Defaults of deepspeed.checkpointing, which Transformers' gradient checkpointing does not read.",
        names=Names.IGNORED)(
        flag("partition_activations", "Splits saved activations over model-parallel GPUs."),
        flag("cpu_checkpointing", "Keeps saved activations in host memory; needs partition_activations."),
        flag("contiguous_memory_optimization",
            "Copies saved activations into one buffer; needs number_checkpoints and partition_activations."),
        row("number_checkpoints", INT, "Checkpoints per forward pass, which determine the size of that buffer.",
            is_nullable=True),
        flag("synchronize_checkpoint_boundary", "Synchronizes the GPU at each checkpoint."),
        flag("profile", "Logs the forward and backward time of each checkpoint."),
    ),
)
# fmt: on
