"""Vision towers on the tape: frozen ones leave features, and nothing for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from dstrain.choices import Attention
from dstrain.facts.model.model_facts import ModelFacts, Vision
from dstrain.facts.workload import seen_samples
from dstrain.plan.memory.layers import attention, blocks, ops
from dstrain.plan.memory.layers.context import Context, Variant
from dstrain.plan.memory.layers.tape import Tensor, Tensors, View


def scattered(run: Context, hidden: Tensor, features: Tensor, mask: Tensor) -> Tensor:
    """`masked_scatter`: the gradient is copied with zeros in the place of features, and theirs is picked out of it."""
    tape, node = run.tape, None
    if tape.needs(hidden, features):
        saved = tape.save(mask)
        needs_hidden, needs_features = hidden.node is not None, features.node is not None
        sizes, item = (hidden.numel, features.numel), hidden.item

        def backward(grad: Tensor) -> Tensors:
            saved.take()
            rest = tape.new(sizes[0], item) if needs_hidden else None
            return (rest, tape.new(sizes[1], item) if needs_features else None)

        node = tape.node((hidden, features), backward)
    return tape.new(hidden.numel, hidden.item, node)


def deepened(run: Context, hidden: Tensor, level: Tensor, mask: Tensor) -> Tensor:
    """A layer's output with features added at the image tokens: a copy, some of whose rows are written again.

    A mask is turned to indices for each use.
    Source: Transformers 5.23 modeling_qwen3_vl.py: Qwen3VLTextModel._deepstack_process.
    """
    tape = run.tape
    copied = ops.copy(tape, hidden)
    places = tape.new(2 * level.numel // run.model.hidden_size, ops.INDEX)
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
    """Returns the pixels in the dtype of training, as `MediaCollator` gives them; None for samples without images."""
    if not run.variant.batch.image_patches or run.model.vision is None:
        return None
    return run.tape.new(_num_patches(run) * _patch_numel(run), run.variant.item)


def qwen3_vl(run: Context, hidden: Tensor, images: Tensor) -> Seen:
    """Qwen 3 VL's tower, its mergers, and its features scattered into the embeddings.

    Source: Transformers 5.23 modeling_qwen3_vl.py: Qwen3VLModel.forward.
    """
    tape = run.tape
    tape.ledger.enter("vision forward")
    last, levels = _tower(run, images)
    merged = _merged(run, last, f"{ROOT}.merger")
    tape.ledger.enter("forward")
    joined = _joined(run, merged)
    mask = tape.new(run.rows, 1)
    hidden = scattered(run, hidden, joined, mask)
    copies = tuple(_joined(run, level) for level in levels)
    return Seen(hidden=hidden, levels=copies, mask=mask, kept_tensors=(last, merged, joined, *levels))


def _joined(run: Context, x: Tensor) -> Tensor:
    """The features of each image, and then of all."""
    count = _num_samples(run)
    return ops.cat(run.tape, ops.split(run.tape, x, (x.numel // count,) * count))


def _num_patches(run: Context) -> int:
    return _num_samples(run) * run.variant.batch.image_patches


def _num_samples(run: Context) -> int:
    """Samples with images, each of which counts as one image: in packed rows as many as they hold at most."""
    batch = run.variant.batch
    per_token = _facts(run).spatial_merge_size ** 2
    return batch.rows * seen_samples(batch.seq_len, batch.image_patches, per_token, is_packed=batch.packing)


def _patch_numel(run: Context) -> int:
    """Numbers of one patch: channels × frames × height × width, as the kernel that embeds it has them."""
    kernel = next(group for group in run.model.tensors if group.name == f"{ROOT}.patch_embed.proj.weight")
    return kernel.numel // kernel.shape[0]


def _facts(run: Context) -> Vision:
    vision = run.model.vision
    assert vision is not None
    return vision


def _tower(run: Context, narrow: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The blocks; if they are frozen, as many as there are levels and one more, which leave nothing that adds up.

    Source: as above, Qwen3VLVisionModel.forward.
    """
    tape, vision = run.tape, _facts(run)
    indices, weights, positions = _places(run)
    hidden = _linear(run, narrow, f"{ROOT}.patch_embed.proj")
    embedded = _embedded_places(run, indices, weights)
    hidden = ops.add(tape, hidden, ops.cast(tape, embedded, hidden.item))
    tables = tuple(tape.new(hidden.numel // vision.num_heads, ops.FP32) for _ in range(2))
    levels: list[Tensor] = []
    num_levels = _num_levels(run)
    # blocks without gradients keep nothing, so that more of them would repeat the same peak
    num_blocks = vision.num_layers if hidden.node is not None else num_levels + 1

    def block(x: Tensor) -> Tensor:
        return _block(run, x, tables)

    for index in range(num_blocks):
        is_recomputed = run.variant.checkpointing.enabled and hidden.node is not None
        hidden = tape.checkpoint(block, hidden) if is_recomputed else block(hidden)
        hidden = _marked(run, hidden, index)
        tape.ledger.enter("vision forward end", name=str(index))
        if index < num_levels:
            levels.append(_merged(run, hidden, f"{ROOT}.deepstack_merger_list.*"))
    del positions, embedded
    return hidden, levels


def _places(run: Context) -> tuple[Tensor, Tensor, Tensor]:
    """Four neighbours of each patch in the grid of learned positions, their weights, and its row and column."""
    tape, patches = run.tape, _num_patches(run)
    return tape.new(4 * patches, ops.INDEX), tape.new(4 * patches, ops.FP32), tape.new(2 * patches, ops.INDEX)


def _embedded_places(run: Context, indices: Tensor, weights: Tensor) -> Tensor:
    """Learned positions, resampled in fp32 to the grid of an image."""
    tape, item, table = run.tape, run.variant.item, run.param(f"{ROOT}.pos_embed.weight")
    numel, width = table.numel, _facts(run).hidden_size
    node = None
    if tape.needs(table):
        saved = tape.save(indices)

        def backward(grad: Tensor) -> Tensors:
            saved.take()
            tape.ledger.enter("vision backward")
            return (tape.grad(numel, item),)

        node = tape.node((table,), backward)
    looked_up = tape.new(indices.numel * width, item, node)
    weighed = ops.mul(tape, looked_up, weights)
    del looked_up
    total, back = weighed.numel, weighed.item
    node = tape.node((weighed,), lambda grad: (View(grad.storage, total, back),)) if tape.needs(weighed) else None
    return tape.new(total // 4, ops.FP32, node)


def _marked(run: Context, x: Tensor, index: int) -> Tensor:
    """Passes the output of a block through; when its gradient comes back, an instant of its own begins."""
    tape = run.tape

    def mark() -> None:
        tape.leave_layer()
        tape.ledger.enter("vision backward", name=str(index))

    return ops.marked(tape, x, mark)


def _num_levels(run: Context) -> int:
    name = f"{ROOT}.deepstack_merger_list.*.linear_fc1.weight"
    return run.outside[name].count if name in run.outside else 0


def num_trained_levels(model: ModelFacts, variant: Variant) -> int:
    """Returns the decoder layers whose output gets features that have a gradient."""
    tower = [group for group in model.tensors if group.name.startswith(f"{ROOT}.")]
    if not variant.model.is_full or not any(group.num_trained for group in tower):
        return 0
    return max((group.count for group in tower if ".deepstack_merger_list." in group.name), default=0)


def _block(run: Context, x: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
    """Norm, attention, sum; norm, MLP, sum. Source: as above, Qwen3VLVisionBlock."""
    tape, root = run.tape, f"{ROOT}.blocks.*"
    normed = _layer_norm(run, x, f"{root}.norm1")
    attended = _attention(run, normed, tables)
    del normed
    hidden = ops.add(tape, x, attended)
    del attended
    normed = _layer_norm(run, hidden, f"{root}.norm2")
    inner = ops.activation(tape, _linear(run, normed, f"{root}.mlp.linear_fc1"))
    outer = _linear(run, inner, f"{root}.mlp.linear_fc2")
    del inner, normed
    return ops.add(tape, hidden, outer)


def _attention(run: Context, x: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
    """Attention inside each image, rotated in fp32. Source: as above, Qwen3VLVisionAttention."""
    tape, vision = run.tape, _facts(run)
    both = _linear(run, x, f"{ROOT}.blocks.*.attn.qkv")
    q, k, v = ops.split(tape, _turned(run, both), (x.numel,) * 3)
    q, k = _rotated(run, q, k, tables)
    queries = x.numel // vision.hidden_size * vision.num_heads
    if run.variant.kernels.attn.is_flash:
        output = attention.fused(run, q, k, v, queries)
    else:
        output = _by_image(run, q, k, v, queries)
    result = _linear(run, output, f"{ROOT}.blocks.*.attn.proj")
    del both, q, k, v
    return result


def _turned(run: Context, x: Tensor) -> Tensor:
    """A view whose gradient has another order, so that a product before it needs a copy."""
    tape = run.tape
    node = tape.node((x,), lambda grad: (tape.like(grad),)) if tape.needs(x) else None
    return Tensor(x.storage, x.numel, x.item, node)


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
    tape, count, heads = run.tape, _num_samples(run), _facts(run).num_heads
    outputs = []
    pieces = [ops.split(tape, x, (x.numel // count,) * count) for x in (q, k, v)]
    for parts in zip(*pieces, strict=True):
        if run.variant.kernels.attn is Attention.SDPA:
            outputs.append(attention.fused(run, parts[0], parts[1], parts[2], queries // count))
        else:
            scores = run.variant.batch.image_patches**2 * heads
            weights = attention.weighed(run, parts[0], parts[1], scores, has_mask=False)
            outputs.append(ops.copy(tape, ops.product(tape, weights, parts[2], parts[2].numel)))
            del weights
    return ops.cat(tape, tuple(outputs))


def _merged(run: Context, x: Tensor, name: str) -> Tensor:
    """Neighbouring patches as one token of the language model. Source: as above, Qwen3VLVisionPatchMerger."""
    normed = _layer_norm(run, x, f"{name}.norm")
    inner = ops.activation(run.tape, _linear(run, normed, f"{name}.linear_fc1"))
    return _linear(run, inner, f"{name}.linear_fc2")


def _layer_norm(run: Context, x: Tensor, name: str) -> Tensor:
    """A LayerNorm: keeps its input, and mean and deviation of each row; if nothing trains these go at once."""
    tape, weight, bias = run.tape, run.param(f"{name}.weight"), run.param(f"{name}.bias")
    width, item, needs_x, trains = weight.numel, run.variant.item, x.node is not None, weight.trains
    statistics = [tape.new(x.numel // width, ops.FP32) for _ in range(2)]
    node = None
    if tape.needs(x, weight):
        saved = tape.save(ops.view_without_node(x), *statistics)

        def backward(grad: Tensor) -> Tensors:
            kept = saved.take()
            grad_x = tape.like(grad) if needs_x else None
            grads = [tape.grad(width, item) if trains else None for _ in range(2)]
            del kept
            return (grad_x, *grads)

        node = tape.node((x, weight, bias), backward)
    return tape.new(x.numel, x.item, node)


def _linear(run: Context, x: Tensor, name: str) -> Tensor:
    weight, bias = run.param(f"{name}.weight"), run.param(f"{name}.bias")
    rows = x.numel * bias.numel // weight.numel
    result = ops.matmul(run.tape, x, weight, rows * bias.numel, run.variant.item, is_flat=True)
    return ops.bias(run.tape, result, bias)
