"""From hidden states to the loss: the head, the logits and their copies."""

from __future__ import annotations

from dstrain.choices import LOGITS_PER_TILE, LossKernel
from dstrain.facts.model.model_facts import Kind
from dstrain.plan.memory.layers import moe, ops, products
from dstrain.plan.memory.layers.context import Context
from dstrain.plan.memory.layers.graph import Tensors
from dstrain.plan.memory.layers.tensor import Param, Part, Tensor


def loss(run: Context, hidden: Tensor, table: Param, *, scales: bool) -> Tensor:
    """The loss of the last hidden states; `table` is the embedding, which a tied head shares.

    Of the scores of a reward model, all but the head's own output has a few bytes a row, which are left out.
    """
    model, variant = run.model, run.variant
    numel = model.num_outputs * model.hidden_size // variant.parallel.tp
    head = table if model.tie_word_embeddings else Param(numel, trains=run.trains_whole(Kind.HEAD), is_root=True)
    tape = run.tape
    hidden = _entered(run, hidden)
    tape.ledger.enter("head forward")
    outer, tape.part = tape.part, Part.LOGITS
    made = {
        LossKernel.FULL: _full,
        LossKernel.IN_PLACE: _in_place,
        LossKernel.FUSED: _fused,
        LossKernel.LIGER: _fused,
        LossKernel.CHUNKED: _chunked,
        LossKernel.TILED: _tiled,
    }[run.kernels.loss if variant.kernels.liger and variant.kernels.loss is LossKernel.LIGER else variant.kernels.loss]
    result = made(run, hidden, head, scales) if model.num_scores is None else logits(run, hidden, head, scales=False)
    result = moe.balancing_loss(run, result)
    run.kept_tensors.clear()
    tape.part = outer
    return result


def _entered(run: Context, hidden: Tensor) -> Tensor:
    """Passes hidden states through; from their gradient on, tensors are activations again."""
    tape = run.tape

    def mark() -> None:
        tape.part = Part.ACTIVATIONS

    return ops.marked(tape, hidden, mark)


def _full(run: Context, hidden: Tensor, head: Param, scales: bool) -> Tensor:
    """All logits at once: in the training precision 2, in fp32 4, log-softmax 4; backward 4 + 4 + 4.

    Source: Transformers 5.23 loss/loss_utils.py: ForCausalLMLoss.
    """
    return cross_entropy(run, _wide_logits(run, hidden, head, scales))


def _in_place(run: Context, hidden: Tensor, head: Param, scales: bool) -> Tensor:
    """Unsloth's loss: one number a token is kept, and the gradient is written over the logits, then copied.

    Source: unsloth kernels/cross_entropy_loss.py: Fast_CrossEntropyLoss. The copy is not in it; published runs reserve
    as much more, to the MiB (fms-acceleration a100_80gb_liger.csv), and their live peak allows it.
    """
    return _read_at_once(run, _wide_logits(run, hidden, head, scales))


def _chunked(run: Context, hidden: Tensor, head: Param, scales: bool) -> Tensor:
    """The logits in the training precision and one number a token, then a gradient like them.

    On CUDA a kernel reads them; elsewhere a chunk of up to 2^26 numbers is in fp32, which is left out here.
    Source: deepspeed 0.19.8 runtime/chunked_cross_entropy.py: _TritonCrossEntropy.
    """
    return _read_at_once(run, logits(run, hidden, head, scales))


def _read_at_once(run: Context, logits: Tensor) -> Tensor:
    """A loss that keeps the logits and one number a token, and makes a gradient like the logits."""
    tape = run.tape
    saved = tape.save(ops.view_without_node(logits), tape.new(run.rows, ops.FP32))

    def backward(grad: Tensor) -> Tensors:
        tape.part = Part.LOGITS
        (kept, _) = saved.take()
        assert kept is not None
        return (tape.like(kept),)

    return tape.new(1, ops.FP32, tape.node((logits,), backward))


def _wide_logits(run: Context, hidden: Tensor, head: Param, scales: bool) -> Tensor:
    """Returns the logits in fp32; those in the training precision, the model's output, live as long as the caller."""
    if run.variant.code.wide_logits is not None:
        return run.variant.code.wide_logits(run, hidden, head, scales)
    run.kept_tensors.append(logits(run, hidden, head, scales))
    return ops.cast(run.tape, run.kept_tensors[-1], ops.FP32)


def logits(run: Context, hidden: Tensor, head: Param, scales: bool) -> Tensor:
    """Returns the logits in the training precision."""
    result = _headed(run, _product(run, hidden, head))
    if run.adapts(Kind.HEAD):
        result = run.with_adapter(hidden, result, run.model.num_outputs, run.model.hidden_size)
    return ops.unary(run.tape, result) if scales else result


def _product(run: Context, hidden: Tensor, head: Param) -> Tensor:
    """The head's product; tensor-parallel ranks each make a part of the vocabulary, and all gather the whole.

    Source: deepspeed 0.19.8 module_inject/auto_tp.py: _replace (gather_output=True for a head that trains).
    """
    tape, item = run.tape, run.variant.item
    whole = hidden.numel // run.model.hidden_size * run.model.num_outputs
    part = whole // run.variant.parallel.tp
    logits = products.matmul(tape, ops.cast(tape, hidden, item), head, part, item)
    if part == whole:
        return logits
    node = tape.node((logits,), lambda grad: (tape.new(part, item),)) if tape.needs(logits) else None
    return tape.new(whole, item, node)


