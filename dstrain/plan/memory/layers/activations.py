"""Runs one micro-batch of a model on the tape, forward and backward, from the embedding to the loss."""

from __future__ import annotations

from collections.abc import Callable

from dstrain.choices import Attention
from dstrain.facts.model.model_facts import Kind, ModelFacts
from dstrain.plan.memory.layers import losses, ops, vision
from dstrain.plan.memory.layers.context import Context, Variant
from dstrain.plan.memory.layers.families import LAYER_CODE, LayerCode
from dstrain.plan.memory.layers.tape import Node, Param, Tensor, Tensors


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
    # checkpointed layers need an input with a gradient, which a frozen table does not give
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
    if variant.code.is_autocast:
        rows, item = ops.cast(tape, rows, variant.item), variant.item
    outer = ops.matmul(tape, rows, up, base.numel, item)
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
    """Makes the mask of windows that Qwen 2 MoE makes even if no layer has windows: rows of any length need it.

    Source: Transformers 5.23 modeling_qwen2_moe.py: Qwen2MoeModel.forward; configuration_qwen2_moe.py: a window of 0.
    """
    variant = run.variant
    if run.model.num_windowed_layers:
        return None
    rows = variant.batch.rows if variant.has_mask or variant.kernels.attn is Attention.EAGER else 1
    if variant.kernels.attn.is_flash:
        return None
    return run.tape.new(rows * variant.seq_len**2, variant.item if variant.kernels.attn is Attention.EAGER else 1)


def has_layer_code(model: ModelFacts) -> bool:
    """Returns whether the tape knows the model's layer code, and all of what it trains on."""
    return model.traced is None and model.model_type in LAYER_CODE


def layer_kinds(model: ModelFacts, variant: Variant) -> dict[str, int]:
    """Returns the number of layers of each kind: with a dense MLP or experts, with or without a mask of their own.

    A window needs a mask where rows are longer and SDPA has none; other attention takes it without, or has a mask
    anyway. Source: Transformers 5.23 masking_utils.py: _ignore_causal_mask_sdpa.
    """
    sparse = model.moe.num_moe_layers if model.moe else 0
    depth = {"dense": model.num_hidden_layers - sparse, "sparse": sparse}
    window = model.sliding_window
    if (
        window is not None
        and window <= variant.seq_len
        and variant.kernels.attn is Attention.SDPA
        and not variant.has_mask
    ):
        left = model.num_windowed_layers
        for kind in ("sparse", "dense"):
            depth[f"{kind}, windowed"] = min(left, depth[kind])
            depth[kind] -= depth[f"{kind}, windowed"]
            left -= depth[f"{kind}, windowed"]
    return {kind: count for kind, count in depth.items() if count}


def play(run: Context, depth: dict[str, int]) -> None:
    """Runs one micro-batch, forward and backward."""
    tape, model = run.tape, run.model
    code = LAYER_CODE[model.model_type]
    tape.ledger.enter("forward")
    count = (
        2 + run.variant.has_mask + (3 if run.variant.batch.image_patches else 0)
    )  # ids, labels; mask; three positions
    inputs = tape.new(run.rows * count, ops.INDEX)
    images = vision.pixels(run) if code.tower else None
    loss = _forward(run, code, depth, images)
    del images  # the Trainer drops a micro-batch before the backward pass
    tape.ledger.enter("loss backward")
    tape.backward(loss)
    del inputs


def _forward(run: Context, code: LayerCode, depth: dict[str, int], images: Tensor | None) -> Tensor:
    """Returns the loss; tensors in the frame of the model's forward pass are freed when it returns."""
    tape, model, variant = run.tape, run.model, run.variant
    places = tape.new(variant.seq_len, ops.INDEX)
    share = variant.parallel.tp if model.tie_word_embeddings else 1  # AutoTP cuts an embedding only with its head
    table = Param(model.vocab_size * model.hidden_size // share, trains=run.trains_whole(Kind.EMBEDDING), is_root=True)
    hidden = embedded(run, table, scales=code.scales_in_embedding)
    if code.scales_embedding:
        hidden = ops.unary(tape, hidden)
    seen = code.tower(run, hidden, images) if code.tower and images else None
    if seen:
        hidden = seen.hidden
    embeddings = hidden  # the frame holds them
    is_windowed = any(kind.endswith("windowed") for kind in depth)
    positions(run, by_row=code.rotates_by_row, by_kind=code.rotates_by_kind, is_windowed=is_windowed)
    idle = idle_mask(run) if code.makes_idle_mask else None
    order = [kind for kind, count in depth.items() for _ in range(count)]
    for index, kind in enumerate(order):
        layer = _layer(run, code, kind)
        hidden = tape.checkpoint(layer, hidden) if variant.checkpointing.recomputes(index) else layer(hidden)
        hidden = output = marked(run, hidden, index)
        is_at_end = index == 0 or index >= model.num_hidden_layers - 2
        if seen and index < len(seen.levels) and (is_at_end or seen.levels[index].node is not None):
            # frozen ones between the first and the last two layers leave as much behind as layers without
            hidden = vision.deepened(run, hidden, seen.levels[index], seen.mask)
    hidden = code.norm(run, hidden, model.hidden_size)
    del embeddings, seen, output, idle
    if not variant.checkpointing.enabled:  # who recomputes a layer calls it again with the mask and the tables
        run.mask = None
        if not run.kernels.rotary:  # Liger's rotation keeps them
            run.cos = run.sin = None
    loss = losses.loss(run, hidden, table, scales=code.scales_logits)
    del places
    return loss


def _layer(run: Context, code: LayerCode, kind: str) -> Callable[[Tensor], Tensor]:
    """Returns a layer of the kind, which knows whether it has a mask when it runs and when it is recomputed."""
    made = code.dense if kind.startswith("dense") else code.sparse
    assert made is not None
    has_mask = run.variant.has_mask or kind.endswith("windowed")

    def layer(x: Tensor) -> Tensor:
        run.has_mask = has_mask
        return made(run, x)

    return layer


def marked(run: Context, x: Tensor, layer: int) -> Tensor:
    """Passes the output of a layer through; when its gradient comes back, the layer's backward pass begins."""
    tape = run.tape
    if x.node is None:
        return x
    output = ops.view_without_node(x) if run.variant.holds_layers else None

    def backward(grad: Tensor) -> tuple[Tensor | None, ...]:
        tape.leave_layer()
        if output is not None:
            tape.kept_tensors += [output, ops.view(grad)]
        tape.ledger.enter("layer backward", layer)
        return (grad,)

    return Tensor(x.storage, x.numel, x.item, tape.node((x,), backward))
