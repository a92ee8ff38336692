"""What comes before the decoder layers on the tape: embeddings, rotary tables, the attention mask."""

from __future__ import annotations

from dstrain.choices import Attention, Stack
from dstrain.plan.tape import ops
from dstrain.plan.tape.context import Context
from dstrain.plan.tape.graph import Tape, Tensors
from dstrain.plan.tape.tensor import Node, Param, Tensor


def embedded(run: Context, table: Param, *, scales: bool) -> Tensor:
    """The embedding of the tokens, perhaps times a constant; its gradient is a table of zeros, summed into."""
    tape, model, item = run.tape, run.model, run.variant.item
    node: Node | None = None
    if table.trains:
        numel = table.numel

        def backward(grad: Tensor) -> Tensors:
            tape.leave_layer()
            run.cos = run.sin = run.mask = None  # the last layer that used them is done
            tape.ledger.enter("embedding backward")
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
    if run.variant.grad_ckpt and not run.trains and run.variant.stack is Stack.TRANSFORMERS_5:
        result.node = _leaf(tape, result)
    if run.variant.residual_item != item:
        return ops.cast(tape, result, run.variant.residual_item)
    return result


def _leaf(tape: Tape, x: Tensor) -> Node:
    """Makes a gradient for x, which nothing that trains has made, so that the first layer can be recomputed.

    Source: Transformers 5.23 modeling_utils.py: enable_input_require_grads; the end of the graph holds x itself.
    """
    held = ops.view_without_node(x)

    def backward(grad: Tensor) -> Tensors:
        assert held.numel == grad.numel
        return (None,)

    return tape.node((held,), backward)


def positions(run: Context, attention_kinds: int, *, by_row: bool) -> None:
    """Makes what all layers share: rotary tables and attention masks, as many as there are kinds of attention."""
    tape, model, variant = run.tape, run.model, run.variant
    numel = (run.rows if variant.packing or by_row else variant.seq_len) * model.rotary_dim * attention_kinds
    run.cos, run.sin = (tape.new(numel, variant.item) for _ in range(2))
    mask = attention_kinds * variant.batch * variant.seq_len**2
    if variant.attn is Attention.EAGER:
        run.mask = tape.new(mask, variant.item).storage
    elif variant.has_mask and variant.attn is Attention.SDPA:
        run.mask = tape.new(mask, 1).storage
