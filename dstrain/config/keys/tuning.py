"""`autotuning`: the launcher's search for fast settings."""

from __future__ import annotations

from dstrain.config.keys.key import BOOL, INT, OBJECT, TEXT, Key, Names, flag, row, section, switch, within

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
