"""Activation memory of any configuration, instant by instant: two short tapes, extrapolated over the layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from dstrain.choices import Method, Stack
from dstrain.facts.model import ModelFacts
from dstrain.plan.configuration import Configuration
from dstrain.plan.tape import losses, ops
from dstrain.plan.tape.context import Context, Variant, variant_of
from dstrain.plan.tape.families import LAYER_CODE, LayerCode
from dstrain.plan.tape.graph import Tape
from dstrain.plan.tape.tensor import GradRelease, Node, Param, Tensor

INDEX = 8
"""Bytes of a token id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """The most that is live at one named instant beyond parameters, in bytes, by part."""

    name: str
    """`forward`, `loss forward`, `loss backward`, `head backward`, `layer backward` or `embedding backward`."""
    activations: int
    """Saved tensors, working tensors, and their gradients."""
    logits: int
    """Logits and the copies of the loss."""
    grads: int
    """Gradients of parameters: the one just made, and those kept."""
    gathered: int
    """Parameters of the module at work, under ZeRO-3."""
    layers_done: int
    """Layers whose backward pass is over."""

    @property
    def total(self) -> int:
        """All parts together."""
        return self.activations + self.logits + self.grads + self.gathered


def is_known(model: ModelFacts) -> bool:
    """Returns whether the tape knows the model's layer code."""
    return model.model_type in LAYER_CODE


def profile(model: ModelFacts, configuration: Configuration) -> tuple[Instant, ...]:
    """Returns the peak of each named instant of one micro-batch, for the whole depth of the model."""
    return of_variant(model, variant_of(configuration))


@cache
def of_variant(model: ModelFacts, variant: Variant) -> tuple[Instant, ...]:
    """Returns the peaks: one tape with a layer of each kind, one more for each kind, extrapolated to the depth."""
    sparse = model.moe.num_moe_layers if model.moe else 0
    depth = {"dense": model.num_hidden_layers - sparse, "sparse": sparse}
    depth = {kind: count for kind, count in depth.items() if count}
    short = dict.fromkeys(depth, 1)
    if variant.method is not Method.FULL:
        short[next(iter(short))] = 2  # the first layer's input needs no gradient: no other layer is like it
    short = {kind: min(count, depth[kind]) for kind, count in short.items()}
    base = peaks(model, variant, short)
    values = {name: list(parts) for name, parts in base.items()}
    for kind, count in short.items():
        if depth[kind] == count:
            continue
        longer = peaks(model, variant, {**short, kind: count + 1})
        for name, parts in longer.items():
            for index, (low, high) in enumerate(zip(base[name], parts, strict=True)):
                values[name][index] += (depth[kind] - count) * (high - low)
    return tuple(_instant(name, parts, model.num_hidden_layers) for name, parts in values.items())


def _instant(name: str, parts: list[int], layers: int) -> Instant:
    activations, logits, grads, gathered = parts
    plain, _, edge = name.partition("/")
    done = {"": 0, "last": 0, "first": layers - 1}.get(edge.rpartition("/")[2], 0)
    if plain == "embedding backward":
        done = layers
    return Instant(name=plain, activations=activations, logits=logits, grads=grads, gathered=gathered, layers_done=done)


