"""Vision towers on the tape: frozen, so they leave features and nothing for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from dstrain.choices import Attention
from dstrain.facts.model.model_facts import Vision
from dstrain.plan.memory.layers import attention, blocks, ops, products
from dstrain.plan.memory.layers.context import Context
from dstrain.plan.memory.layers.graph import Tensors
from dstrain.plan.memory.layers.tensor import Param, Tensor

INDEX = 8
"""Bytes of an index."""
ROOT = "model.visual"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Output of a vision tower, as the decoder uses it."""

    hidden: Tensor
    """Embeddings with image features in the place of image tokens."""
    levels: tuple[Tensor, ...]
    """Features of earlier blocks, each added to the output of one of the first decoder layers."""
    mask: Tensor
    """Mask of image tokens."""
    kept_tensors: tuple[Tensor, ...]
    """Other tensors that the model's frame keeps until the last decoder layer ends."""


def pixels(run: Context) -> Tensor | None:
    """Returns the pixels as the processor gives them, in fp32, or None for samples without images."""
    if not run.variant.batch.image_patches or run.model.vision is None:
        return None
    return run.tape.new(_num_patches(run) * _patch_numel(run), ops.FP32)


def qwen3_vl(run: Context, hidden: Tensor, images: Tensor) -> Seen:
    """Qwen 3 VL's tower, its mergers, and its features scattered into the embeddings.

    Source: Transformers 5.23 modeling_qwen3_vl.py: Qwen3VLModel.forward.
    """
    tape, item = run.tape, run.variant.item
    tape.ledger.enter("vision forward")
    narrow = ops.cast(tape, images, item)
    last, levels = _tower(run, narrow)
    merged = _merged(run, last, f"{ROOT}.merger")
    del narrow
    tape.ledger.enter("forward")
    joined = ops.copy(tape, merged)
    mask = tape.new(run.rows, 1)
    hidden = _scattered(run, hidden, mask)
    copies = tuple(ops.copy(tape, level) for level in levels)
    return Seen(hidden=hidden, levels=copies, mask=mask, kept_tensors=(last, merged, joined, *levels))


def _num_patches(run: Context) -> int:
    return run.variant.batch.rows * run.variant.batch.image_patches


def _patch_numel(run: Context) -> int:
    """Numbers of one patch: channels × frames × height × width, as the kernel that embeds it has them."""
    kernel = next(group for group in run.model.tensors if group.name == f"{ROOT}.patch_embed.proj.weight")
    return kernel.numel // kernel.shape[0]


def _facts(run: Context) -> Vision:
    vision = run.model.vision
    assert vision is not None
    return vision


