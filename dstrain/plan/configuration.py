"""One complete training configuration, in parts: a part is what some computation depends on, and a key of its cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Any, get_type_hints

from dstrain.choices import Attention, LossKernel, Method, Offload, Optimizer, Precision, Task
from dstrain.job.model_changes import Lora, RopeScaling
from dstrain.plan.training_code import TrainingCode

BF16_STATES = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
"""Keys of `bf16` that, together, keep what steps the optimizer in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where a choice of `Configuration` lives."""

    part: str = ""
    """The field of `Configuration` that has it; empty: `Configuration` itself."""
    field: str = ""
    """Its name there."""
    keys: tuple[str, ...] = ()
    """Keys of ds_config.json from which the planner reads it."""
    repeated: tuple[str, ...] = ()
    """Keys of ds_config.json that repeat it, although job.yaml holds it."""
    is_speed: bool = False
    """Whether it changes the speed of a step and not what the step trains on, beyond rounding."""
    is_tuned: bool = False
    """Whether `dstrain tune` may make it otherwise in the files of a job."""
    values: tuple[Any, ...] = ()
    """The values that plans compare, those that need most memory first; empty: they depend on the rest."""
    follows: str = ""
    """The choice of which it is a detail: it is neutral when that one changes."""
    least_stage: int = 0
    """The stage of ZeRO below which it is neutral."""

    @property
    def is_of_zero(self) -> bool:
        """Whether ds_config.json alone holds it."""
        return self.part == "zero"

    def of(self, configuration: Configuration) -> Any:
        """Returns its value."""
        return getattr(getattr(configuration, self.part) if self.part else configuration, self.field)


def _choice(default: Any, name: str = "", **facts: Any) -> Any:
    """Returns the field of a choice, with the name that requests, jobs and JSON know it by if it is another."""
    if isinstance(default, bool):
        facts.setdefault("values", (False, True))
    return field(default=default, metadata={"name": name, "choice": Choice(**facts)})


def _of_zero(default: Any, *keys: str, name: str = "", **facts: Any) -> Any:
    """Returns the field of a choice that the section `zero_optimization` holds."""
    return _choice(default, name, keys=tuple(f"zero_optimization.{key}" for key in keys), **facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """Which weights train, and the dtypes of their copies."""

    method: Method = Method.FULL
    """Trained parameters: all, or an adapter."""
    lora: Lora = field(default_factory=Lora)
    """The adapter, for LoRA and QLoRA."""
    precision: Precision = _choice(Precision.BF16, repeated=("bf16.enabled", "fp16.enabled"))
    """Dtype of forward and backward."""

    @property
    def is_full(self) -> bool:
        """Whether every weight trains, not an adapter."""
        return self.method is Method.FULL

    @property
    def item(self) -> int:
        """Bytes of one element in the training precision."""
        return self.precision.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The input of one forward pass of one GPU."""

    seq_len: int = 4096
    """Longest sample in tokens."""
    rope_scaling: RopeScaling | None = None
    """How positions reach that length, beyond the model's own; costs neither memory nor time."""
    micro_batch: int = _choice(1, repeated=("train_micro_batch_size_per_gpu",), is_speed=True, is_tuned=True)
    """Samples of one forward pass of one GPU."""
    task: Task = Task.SFT
    """Training task, which decides how many sequences a sample has."""
    packing: bool = False
    """Whether samples share rows, so that no row has padding."""
    image_patches: int = 0
    """Patches of all images of one sample that the vision tower sees."""

    @property
    def rows(self) -> int:
        """Sequences of one forward pass of one GPU."""
        return self.micro_batch * self.task.rows

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass of one GPU, at most."""
        return self.micro_batch * self.sample_tokens

    @property
    def sample_tokens(self) -> int:
        """Tokens of the sequences of one sample, at most."""
        return self.task.rows * self.seq_len

    @property
    def is_padded(self) -> bool:
        """Whether attention receives a padding mask."""
        return not self.packing and self.rows > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """How gradients become new weights."""

    optimizer: Optimizer = _choice(Optimizer.ADAMW, keys=("optimizer.type", *(f"bf16.{name}" for name in BF16_STATES)))
    grad_accum: int = _choice(
        1, repeated=("gradient_accumulation_steps",), is_speed=True, is_tuned=True, follows="micro_batch"
    )
    """Micro-batches of one optimizer step."""
    grad_accum_dtype: Precision | None = _choice(None, keys=("data_types.grad_accum_dtype",))
    """Dtype in which DeepSpeed accumulates gradients; None: the gradients' own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The implementations of a layer's parts."""

    attn: Attention = _choice(Attention.SDPA, is_speed=True)
    """Attention implementation."""
    liger: bool = False
    """Whether Liger's kernels replace norms, rotary embedding and gated MLP, as far as it has them for the family."""
    loss: LossKernel = _choice(LossKernel.FULL, is_speed=True, values=tuple(LossKernel))
    """How the loss is computed."""
    router_loss: bool = False
    """Whether the loss that balances experts is computed; families without one ignore it."""
    torch_compile: bool = _choice(False, is_tuned=True)
    """Whether torch.compile compiles the decoder layers; the plan counts neither its gain nor its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """Which activations are recomputed in the backward pass."""

    enabled: bool = _choice(False, "grad_ckpt", is_speed=True, is_tuned=True)
    """Whether layers keep their input alone."""
    every_n_layers: int = _choice(
        1, "grad_ckpt_every_n_layers", is_speed=True, is_tuned=True, values=(4, 2, 1), follows="grad_ckpt"
    )
    """Every n-th layer does so, from the first one on; the others keep what the backward pass needs."""
    offload: bool = _choice(False, "activation_offload", is_speed=True, is_tuned=True, follows="grad_ckpt")
    """Whether these inputs wait in host RAM."""
    tiled_mlp: bool = _choice(False, is_speed=True, is_tuned=True)
    """Whether MLPs are computed for a part of the tokens at a time, and again for each part in the backward pass."""

    @property
    def period(self) -> int:
        """Layers after which the pattern of recomputed layers repeats."""
        return self.every_n_layers if self.enabled else 1

    def recomputes(self, layer: int) -> bool:
        """Returns whether a layer is recomputed. Source: Transformers 5.23 PreTrainedModel._set_gradient_checkpointing.

        >>> [layer for layer in range(7) if Checkpointing(enabled=True, every_n_layers=3).recomputes(layer)]
        [0, 3, 6]
        """
        return self.enabled and layer % self.every_n_layers == 0

    def share(self, num_layers: int) -> float:
        """Returns the share of recomputed layers, 0…1."""
        return -(-num_layers // self.every_n_layers) / num_layers if self.enabled else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Ranks that share the work on one sample."""

    sp: int = _choice(1, is_speed=True, is_tuned=True)
    """Ulysses sequence-parallel ranks: each has 1/sp of a sequence and, inside attention, of the heads."""
    tp: int = _choice(1, repeated=("tensor_parallel.autotp_size",), is_speed=True)
    """AutoTP tensor-parallel ranks: each has 1/tp of every sharded weight."""
    ep: int = _choice(1, repeated=("expert_parallel.autoep_size",), is_speed=True)
    """AutoEP expert-parallel ranks: each has 1/ep of the experts, and trains on samples of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """ZeRO's settings, with DeepSpeed's defaults. Sizes of buffers are in elements.

    Source: deepspeed 0.19.8 runtime/zero/config.py and offload_config.py; overlap_comm is true by default under ZeRO-3.
    """

    stage: int = _of_zero(0, "stage", name="zero_stage", is_speed=True, is_tuned=True, values=(0, 1, 2, 3))
    """ZeRO stage, 0…3."""
    offload: Offload = _of_zero(
        Offload.NONE,
        "offload_optimizer.device",
        "offload_param.device",
        is_speed=True,
        is_tuned=True,
        values=tuple(Offload),
    )
    """States kept outside GPU memory."""
    offload_ratio: float = _of_zero(
        1.0, "offload_optimizer.ratio", is_speed=True, is_tuned=True, follows="offload", least_stage=3
    )
    """Share of the optimizer's sub-groups that is offloaded, 0…1 (ZeRO-3 only)."""
    pin_memory: bool = _of_zero(True, "offload_optimizer.pin_memory")
    """Whether offloaded states are in page-locked memory."""
    overlap_comm: bool = _of_zero(False, "overlap_comm")
    """Whether gradient reduction overlaps the backward pass (twice the bucket)."""
    reduce_bucket_size: int = _of_zero(500_000_000, "reduce_bucket_size")
    """Elements of gradient reduced at once."""
    sub_group_size: int = _of_zero(1_000_000_000, "sub_group_size")
    """Partitioned elements that ZeRO-3 steps at once."""
    prefetch_bucket_size: int = _of_zero(50_000_000, "stage3_prefetch_bucket_size")
    """Elements that ZeRO-3 gathers ahead."""
    param_persistence_threshold: int = _of_zero(100_000, "stage3_param_persistence_threshold")
    """Parameters of up to that many elements stay gathered under ZeRO-3."""
    max_live_parameters: int = _of_zero(1_000_000_000, "stage3_max_live_parameters")
    """Gathered elements above which ZeRO-3 stops prefetching."""
    max_reuse_distance: int = _of_zero(1_000_000_000, "stage3_max_reuse_distance")
    """ZeRO-3 keeps a parameter gathered if it is used again within that many elements."""
    hpz: int = _of_zero(1, "zero_hpz_partition_size", is_speed=True, is_tuned=True, least_stage=3)
    """Ranks that share ZeRO++'s secondary copy of the parameters; 1: no such copy."""
    qwz: bool = _of_zero(False, "zero_quantized_weights", is_speed=True, least_stage=3)
    """Whether parameters are gathered in 8 bits (ZeRO++), which rounds them."""

    @property
    def is_offloaded(self) -> bool:
        """Whether anything leaves GPU memory."""
        return self.offload is not Offload.NONE

    @property
    def offloads_params(self) -> bool:
        """Whether parameters leave GPU memory too."""
        return self.offload in (Offload.PARAMS, Offload.NVME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A configuration as DeepSpeed 0.19 and Transformers 5 understand it."""

    model: TrainedModel = TrainedModel()
    batch: MicroBatch = MicroBatch()
    step: OptimizerStep = OptimizerStep()
    kernels: Kernels = Kernels()
    checkpointing: Checkpointing = Checkpointing()
    parallel: Parallel = Parallel()
    zero: Zero = Zero()
    expandable_segments: bool = True
    """Whether PyTorch's caching allocator may grow its segments, as `dstrain run` lets it."""
    code: TrainingCode = field(default_factory=TrainingCode)
    """How the training code computes."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Makes records write a configuration as `flat` has it, and read it back; old ones lack choices."""
        from pydantic_core import core_schema

        parts = {choice.part for choice in choices().values()}
        hints = {part: get_type_hints(type(getattr(DEFAULTS, part)) if part else cls) for part in parts}
        schemas = {name: handler.generate_schema(hints[at.part][at.field]) for name, at in choices().items()}
        legal = {name: core_schema.typed_dict_field(schema, required=False) for name, schema in schemas.items()}
        return core_schema.no_info_after_validator_function(
            lambda values: changed(DEFAULTS, **values),
            core_schema.typed_dict_schema(legal, config=core_schema.CoreConfig(strict=True)),
            serialization=core_schema.plain_serializer_function_ser_schema(flat),
        )


DEFAULTS = Configuration()
"""DeepSpeed's defaults."""
DEGREES = tuple(degree.name for degree in fields(Parallel))


@cache
def choices() -> Mapping[str, Choice]:
    """Returns every choice by the name that requests, jobs and JSON use.

    >>> choices()["zero_stage"].keys, choices()["micro_batch"].repeated
    (('zero_optimization.stage',), ('train_micro_batch_size_per_gpu',))
    """
    found: dict[str, Choice] = {}
    for part in fields(Configuration):
        if part.name == "expandable_segments":
            found[part.name] = Choice(field=part.name)
        elif part.name != "code":  # nobody chooses it
            for choice in fields(getattr(DEFAULTS, part.name)):
                known: Choice = choice.metadata.get("choice", Choice())
                name = choice.metadata.get("name") or choice.name
                found[name] = replace(known, part=part.name, field=choice.name)
    return found


def changed(configuration: Configuration, **values: Any) -> Configuration:
    """Returns the configuration with some choices made otherwise, by the names of `choices`, or with other parts.

    >>> changed(DEFAULTS, zero_stage=3, micro_batch=2).zero.stage
    3
    """
    by_part: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        choice = choices().get(name) or Choice(field=name)
        by_part.setdefault(choice.part, {})[choice.field] = value
    own = by_part.pop("", {})
    parts = {part: replace(getattr(configuration, part), **chosen) for part, chosen in by_part.items()}
    return replace(configuration, **parts, **own)


def changes(configuration: Configuration, name: str, values: Iterable[Any] | None = None) -> Iterator[Configuration]:
    """Yields the configuration with each other value of a choice, or with each of `values`.

    Details of the choice are then neutral, and so is everything that the stage of ZeRO lacks; the samples of a step
    stay.

    >>> [other.zero.stage for other in changes(DEFAULTS, "zero_stage")]
    [1, 2, 3]
    >>> [(c.batch.micro_batch, c.step.grad_accum) for c in changes(changed(DEFAULTS, grad_accum=4), "micro_batch")]
    [(2, 2), (4, 1)]
    """
    samples = configuration.batch.micro_batch * configuration.step.grad_accum
    if values is None:
        values = range(1, samples + 1) if name == "micro_batch" else choices()[name].values
    for value in values:
        made = {name: value}
        for detail, choice in choices().items():
            if choice.follows == name or (name == "zero_stage" and value < choice.least_stage):
                made[detail] = choice.of(DEFAULTS)
        if name == "micro_batch":
            # only a divisor leaves the samples of a step as they are
            if samples % value:
                continue
            made["grad_accum"] = samples // value
        other = changed(configuration, **made)
        if other != configuration:
            yield other


def flat(configuration: Configuration) -> dict[str, Any]:
    """Returns every choice as data, by the names of `choices`."""
    data = asdict(configuration)
    return {name: (data[choice.part] if choice.part else data)[choice.field] for name, choice in choices().items()}
