"""Plays the embeddings, rotary tables and attention mask that precede the decoder layers."""

from __future__ import annotations

from dstrain.choices import Attention, StateDtypes
from dstrain.facts.model.model_facts import Kind
from dstrain.plan.memory.layers import ops, products
from dstrain.plan.memory.layers.context import Context
from dstrain.plan.memory.layers.graph import Tensors
from dstrain.plan.memory.layers.tensor import Node, Param, Tensor


def embedded(run: Context, table: Param, *, scales: bool) -> Tensor:
    """The embedding of the tokens, perhaps times a constant; its gradient is a table of zeros, summed into."""
    tape, model, item = run.tape, run.model, run.variant.item
    node: Node | None = None
    if table.trains:
        numel = table.numel

        def backward(grad: Tensor) -> Tensors:
            _enter_backward(run)
            whole = tape.gathered(numel, item)
            result = tape.grad(numel, item)
            del whole
            return (result,)

        node = tape.node((table,), backward)
    whole = tape.gathered(table.numel, item)
    result = tape.new(run.rows * model.hidden_size, item, node)
    del whole
    if scales:
        result = ops.unary(tape, result)
    if run.variant.checkpointing.enabled and not table.trains and run.variant.code.stops_early:
        result.node = _leaf(run, result)
    if run.adapts(Kind.EMBEDDING):
        result = _adapted(run, result, scales=scales)
    if run.variant.residual_item != item:
        return ops.cast(tape, result, run.variant.residual_item)
    return result


def _enter_backward(run: Context) -> None:
    run.tape.leave_layer()
    run.cos = run.sin = run.mask = None  # the last layer that used them is done
    run.tape.ledger.enter("embedding backward")


def _adapted(run: Context, base: Tensor, *, scales: bool) -> Tensor:
    """Adds rows of the adapter's first matrix, times the second.

    The gradient of the first is a table of zeros, summed into, then copied: PEFT has the matrix the other way round.
    Source: peft 0.21 tuners/lora/layer.py: Embedding.forward.
    """
    tape, model, variant, rank = run.tape, run.model, run.variant, run.variant.model.lora.rank
    item = variant.adapter_item
    down, up = Param(rank * model.vocab_size, trains=True), Param(rank * model.hidden_size, trains=True)

    def table_backward(grad: Tensor) -> Tensors:
        table = tape.new(down.numel, item)
        result = tape.grad(down.numel, item)
        del table
        return (result,)

    whole = tape.gathered(down.numel, item)
    rows = tape.new(run.rows * rank, item, tape.node((down,), table_backward) if tape.needs(down) else None)
    del whole
    if variant.model.state_dtypes is StateDtypes.AUTOCAST:
        rows, item = ops.cast(tape, rows, variant.item), variant.item
    outer = products.matmul(tape, rows, up, base.numel, item)
    del rows
    for _ in range(2 if scales else 1):  # by the adapter's own factor, and by that of the embedding
        outer = ops.unary(tape, outer)
    total = ops.add_up(tape, base, outer)

    def backward(grad: Tensor) -> Tensors:
        _enter_backward(run)
        return (grad,)

    node = tape.node((total,), backward) if tape.needs(total) else None
    return ops.cast(tape, Tensor(total.storage, total.numel, total.item, node), base.item)


def _leaf(run: Context, x: Tensor) -> Node:
    """Makes a gradient for x, which nothing that trains has made, so that the first layer can be recomputed.

    Source: Transformers 5.23 modeling_utils.py: enable_input_require_grads; the end of the graph holds x itself.
    """
    view = ops.view_without_node(x)

    def backward(grad: Tensor) -> Tensors:
        assert view.numel == grad.numel
        if not run.adapts(Kind.EMBEDDING):  # whose adapter has the gradient first
            _enter_backward(run)
        return (None,)

    return run.tape.node((view,), backward)


def positions(run: Context, *, by_row: bool, by_kind: bool, is_windowed: bool) -> None:
    """Makes what all layers share: rotary tables, by row or kind of attention or for all, and attention masks.

    `is_windowed` says that windows alone need a mask, which is the same for all rows.
    """
    tape, model, variant = run.tape, run.model, run.variant
    kinds = (model.num_windowed_layers > 0) + (model.num_windowed_layers < model.num_hidden_layers)
    numel = (
        (run.rows if variant.batch.packing or by_row else variant.seq_len)
        * model.rotary_dim
        * (kinds if by_kind else 1)
    )
    run.cos, run.sin = (tape.new(numel, variant.item) for _ in range(2))
    if is_windowed and not variant.is_by_sample:
        run.mask = tape.new(variant.seq_len**2, 1).storage
    elif variant.kernels.attn is Attention.EAGER:
        run.mask = tape.new(kinds * variant.batch.rows * variant.seq_len**2, variant.item).storage
    elif variant.has_mask and variant.kernels.attn is Attention.SDPA:
        run.mask = tape.new(kinds * variant.batch.rows * variant.seq_len**2, 1).storage


def idle_mask(run: Context) -> Tensor | None:
    """Makes the mask of windows that Qwen 2 MoE makes although no layer has windows: rows of any length need it.

    Source: Transformers 5.23 modeling_qwen2_moe.py: Qwen2MoeModel.forward; configuration_qwen2_moe.py: a window of 0.
    """
    variant = run.variant
    if run.model.model_type != "qwen2_moe" or run.model.num_windowed_layers:
        return None
    rows = variant.batch.rows if variant.has_mask or variant.kernels.attn is Attention.EAGER else 1
    if variant.kernels.attn.is_flash:
        return None
    return run.tape.new(rows * variant.seq_len**2, variant.item if variant.kernels.attn is Attention.EAGER else 1)
