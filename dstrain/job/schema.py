"""The schema of the job file: model, data, hyper-parameters and output folder.

Keys of Transformers' TrainingArguments keep their names (`learning_rate`, `save_steps` …); choices of the planner have
dstrain's (`micro_batch`, `grad_accum`, `grad_ckpt`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from dstrain.choices import (
    Attention,
    Column,
    CompileBackend,
    DataFormat,
    DpoLoss,
    Hub,
    Interval,
    LossKernel,
    LossOn,
    Method,
    OnBadRow,
    OnLongSample,
    Optimizer,
    Precision,
    Schedule,
    SinkName,
    StoppingStrategy,
    SwanLabMode,
    Task,
    Thinking,
)
from dstrain.job.data_source import DataSource, Positive, PositiveFloat, Sources, listed
from dstrain.job.model_changes import Lora, Ratio, RopeScaling
from dstrain.records import type_config

Beta = Annotated[float, Ge(0), Lt(1)]
NonNegative = Annotated[float, Ge(0)]
Steps = Positive | Annotated[float, Gt(0), Lt(1)]
"""A number of optimizer steps, or a share of the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dpo:
    """The loss of `task: dpo`, by TRL's names."""

    __pydantic_config__ = type_config

    beta: PositiveFloat = 0.1
    """How closely the model keeps to the reference, which is the model before training; `ipo` calls it tau."""
    loss_type: DpoLoss = DpoLoss.SIGMOID
    """`sigmoid`, `hinge`, `ipo` or `robust`."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """Share of pairs whose preference is wrong, for `robust`."""
    sft_weight: NonNegative = 0.0
    """Weight of the chosen answer's own loss per token, which is added: `rpo_alpha` of ms-swift."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitor:
    """Destinations of metrics besides `metrics.jsonl`, which is always written."""

    __pydantic_config__ = type_config

    sinks: tuple[SinkName, ...] = (SinkName.SWANLAB,)
    """Any of `swanlab`, `tensorboard`, `wandb`."""
    mode: SwanLabMode | None = None
    """SwanLab's mode: `online`, `offline`, `local` or `disabled`; default: `online` with an API key, else `offline`."""
    project: str = "dstrain"
    """Project name in SwanLab and W&B."""
    name: str | None = None
    """Name of the run; default: `MODEL-METHOD-GPUSxGPU-ZEROn`, such as `qwen3-8b-lora-4x4090-zero2`."""
    collectives: bool = True
    """Whether each rank measures its collectives; `false` leaves PyTorch's functions as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Texts that the model generates as training goes, greedily."""

    __pydantic_config__ = type_config

    prompts: tuple[str, ...] = ()
    """Questions, which get the chat template; with `task: pretrain`, or without a template, beginnings of texts."""
    eval_prompts: Annotated[int, Ge(0)] = 0
    """Number of evaluation samples, from the first one, of which the part before the first answer is a prompt, too."""
    generate_every: Annotated[int, Gt(0)] | None = None
    """Optimizer steps between generations; default: at each evaluation."""
    max_new_tokens: Annotated[int, Gt(0)] = 128
    """Tokens of a generated text, at most."""


class HealthRule(StrEnum):
    """A rule about a running training, by what it detects."""

    LOSS_SPIKE = "loss_spike"
    ZERO_LOSS = "zero_loss"
    FIRST_LOSS = "first_loss"
    ABOVE_GUESSING = "above_guessing"
    OVERFITTING = "overfitting"
    ALWAYS_CLIPPED = "always_clipped"
    VANISHED_GRADIENT = "vanished_gradient"
    SKIPPED_STEPS = "skipped_steps"
    PLATEAU = "plateau"
    RESUMED_LOSS = "resumed_loss"
    MASKED_SAMPLES = "masked_samples"
    BUSIEST_EXPERT = "busiest_expert"
    DEAD_EXPERTS = "dead_experts"
    SLOWDOWN = "slowdown"
    SLOW_RANK = "slow_rank"
    BUS_BANDWIDTH = "bus_bandwidth"
    DATA_WAIT = "data_wait"
    PADDING = "padding"
    SLOW_CHECKPOINT = "slow_checkpoint"
    MEMORY_GROWTH = "memory_growth"


