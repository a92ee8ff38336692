"""The blocks that decoder layers are made of, as Transformers 5.23 computes them."""

from __future__ import annotations

from dstrain.choices import Attention, Stack
from dstrain.plan.tape import ops
from dstrain.plan.tape.context import Context
from dstrain.plan.tape.graph import Tensors
from dstrain.plan.tape.tensor import Param, Tensor

REPEATED_KEYS = ("mistral", "mixtral")
"""Families that Transformers 4.45 repeats keys and values of even for flash attention.
Source: Transformers 4.45 modeling_mistral.py: MistralFlashAttention2.forward."""
LIGER_NORM_PROGRAMS = 132
"""Rows of the partial sums of a weight gradient: one for each multiprocessor of an H100 (108 on an A100).
Source: liger_kernel/ops/rms_norm.py: rms_norm_backward."""


def rms_norm(run: Context, x: Tensor, width: int) -> Tensor:
    """Llama's norm: computed in fp32, scaled in the dtype of its input."""
    if run.variant.liger or run.variant.unsloth:
        return fused_norm(run, x, width)
    tape, item = run.tape, x.item
    hidden = ops.cast(tape, x, ops.FP32)
    hidden = ops.mul(tape, hidden, ops.inverse_rms(tape, hidden, x.numel // width))
    return ops.scale(tape, ops.cast(tape, hidden, item), Param(width, trains=run.trains), item)


def gemma_norm(run: Context, x: Tensor, width: int) -> Tensor:
    """Gemma's norm: scaled in fp32 too, by one plus the weight."""
    if run.variant.liger or run.variant.unsloth:
        return fused_norm(run, x, width)
    tape, item = run.tape, x.item
    hidden = ops.cast(tape, x, ops.FP32)
    output = ops.mul(tape, hidden, ops.inverse_rms(tape, hidden, x.numel // width))
    del hidden
    output = ops.scale(tape, output, Param(width, trains=run.trains), item)
    return ops.cast(tape, output, item)


def fused_norm(run: Context, x: Tensor, width: int) -> Tensor:
    """Liger's norm: keeps its input and one number a row; the gradient is written over the incoming one.

    Source: liger_kernel/ops/rms_norm.py: LigerRMSNormFunction.
    """
    tape, trains, item = run.tape, run.trains, x.item
    node = None
    if tape.needs(x, Param(width, trains=trains)):
        scale = tape.new(x.numel // width, ops.FP32)
        saved = tape.save(ops.view_without_node(x), scale)

        def backward(grad: Tensor) -> Tensors:
            saved.take()
            partial = tape.new(LIGER_NORM_PROGRAMS * width, ops.FP32)
            grad_weight = tape.grad(width, item) if trains else None
            del partial
            return (ops.view(grad), grad_weight)

        node = tape.node((x, Param(width, trains=trains)), backward)
    return tape.new(x.numel, item, node)


def rotary(run: Context, x: Tensor) -> Tensor:
    """Rotary embedding of whole heads: x·cos + rotate_half(x)·sin."""
    return _fused_rotary(run, x) if run.variant.liger or run.variant.unsloth else _rotated(run, x)


def partial_rotary(run: Context, x: Tensor) -> Tensor:
    """Rotary embedding of the first elements of each head; the result is put together anew, all of them or not."""
    tape, model = run.tape, run.model
    turned = x.numel * model.rotary_dim // model.head_dim
    part = ops.view(x) if turned == x.numel else ops.cut(tape, x, turned)
    rest = ops.cut(tape, x, x.numel - turned)
    return ops.cat(tape, (_rotated(run, part), rest))


def _rotated(run: Context, x: Tensor) -> Tensor:
    tape = run.tape
    assert run.cos is not None
    assert run.sin is not None
    cosine = ops.mul(tape, x, run.cos)
    first, second = ops.cut(tape, x, x.numel // 2), ops.cut(tape, x, x.numel - x.numel // 2)
    half = ops.cat(tape, (ops.unary(tape, second), first))
    del first, second
    return ops.add(tape, cosine, ops.mul(tape, half, run.sin))


def _fused_rotary(run: Context, x: Tensor) -> Tensor:
    """Liger's rotary embedding works in place, both ways. Source: liger_kernel/ops/rope.py: LigerRopeFunction."""
    node = run.tape.node((x,), lambda grad: (ops.view(grad),)) if run.tape.needs(x) else None
    return Tensor(x.storage, x.numel, x.item, node)


def gated_mlp(run: Context, x: Tensor) -> Tensor:
    """`down(act(gate(x)) * up(x))`."""
    names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    return named_mlp(run, x, *names)


def named_mlp(run: Context, x: Tensor, gate: str, up: str, down: str) -> Tensor:
    """The gated MLP of three linear layers."""
    if run.variant.liger:
        gated = run.linear(x, gate, shards="columns")
        return run.linear(gated_product(run, gated, run.linear(x, up, shards="columns")), down, shards="rows")
    tape = run.tape
    return run.linear(
        ops.mul(tape, ops.activation(tape, run.linear(x, gate, shards="columns")), run.linear(x, up, shards="columns")),
        down,
        shards="rows",
    )


def gated_product(run: Context, gate: Tensor, up: Tensor) -> Tensor:
    """Liger's SwiGLU or GeGLU: keeps both inputs and writes their gradients over them.

    Source: liger_kernel/ops/swiglu.py: LigerSiLUMulFunction.
    """
    tape = run.tape
    node = None
    if tape.needs(gate, up):
        saved = tape.save(ops.view_without_node(gate), ops.view_without_node(up))

        def backward(grad: Tensor) -> Tensors:
            return saved.take()

        node = tape.node((gate, up), backward)
    return tape.new(gate.numel, gate.item, node)


def fused_mlp(run: Context, x: Tensor) -> Tensor:
    """The gated MLP whose gate and up projection are one matrix: the activation is the second factor."""
    tape = run.tape
    both = run.linear(x, "mlp.gate_up_proj", shards="columns")
    gate, up = ops.split(tape, both, (both.numel // 2, both.numel // 2))
    del both
    if run.variant.liger:
        product = gated_product(run, ops.copy(tape, gate), ops.copy(tape, up))
    else:
        product = ops.mul(tape, up, ops.activation(tape, gate))
    del up
    return run.linear(product, "mlp.down_proj", shards="rows")


def by_head(run: Context, x: Tensor) -> Tensor:
    """A view of x head by head; its gradient is written out token by token again."""
    tape = run.tape
    if not tape.needs(x):
        return ops.view(x)
    numel, item = x.numel, x.item
    return Tensor(x.storage, numel, item, tape.node((x,), lambda grad: (tape.new(numel, item),)))


def self_attention(run: Context, q: Tensor, k: Tensor, v: Tensor, heads: int, *, is_cat: bool = False) -> Tensor:
    """Attention over the whole sequence by the implementation asked for; q, k and v are already rotated.

    The flash kernel lays its result out like q: where that was put together anew (`is_cat`), head by head, so that the
    tokens' order needs a copy.
    """
    if run.variant.attn is Attention.EAGER:
        return _eager(run, q, k, v, heads)
    masked = run.variant.has_mask and run.variant.attn is Attention.SDPA
    if run.variant.stack is Stack.TRANSFORMERS_4_45 and run.model.model_type in REPEATED_KEYS:
        k, v = repeated(run, k, q.numel), repeated(run, v, q.numel * v.numel // k.numel)
    if masked:
        k, v = repeated(run, k, q.numel), repeated(run, v, q.numel * v.numel // k.numel)
    if v.numel != k.numel and run.variant.attn is Attention.FLASH_ATTENTION_2:
        return _padded_flash(run, q, k, v, heads)
    output = _flash(run, q, k, v, heads, has_bias=masked)
    return ops.copy(run.tape, output) if is_cat and not masked else output


def _padded_flash(run: Context, q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Values narrower than keys are padded for the kernel, and its result is cut again.

    Source: Transformers 5.23 integrations/flash_attention.py: flash_attention_forward.
    """
    tape, narrow, item = run.tape, v.numel, v.item
    node = tape.node((v,), lambda grad: (tape.new(narrow, item),)) if tape.needs(v) else None
    output = _flash(run, q, k, tape.new(k.numel, item, node), heads, has_bias=False)
    return ops.copy(tape, ops.cut(tape, output, narrow * q.numel // k.numel))


def repeated(run: Context, x: Tensor, numel: int) -> Tensor:
    """`repeat_kv`: keys or values written out for every query head."""
    if x.numel == numel:
        return x
    tape = run.tape
    node = None
    if tape.needs(x):
        before, item = x.numel, x.item
        node = tape.node((x,), lambda grad: (tape.new(before, item),))
    return tape.new(numel, x.item, node)


def _flash(run: Context, q: Tensor, k: Tensor, v: Tensor, heads: int, *, has_bias: bool) -> Tensor:
    """A fused kernel: keeps q, k, v, the output and one fp32 number for each query and head.

    A boolean mask becomes a bias in the training precision, kept in each layer. The backward kernel sums queries'
    gradients in fp32 and, where heads share keys, makes gradients for every head first.
    Source: torch 2.13 ATen/native/transformers/cuda/attention_backward.cu, flash_attn/flash_api.cpp: mha_bwd.
    """
    tape, variant = run.tape, run.variant
    rows, item = run.rows, q.item
    numels = (q.numel, k.numel, v.numel)
    out_numel = q.numel * v.numel // k.numel
    node = None
    bias = tape.new(variant.batch * variant.seq_len**2, item) if has_bias else None
    out = tape.new(out_numel, item)
    sums = tape.new(rows * heads, ops.FP32)
    if tape.needs(q, k, v):
        saved = tape.save(q, k, v, ops.view_without_node(out), sums, bias)

        def backward(grad: Tensor) -> Tensors:
            kept = saved.take()
            work = []
            if variant.kernel_workspaces and not has_bias:
                work = [tape.new(numels[0], ops.FP32), tape.new(rows * heads, ops.FP32)]
                if numels[1] < numels[0]:
                    work += [tape.new(numels[0], item), tape.new(out_numel, item)]
            grads = tuple(tape.new(numel, item) for numel in numels)
            del kept, work
            return grads

        node = tape.node((q, k, v), backward)
    return Tensor(out.storage, out_numel, item, node)


def _eager(run: Context, q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Attention with every score written out; the softmax is computed and kept in fp32."""
    tape, rows, item = run.tape, run.rows, q.item
    scores_numel = rows * heads * run.variant.seq_len
    values_numel = q.numel * v.numel // k.numel
    k, v = repeated(run, k, q.numel), repeated(run, v, values_numel)
    scores = ops.unary(tape, ops.product(tape, ops.copy(tape, q) if run.variant.batch > 1 else q, k, scores_numel))
    scores = ops.unary(tape, scores)  # the mask is added
    weights = ops.cast(tape, ops.softmax(tape, ops.cast(tape, scores, ops.FP32)), item)
    del scores
    return ops.copy(tape, ops.product(tape, weights, v, values_numel))
