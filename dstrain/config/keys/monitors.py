"""Monitoring and logging: monitors, `comms_logger`, `flops_profiler`, `timers`, and `activation_checkpointing`."""

from __future__ import annotations

from dstrain.config.keys.key import (
    BOOL,
    INT,
    LIST,
    NUMBER,
    OBJECT,
    TEXT,
    Key,
    Names,
    flag,
    row,
    section,
    switch,
    within,
)

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


COMPILE = "compile/config.py: CompileConfig"
HYBRID = "runtime/config.py: HybridEngineConfig"

# fmt: off
COMPILING: tuple[Key, ...] = (
    *section("compile", COMPILE,
        "DeepCompile; takes effect only if engine.compile() is called (Trainer: torch_compile).", since="0.16.6")(
        flag("deepcompile", "Inserts ZeRO's communication into the compiled graph; stages 1 to 3."),
        flag("autoep_non_moe", "AutoEP: compiles everything except the MoE layers, which stay eager.", since="0.19.8"),
        flag("free_activation",
            "Frees large activations in the graph as early as possible; incompatible with inductor."),
        row("free_activation_threshold", INT, "Smallest tensor that free_activation frees, in bytes.",
            default=10_485_760, since="0.18.0"),
        flag("offload_activation",
            "Moves saved activations of 5 MB and more to host memory; incompatible with offload_parameters and "
            "offload_opt_states."),
        row("offload_activation_pin_memory", BOOL, "Page-locks that host memory for faster copies.", default=True,
            since="0.19.6"),
        flag("offload_opt_states",
            "Keeps optimizer states in host memory outside the step; for one accumulation step."),
        row("double_buffer", BOOL, "Uses two buffers in reductions, so that filling and sending overlap.",
            default=True),
        flag("symmetric_memory", "Uses torch's symmetric memory for gathers."),
        flag("debug_log", "Writes the graphs before and after each pass."),
        flag("offload_parameters",
            "Keeps parameters in host memory between uses; enabled automatically if both offload sections are "
            "present."),
        flag("sync_before_reduce", "Synchronizes before each reduction; for debugging."),
        flag("sync_after_reduce", "Synchronizes after each reduction; for debugging."),
        flag("sync_before_allgather", "Synchronizes before each gather; for debugging."),
        flag("sync_after_allgather", "Synchronizes after each gather; for debugging."),
        row("keep_int_input_tensors", BOOL,
            "Keeps the real values of integer inputs for profiling, which index operations need.", default=True,
            since="0.17.2"),
        flag("keep_all_input_tensors", "Keeps the real values of all inputs for profiling; more memory.",
            since="0.17.2"),
    ),
    *section("compile.passes", COMPILE,
        "Passes to run instead of the stage's defaults; autotp cannot be combined with others.", kind=LIST,
        is_nullable=True, since="0.18.9")(
        row("*", TEXT, "One pass.", words=("z1", "z3", "autosp", "autotp")),
    ),
    *section("hybrid_engine", HYBRID, "Switches between training and fast generation, as RLHF needs.")(
        switch(),
        row("max_out_tokens", INT, "Tokens of prompt and answer that the cache is sized for.", default=512, least=1),
        row("inference_tp_size", INT, "GPUs that split the model during generation.", default=1),
        flag("release_inference_cache", "Frees the generation cache before training resumes; less memory, slower."),
        row("pin_parameters", BOOL, "Keeps gathered parameters during a whole generation (stage 3).", default=True),
        row("tp_gather_partition_size", INT, "Layers gathered at a time for generation (stage 3).", default=8),
        flag("enable_cuda_graph", "Replays generation as a CUDA graph; incompatible with stage 3.", since="0.19.6"),
    ),
)
# fmt: on


CONFIG = "autotuning/config.py: DeepSpeedAutotuningConfig"
MODEL = "autotuning/config.py: get_model_info_config"

# fmt: off
TUNING: tuple[Key, ...] = (
    *section("autotuning", CONFIG, "Search for stage, micro-batch and bucket sizes, started by deepspeed --autotuning.",
        names=Names.IGNORED)(
        switch("Enables the section; set by the launcher in its experiments."),
        row("fast", BOOL, "Tries micro-batches only, not the other settings of ZeRO.", default=True),
        row("results_dir", TEXT, "Folder for results; must not be empty.", default="autotuning_results"),
        row("exps_dir", TEXT, "Folder for the descriptions of experiments; must not be empty.",
            default="autotuning_exps"),
        row("overwrite", BOOL, "Deletes the previous contents of those folders.", default=True),
        row("start_profile_step", INT, "Step at which measuring starts.", default=3),
        row("end_profile_step", INT, "Step at which measuring and the experiment end.", default=5),
        row("metric", TEXT, "What is optimized: samples per second, time per step, or FLOPS per GPU.",
            default="throughput", words=("throughput", "latency", "flops")),
        row("metric_path", TEXT, "File to which an experiment writes its metric; set by the autotuner.",
            is_nullable=True),
        row("tuner_type", TEXT, "Order in which experiments are tried.", default="gridsearch",
            words=("gridsearch", "random", "model_based")),
        row("tuner_early_stopping", INT, "Experiments without improvement before the search of a stage ends.",
            default=5),
        row("tuner_num_trials", INT, "Maximum experiments per stage.", default=50),
        row("arg_mappings", OBJECT,
            "Maps keys of this file to options of the training script, such as --per_device_train_batch_size.",
            is_nullable=True, names=Names.FREE),
    ),
    *section("autotuning.model_info", MODEL, "Facts about the model that replace measurements.", is_nullable=True,
        names=Names.IGNORED, own_source=CONFIG)(
        flag("profile", "Measures them in a first run; set by the autotuner."),
        row("num_params", INT, "Parameters of the model.", is_nullable=True),
        row("hidden_size", INT, "Width of the model.", is_nullable=True),
        row("num_layers", INT, "Layers of the model.", is_nullable=True),
    ),
    *within("autotuning", CONFIG)(
        row("model_info_path", TEXT, "File with the measured facts; set by the autotuner.", is_nullable=True),
        row("mp_size", INT, "GPUs over which the script splits the model.", default=1),
        row("max_train_batch_size", INT, "Upper bound of train_batch_size.", default_note="no bound", is_nullable=True),
        row("min_train_batch_size", INT, "Lower bound of train_batch_size.", default=1),
        row("max_train_micro_batch_size_per_gpu", INT, "Upper bound of the micro-batch.", default=1024),
        row("min_train_micro_batch_size_per_gpu", INT, "Lower bound of the micro-batch.", default=1),
        row("num_tuning_micro_batch_sizes", INT, "Micro-batches tried per stage.", default=3),
    ),
)
# fmt: on