class HealthAction(StrEnum):
    """Consequence of a broken health rule."""

    TELL = "tell"
    SAVE = "save"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthLimits:
    """Limits and consequences of one health rule."""

    __pydantic_config__ = type_config

    enabled: bool = True
    """Whether the rule is checked."""
    warn: float | None = None
    """The signal from which it is a warning; default: the rule's."""
    critical: float | None = None
    """The signal from which it is critical; default: the rule's."""
    action: HealthAction = HealthAction.TELL
    """Consequence at the highest level: `tell`, `save` (a checkpoint too), or `stop` (save and end the run)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job. Paths are relative to the folder of the job file."""

    __pydantic_config__ = type_config

    model: str
    """A local folder, or a model id on the hub."""
    output_dir: str
    """The run directory, relative to the job file: metrics, checkpoints, the final model."""
    task: Task = Task.SFT
    """Training task: `sft` (conversations), `pretrain` (texts) or `dpo` (pairs of answers)."""
    dpo: Dpo = field(default_factory=Dpo)
    """The loss, for `dpo`."""
    data: Sources | None = None
    """Training data: a JSONL, JSON, Parquet or Arrow file, a glob, a data set id on the hub, or a list of data sets."""
    eval_data: Sources | None = None
    """Evaluation data, in the same forms, for the mean loss per token; default: no evaluation."""
    val_split: PositiveFloat | None = None
    """Samples of `data` held out for evaluation, in place of `eval_data`: a share below 1, or a number."""
    data_format: DataFormat = DataFormat.AUTO
    """`alpaca` (also other questions), `messages` (also ShareGPT), `text`, `preference`, or `auto`."""
    columns: Mapping[Column, str] = field(default_factory=dict)
    """Columns of the data: the name that dstrain knows → the name in the file, such as `{question: Q, answer: A}`."""
    system: str | None = None
    """System prompt of conversations that have none."""
    max_samples: Positive | None = None
    """Number of samples to use of each data set, from its beginning; default: all."""
    stopping_strategy: StoppingStrategy = StoppingStrategy.FIRST_EXHAUSTED
    """With weights, an epoch ends after the `first_exhausted` data set, or after `all_exhausted`, which repeats."""
    streaming: bool = False
    """Whether ranks read and tokenize rows as training goes, in place of a cache of all tokens; needs `max_steps`."""
    shuffle_buffer: Positive = 10_000
    """With `streaming`, the samples that each reader shuffles at a time."""
    on_bad_row: OnBadRow = OnBadRow.STOP
    """How to handle unusable rows: `stop` ends the run; `skip` omits them and logs each one."""
    on_long_sample: OnLongSample = OnLongSample.TRUNCATE
    """How to handle samples longer than `seq_len`: `truncate` or `drop`."""
    ds_config: str = "ds_config.json"
    """The DeepSpeed configuration."""
    hostfile: str | None = None
    """The hostfile; default: this machine."""
    hub: Hub = Hub.HF
    """The hub of model and data set ids."""
    trust_remote_code: bool = False
    """Whether code from the model's repository may run."""

    method: Method = Method.FULL
    """Trained parameters: all (`full`), or an adapter (`lora`), of a model in 4 bits (`qlora`)."""
    lora: Lora = field(default_factory=Lora)
    """The adapter, for `lora` and `qlora`."""
    adapter: str | None = None
    """Folder of a saved adapter to continue from, whose rank, alpha and targets hold; default: a new one."""
    precision: Precision = Precision.BF16
    """Dtype of forward and backward, `bf16`, `fp16` or `fp32`; saved models keep the base model's dtype."""
    attn: Attention = Attention.SDPA
    """The attention implementation, by Transformers' names; `auto` is the best one that every node has."""
    seq_len: Positive = 4096
    """Maximum length of a sample in tokens; the log counts longer samples."""
    rope_scaling: RopeScaling | None = None
    """Stretches the model's positions to a longer `seq_len`, in its config.json too; a job gives type and factor."""
    packing: bool = False
    """Whether short samples share rows of `seq_len` tokens; refused for models that cannot isolate them."""
    loss_on: LossOn = LossOn.ANSWER
    """Tokens that count in the loss: every `answer` and tool call, only the `last` answer, or `all`."""
    thinking: Thinking = Thinking.AUTO
    """Reasoning to keep: `all`, only that after the `last` question, none (`off`), or `auto` (`all`)."""
    max_pixels: Positive | None = None
    """Pixels of an image at most; larger ones are made smaller before the model's processor, which may round up."""
    min_pixels: Positive | None = None
    """Pixels of an image at least; smaller ones are made larger before the model's processor."""
    video_max_pixels: Positive | None = None
    """Pixels of a frame of a video at most; default: `max_pixels`. The processor may limit the whole video, too."""
    video_fps: PositiveFloat | None = None
    """Frames of a video per second, also of a list of frames; default: the processor's (2 in Qwen3-VL)."""
    video_maxlen: Annotated[int, Ge(2)] | None = None
    """Frames of a video at most, evenly spaced; default: the processor's (768 in Qwen3-VL)."""
    image_patches: Annotated[int, Ge(0)] = 0
    """Patches of all images and videos of a sample, for estimates of memory and speed alone."""
    freeze_vision_tower: bool = True
    """Whether the vision tower of a vision-language model stays as it is."""
    freeze_multi_modal_projector: bool = True
    """Whether what joins tower and language model (aligner, merger, projector) stays as it is."""
    freeze_language_model: bool = False
    """Whether the language model stays as it is, in a vision-language model of which another part trains."""
    new_tokens: tuple[str, ...] = ()
    """Tokens to add to the tokenizer, with rows in embedding and head; an adapter needs `modules_to_save` for them."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameters that stay as they are: regular expressions for any part of a name, for `full`."""
    train_only: tuple[str, ...] = ()
    """Patterns of the only parameters that train, less `freeze`, for `full`; default: all."""
    chat_template: str | None = None
    """A chat template, or a file with one; default: the model's own."""
    micro_batch: Positive = 1
    """Samples (with packing: rows; for `dpo`: pairs) per forward pass of one GPU."""
    grad_accum: Positive = 1
    """Micro-batches per optimizer step."""
    sp: Positive = 1
    """Sequence-parallel ranks (Ulysses), which share the tokens of each row; they divide GPUs and attention heads."""
    tp: Positive = 1
    """Tensor-parallel ranks (DeepSpeed's AutoTP), which share each weight; they divide GPUs and key-value heads."""
    ep: Positive = 1
    """Expert-parallel ranks (DeepSpeed's AutoEP), which share each layer's experts; they divide GPUs and experts."""
    router_aux_loss_coef: NonNegative | None = None
    """Weight of the loss that balances experts; default: the model's, where its config.json asks for that loss."""
    loss: Literal[LossKernel.FULL, LossKernel.CHUNKED, LossKernel.FUSED] = LossKernel.FULL
    """The same loss with less memory: `chunked` keeps no fp32 logits, `fused` only a few hundred tokens' logits."""
    liger: bool = False
    """Whether norms, rotary embedding and MLPs run on Liger's Triton kernels, for families that it knows."""
    grad_ckpt: bool = True
    """Whether activations are recomputed in the backward pass."""
    grad_ckpt_every_n_layers: Positive = 1
    """With `grad_ckpt`, one layer of every n is recomputed; more than 1 is faster and needs more memory."""
    activation_offload: bool = False
    """With `grad_ckpt`, whether the inputs of layers wait in host RAM for the backward pass, which takes time."""
    tiled_mlp: bool = False
    """Whether MLPs are computed for a part of the tokens at a time, and once more: less memory for long rows."""
    torch_compile: bool = False
    """Whether torch.compile compiles the decoder layers: faster steps after a first one that takes minutes."""
    torch_compile_backend: CompileBackend = CompileBackend.INDUCTOR
    """`inductor`, or `aot_eager`, which compiles no kernels and so shows whether a fault is the compiler's."""

    num_train_epochs: PositiveFloat = 3.0
    """Passes over the data."""
    max_steps: Positive | None = None
    """Optimizer steps; if given, it ends the run instead of `num_train_epochs`."""
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate."""
    lr_scheduler_type: Schedule = Schedule.COSINE
    """A schedule of Transformers: `cosine`, `linear`, `constant_with_warmup` …"""
    lr_scheduler_kwargs: Mapping[str, float | int | str] = field(default_factory=dict)
    """Further parameters of the schedule, such as `{min_lr_rate: 0.1}` of `cosine_with_min_lr`."""
    warmup_ratio: Ratio = 0.03
    """Fraction of the steps in which the learning rate rises from 0; if above 0, step 1 changes nothing."""
    warmup_steps: Annotated[int, Ge(0)] | None = None
    """Steps in which the learning rate rises from 0, in place of `warmup_ratio`."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    adam_beta1: Beta = 0.9
    """AdamW's first beta."""
    adam_beta2: Beta = 0.999
    """AdamW's second beta."""
    adam_epsilon: NonNegative = 1e-8
    """AdamW's epsilon."""
    optimizer: Literal[Optimizer.ADAMW, Optimizer.ADAMW_8BIT, Optimizer.ADAMW_BF16, Optimizer.MUON] = Optimizer.ADAMW
    """`adamw`, `adamw_8bit` (moments of a byte), `adamw_bf16` (all states in bf16; lossy) or DeepSpeed's `muon`."""
    muon_learning_rate: PositiveFloat | None = None
    """Peak learning rate of the matrices under `muon`, whose updates are orthogonal; default: `learning_rate`."""
    max_grad_norm: NonNegative = 1.0
    """Maximum gradient norm, above which gradients are clipped; 0 disables clipping."""
    seed: Annotated[int, Ge(0), Lt(2**32)] = 42
    """Random seed of shuffling, dropout and adapters."""
    full_determinism: bool = False
    """Whether PyTorch uses only deterministic algorithms; slower, and without overlap on GPUs."""
    tf32: bool = False
    """Whether matrix products of fp32 are computed in TF32, on Ampere and later GPUs; elsewhere without effect."""
    stop_on_nonfinite: Annotated[int, Ge(0)] = 20
    """Steps with non-finite gradients that end the run, in a row or as most of all; 0: never. fp16 starts with some."""

    preflight: bool = True
    """Whether the run is checked before its first step: labels, heaviest micro-batch, loss, gradients, packing."""

    logging_steps: Positive = 10
    """Optimizer steps between lines of `metrics.jsonl`."""
    eval_strategy: Interval = Interval.STEPS
    """When the model is evaluated besides the end of the run: after `eval_steps`, or after each `epoch`."""
    eval_steps: Steps | None = None
    """Optimizer steps between evaluations, or a share of the run below 1; default: only at the end of the run."""
    eval_on_start: bool = False
    """Whether the model is evaluated before the first step too."""
    eval_micro_batch: Positive | None = None
    """Samples (with packing: rows) per forward pass of one GPU in evaluation; default: `micro_batch`."""
    save_strategy: Interval = Interval.STEPS
    """When checkpoints are written: after `save_steps`, or after each `epoch`."""
    save_steps: Steps = 500
    """Optimizer steps between checkpoints, or a share of the run below 1."""
    save_only_model: bool = False
    """Whether checkpoints hold the weights alone, a fraction of the size, from which no run can resume."""
    save_total_limit: Positive | None = 2
    """Number of checkpoints to keep, besides the best one with `load_best`."""
    load_best: bool = False
    """Whether the final model is the one with the lowest evaluation loss; needs a checkpoint per evaluation."""
    early_stopping: Positive | None = None
    """Evaluations in a row without a lower loss that end the run; has the effect of `load_best`, too."""
    early_stopping_threshold: NonNegative = 0.0
    """With `early_stopping`, how much lower than the best an evaluation loss has to be."""
    resume: str = "never"
    """`never`, `auto` (from the newest complete checkpoint in `output_dir`), or a checkpoint folder."""
    dataloader_num_workers: Annotated[int, Ge(0)] = 0
    """Worker processes of each rank's data loader."""

    samples: Samples | None = None
    """Texts that the model generates as training goes; default: none."""
    monitor: Monitor = field(default_factory=Monitor)
    """Where metrics go."""
    health: Mapping[HealthRule, HealthLimits] = field(default_factory=dict)
    """Rules whose limits or consequences differ from the defaults (docs/health.md)."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of every rank; put secrets in your own environment, not here."""

    def data_parallel(self, num_ranks: int) -> int:
        """Returns how many micro-batches the ranks train on at once."""
        return max(1, num_ranks // self.ranks_per_batch)

    @property
    def ranks_per_batch(self) -> int:
        """Ranks that train on the same micro-batch: a sequence- or tensor-parallel group."""
        return self.sp * self.tp

    @property
    def router_loss(self) -> bool | None:
        """Whether the loss that balances experts is computed; None: as the model's config.json has it."""
        return None if self.router_aux_loss_coef is None else self.router_aux_loss_coef > 0

    def samples_per_step(self, num_ranks: int) -> int:
        """Returns the samples of one step; with packing its rows."""
        return self.micro_batch * self.grad_accum * self.data_parallel(num_ranks)

    @property
    def train_sources(self) -> tuple[DataSource, ...]:
        """The data sets to train on; format, columns and number of samples default to the job's."""
        return tuple(map(self._with_defaults, listed(self.data)))

    @property
    def eval_sources(self) -> tuple[DataSource, ...]:
        """The data sets of `eval_data`, likewise."""
        return tuple(map(self._with_defaults, listed(self.eval_data)))

    @property
    def data_paths(self) -> tuple[str, ...]:
        """Files, globs and ids of all data sets."""
        return tuple(source.path for source in (*self.train_sources, *self.eval_sources))

    @property
    def has_eval(self) -> bool:
        """Whether the model is evaluated."""
        return self.eval_data is not None or self.val_split is not None

    @property
    def keeps_best(self) -> bool:
        """Whether the checkpoint of the lowest evaluation loss stays, and becomes the final model."""
        return self.load_best or self.early_stopping is not None

    def _with_defaults(self, source: DataSource) -> DataSource:
        columns = self.columns if source.columns is None else source.columns
        most = source.max_samples or self.max_samples
        return replace(source, format=source.format or self.data_format, columns=columns, max_samples=most)
