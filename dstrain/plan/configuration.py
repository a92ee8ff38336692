"""One complete training configuration, in parts: a part is what some computation depends on, and a key of its cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Any, get_type_hints

from dstrain.choices import Attention, LossKernel, Method, Offload, Optimizer, Precision, StateDtypes, Task
from dstrain.job.model_changes import Lora, RopeScaling
from dstrain.plan.training_code import TrainingCode


def _named(name: str, default: Any) -> Any:
    """Returns a field that requests, jobs and JSON know by another name."""
    return field(default=default, metadata={"name": name})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """Which weights train, and the dtypes of their copies."""

    method: Method = Method.FULL
    """Trained parameters: all, or an adapter."""
    lora: Lora = field(default_factory=Lora)
    """The adapter, for LoRA and QLoRA."""
    precision: Precision = Precision.BF16
    """Dtype of forward and backward."""
    state_dtypes: StateDtypes = StateDtypes.MIXED
    """Which copies of a parameter exist, and so whether DeepSpeed or PyTorch's own sharding holds them."""

    @property
    def is_full(self) -> bool:
        """Whether every weight trains, not an adapter."""
        return self.method is Method.FULL

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed holds the states, not PyTorch's own sharding."""
        return self.state_dtypes is StateDtypes.MIXED

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
    micro_batch: int = 1
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

    optimizer: Optimizer = Optimizer.ADAMW
    grad_accum: int = 1
    """Micro-batches of one optimizer step."""
    grad_accum_dtype: Precision | None = None
    """Dtype in which DeepSpeed accumulates gradients; None: the gradients' own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The implementations of a layer's parts."""

    attn: Attention = Attention.SDPA
    """Attention implementation."""
    liger: bool = False
    """Whether Liger's kernels replace norms, rotary embedding and gated MLP, as far as it has them for the family."""
    loss: LossKernel = LossKernel.FULL
    """How the loss is computed."""
    router_loss: bool = False
    """Whether the loss that balances experts is computed; families without one ignore it."""
    torch_compile: bool = False
    """Whether torch.compile compiles the decoder layers; the plan counts neither its gain nor its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """Which activations are recomputed in the backward pass."""

    enabled: bool = _named("grad_ckpt", False)
    """Whether layers keep their input alone."""
    every_n_layers: int = _named("grad_ckpt_every_n_layers", 1)
    """Every n-th layer does so, from the first one on; the others keep what the backward pass needs."""
    offload: bool = _named("activation_offload", False)
    """Whether these inputs wait in host RAM."""
    tiled_mlp: bool = False
    """Whether MLPs are computed for a part of the tokens at a time, and again for each part in the backward pass."""

    @property
    def period(self) -> int:
        """Layers after which the pattern of recomputed layers repeats."""
        return self.every_n_layers if self.enabled else 1

    @property
    def words(self) -> str:
        """The choice in words, such as `checkpointing of every 2 layers`."""
        every = "" if self.every_n_layers == 1 else f" of every {self.every_n_layers} layers"
        where = " with inputs in RAM" if self.offload else ""
        words = f"checkpointing{every}{where}" if self.enabled else "no checkpointing"
        return f"{words}, tiled MLPs" if self.tiled_mlp else words

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

    sp: int = 1
    """Ulysses sequence-parallel ranks: each has 1/sp of a sequence and, inside attention, of the heads."""
    tp: int = 1
    """AutoTP tensor-parallel ranks: each has 1/tp of every sharded weight."""
    ep: int = 1
    """AutoEP expert-parallel ranks: each has 1/ep of the experts, and trains on samples of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """ZeRO's settings, with DeepSpeed's defaults. Sizes of buffers are in elements.

    Source: deepspeed 0.19.8 runtime/zero/config.py and offload_config.py; overlap_comm is true by default under ZeRO-3.
    """

    stage: int = _named("zero_stage", 0)
    """ZeRO stage, 0…3."""
    offload: Offload = Offload.NONE
    """States kept outside GPU memory."""
    offload_ratio: float = 1.0
    """Share of the optimizer's sub-groups that is offloaded, 0…1 (ZeRO-3 only)."""
    pin_memory: bool = True
    """Whether offloaded states are in page-locked memory."""
    overlap_comm: bool = False
    """Whether gradient reduction overlaps the backward pass (twice the bucket)."""
    reduce_bucket_size: int = 500_000_000
    """Elements of gradient reduced at once."""
    sub_group_size: int = 1_000_000_000
    """Partitioned elements that ZeRO-3 steps at once."""
    prefetch_bucket_size: int = 50_000_000
    """Elements that ZeRO-3 gathers ahead."""
    param_persistence_threshold: int = 100_000
    """Parameters of up to that many elements stay gathered under ZeRO-3."""
    max_live_parameters: int = 1_000_000_000
    """Gathered elements above which ZeRO-3 stops prefetching."""
    max_reuse_distance: int = 1_000_000_000
    """ZeRO-3 keeps a parameter gathered if it is used again within that many elements."""
    hpz: int = 1
    """Ranks that share ZeRO++'s secondary copy of the parameters; 1: no such copy."""
    qwz: bool = False
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

    @property
    def title(self) -> str:
        """Returns the choice in a few words, such as `ZeRO-3 + optimizer offload, checkpointing, micro-batch 1`."""
        return ", ".join(self.title_parts)

    @property
    def title_parts(self) -> list[str]:
        """Returns the parts of the title: ZeRO and offload, checkpointing, torch.compile, micro-batch."""
        offload = f" + {self.zero.offload.words}" if self.zero.is_offloaded else ""
        words = [self.checkpointing.words] if self.checkpointing.enabled or self.checkpointing.tiled_mlp else []
        words += ["torch.compile"] if self.kernels.torch_compile else []
        return [f"ZeRO-{self.zero.stage}{offload}", *words, f"micro-batch {self.batch.micro_batch}"]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Makes records write a configuration as `flat` has it, and read it back; old ones lack choices."""
        from pydantic_core import core_schema

        kinds = {part: get_type_hints(type(getattr(DEFAULTS, part)) if part else cls) for part, _ in choices().values()}
        legal = {
            name: core_schema.typed_dict_field(handler.generate_schema(kinds[part][choice]), required=False)
            for name, (part, choice) in choices().items()
        }
        return core_schema.no_info_after_validator_function(
            lambda values: changed(DEFAULTS, **values),
            core_schema.typed_dict_schema(legal, config=core_schema.CoreConfig(strict=True)),
            serialization=core_schema.plain_serializer_function_ser_schema(flat),
        )


DEFAULTS = Configuration()
"""DeepSpeed's defaults."""
DEGREES = tuple(degree.name for degree in fields(Parallel))


