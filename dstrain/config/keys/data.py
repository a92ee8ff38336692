"""`data_efficiency`: curriculum learning, batches by tokens, and random layer-token dropping."""

from __future__ import annotations

from dstrain.config.keys.key import INT, LIST, TEXT, Key, Names, flag, row, section, switch

CONFIG = "runtime/data_pipeline/config.py: get_data_efficiency_config"
SAMPLER = "runtime/data_pipeline/data_sampling/data_sampler.py: DeepSpeedDataSampler"
CURRICULUM = "runtime/data_pipeline/curriculum_scheduler.py: CurriculumScheduler"
BATCHING = "runtime/data_pipeline/config.py: get_dynamic_batching"
LTD = "runtime/data_pipeline/data_routing/scheduler.py: RandomLTDScheduler"
LTD_LAYER = "runtime/data_pipeline/data_routing/basic_layer.py: RandomLayerTokenDrop"

# fmt: off
DATA: tuple[Key, ...] = (
    *section("data_efficiency", CONFIG, "Methods that train with less data; for data loaders of deepspeed.initialize.",
        names=Names.IGNORED)(
        switch(),
        row("seed", INT, "Random seed of sampling.", default=1234),
    ),
    *section("data_efficiency.data_sampling", CONFIG, "Selects and orders samples.", names=Names.IGNORED)(
        switch(),
        row("num_epochs", INT, "Maximum number of epochs that the sampler plans.", default=1000),
        row("num_workers", INT, "Worker processes of the data loader.", default=0),
        flag("pin_memory", "Page-locks batches in host memory.", since="0.16.5"),
    ),
    *section("data_efficiency.data_sampling.curriculum_learning", CONFIG,
        "Starts with easy samples and increases difficulty.", names=Names.IGNORED)(
        switch(),
        row("data_cluster_path", TEXT, "Folder for the sample indexes; required if the section is enabled.",
            source=SAMPLER),
    ),
    *section("data_efficiency.data_sampling.curriculum_learning.curriculum_metrics", CONFIG,
        "Difficulty metrics by name, such as seqlen; required if the section is enabled.", names=Names.FREE)(),
    *section("data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*", SAMPLER,
        "One difficulty metric.", names=Names.IGNORED)(
        row("index_to_sample_path", TEXT,
            "File from difficulty to samples, written by the data analyzer; unused with single_cluster."),
        row("index_to_metric_path", TEXT,
            "File from index to difficulty, written by the data analyzer; used with difficulty_type value."),
        row("difficulty_type", TEXT, "Whether difficulties are values of the metric or percentiles of the data.",
            words=("value", "percentile")),
        row("clustering_type", TEXT,
            "single_cluster for metrics that change a sample (truncation); otherwise, samples are grouped by "
            "difficulty.", words=("single_cluster", "schedule_based")),
        row("min_difficulty", INT, "First difficulty.", source=CURRICULUM),
        row("max_difficulty", INT, "Last difficulty.", source=CURRICULUM),
        row("schedule_type", TEXT, "How difficulty increases; custom is set from Python.",
            words=("fixed_linear", "fixed_root", "fixed_discrete", "custom"), source=CURRICULUM),
    ),
    *section("data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config", CURRICULUM,
        "Settings of the schedule.", names=Names.IGNORED)(
        row("total_curriculum_step", INT, "fixed_linear, fixed_root: steps from first to last difficulty.", least=1),
        row("difficulty_step", INT,
            "fixed_linear, fixed_root: difficulties are multiples of this (8 for tensor cores).", least=1),
        row("root_degree", INT, "fixed_root: degree of the root; 2 is the square root.", least=1),
        row("difficulty", LIST, "fixed_discrete: the list of difficulties."),
        row("max_step", LIST, "fixed_discrete: last step of each difficulty except the last."),
    ),
    *section("data_efficiency.data_sampling.dynamic_batching", BATCHING,
        "Batches with about equal numbers of tokens instead of samples; the learning rate is scaled accordingly.",
        names=Names.IGNORED, since="0.16.5")(
        switch(),
        row("metrics_path", TEXT, "Folder of the sequence lengths that the data analyzer writes.",
            source="runtime/data_pipeline/data_sampling/variable_batch_size_and_lr.py"),
        row("max_tokens", INT, "Maximum tokens per batch; required if the section is enabled."),
        row("lr_scaling_method", TEXT, "How the learning rate scales with the batch size.", default="linear",
            words=("linear", "sqrt", "none")),
        row("min_batch_size", INT, "Minimum samples per batch; smaller batches are dropped.", default=1),
        row("max_batch_size", INT, "Maximum samples per batch.", default_note="no bound"),
        row("sequence_picking_order", TEXT, "Order in which samples fill batches.", default="dataloader",
            words=("dataloader", "random", "seqlen")),
        flag("verbose", "Prints the resulting batches."),
    ),
    *section("data_efficiency.data_routing", CONFIG, "Selects which tokens pass which layers.", names=Names.IGNORED)(
        switch(),
    ),
    *section("data_efficiency.data_routing.random_ltd", LTD_LAYER,
        "Random-LTD: middle layers process a random subset of the tokens, which grows.", names=Names.IGNORED,
        own_source=CONFIG)(
        switch(source=CONFIG),
        row("total_layer_num", INT, "Layers of the model.", source=LTD),
        row("random_ltd_layer_num", INT, "Number of layers that drop tokens: the length of random_ltd_layer_id.",
            source=LTD),
        row("random_ltd_layer_id", LIST, "Indexes of the layers that drop tokens.",
            source="runtime/engine.py: random_ltd_initialize"),
        row("model_mask_name", TEXT, "Name of the layers' attention-mask argument; null if they have none.",
            is_nullable=True),
        row("model_type", TEXT, "How tokens are sampled.", words=("encoder", "decoder")),
        row("hidden_state_order", TEXT, "Order of the dimensions of hidden states.",
            words=("batch_seq_dim", "seq_batch_dim")),
        row("global_batch_size", INT, "Overwritten by train_batch_size.", source="runtime/engine.py: DeepSpeedEngine"),
        row("micro_batch_size", INT, "Overwritten by train_micro_batch_size_per_gpu.",
            source="runtime/engine.py: DeepSpeedEngine"),
    ),
    *section("data_efficiency.data_routing.random_ltd.layer_token_lr_schedule", LTD,
        "A learning rate by kept tokens: not implemented; its enabled must be false.", names=Names.IGNORED)(
        flag("enabled", "Must be false: true raises."),
    ),
    *section("data_efficiency.data_routing.random_ltd.random_ltd_schedule", LTD, "How the number of kept tokens grows.",
        names=Names.IGNORED)(
        row("min_value", INT, "Initial number of kept tokens."),
        row("max_value", INT, "Final number of kept tokens: the sequence length."),
        row("schedule_type", TEXT, "Shape of the growth.", words=("fixed_linear",)),
    ),
    *section("data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config", LTD,
        "Settings of the schedule.", names=Names.IGNORED)(
        row("require_steps", INT, "Steps from the initial to the final number.", least=1),
        row("seq_per_step", INT, "The number of kept tokens is a multiple of this.", least=1),
    ),
)
# fmt: on
