"""The code that published runs were made with, where it is not what dstrain runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from benchmarks.published import mixtral_loop
from dstrain.choices import LossKernel
from dstrain.facts.model.families import LIGER
from dstrain.facts.model.traits import FusedParts
from dstrain.plan.memory.layers import losses, ops
from dstrain.plan.memory.layers.context import Context
from dstrain.plan.memory.layers.tape import Param, Part, Tensor, Tensors
from dstrain.plan.speed.kernel_costs import Cost
from dstrain.plan.training_code import ExpertLoop, TrainingCode


class Loss(StrEnum):
    """How published runs get from hidden states to a number, where the planner has no such loss.

    With the gradient written over the logits (Unsloth, flash-attn); fused into the head (Liger); in tiles that are all
    kept (torchtune, LitGPT)."""

    FULL = "full"
    IN_PLACE = "in-place"
    LIGER = "liger"
    TILED = "tiled"


PLANNED: Mapping[Loss, LossKernel] = MappingProxyType(
    {
        Loss.FULL: LossKernel.FULL,
        Loss.IN_PLACE: LossKernel.CHUNKED,
        Loss.LIGER: LossKernel.FUSED,
        Loss.TILED: LossKernel.FULL,
    }
)
"""The planner's loss that moves as many bytes as another one."""
TILES = 8
"""Tiles of the tiled loss. Source: torchtune modules/loss/ce_chunked_output_loss.py: num_output_chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What differs in the losses of published code."""

    shifts: bool = False
    """Whether the logits are copied, shifted and in fp32, as up to Transformers 4."""
    is_returned: bool = True
    """Whether the model returns the logits in the training precision beside that copy."""
    drops_last: bool = False
    """Whether that copy has all but the last row of each sample. Transformers 4.48's source drops it too, but the
    published peaks of its own loss have every row, to 2 KiB (fms-acceleration a100_80gb.csv)."""
    widens_fused: bool = False
    """Whether the fused loss casts its logits to fp32, as Liger up to 0.4 did."""
    chunk_loss: Callable[[Context, Tensor], Tensor] | None = None
    """The loss of one tile of logits; None: in fp32."""


@dataclass(frozen=True, slots=True)
class OnTape:
    """A published loss on the tape: `TrainingCode.loss`."""

    loss: Loss
    how: Losses

    def __call__(self, run: Context, hidden: Tensor, head: Param, scales: bool) -> Tensor:
        """Returns the loss of the last hidden states. Liger gives Granite, which scales logits, a loss in place, and
        families that it does not know none."""
        loss, family = self.loss, run.model.model_type
        if loss is Loss.LIGER and run.variant.kernels.liger and (family == "granite" or family not in LIGER):
            loss = Loss.IN_PLACE if family == "granite" else Loss.FULL
        if loss is Loss.LIGER:
            return _liger(run, hidden, head, widens=self.how.widens_fused)
        if loss is Loss.TILED:
            return _tiled(run, hidden, head, self.how.chunk_loss or _wide_cross_entropy)
        read = losses.read_at_once if loss is Loss.IN_PLACE else losses.cross_entropy
        return read(run, self._wide_logits(run, hidden, head, scales, is_in_place=self.loss is Loss.IN_PLACE))

    def _wide_logits(self, run: Context, hidden: Tensor, head: Param, scales: bool, *, is_in_place: bool) -> Tensor:
        """Returns the logits in fp32; those in the training precision, the model's output, live as long as the caller.

        Source: Transformers 4.46 loss/loss_utils.py: ForCausalLMLoss; 4.45 modeling_llama.py.
        """
        tape, samples = run.tape, run.variant.batch.micro_batch
        logits = losses.logits(run, hidden, head, scales)
        if not self.how.shifts or self.how.is_returned:
            run.kept_tensors.append(logits)
        wide = ops.cast(tape, logits, ops.FP32)
        del logits
        if samples == 1 or not self.how.shifts:
            return wide
        run.kept_tensors.append(wide)
        numel = run.rows * run.model.vocab_size
        if self.how.drops_last or is_in_place:
            numel -= samples * run.model.vocab_size
        return ops.copy(tape, ops.cut(tape, wide, numel))


def _liger(run: Context, hidden: Tensor, head: Param, *, widens: bool) -> Tensor:
    """Liger's fused head and loss: as dstrain's, with the gradient written over the logits.

    From 0.6 to 0.8.0 a second gradient of the head and one in fp32 stood beside the first, for a moment in each tile,
    as they still do in fp32 training.
    Source: liger-kernel 0.8.5 ops/fused_linear_cross_entropy.py: fused_linear_cross_entropy_forward.
    """
    tape, model, item = run.tape, run.model, run.variant.item
    rows, width, vocabulary = run.rows, model.hidden_size, model.vocab_size // run.variant.parallel.tp
    tape.ledger.enter("loss forward")
    grad_input = tape.new(rows * width, item)
    grad_weight = tape.grad(vocabulary * width, item) if head.trains else None
    sums = tape.new(rows, ops.FP32)
    whole = tape.gathered(vocabulary * width, item)
    logits = tape.new(liger_tile_rows(rows, width, vocabulary) * vocabulary, item)
    if widens:
        logits = ops.cast(tape, logits, ops.FP32)
    if head.trains and item == ops.FP32:
        product = tape.grad(vocabulary * width, item)
        del product
    del logits, sums, whole
    return losses.head_and_loss(run, hidden, head, grad_input, grad_weight)


