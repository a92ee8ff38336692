"""The code that published runs were made with, where it is not what dstrain runs."""

from __future__ import annotations

from functools import partial

from benchmarks.published import mixtral_loop
from dstrain.choices import LossKernel
from dstrain.plan.memory.layers import losses, ops
from dstrain.plan.memory.layers.context import Context
from dstrain.plan.memory.layers.graph import Tensors
from dstrain.plan.memory.layers.kernels import FusedParts
from dstrain.plan.memory.layers.tensor import Param, Part, Tensor
from dstrain.plan.speed.kernel_costs import Cost
from dstrain.plan.training_code import ExpertLoop, TrainingCode


def shifted_logits(
    run: Context, hidden: Tensor, head: Param, scales: bool, *, is_returned: bool, drops_last: bool
) -> Tensor:
    """Returns a shifted fp32 copy of the logits, beside those in the training precision if the model returns them.

    The copy has all but the last row of each sample (`drops_last`). Transformers 4.48's source drops it too, but the
    published peaks of its own loss have every row, to 2 KiB (fms-acceleration a100_80gb.csv).
    Source: Transformers 4.46 loss/loss_utils.py: ForCausalLMLoss; 4.45 modeling_llama.py.
    """
    tape, samples = run.tape, run.variant.batch.micro_batch
    logits = losses.logits(run, hidden, head, scales)
    wide = ops.cast(tape, logits, ops.FP32)
    if is_returned:
        run.kept_tensors.append(logits)
    del logits
    if samples == 1:
        return wide
    run.kept_tensors.append(wide)
    numel = run.rows * run.model.vocab_size
    if drops_last or run.variant.kernels.loss is LossKernel.IN_PLACE:
        numel -= samples * run.model.vocab_size
    return ops.copy(tape, ops.cut(tape, wide, numel))


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


_EXPERT_LOOP = ExpertLoop(kernels=(11.0, 20.0), modules=3)
"""Kernels of an expert: choose, gather, three products, activation, two products of elements, add. Source:
modeling_mixtral.py of Transformers 4.44."""
_SHIFT = partial(shifted_logits, is_returned=True, drops_last=False)

TRANSFORMERS_5 = TrainingCode(has_early_states=False, splits_packed_rows=False, masks_padding=True)
"""What others run on Transformers 5."""
TRANSFORMERS_4 = TrainingCode(
    has_early_states=False,
    stops_early=False,
    is_reentrant=True,
    splits_packed_rows=False,
    skips_packed_masks=True,
    masks_padding=True,
    has_linear_experts=True,
    expert_loop=_EXPERT_LOOP,
    mixtral=mixtral_loop.mixtral,
    wide_logits=_SHIFT,
    widens_fused_logits=True,
    loss_bytes_per_logit=16.0,  # a shifted, contiguous fp32 copy, and back
)
"""Transformers 4.46 to 4.52: checkpointing is reentrant unless told otherwise, the loss is that of a shifted copy, and
experts are linear layers, one after the other. Source: modeling_llama.py of Transformers 4.44:
LlamaForCausalLM.forward."""
TRANSFORMERS_4_45 = TrainingCode(
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
    wide_logits=partial(shifted_logits, is_returned=False, drops_last=True),
    widens_fused_logits=True,
    loss_bytes_per_logit=16.0,
)
"""Transformers 4.45 and before: drops the logits in the training precision earlier, and repeats keys and values before
flash attention. Source: its modeling_mistral.py, modeling_mixtral.py: …FlashAttention2.forward."""
TORCHTUNE = TrainingCode(
    inputs_in_flight=3,  # two on their way out, and the last, which is needed first
    stops_early=False,
    has_peft=False,
    splits_packed_rows=False,
    skips_packed_masks=True,
    masks_padding=True,
    has_linear_experts=True,
    mixtral=mixtral_loop.mixtral,
    wide_logits=_SHIFT,
    chunk_loss=compiled_loss,
    widens_fused_logits=True,
)
"""Torchtune and torchtitan, with layer code, adapters and losses of their own."""
LITGPT = TrainingCode(
    stops_early=False,
    has_peft=False,
    splits_packed_rows=False,
    skips_packed_masks=True,
    masks_padding=True,
    keeps_quantized_inputs=True,  # its bitsandbytes is older than 0.42
    has_linear_experts=True,
    mixtral=mixtral_loop.mixtral,
    wide_logits=_SHIFT,
    chunk_loss=losses.cross_entropy,  # litgpt utils.py: chunked_cross_entropy, in the training precision
    widens_fused_logits=True,
)
"""LitGPT, with layer code, adapters and losses of its own."""

LLM_FOUNDRY = TrainingCode(
    splits_packed_rows=False,
    skips_packed_masks=True,
    wide_logits=_SHIFT,
    attention_speed=0.6,
    fused=FusedParts(loss=LossKernel.IN_PLACE),
)
"""MPT: one kernel for a norm in the training precision, no rotary embedding, GELU, a fused loss, and FlashAttention in
Triton, which has 0.5 to 0.6 of FlashAttention-2's speed on an A100 (arXiv 2307.08691, figure 5, from memory; the A100s
of 80 GB at 16k to 64k come to 0.6). Source: llm-foundry models/layers/norm.py: LPLayerNorm; models/mpt."""
INTERNEVO = TrainingCode(
    has_early_states=False,
    stops_early=False,
    is_reentrant=True,
    splits_packed_rows=False,
    skips_packed_masks=True,
    has_linear_experts=True,
    wide_logits=_SHIFT,
    attention_speed=0.5,
    fused=FusedParts(loss=LossKernel.IN_PLACE),
)
"""InternEvo: Apex's RMSNorm, flash-attn's rotary embedding and loss, SiLU and product scripted into one kernel. Of
the ranks that share the states (`zero1`), each broadcasts its part. Its tables of throughput are of July 2023, when
doc/en/install.md asked for flash-attention 1.0.5, which FlashAttention-2 doubles (arXiv 2307.08691, abstract). Source:
internlm/solver/optimizer/hybrid_zero_optim.py: broadcast_params; configs/7B_sft.py (overlap_sync_grad)."""

COMPILED = FusedParts(loss=LossKernel.FULL)
"""What torch.compile makes of a layer: one kernel each for norm, rotary embedding, and activation with product."""
COMPILED_ADAPTER_COSTS = (
    Cost(forward=2, backward=6, forward_kernels=2, backward_kernels=4),
    Cost(forward=6, backward=4, forward_kernels=1, backward_kernels=0),
)
"""Adapters whose output is scaled and summed by one kernel: both products read, sum written."""
UNSLOTH = FusedParts(mlp=False, loss=LossKernel.FULL)
"""Unsloth's norms and rotary embedding, as fms-acceleration patches them into any model."""
UNSLOTH_ADAPTER_COSTS = (
    Cost(forward=2, backward=6, forward_kernels=2, backward_kernels=4),
    Cost(forward=4, backward=4, forward_kernels=0, backward_kernels=0),
)
"""Adapters on 4-bit weights whose products add to what is there: input read, output updated in place. Source: unsloth
kernels/utils.py: matmul_lora; fast_lora.py: LoRA_QKV, LoRA_W."""