def _headed(run: Context, logits: Tensor) -> Tensor:
    """Passes logits through; with their gradient the head's backward pass begins."""
    ledger = run.tape.ledger
    ledger.enter("loss forward")
    return ops.marked(run.tape, logits, lambda: ledger.enter("head backward"))


def cross_entropy(run: Context, logits: Tensor) -> Tensor:
    """Log-softmax, kept, and the negative log-likelihood."""
    tape, numel, item = run.tape, logits.numel, logits.item
    likely = ops.softmax(tape, logits)
    labels = tape.new(numel // run.model.vocab_size, ops.INDEX)  # shifted, beside the padded ones they are a copy of
    kept_too = tape.save(ops.view_without_node(likely), labels)

    def likelihood_backward(grad: Tensor) -> Tensors:
        tape.part = Part.LOGITS
        kept_too.take()
        return (tape.new(numel, item),)

    return tape.new(1, ops.FP32, tape.node((likely,), likelihood_backward))


def _fused(run: Context, hidden: Tensor, head: Param, scales: bool) -> Tensor:
    """The fused head and loss: gradients are made in the forward pass, a tile of logits at a time.

    dstrain's has the logits of a tile, their gradient, and a copy of its hidden states; its tiles are of tokens with a
    target, here all. Liger's writes the gradient over the logits. Liger up to 0.4 cast each tile to fp32; from
    0.6 to 0.8.0 a second gradient of the head and one in fp32 stood beside the first, for a moment in each tile, as
    they still do in fp32 training.
    Source: liger-kernel 0.8.5 ops/fused_linear_cross_entropy.py: fused_linear_cross_entropy_forward.
    """
    tape, model, item = run.tape, run.model, run.variant.item
    rows, width, vocabulary = run.rows, model.hidden_size, model.vocab_size // run.variant.parallel.tp
    kernel = run.variant.kernels.loss
    tape.ledger.enter("loss forward")
    grad_input = tape.new(rows * width, item)
    grad_weight = tape.grad(vocabulary * width, item) if head.trains else None
    sums = tape.new(rows, ops.FP32)
    size = tile_rows(kernel, rows, width, vocabulary)
    whole = tape.gathered(vocabulary * width, item)
    picked = (tape.new(rows, ops.INDEX), tape.new(size * width, item)) if kernel is LossKernel.FUSED else ()
    logits = tape.new(size * vocabulary, item)
    if run.variant.code.widens_fused_logits:
        logits = ops.cast(tape, logits, ops.FP32)
    if kernel is LossKernel.FUSED:
        gradient = tape.like(logits)
        del gradient
    elif head.trains and item == ops.FP32:
        product = tape.grad(vocabulary * width, item)
        del product
    del logits, picked, sums, whole
    saved = tape.save(grad_input, grad_weight)

    def backward(grad: Tensor) -> Tensors:
        tape.ledger.enter("head backward")
        return saved.take()

    return tape.new(1, ops.FP32, tape.node((hidden, head), backward))


TILED_HEADS = (LossKernel.FUSED, LossKernel.LIGER)
"""Losses that have the logits of a tile of tokens at a time."""


def tile_rows(kernel: LossKernel, rows: int, width: int, vocabulary: int) -> int:
    """Returns the tokens whose logits a fused loss has at a time; `width` is that of hidden states.

    >>> [tile_rows(kernel, 4096, 4096, 151936) for kernel in TILED_HEADS]
    [883, 128]
    """
    if kernel is LossKernel.FUSED:
        return min(rows, max(1, LOGITS_PER_TILE // vocabulary))
    tiles = -(-vocabulary // width)
    return min(rows, 1 << (-(-rows // tiles) - 1).bit_length())


TILES = 8
"""Tiles of the tiled loss. Source: torchtune modules/loss/ce_chunked_output_loss.py: num_output_chunks."""


def _tiled(run: Context, hidden: Tensor, head: Param, scales: bool) -> Tensor:
    """The logits in the training precision, tile by tile, and the loss of each tile.

    Torchtune compiles the loss, which then keeps nothing; LitGPT computes it in the training precision.
    Source: torchtune 0.6 modules/transformer.py: chunked_output, modules/loss/ce_chunked_output_loss.py; litgpt
    utils.py: chunkedcross_entropy.
    """
    tape = run.tape
    sizes = [hidden.numel // TILES] * (TILES - 1)
    pieces = ops.split(tape, hidden, (*sizes, hidden.numel - sum(sizes)))
    chunks = [_headed(run, _product(run, piece, head)) for piece in pieces]
    del pieces
    parts = [(run.variant.code.chunk_loss or _wide_cross_entropy)(run, chunk) for chunk in chunks]
    total = parts[0]
    for part in parts[1:]:
        total = ops.add(tape, total, part)
    return total


def _wide_cross_entropy(run: Context, logits: Tensor) -> Tensor:
    return cross_entropy(run, ops.cast(run.tape, logits, ops.FP32))
