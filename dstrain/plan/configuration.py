"""One complete training configuration: everything that the Trainer and the engine are told and memory depends on."""

from __future__ import annotations

from dataclasses import dataclass

from dstrain.choices import (
    Attention,
    LossKernel,
    Method,
    Offload,
    Optimizer,
    Precision,
    Stack,
    StateDtypes,
)
from dstrain.job.schema import Lora


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A configuration as DeepSpeed 0.19 and Transformers 5 understand it. Sizes of buckets are in elements."""

    method: Method
    """What is trained."""
    lora: Lora
    """The adapter, for LoRA and QLoRA."""
    seq_len: int
    """Longest sample in tokens."""
    micro_batch: int
    """Samples of one forward of one GPU."""
    grad_accum: int
    """Micro-batches of one optimizer step."""
    grad_ckpt: bool
    """Whether activations are recomputed."""
    precision: Precision
    """Dtype of forward and backward."""
    attn: Attention
    """Attention implementation."""
    packing: bool
    """Whether samples share rows, so that there is no padding mask."""

    zero_stage: int
    """ZeRO stage, 0…3."""
    offload: Offload
    """What leaves GPU memory."""
    overlap_comm: bool
    """Whether gradient reduction overlaps the backward pass (twice the bucket)."""
    reduce_bucket_size: int
    """Elements of gradient reduced at once."""
    sub_group_size: int
    """Partitioned elements that ZeRO-3 steps at once."""
    prefetch_bucket_size: int
    """Elements that ZeRO-3 gathers ahead."""
    param_persistence_threshold: int
    """Parameters of up to so many elements stay gathered under ZeRO-3."""
    max_live_parameters: int
    """Gathered elements above which ZeRO-3 stops prefetching."""
    max_reuse_distance: int
    """ZeRO-3 keeps a parameter gathered when it is used again within so many elements."""
    pin_memory: bool
    """Whether offloaded states are in page-locked memory."""

    optimizer: Optimizer = Optimizer.ADAMW
    state_dtypes: StateDtypes = StateDtypes.MIXED
    """Which copies of a parameter there are, and so whether DeepSpeed or PyTorch's own sharding holds them."""
    grad_accum_dtype: Precision | None = None
    """Dtype in which DeepSpeed accumulates gradients; None: that of the gradients."""
    offload_ratio: float = 1.0
    """Share of the optimizer's sub-groups that is offloaded, 0…1 (ZeRO-3 only)."""
    hpz: int = 1
    """Ranks that share ZeRO++'s secondary copy of the parameters; 1: no such copy."""
    sp: int = 1
    """Ulysses sequence-parallel ranks: each has 1/sp of a sequence and, inside attention, of the heads."""
    tp: int = 1
    """AutoTP tensor-parallel ranks: each has 1/tp of every sharded weight."""
    liger: bool = False
    """Whether Liger's kernels replace norms, rotary embedding and gated MLP."""
    unsloth: bool = False
    """Whether Unsloth's kernels replace norms and rotary embedding, as some published measurements were made."""
    loss: LossKernel = LossKernel.FULL
    """How the loss is computed."""
    fp32_norms: bool = False
    """Whether norms, and so the residual stream, are fp32 beside a quantised base, as TRL makes them."""
    activation_offload: bool = False
    """Whether checkpointed layer inputs wait in host RAM."""
    double_quant: bool = True
    """Whether QLoRA's scales are quantised too."""
    image_patches: int = 0
    """Patches of all images of one sample that the vision tower sees."""
    expandable_segments: bool = True
    """Whether PyTorch's caching allocator may grow its segments, as `dstrain run` lets it."""
    stack: Stack = Stack.TRANSFORMERS_5
    """Whose layer code runs."""

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens of one forward of one GPU, at most."""
        return self.micro_batch * self.seq_len

    @property
    def title(self) -> str:
        """Returns the choice in a few words, such as `ZeRO-3 + optimizer offload, checkpointing, micro-batch 1`."""
        return ", ".join(self.title_parts)

    @property
    def title_parts(self) -> list[str]:
        """Returns the parts of the title: ZeRO and offload, checkpointing, micro-batch."""
        parts = [f"ZeRO-{self.zero_stage}"]
        if self.offload is not Offload.NONE:
            parts[0] += f" + {OFFLOAD_WORDS[self.offload]}"
        if self.grad_ckpt:
            parts.append("checkpointing")
        return [*parts, f"micro-batch {self.micro_batch}"]


OFFLOAD_WORDS = {
    Offload.OPTIMIZER: "optimizer offload",
    Offload.PARAMS: "optimizer and parameter offload",
    Offload.NVME: "NVMe offload",
}
"""How each offload is spoken of."""


DEFAULTS = Configuration(
    method=Method.FULL,
    lora=Lora(),
    seq_len=4096,
    micro_batch=1,
    grad_accum=1,
    grad_ckpt=False,
    precision=Precision.BF16,
    attn=Attention.SDPA,
    packing=False,
    zero_stage=0,
    offload=Offload.NONE,
    overlap_comm=False,
    reduce_bucket_size=500_000_000,
    sub_group_size=1_000_000_000,
    prefetch_bucket_size=50_000_000,
    param_persistence_threshold=100_000,
    max_live_parameters=1_000_000_000,
    max_reuse_distance=1_000_000_000,
    pin_memory=True,
)
"""What DeepSpeed takes where a configuration is silent. Source: deepspeed 0.19.8 runtime/zero/config.py and
offload_config.py; overlap_comm is true by default under ZeRO-3."""
