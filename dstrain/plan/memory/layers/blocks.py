"""The building blocks of decoder layers, as Transformers 5.23 computes them."""

from __future__ import annotations

from collections.abc import Callable

from dstrain.plan.memory.layers import ops
from dstrain.plan.memory.layers.context import Context
from dstrain.plan.memory.layers.tape import Node, Param, Tensor, Tensors, View

LIGER_NORM_PROGRAMS = 132
"""Rows of the partial sums of a weight gradient: one for each multiprocessor of an H100 (108 on an A100).
Source: liger-kernel 0.8.5 ops/rms_norm.py: rms_norm_backward."""


def rms_norm(run: Context, x: Tensor, width: int) -> Tensor:
    """Llama's norm: computed in fp32, scaled in the dtype of its input."""
    if run.kernels.norm:
        return fused_norm(run, x, width)
    tape, item = run.tape, x.item
    hidden = ops.cast(tape, x, ops.FP32)
    hidden = ops.mul(tape, hidden, ops.inverse_rms(tape, hidden, x.numel // width))
    return ops.scale(tape, ops.cast(tape, hidden, item), Param(width, trains=run.trains), item)


def gemma_norm(run: Context, x: Tensor, width: int) -> Tensor:
    """Gemma's norm: scaled in fp32 too, by one plus the weight."""
    if run.kernels.norm:
        return fused_norm(run, x, width)
    tape, item = run.tape, x.item
    hidden = ops.cast(tape, x, ops.FP32)
    output = ops.mul(tape, hidden, ops.inverse_rms(tape, hidden, x.numel // width))
    del hidden
    output = ops.scale(tape, output, Param(width, trains=run.trains), item)
    return ops.cast(tape, output, item)


def fused_norm(run: Context, x: Tensor, width: int) -> Tensor:
    """Liger's norm: keeps its input and one number a row; mostly the gradient is written over the incoming one.

    Source: liger-kernel 0.8.5 ops/rms_norm.py: rms_norm_forward, rms_norm_backward.
    """
    tape, trains, item, in_place = run.tape, run.trains, x.item, run.kernels.norm_in_place
    node = None
    output = tape.new(x.numel, item)
    scale = tape.new(x.numel // width, ops.FP32)
    if tape.needs(x, Param(width, trains=trains)):
        saved, needs_x, numel = tape.save(ops.view_without_node(x), scale), x.node is not None, x.numel

        def backward(grad: Tensor) -> Tensors:
            saved.take()
            partial = tape.new(LIGER_NORM_PROGRAMS * width, ops.FP32) if trains else None
            result = ops.view(grad) if in_place else tape.new(numel, item)
            grad_weight = tape.grad(width, item) if trains else None
            del partial
            return (result if needs_x else None, grad_weight)

        node = tape.node((x, Param(width, trains=trains)), backward)
    return Tensor(output.storage, output.numel, item, node)


def rotary(run: Context, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of whole heads: x·cos + rotate_half(x)·sin."""
    if run.kernels.rotary:
        return _fused_rotary(run, q), _fused_rotary(run, k)
    return _rotated(run, q, run.tables), _rotated(run, k, run.tables)


def partial_rotary(run: Context, q: Tensor, k: Tensor, *, interleaves: bool = False) -> tuple[Tensor, Tensor]:
    """Rotary embedding of the first elements of each head; the result is put together anew, all of them or not.

    GLM writes the tables out in another order in each layer. Source: Transformers 5.23 modeling_phi3.py,
    modeling_glm.py: apply_rotary_pos_emb.
    """
    tape, model = run.tape, run.model
    if run.kernels.rotary:  # in place, on copies of what are views here
        return _fused_rotary(run, ops.copy(tape, q)), _fused_rotary(run, ops.copy(tape, k))
    cos, sin = run.tables
    if interleaves:
        cos, sin = ops.copy(tape, cos), ops.copy(tape, sin)
    turned = []
    for x in (q, k):
        numel = x.numel * model.rotary_dim // model.head_dim
        part = x if numel == x.numel else ops.cut(tape, x, numel)
        turned.append((_rotated(run, part, (cos, sin)), ops.cut(tape, x, x.numel - numel)))
    return ops.cat(tape, turned[0]), ops.cat(tape, turned[1])


def _rotated(run: Context, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    tape, (cos, sin) = run.tape, tables
    return ops.add(tape, ops.mul(tape, x, cos), ops.mul(tape, half_rotated(run, x), sin))


def half_rotated(run: Context, x: Tensor) -> Tensor:
    """`rotate_half`: the second half of each head, negated, before the first."""
    tape, half = run.tape, x.numel // 2
    first = ops.cut(tape, x, half)
    return ops.cat(tape, (ops.unary(tape, ops.cut(tape, x, x.numel - half)), first))


def _fused_rotary(run: Context, x: Tensor) -> Tensor:
    """Liger's rotary embedding works in place, both ways. Source: liger-kernel 0.8.5 ops/rope.py: rope_forward."""
    node = run.tape.node((x,), lambda grad: (ops.view(grad),)) if run.tape.needs(x) else None
    return Tensor(x.storage, x.numel, x.item, node)


def gated_mlp(run: Context, x: Tensor) -> Tensor:
    """`down(act(gate(x)) * up(x))`."""
    names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    return tiled(run, x, lambda part: named_mlp(run, part, *names))


def tiled(run: Context, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Computes an MLP for a tile of tokens at a time, if it is tiled, and each tile again in the backward pass.

    Source: deepspeed 0.19.8 runtime/sequence_parallel/ulysses_sp.py: TiledMLP; dstrain/train/model.py.
    """
    if not run.variant.checkpointing.tiled_mlp:
        return compute(x)
    tape, width, node = run.tape, run.model.hidden_size, None
    tokens, item = x.numel // width, x.item
    count = -(-tokens // width)
    result = _tiled_forward(run, x, compute, count)
    if tape.needs(x):
        saved = tape.save(ops.view_without_node(x))

        def backward(grad: Tensor) -> Tensors:
            (kept,) = saved.take()
            assert kept is not None
            grad_x = tape.new(tokens * width, item)
            tiles = [size * width for size in _chunks(tokens, count)]
            if not tape.plays_all_tiles:  # from the second on, each holds what the one before held
                tiles = [*tiles[:2], *tiles[2:][-1:]]
            run.is_tiling = True
            for number, numel in enumerate(tiles):

                def tile(numel: int = numel) -> tuple[Tensor, Tensor]:
                    end = Node(0, (None,), lambda grad: (None,))  # it is added to its part of grad_x
                    return compute(Tensor(kept.storage, numel, item, end)), Tensor(grad.storage, numel, grad.item)

                tape.tile_backward(tile, number=number, count=len(tiles))
            run.is_tiling = False
            return (View(grad_x.storage, tokens * width, item),)

        node = tape.node((x,), backward)
    return Tensor(result.storage, result.numel, item, node)


def _tiled_forward(run: Context, x: Tensor, compute: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """Returns the results of `count` tiles, each of the same part of every row, in one tensor."""
    tape, width, rows = run.tape, run.model.hidden_size, run.variant.batch.rows
    sizes = [rows * size * width for size in _chunks(x.numel // width // rows, count)]
    outer, tape.grad_enabled, run.is_tiling = tape.grad_enabled, False, True
    alike = 0 if tape.plays_all_tiles else max(0, len(sizes) - 2)
    parts = [tape.new(sum(sizes[:alike]), x.item)] if alike else []  # the peak is in the last tiles
    parts += [compute(Tensor(x.storage, size, x.item)) for size in sizes[alike:]]
    result = tape.new(x.numel, x.item)
    del parts
    tape.grad_enabled, run.is_tiling = outer, False
    return result


def _chunks(count: int, parts: int) -> list[int]:
    """Returns the sizes that `torch.chunk` makes.

    >>> _chunks(10, 4)
    [3, 3, 3, 1]
    """
    size = -(-count // parts)
    return [min(size, count - begin) for begin in range(0, count, size)]


def named_mlp(run: Context, x: Tensor, gate: str, up: str, down: str) -> Tensor:
    """The gated MLP of three linear layers."""
    if run.kernels.mlp:
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

    Source: liger-kernel 0.8.5 ops/swiglu.py: swiglu_forward, swiglu_backward; ops/geglu.py likewise.
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
    return tiled(run, x, lambda part: _fused_mlp(run, part))


def _fused_mlp(run: Context, x: Tensor) -> Tensor:
    tape = run.tape
    both = run.linear(x, "mlp.gate_up_proj", shards="columns")
    gate, up = ops.split(tape, both, (both.numel // 2, both.numel // 2))
    del both
    if run.kernels.mlp:
        product = gated_product(run, ops.copy(tape, gate), ops.copy(tape, up))
    else:
        product = ops.mul(tape, up, ops.activation(tape, gate))
    del up
    return run.linear(product, "mlp.down_proj", shards="rows")


def by_head(run: Context, x: Tensor) -> Tensor:
    """A view of x head by head; its gradient is written out token by token, unless Liger's rotation has done so."""
    tape = run.tape
    if not tape.needs(x) or run.kernels.rotary:
        return ops.view(x)
    numel, item = x.numel, x.item
    return Tensor(x.storage, numel, item, tape.node((x,), lambda grad: (tape.new(numel, item),)))