def _tower(run: Context, narrow: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The blocks, as many as there are levels and one more: frozen ones leave nothing that adds up.

    Source: as above, Qwen3VLVisionModel.forward.
    """
    tape, vision, patches = run.tape, _facts(run), _num_patches(run)
    positions = tape.new(2 * patches, INDEX), tape.new(4 * patches, INDEX), tape.new(4 * patches, ops.FP32)
    hidden = _product(run, narrow, vision.hidden_size, _patch_numel(run))
    looked_up = tape.new(4 * patches * vision.hidden_size, run.variant.item)
    weighed = tape.new(looked_up.numel, ops.FP32)
    del looked_up
    places = tape.new(hidden.numel, ops.FP32)
    del weighed
    hidden = ops.add(tape, hidden, ops.cast(tape, places, hidden.item))
    tables = tuple(tape.new(hidden.numel // vision.num_heads, ops.FP32) for _ in range(2))
    levels: list[Tensor] = []
    for index in range(_num_levels(run) + 1):
        hidden = _block(run, hidden, tables)
        if index < _num_levels(run):
            levels.append(_merged(run, hidden, f"{ROOT}.deepstack_merger_list.*"))
    del positions, places
    return hidden, levels


def _num_levels(run: Context) -> int:
    return next(
        (g.count for g in run.model.tensors if g.name == f"{ROOT}.deepstack_merger_list.*.linear_fc1.weight"), 0
    )


def _block(run: Context, x: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
    """Norm, attention, sum; norm, MLP, sum. Source: as above, Qwen3VLVisionBlock."""
    tape, root = run.tape, f"{ROOT}.blocks.*"
    normed = _layer_norm(run, x)
    attended = _attention(run, normed, tables)
    del normed
    hidden = ops.add(tape, x, attended)
    del attended
    normed = _layer_norm(run, hidden)
    inner = ops.activation(tape, _linear(run, normed, f"{root}.mlp.linear_fc1"))
    outer = _linear(run, inner, f"{root}.mlp.linear_fc2")
    del inner, normed
    return ops.add(tape, hidden, outer)


def _attention(run: Context, x: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
    """Attention inside each image, rotated in fp32. Source: as above, Qwen3VLVisionAttention."""
    tape, vision = run.tape, _facts(run)
    both = _linear(run, x, f"{ROOT}.blocks.*.attn.qkv")
    q, k, v = (ops.cut(tape, both, x.numel) for _ in range(3))
    q, k = _rotated(run, q, k, tables)
    queries = x.numel // vision.hidden_size * vision.num_heads
    if run.variant.kernels.attn.is_flash:
        output = attention.fused(run, q, k, v, queries)
    else:
        output = _by_image(run, q, k, v, queries)
    result = _linear(run, output, f"{ROOT}.blocks.*.attn.proj")
    del both, q, k, v
    return result


def _rotated(run: Context, q: Tensor, k: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Source: as above, apply_rotary_pos_emb_vision."""
    tape, (cos, sin), item = run.tape, tables, q.item
    q, k = ops.cast(tape, q, ops.FP32), ops.cast(tape, k, ops.FP32)
    turned = [ops.add(tape, ops.mul(tape, x, cos), ops.mul(tape, blocks.half_rotated(run, x), sin)) for x in (q, k)]
    turned[0] = ops.cast(tape, turned[0], item)
    turned[1] = ops.cast(tape, turned[1], item)
    return turned[0], turned[1]


def _by_image(run: Context, q: Tensor, k: Tensor, v: Tensor, queries: int) -> Tensor:
    """One image after the other, and their results side by side."""
    tape, count, heads = run.tape, run.variant.batch.rows, _facts(run).num_heads
    outputs = []
    for _ in range(count):
        parts = [ops.cut(tape, x, x.numel // count) for x in (q, k, v)]
        if run.variant.kernels.attn is Attention.SDPA:
            outputs.append(attention.fused(run, parts[0], parts[1], parts[2], queries // count))
        else:
            scores = run.variant.batch.image_patches**2 * heads
            weights = attention.weighed(run, parts[0], parts[1], scores, has_mask=False)
            outputs.append(ops.copy(tape, products.product(tape, weights, parts[2], parts[2].numel)))
            del weights
    return ops.cat(tape, tuple(outputs))


def _merged(run: Context, x: Tensor, name: str) -> Tensor:
    """Neighbouring patches as one token of the language model. Source: as above, Qwen3VLVisionPatchMerger."""
    tape = run.tape
    normed = _layer_norm(run, x)
    return _linear(run, ops.activation(tape, _linear(run, normed, f"{name}.linear_fc1")), f"{name}.linear_fc2")


def _layer_norm(run: Context, x: Tensor) -> Tensor:
    """A frozen LayerNorm: mean and deviation of each row go at once."""
    rows = _num_patches(run)
    output = run.tape.new(x.numel, x.item)
    statistics = [run.tape.new(rows, ops.FP32) for _ in range(2)]
    del statistics
    return output


def _linear(run: Context, x: Tensor, name: str) -> Tensor:
    shape = run.linears[name]
    return _product(run, x, shape.outputs, shape.inputs)


def _product(run: Context, x: Tensor, outputs: int, inputs: int) -> Tensor:
    weight = Param(outputs * inputs, trains=False)
    return products.matmul(run.tape, x, weight, x.numel // inputs * outputs, run.variant.item)


def _scattered(run: Context, hidden: Tensor, mask: Tensor) -> Tensor:
    """`masked_scatter` of frozen features: the gradient is copied with zeros in their place."""
    tape, node = run.tape, None
    if tape.needs(hidden):
        saved = tape.save(mask)
        numel, item = hidden.numel, hidden.item

        def backward(grad: Tensor) -> Tensors:
            saved.take()
            return (tape.new(numel, item),)

        node = tape.node((hidden,), backward)
    return tape.new(hidden.numel, hidden.item, node)


def deepened(run: Context, hidden: Tensor, level: Tensor, mask: Tensor) -> Tensor:
    """A layer's output with features added at the image tokens: a copy, some of whose rows are written again.

    A mask is turned to indices for each use. Source: as above, Qwen3VLTextModel._deepstack_process.
    """
    tape = run.tape
    copied = ops.copy(tape, hidden)
    places = tape.new(2 * level.numel // run.model.hidden_size, INDEX)
    rows = ops.picked(tape, copied, level.numel, mask)
    del places
    return _written(run, copied, ops.add(tape, rows, level), mask)


def _written(run: Context, x: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """`x[mask] = rows` in place: the gradient is copied with zeros there, and picked there."""
    tape = run.tape
    if not tape.needs(x, rows):
        return x
    saved = tape.save(mask)
    sizes, item = (x.numel, rows.numel), x.item

    def backward(grad: Tensor) -> Tensors:
        saved.take()
        zeros = tape.new(sizes[1], item)
        rest = tape.new(sizes[0], item)
        del zeros
        return (rest, tape.new(sizes[1], item))

    return Tensor(x.storage, x.numel, x.item, tape.node((x, rows), backward))
