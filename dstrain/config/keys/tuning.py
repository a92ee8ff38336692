"""`autotuning`: the launcher's search for fast settings."""

from __future__ import annotations

from dstrain.config.keys.key import Key, Kind, Names

CONFIG = "autotuning/config.py: DeepSpeedAutotuningConfig"
MODEL = "autotuning/config.py: get_model_info_config"

# fmt: off
TUNING: tuple[Key, ...] = (
    Key(path="autotuning", kind=Kind.OBJECT, names=Names.IGNORED, source=CONFIG,
        meaning="Search for stage, micro batch and buckets, started by deepspeed --autotuning."),
    Key(path="autotuning.enabled", kind=Kind.BOOL, default=False, source=CONFIG,
        meaning="Turns it on; set by the launcher in its experiments."),
    Key(path="autotuning.fast", kind=Kind.BOOL, default=True, source=CONFIG,
        meaning="Tries micro batches only, not the other settings of ZeRO."),
    Key(path="autotuning.results_dir", kind=Kind.TEXT, default="autotuning_results", source=CONFIG,
        meaning="Folder for results; may not be empty."),
    Key(path="autotuning.exps_dir", kind=Kind.TEXT, default="autotuning_exps", source=CONFIG,
        meaning="Folder for the experiments' descriptions; may not be empty."),
    Key(path="autotuning.overwrite", kind=Kind.BOOL, default=True, source=CONFIG,
        meaning="Deletes what those folders hold from before."),
    Key(path="autotuning.start_profile_step", kind=Kind.INT, default=3, source=CONFIG,
        meaning="Step at which measuring starts."),
    Key(path="autotuning.end_profile_step", kind=Kind.INT, default=5, source=CONFIG,
        meaning="Step at which measuring and the experiment end."),
    Key(path="autotuning.metric", kind=Kind.TEXT, default="throughput", words=("throughput", "latency", "flops"),
        source=CONFIG, meaning="What is made best: samples per second, time per step, or FLOPS per GPU."),
    Key(path="autotuning.metric_path", kind=Kind.TEXT, is_nullable=True, source=CONFIG,
        meaning="File an experiment writes its metric to; set by the autotuner."),
    Key(path="autotuning.tuner_type", kind=Kind.TEXT, default="gridsearch",
        words=("gridsearch", "random", "model_based"), source=CONFIG, meaning="Order in which experiments are tried."),
    Key(path="autotuning.tuner_early_stopping", kind=Kind.INT, default=5, source=CONFIG,
        meaning="Experiments without progress before the search of a stage ends."),
    Key(path="autotuning.tuner_num_trials", kind=Kind.INT, default=50, source=CONFIG,
        meaning="Experiments per stage at most."),
    Key(path="autotuning.arg_mappings", kind=Kind.OBJECT, is_nullable=True, names=Names.FREE, source=CONFIG,
        meaning="From keys of this file to options of the training script, such as --per_device_train_batch_size."),
    Key(path="autotuning.model_info", kind=Kind.OBJECT, is_nullable=True, names=Names.IGNORED, source=CONFIG,
        meaning="Facts of the model, where they shall not be measured."),
    Key(path="autotuning.model_info.profile", kind=Kind.BOOL, default=False, source=MODEL,
        meaning="Measures them in a first run; set by the autotuner."),
    Key(path="autotuning.model_info.num_params", kind=Kind.INT, is_nullable=True, source=MODEL,
        meaning="Parameters of the model."),
    Key(path="autotuning.model_info.hidden_size", kind=Kind.INT, is_nullable=True, source=MODEL,
        meaning="Width of the model."),
    Key(path="autotuning.model_info.num_layers", kind=Kind.INT, is_nullable=True, source=MODEL,
        meaning="Layers of the model."),
    Key(path="autotuning.model_info_path", kind=Kind.TEXT, is_nullable=True, source=CONFIG,
        meaning="File with the measured facts; set by the autotuner."),
    Key(path="autotuning.mp_size", kind=Kind.INT, default=1, source=CONFIG,
        meaning="GPUs over which the script splits the model."),
    Key(path="autotuning.max_train_batch_size", kind=Kind.INT, default_note="no bound", is_nullable=True, source=CONFIG,
        meaning="Upper bound of train_batch_size."),
    Key(path="autotuning.min_train_batch_size", kind=Kind.INT, default=1, source=CONFIG,
        meaning="Lower bound of train_batch_size."),
    Key(path="autotuning.max_train_micro_batch_size_per_gpu", kind=Kind.INT, default=1024, source=CONFIG,
        meaning="Upper bound of the micro batch."),
    Key(path="autotuning.min_train_micro_batch_size_per_gpu", kind=Kind.INT, default=1, source=CONFIG,
        meaning="Lower bound of the micro batch."),
    Key(path="autotuning.num_tuning_micro_batch_sizes", kind=Kind.INT, default=3, source=CONFIG,
        meaning="Micro batches tried per stage."),
)
# fmt: on
