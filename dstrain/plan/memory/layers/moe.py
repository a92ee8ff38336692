"""Mixtures of experts on the tape: routers, experts as grouped matrix products, their adapters, expert parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dstrain.plan.memory.layers import blocks, ops
from dstrain.plan.memory.layers.context import Context
from dstrain.plan.memory.layers.tape import Param, Tensor, Tensors

UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
"""The weights of a layer's experts."""


def check(run: Context) -> None:
    """Adds each adapter once before the experts are called, to see that the shape stays; the outer one first."""
    for name in (DOWN, UP):
        if run.adapts_experts(name):
            _added(run, name)


def weight(run: Context, name: str) -> Param | Tensor:
    """The matrices of all experts: the parameter, or a copy with the adapter of each expert added."""
    if run.adapts_experts(name):
        return _added(run, name)
    experts, outputs, inputs = _shape(run, name)
    return Param(experts * outputs * inputs, trains=run.trains)


def _shape(run: Context, name: str) -> tuple[int, int, int]:
    """Returns the number of experts, and the outputs and inputs of the matrix of each."""
    moe, width = run.moe, run.model.hidden_size
    sides = (2 * moe.intermediate_size, width) if name == UP else (width, moe.intermediate_size)
    return moe.num_experts, *sides


def _added(run: Context, name: str) -> Tensor:
    """`baddbmm(weight, up, down)`: the copy needs no input for its gradient, each factor the other one.

    The gradient of a factor is a product, which is then scaled. Factors are kept as views of parameters, so that what
    ZeRO-3 has gathered of these stays when it gives them back.
    """
    tape, item = run.tape, run.variant.item
    experts, outputs, inputs = _shape(run, name)
    factors = [_factor(run, experts * run.variant.model.lora.rank * side) for side in (outputs, inputs)]
    numel, sizes = experts * outputs * inputs, [factor.numel for factor in factors]
    node = None
    if tape.needs(*factors):
        are_params = [isinstance(factor, Param) for factor in factors]
        casts = [factor for factor in factors if isinstance(factor, Tensor)]
        # ZeRO-3 gives parameters back, so what the product needs of them is copied; else they are there anyway
        saved = tape.save(*([tape.new(size, item) for size in sizes] if tape.keeps_inputs else casts))

        def backward(grad: Tensor) -> Tensors:
            kept = saved.take()
            grads = []
            for size, is_param in zip(sizes, are_params, strict=True):
                product = tape.new(size, item)
                grads.append(tape.grad(size, item) if is_param else tape.new(size, item))
                del product
            del kept
            return tuple(grads)

        node = tape.node(tuple(factors), backward)
    whole = tape.gathered(numel, item)
    result = tape.new(numel, item, node)
    del whole
    return result


def _factor(run: Context, numel: int) -> Param | Tensor:
    """One of the two matrices of an adapter, in the dtype of the weights."""
    param, item = Param(numel, trains=True), run.variant.adapter_item
    return param if item == run.variant.item else ops.cast_param(run.tape, param, item, run.variant.item)


ALIGNMENT = 8
"""Rows to which each expert's rows are padded. Source: moe/ep_kernels.py: TOKEN_GROUP_ALIGN_SIZE_M."""


def routed(run: Context, x: Tensor) -> Tensor:
    """Returns the output of the experts for x, without shared experts: (tokens, hidden)."""
    tape, moe, width = run.tape, run.moe, run.model.hidden_size
    scores, order = _route(run, x)
    rows = scores.numel
    sent = ops.picked(tape, x, rows * width, tape.new(rows, ops.INDEX))
    sent = ops.unary(tape, sent)  # an exchange: its gradient is exchanged back
    padded = rows + moe.num_experts // run.variant.parallel.ep * ALIGNMENT
    places = tape.new(padded, ops.INDEX)
    sent = ops.picked(tape, sent, padded * width, places)
    gate, up = (_grouped(run, sent, moe.intermediate_size) for _ in range(2))
    hidden = ops.mul(tape, ops.activation(tape, gate), up)
    computed = _grouped(run, hidden, width)
    del sent, gate, up, hidden
    computed = ops.picked(tape, computed, rows * width, places)
    computed = ops.unary(tape, computed)
    placed = ops.picked(tape, computed, rows * width, order)
    summed = ops.resized(tape, ops.mul(tape, placed, scores), x.numel)
    return ops.cast(tape, summed, x.item)