@cache
def choices() -> Mapping[str, tuple[str, str]]:
    """Returns every choice by the name that requests, jobs and JSON use → its part, and its name there.

    >>> choices()["zero_stage"], choices()["expandable_segments"]
    (('zero', 'stage'), ('', 'expandable_segments'))
    """
    places: dict[str, tuple[str, str]] = {}
    for part in fields(Configuration):
        if part.name == "expandable_segments":
            places[part.name] = "", part.name
        elif part.name != "code":  # nobody chooses it
            for choice in fields(getattr(DEFAULTS, part.name)):
                places[choice.metadata.get("name", choice.name)] = part.name, choice.name
    return places


def changed(configuration: Configuration, **values: Any) -> Configuration:
    """Returns the configuration with some choices made otherwise, by the names of `choices`, or with other parts.

    >>> changed(DEFAULTS, zero_stage=3, micro_batch=2).title
    'ZeRO-3, micro-batch 2'
    """
    by_part: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        part, choice = choices().get(name, ("", name))
        by_part.setdefault(part, {})[choice] = value
    own = by_part.pop("", {})
    parts = {part: replace(getattr(configuration, part), **chosen) for part, chosen in by_part.items()}
    return replace(configuration, **parts, **own)


def flat(configuration: Configuration) -> dict[str, Any]:
    """Returns every choice as data, by the names of `choices`."""
    data = asdict(configuration)
    return {name: (data[part] if part else data)[choice] for name, (part, choice) in choices().items()}