def peaks(model: ModelFacts, variant: Variant, depth: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Returns the peak of each instant of a model with so many layers of each kind, by part.

    The backward pass of the first and of the last layer of a kind are instants of their own: between them the peak
    goes in a straight line, so one of the two is the largest.
    """
    tape = Tape(release=variant.release, gathers=variant.gathers)
    tape.offloads_inputs = variant.activation_offload
    tape.stops_early = variant.stack is Stack.TRANSFORMERS_5
    play(Context(model, variant, tape), depth)
    found = tape.ledger.peaks
    order = [kind for kind, count in depth.items() for _ in range(count)]
    named: dict[str, tuple[int, ...]] = {}
    for name, parts in found.items():
        if not name.startswith("layer backward"):
            named[name] = parts
    for kind in depth:
        places = [index for index, each in enumerate(order) if each == kind]
        for edge, index in (("first", places[0]), ("last", places[-1])):
            name = f"layer backward {index}"
            if name in found:
                named[f"layer backward/{kind}/{edge}"] = found[name]
    return named


def play(run: Context, depth: dict[str, int]) -> None:
    """Runs one micro-batch, forward and backward."""
    tape, model = run.tape, run.model
    code = LAYER_CODE[model.model_type]
    loss = _forward(run, code, depth)
    tape.ledger.enter("loss backward")
    tape.backward(loss)


def _forward(run: Context, code: LayerCode, depth: dict[str, int]) -> Tensor:
    """Returns the loss; what the model's forward pass keeps in its frame goes when it returns."""
    tape, model, variant = run.tape, run.model, run.variant
    tape.ledger.enter("forward")
    ids = [tape.new(run.rows, INDEX) for _ in range(2)]  # ids and labels
    places = tape.new(variant.seq_len, INDEX)
    table = Param(model.vocab_size * model.hidden_size // variant.tp, trains=run.trains, is_root=True)
    hidden = embedded(run, table)
    if code.scales_embedding:
        hidden = ops.unary(tape, hidden)
    positions(run)
    order = [kind for kind, count in depth.items() for _ in range(count)]
    for index, kind in enumerate(order):
        layer = code.dense if kind == "dense" else code.sparse
        assert layer is not None
        if variant.grad_ckpt:
            hidden = tape.checkpoint(lambda x, layer=layer: layer(run, x), hidden)  # type: ignore[misc]
        else:
            hidden = layer(run, hidden)
        hidden = marked(run, hidden, f"layer backward {index}")
    hidden = code.norm(run, hidden, model.hidden_size)
    loss = losses.loss(run, hidden, table, scales=code.scales_logits)
    del ids, places
    return loss


def embedded(run: Context, table: Param) -> Tensor:
    """The embedding of the tokens; its gradient is a table of zeros, summed into."""
    tape, model, item = run.tape, run.model, run.variant.item
    node: Node | None = None
    if table.trains:
        numel = table.numel

        def backward(grad: Tensor) -> tuple[Tensor | None, ...]:
            _leave_layer(tape)
            tape.ledger.enter("embedding backward")
            whole = tape.gathered(numel, item)
            result = tape.grad(numel, item)
            del whole
            return (result,)

        node = tape.node((table,), backward)
    whole = tape.gathered(table.numel, item)
    result = tape.new(run.rows * model.hidden_size, item, node)
    del whole
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

    def backward(grad: Tensor) -> tuple[Tensor | None, ...]:
        assert held.numel == grad.numel
        return (None,)

    return tape.node((held,), backward)


def positions(run: Context) -> None:
    """Makes what all layers share: the rotary tables and the attention mask."""
    tape, model, variant = run.tape, run.model, run.variant
    width = model.rotary_dim
    run.cos, run.sin = (tape.new(variant.seq_len * width, variant.item) for _ in range(2))
    if variant.has_mask:
        run.mask = tape.new(variant.batch * variant.seq_len**2, 1).storage


def marked(run: Context, x: Tensor, name: str) -> Tensor:
    """Passes x through; when its gradient comes back, the instant `name` begins."""
    tape = run.tape
    if x.node is None:
        return x
    output = ops.view_without_node(x) if run.variant.holds_layers else None

    def backward(grad: Tensor) -> tuple[Tensor | None, ...]:
        _leave_layer(tape)
        if output is not None:
            tape.held += [output, ops.view(grad)]
        tape.ledger.enter(name)
        return (grad,)

    return Tensor(x.storage, x.numel, x.item, tape.node((x,), backward))


def _leave_layer(tape: Tape) -> None:
    """Reduces the gradients of the layer before: a flat copy of them all, then both go."""
    if tape.release is not GradRelease.AFTER_LAYER or not tape.grads:
        return
    flat = tape.grad(sum(grad.numel for grad in tape.grads), tape.grads[0].item)
    tape.grads.clear()
    del flat