def liger_tile_rows(rows: int, width: int, vocabulary: int) -> int:
    """Returns the tokens whose logits Liger's loss has at a time; `width` is that of hidden states.

    >>> liger_tile_rows(4096, 4096, 151936)
    128
    """
    tiles = -(-vocabulary // width)
    return min(rows, 1 << (-(-rows // tiles) - 1).bit_length())


def _tiled(run: Context, hidden: Tensor, head: Param, chunk_loss: Callable[[Context, Tensor], Tensor]) -> Tensor:
    """The logits in the training precision, tile by tile, and the loss of each tile.

    Torchtune compiles the loss, which then keeps nothing; LitGPT computes it in the training precision.
    Source: torchtune 0.6 modules/transformer.py: chunked_output, modules/loss/ce_chunked_output_loss.py; litgpt
    utils.py: chunkedcross_entropy.
    """
    tape = run.tape
    sizes = [hidden.numel // TILES] * (TILES - 1)
    pieces = ops.split(tape, hidden, (*sizes, hidden.numel - sum(sizes)))
    chunks = [losses.headed(run, losses.product(run, piece, head)) for piece in pieces]
    del pieces
    parts = [chunk_loss(run, chunk) for chunk in chunks]
    total = parts[0]
    for part in parts[1:]:
        total = ops.add(tape, total, part)
    return total


def _wide_cross_entropy(run: Context, logits: Tensor) -> Tensor:
    return losses.cross_entropy(run, ops.cast(run.tape, logits, ops.FP32))


def compiled_loss(run: Context, logits: Tensor) -> Tensor:
    """A compiled loss of one chunk: keeps the logits and one number a token, and makes only the gradient.

    Source: torchtune 0.6 modules/transformer.py: chunked_output, modules/loss/ce_chunked_output_loss.py.
    """
    tape = run.tape
    numel, item = logits.numel, logits.item
    saved = tape.save(ops.view_without_node(logits), tape.new(numel // run.model.vocab_size, ops.FP32))

    def backward(grad: Tensor) -> Tensors:
        tape.part = Part.LOGITS
        kept = saved.take()
        result = tape.new(numel, item)
        del kept
        return (result,)

    return tape.new(1, ops.FP32, tape.node((logits,), backward))


class StateDtypes(StrEnum):
    """Who keeps which copy of a parameter.

    `mixed` is DeepSpeed: weights and gradients in the training precision, an fp32 master copy and fp32 states.
    `pure-bf16` and `autocast` are PyTorch without DeepSpeed (one GPU, DDP, FSDP): everything in bf16, or everything in
    fp32 with bf16 copies made for each use."""

    MIXED = "mixed"
    PURE_BF16 = "pure-bf16"
    AUTOCAST = "autocast"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCode(TrainingCode):
    """Training code with what PyTorch's own sharding holds otherwise."""

    state_dtypes: StateDtypes = StateDtypes.MIXED
    """Which copies of a parameter exist, and so whether DeepSpeed or PyTorch's own sharding holds them."""
    has_peft: bool = True
    """Whether adapters are PEFT's: fp32 unless DeepSpeed casts them. Others have the training precision."""
    fuses_step: bool = False
    """Whether AdamW without DeepSpeed is the fused one; the foreach one has temporaries as large as the parameters."""
    has_linear_experts: bool = False
    """Whether each expert is made of linears of its own, which 4 bits can hold."""
    scale_bytes: float = 0.0
    """Bytes by which the scales of a 4-bit weight exceed those that are quantised too."""


def published(code: TrainingCode) -> PublishedCode:
    """Returns training code with these fields, at their defaults unless it has them."""
    return code if isinstance(code, PublishedCode) else PublishedCode()


_EXPERT_LOOP = ExpertLoop(kernels=(11.0, 20.0), modules=3)
"""Kernels of an expert: choose, gather, three products, activation, two products of elements, add. Source:
modeling_mixtral.py of Transformers 4.44."""

TRANSFORMERS_5 = PublishedCode(
    has_early_states=False, splits_packed_rows=False, masks_padding=True, loss=OnTape(Loss.FULL, Losses())
)
"""What others run on Transformers 5."""
TRANSFORMERS_4 = PublishedCode(
    loss=OnTape(Loss.FULL, Losses(shifts=True, widens_fused=True)),
    has_early_states=False,
    stops_early=False,
    is_reentrant=True,
    splits_packed_rows=False,
    skips_packed_masks=True,
    masks_padding=True,
    has_linear_experts=True,
    expert_loop=_EXPERT_LOOP,
    mixtral=mixtral_loop.mixtral,
    loss_bytes_per_logit=16.0,  # a shifted, contiguous fp32 copy, and back
)
"""Transformers 4.46 to 4.52: checkpointing is reentrant unless told otherwise, the loss is that of a shifted copy, and
experts are linear layers, one after the other. Source: modeling_llama.py of Transformers 4.44:
LlamaForCausalLM.forward."""
TRANSFORMERS_4_45 = PublishedCode(
    loss=OnTape(Loss.FULL, Losses(shifts=True, is_returned=False, drops_last=True, widens_fused=True)),
    has_early_states=False,
    stops_early=False,
    is_reentrant=True,
    splits_packed_rows=False,
    skips_packed_masks=True,
    masks_padding=True,
    families_that_repeat_keys=("mistral", "mixtral"),
    has_linear_experts=True,
    expert_loop=_EXPERT_LOOP,
    mixtral=mixtral_loop.mixtral,
    loss_bytes_per_logit=16.0,
)
"""Transformers 4.45 and before: drops the logits in the training precision earlier, and repeats keys and values before
flash attention. Source: its modeling_mistral.py, modeling_mixtral.py: …FlashAttention2.forward."""
TORCHTUNE = PublishedCode(
    loss=OnTape(Loss.FULL, Losses(shifts=True, widens_fused=True, chunk_loss=compiled_loss)),
    inputs_in_flight=3,  # two on their way out, and the last, which is needed first
    stops_early=False,
    has_peft=False,
    splits_packed_rows=False,
    skips_packed_masks=True,
    masks_padding=True,
    has_linear_experts=True,
    mixtral=mixtral_loop.mixtral,
)
"""Torchtune and torchtitan, with layer code, adapters and losses of their own."""
LITGPT = PublishedCode(
    # litgpt utils.py: chunked_cross_entropy, in the training precision
    loss=OnTape(Loss.FULL, Losses(shifts=True, widens_fused=True, chunk_loss=losses.cross_entropy)),
    stops_early=False,
    has_peft=False,
    splits_packed_rows=False,
    skips_packed_masks=True,
    masks_padding=True,
    keeps_quantized_inputs=True,  # its bitsandbytes is older than 0.42
    has_linear_experts=True,
    mixtral=mixtral_loop.mixtral,
)
"""LitGPT, with layer code, adapters and losses of its own."""

LLM_FOUNDRY = PublishedCode(
    loss=OnTape(Loss.FULL, Losses(shifts=True)),
    splits_packed_rows=False,
    skips_packed_masks=True,
    attention_speed=0.6,
    fused=FusedParts(),
)
"""MPT: one kernel for a norm in the training precision, no rotary embedding, GELU, a fused loss, and FlashAttention in
Triton, which has 0.5 to 0.6 of FlashAttention-2's speed on an A100 (arXiv 2307.08691, figure 5, from memory; the A100s
of 80 GB at 16k to 64k come to 0.6). Source: llm-foundry models/layers/norm.py: LPLayerNorm; models/mpt."""
INTERNEVO = PublishedCode(
    loss=OnTape(Loss.FULL, Losses(shifts=True)),
    has_early_states=False,
    stops_early=False,
    is_reentrant=True,
    splits_packed_rows=False,
    skips_packed_masks=True,
    has_linear_experts=True,
    attention_speed=0.5,
    fused=FusedParts(),
)
"""InternEvo: Apex's RMSNorm, flash-attn's rotary embedding and loss, SiLU and product scripted into one kernel. Of
the ranks that share the states (`zero1`), each broadcasts its part. Its tables of throughput are of July 2023, when
doc/en/install.md asked for flash-attention 1.0.5, which FlashAttention-2 doubles (arXiv 2307.08691, abstract). Source:
internlm/solver/optimizer/hybrid_zero_optim.py: broadcast_params; configs/7B_sft.py (overlap_sync_grad)."""


def with_loss(code: TrainingCode, loss: Loss) -> TrainingCode:
    """Returns training code with another of its losses."""
    how = code.loss.how if isinstance(code.loss, OnTape) else Losses()
    return replace(code, loss=OnTape(loss, how), tile_rows=liger_tile_rows if loss is Loss.LIGER else None)


COMPILED = FusedParts()
"""What torch.compile makes of a layer: one kernel each for norm, rotary embedding, and activation with product."""
COMPILED_ADAPTER_COSTS = (
    Cost(forward=2, backward=6, forward_kernels=2, backward_kernels=4),
    Cost(forward=6, backward=4, forward_kernels=1, backward_kernels=0),
)
"""Adapters whose output is scaled and summed by one kernel: both products read, sum written."""
UNSLOTH = FusedParts(mlp=False)
"""Unsloth's norms and rotary embedding, as fms-acceleration patches them into any model."""
UNSLOTH_ADAPTER_COSTS = (
    Cost(forward=2, backward=6, forward_kernels=2, backward_kernels=4),
    Cost(forward=4, backward=4, forward_kernels=0, backward_kernels=0),
)
"""Adapters on 4-bit weights whose products add to what is there: input read, output updated in place. Source: unsloth
kernels/utils.py: matmul_lora; fast_lora.py: LoRA_QKV, LoRA_W."""
