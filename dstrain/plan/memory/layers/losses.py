"""From hidden states to the loss: the head, the logits and their copies."""

from __future__ import annotations

from dstrain.choices import LOGITS_PER_TILE, LossKernel
from dstrain.facts.model.model_facts import Kind
from dstrain.plan.memory.layers import moe, ops
from dstrain.plan.memory.layers.context import Context
from dstrain.plan.memory.layers.tape import Param, Part, Tensor, Tensors


def loss(run: Context, hidden: Tensor, table: Param, *, scales: bool) -> Tensor:
    """The loss of the last hidden states; `table` is the embedding, which a tied head shares."""
    model, variant = run.model, run.variant
    numel = model.vocab_size * model.hidden_size // variant.parallel.tp
    head = table if model.tie_word_embeddings else Param(numel, trains=run.trains_whole(Kind.HEAD), is_root=True)
    tape = run.tape
    hidden = _entered(run, hidden)
    tape.ledger.enter("head forward")
    outer, tape.part = tape.part, Part.LOGITS
    kernels = {LossKernel.FULL: _full, LossKernel.FUSED: _fused, LossKernel.CHUNKED: _chunked}
    made = variant.code.loss or kernels[variant.kernels.loss]
    result = made(run, hidden, head, scales)
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
    run.kept_tensors.append(logits(run, hidden, head, scales))  # the model's output lives as long as the caller
    return cross_entropy(run, ops.cast(run.tape, run.kept_tensors[-1], ops.FP32))


def _chunked(run: Context, hidden: Tensor, head: Param, scales: bool) -> Tensor:
    """The logits in the training precision and one number a token, then a gradient like them.

    On CUDA a kernel reads them; elsewhere a chunk of up to 2^26 numbers is in fp32, which is left out here.
    Source: deepspeed 0.19.8 runtime/chunked_cross_entropy.py: _TritonCrossEntropy.
    """
    return read_at_once(run, logits(run, hidden, head, scales))


def read_at_once(run: Context, logits: Tensor) -> Tensor:
    """A loss that keeps the logits and one number a token, and makes a gradient like the logits."""
    tape = run.tape
    saved = tape.save(ops.view_without_node(logits), tape.new(run.rows, ops.FP32))

    def backward(grad: Tensor) -> Tensors:
        tape.part = Part.LOGITS
        (kept, _) = saved.take()
        assert kept is not None
        return (tape.like(kept),)

    return tape.new(1, ops.FP32, tape.node((logits,), backward))


def logits(run: Context, hidden: Tensor, head: Param, scales: bool) -> Tensor:
    """Returns the logits in the training precision."""
    result = headed(run, product(run, hidden, head))
    if run.adapts(Kind.HEAD):
        result = run.with_adapter(hidden, result, run.model.vocab_size, run.model.hidden_size)
    return ops.unary(run.tape, result) if scales else result


def product(run: Context, hidden: Tensor, head: Param) -> Tensor:
    """The head's product; tensor-parallel ranks each make a part of the vocabulary, and all gather the whole.

    Source: deepspeed 0.19.8 module_inject/auto_tp.py: _replace (gather_output=True for a head that trains).
    """
    tape, item = run.tape, run.variant.item
    whole = hidden.numel // run.model.hidden_size * run.model.vocab_size
    part = whole // run.variant.parallel.tp
    logits = ops.matmul(tape, ops.cast(tape, hidden, item), head, part, item)
    if part == whole:
        return logits
    node = tape.node((logits,), lambda grad: (tape.new(part, item),)) if tape.needs(logits) else None
    return tape.new(whole, item, node)


def headed(run: Context, logits: Tensor) -> Tensor:
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

    There are the logits of a tile, their gradient, and a copy of its hidden states; tiles are of tokens with a target,
    here all.
    """
    tape, model, item = run.tape, run.model, run.variant.item
    rows, width, vocabulary = run.rows, model.hidden_size, model.vocab_size // run.variant.parallel.tp
    tape.ledger.enter("loss forward")
    grad_input = tape.new(rows * width, item)
    grad_weight = tape.grad(vocabulary * width, item) if head.trains else None
    sums = tape.new(rows, ops.FP32)
    size = tile_rows(rows, vocabulary)
    whole = tape.gathered(vocabulary * width, item)
    picked = (tape.new(rows, ops.INDEX), tape.new(size * width, item))
    logits = tape.new(size * vocabulary, item)
    gradient = tape.like(logits)
    del gradient, logits, picked, sums, whole
    return head_and_loss(run, hidden, head, grad_input, grad_weight)


def head_and_loss(run: Context, hidden: Tensor, head: Param, grad_input: Tensor, grad_weight: Tensor | None) -> Tensor:
    """Returns the loss of a head whose gradients are there already: the backward pass hands them on."""
    tape = run.tape
    saved = tape.save(grad_input, grad_weight)

    def backward(grad: Tensor) -> Tensors:
        tape.ledger.enter("head backward")
        return saved.take()

    return tape.new(1, ops.FP32, tape.node((hidden, head), backward))


def tile_rows(rows: int, vocabulary: int) -> int:
    """Returns the tokens whose logits the fused loss has at a time.

    >>> tile_rows(4096, 151936)
    883
    """
    return min(rows, max(1, LOGITS_PER_TILE // vocabulary))