def _route(run: Context, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the weight of each expert picked for a token, in fp32, and the order of tokens by expert."""
    tape, moe, width = run.tape, run.moe, run.model.hidden_size
    tokens = x.numel // width
    weight = Param(moe.num_experts * width, trains=run.trains)
    logits = ops.matmul(tape, x, weight, tokens * moe.num_experts, run.variant.item, is_flat=True)
    scores = ops.softmax(tape, ops.cast(tape, logits, ops.FP32))
    picked = tape.new(tokens * moe.experts_per_token, ops.INDEX)
    best = ops.picked(tape, scores, picked.numel, picked)
    sums = ops.resized(tape, best, tokens)
    best = ops.unary(tape, ops.mul(tape, best, sums))
    return best, tape.new(picked.numel, ops.INDEX)


def _grouped(run: Context, x: Tensor, outputs: int) -> Tensor:
    """The rows of each expert times its matrix, for all experts of this rank at once."""
    moe, width = run.moe, run.model.hidden_size
    inputs = width + moe.intermediate_size - outputs
    weight = Param(moe.num_experts // run.variant.parallel.ep * outputs * inputs, trains=run.trains)
    return ops.matmul(run.tape, x, weight, x.numel // inputs * outputs, run.variant.item, is_flat=True)


ROUTER_LOSS = "router loss forward"
"""The instant at which the loss that balances experts is computed."""

Routing = tuple[Tensor, Tensor, Tensor]
"""Logits, which the block's frame holds, the weight of each expert picked for a token, and which experts they are."""
Router = Callable[[Context, Tensor], Routing]


def qwen3_moe(run: Context, x: Tensor) -> Tensor:
    """Qwen 3's block. Source: Transformers 5.23 modeling_qwen3_moe.py: Qwen3MoeSparseMoeBlock."""
    return _routed(run, x, softmax_router)


def _routed(run: Context, x: Tensor, router: Router) -> Tensor:
    """Returns the output of the routed experts for x."""
    if run.variant.parallel.ep > 1:
        return routed(run, x)
    logits, weights, indices = router(run, x)
    output = grouped_experts(run, x, weights, indices)
    del logits
    return output


def mixtral(run: Context, x: Tensor) -> Tensor:
    """Mixtral's block: its weights stay fp32, and so does what they multiply.

    Source: Transformers 5.23 modeling_mixtral.py: MixtralTopKRouter.
    """
    if run.variant.code.mixtral is not None:
        block: Tensor = run.variant.code.mixtral(run, x)
        return block
    return _routed(run, x, partial(softmax_router, narrows=False))


def qwen2_moe(run: Context, x: Tensor) -> Tensor:
    """Qwen 2's block: an expert that all tokens visit is weighed by a gate of its own.

    Source: Transformers 5.23 modeling_qwen2_moe.py: Qwen2MoeSparseMoeBlock.
    """
    tape = run.tape
    shared = _mlp(run, x, "mlp.shared_expert")
    logits, weights, indices = softmax_router(run, x, normalises=False)
    output = grouped_experts(run, x, weights, indices)
    shared = ops.mul(tape, shared, ops.softmax(tape, run.linear(x, "mlp.shared_expert_gate")))
    del logits
    return ops.add(tape, output, shared)


def deepseek_v2(run: Context, x: Tensor) -> Tensor:
    """DeepSeek V2's block: the router is fp32, as are its weights; experts for all tokens beside those picked.

    Its larger models keep besides one byte an expert and token, of the groups left out.
    Source: Transformers 5.23 modeling_deepseek_v2.py: DeepseekV2Moe, DeepseekV2TopkRouter.
    """
    return _with_shared_experts(run, x, _wide_softmax_router)


def deepseek_v3(run: Context, x: Tensor) -> Tensor:
    """DeepSeek V3's block: sigmoid scores, groups of experts chosen first.

    Source: Transformers 5.23 modeling_deepseek_v3.py: DeepseekV3MoE, DeepseekV3TopkRouter.
    """
    return _with_shared_experts(run, x, _sigmoid_router)


def _with_shared_experts(run: Context, x: Tensor, router: Router) -> Tensor:
    if run.variant.parallel.ep > 1:
        return ops.add(run.tape, routed(run, x), _mlp(run, x, "mlp.shared_experts"))
    logits, weights, indices = router(run, x)
    output = grouped_experts(run, x, weights, indices)
    output = ops.add(run.tape, output, _mlp(run, x, "mlp.shared_experts"))
    del logits
    return output


def _mlp(run: Context, x: Tensor, part: str) -> Tensor:
    return blocks.named_mlp(run, x, f"{part}.gate_proj", f"{part}.up_proj", f"{part}.down_proj")


def _router_logits(run: Context, x: Tensor, item: int) -> Tensor:
    """The router's linear layer; in fp32 its weight is cast too."""
    tape, width = run.tape, run.model.hidden_size
    numel, rows = run.moe.num_experts * width, x.numel // width
    weight = Param(numel, trains=run.trains)
    x = ops.cast(tape, x, item)
    if item == run.variant.item:
        return ops.matmul(tape, x, weight, rows * run.moe.num_experts, item, is_flat=True)
    wide = ops.cast_param(tape, weight, run.variant.item, item)
    return ops.product(tape, x, wide, rows * run.moe.num_experts)


def softmax_router(run: Context, x: Tensor, *, normalises: bool = True, narrows: bool = True) -> Routing:
    """Softmax in fp32, the best k, perhaps normalised to sum 1, perhaps cast back.

    Source: Transformers 5.23 modeling_qwen3_moe.py: Qwen3MoeTopKRouter.
    """
    tape, item = run.tape, run.variant.item
    logits = _router_logits(run, x, item)
    if run.variant.kernels.router_loss and not tape.is_recomputing:
        run.router_logits.append(logits)
    probabilities = ops.softmax(tape, ops.cast(tape, logits, ops.FP32))
    weights, indices = _top_k(run, probabilities)
    if normalises:
        weights = _normalised(run, weights)
    if narrows:
        weights = ops.cast(tape, weights, item)
    del probabilities
    return logits, weights, indices


def balancing_loss(run: Context, loss: Tensor) -> Tensor:
    """Adds the loss that balances experts: for each layer, the softmax of its router's logits, which
    the backward pass needs, in fp32 for its sum, and the experts picked once more.

    Logits go with the model's outputs, before the backward pass, which has the gradients of all of them first.
    Source: Transformers 5.23 modeling_mixtral.py: load_balancing_loss_func.
    """
    tape, rows = run.tape, run.rows
    if not run.router_logits:
        return loss
    tape.ledger.enter(ROUTER_LOSS)
    mask = tape.new(rows, ops.FP32) if run.variant.has_mask and not run.variant.batch.packing else None
    total = None
    for logits in run.router_logits:
        probabilities = ops.softmax(tape, logits)
        # Transformers picks again: the layer's own picks are not among its outputs
        picked = _top_k(run, probabilities)
        counted = tape.new(picked[1].numel, ops.FP32)
        wide = ops.cast(tape, probabilities, ops.FP32)
        summed = _summed(run, wide if mask is None else ops.mul(tape, wide, mask))
        del wide, counted
        total = summed if total is None else ops.add(tape, total, summed)
    run.router_logits.clear()
    assert total is not None
    numel = total.numel
    node = tape.node((loss, total), lambda grad: (ops.view(grad), tape.new(numel, ops.FP32)))
    return tape.new(1, ops.FP32, node)


def _summed(run: Context, x: Tensor) -> Tensor:
    """The sum over tokens: its gradient is seen as large as x without being written out."""
    numel, node = x.numel, None
    if run.tape.needs(x):
        node = run.tape.node((x,), lambda grad: (Tensor(grad.storage, numel, grad.item),))
    return run.tape.new(run.moe.num_experts, ops.FP32, node)


def _wide_softmax_router(run: Context, x: Tensor) -> Routing:
    tape = run.tape
    logits = _router_logits(run, x, ops.FP32)
    scores = ops.softmax(tape, logits)
    weights, indices = _top_k(run, scores)
    weights = ops.unary(tape, weights)  # a constant factor
    del scores
    return logits, weights, indices


def _sigmoid_router(run: Context, x: Tensor) -> Routing:
    """Groups are chosen by tensors that go with the router's frame, all as small as one number an expert and token."""
    tape, moe = run.tape, run.moe
    logits = _router_logits(run, x, ops.FP32)
    scores = ops.softmax(tape, logits)
    rows = scores.numel // moe.num_experts
    shifted, masked = (tape.new(scores.numel, scores.item) for _ in range(2))
    indices = tape.new(rows * moe.experts_per_token, ops.INDEX)
    weights = ops.picked(tape, scores, indices.numel, indices)
    weights = ops.unary(tape, _normalised(run, weights))
    del shifted, masked
    return logits, weights, indices


def _top_k(run: Context, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The best k of each row, and their indices."""
    rows, k = scores.numel // run.moe.num_experts, run.moe.experts_per_token
    indices = run.tape.new(rows * k, ops.INDEX)
    return ops.picked(run.tape, scores, indices.numel, indices), indices


def _normalised(run: Context, weights: Tensor) -> Tensor:
    """Weights divided by their sum in place: keeps a copy of what they were, and the sums."""
    tape = run.tape
    sums = tape.new(weights.numel // run.moe.experts_per_token, weights.item)
    if not tape.needs(weights):
        return weights
    saved = tape.save(tape.new(weights.numel, weights.item), sums)

    def backward(grad: Tensor) -> Tensors:
        kept = saved.take()
        of_weights, of_sums = tape.like(grad), tape.like(grad)
        del kept, of_sums
        return (of_weights,)

    return Tensor(weights.storage, weights.numel, weights.item, tape.node((weights,), backward))


def grouped_experts(run: Context, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """All experts as two grouped products over rows sorted by expert.

    Source: Transformers 5.23 integrations/moe.py: grouped_mm_experts_forward.
    """
    if run.kernels.experts:
        return _fused_experts(run, x, weights, indices)
    tape, width = run.tape, run.model.hidden_size
    rows = indices.numel
    check(run)
    sorted_ids, order = tape.new(rows, ops.INDEX), tape.new(rows, ops.INDEX)
    chosen = ops.picked(tape, x, rows * width, tape.new(rows, ops.INDEX))
    sorted_weights = ops.picked(tape, weights, rows, order)
    narrow_ids = tape.new(rows, 4)
    up = weight(run, UP)
    hidden = _grouped_product(run, chosen, up, 2 * run.moe.intermediate_size)
    hidden = _gated(run, hidden)
    down = weight(run, DOWN)
    hidden = _grouped_product(run, hidden, down, width)
    weighted = ops.mul(tape, hidden, sorted_weights)
    inverse, counted = tape.new(rows, ops.INDEX), tape.new(rows, ops.INDEX)
    del counted
    weighted = ops.picked(tape, weighted, rows * width, inverse)
    many = run.moe.experts_per_token > 1  # the gradient of a sum of one is a view
    output = ops.cast(tape, ops.resized(tape, weighted, x.numel) if many else ops.copy(tape, weighted), x.item)
    del sorted_ids, chosen, narrow_ids, hidden
    return output


def _gated(run: Context, both: Tensor) -> Tensor:
    """The activation of one half times the other. Source: as above, _default_apply_gate."""
    gate, up = ops.split(run.tape, both, (both.numel // 2, both.numel // 2))
    return ops.mul(run.tape, ops.activation(run.tape, gate), up)


def _grouped_product(run: Context, x: Tensor, weight: Param | Tensor, outputs: int) -> Tensor:
    """The rows of each expert times its matrix, for all experts at once."""
    inputs = weight.numel // (run.moe.num_experts * outputs)
    numel = x.numel // inputs * outputs
    if isinstance(weight, Tensor):
        return ops.product(run.tape, x, weight, numel)
    return ops.matmul(run.tape, x, weight, numel, run.variant.item, is_flat=True)


def _fused_experts(run: Context, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """Liger's experts: keeps the input and the products before the activation; frozen weights get gradients as well.

    Source: liger-kernel 0.8.5 ops/fused_moe.py: LigerFusedMoEFunction.
    """
    tape, item, inner, width = run.tape, x.item, run.moe.intermediate_size, run.model.hidden_size
    rows, x_numel, numel = indices.numel, x.numel, run.moe.num_experts * run.moe.intermediate_size * width
    places = tape.new(3 * rows, 4), tape.new(rows, 4)
    before, after = tape.new(rows * 2 * inner, item), tape.new(rows * inner, item)
    outputs = tape.new(rows * width, item)
    output = tape.new(x_numel, item)
    del after, outputs
    up, down = Param(2 * numel, trains=run.trains), Param(numel, trains=run.trains)
    if not tape.needs(x, weights, up, down):
        return output
    saved = tape.save(ops.view_without_node(x), before, ops.view_without_node(weights), places[0])

    def backward(grad: Tensor) -> Tensors:
        kept = saved.take()
        whole = tape.gathered(3 * numel, item)
        grad_before, weighed = tape.new(rows * 2 * inner, item), tape.new(rows * inner, item)
        grad_weights = tape.new(rows, item)
        grad_down, expanded = tape.grad(numel, item), tape.new(rows * width, item)
        grad_x, grad_up = tape.new(x_numel, item), tape.grad(2 * numel, item)
        del kept, whole, grad_before, weighed, expanded
        return (grad_x, grad_weights, grad_up if run.trains else None, grad_down if run.trains else None)

    return Tensor(output.storage, x_numel, item, tape.node((x, weights, up, down), backward))
