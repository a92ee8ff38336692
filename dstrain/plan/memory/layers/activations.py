"""Activation memory of any configuration at each instant: two short tapes, extrapolated over the layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from dstrain.choices import Attention
from dstrain.facts.model.model_facts import Kind, ModelFacts
from dstrain.facts.model.traced_activations import Traced
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.layers import embedding, features, losses, ops, vision
from dstrain.plan.memory.layers.context import Context, Variant, variant_of
from dstrain.plan.memory.layers.families import LAYER_CODE, LayerCode
from dstrain.plan.memory.layers.graph import Tape
from dstrain.plan.memory.layers.tensor import GradRelease, Param, Tensor

Peaks = dict[str, tuple[int, ...]]
"""Peaks of named instants by part."""
_GATHERED = 3
"""Place of the gathered bytes in the parts of a peak: activations, logits, gradients, gathered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """Peak of live bytes beyond parameters at one named instant, by part."""

    name: str
    """`forward`, `loss forward`, `router loss forward`, `loss backward`, `head backward`, `layer backward` or
    `embedding backward`."""
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


def has_layer_code(model: ModelFacts) -> bool:
    """Returns whether the tape knows the model's layer code, and all of what it trains on."""
    return model.traced is None and model.model_type in LAYER_CODE


def profile(model: ModelFacts, configuration: Configuration) -> tuple[Instant, ...]:
    """Returns the peak of each named instant of one micro-batch, for the whole depth of the model.

    A model whose layer code the tape does not know was traced instead.
    """
    variant = variant_of(configuration)
    if model.traced is not None:
        return _traced(model.traced, model, variant)
    return of_variant(model, _of_fewest_ranks(model, variant))


def _of_fewest_ranks(model: ModelFacts, variant: Variant) -> Variant:
    """Returns a smaller question with the same bytes to 1 %, played once for all: fewer samples and ranks.

    Tables of positions and masks, of which larger parts of a sample need more, are a hundredth at most.
    """
    sp, micro_batch = variant.parallel.sp, variant.batch.micro_batch
    while sp % 4 == micro_batch % 2 == 0 and sp <= model.num_key_value_heads:
        sp, micro_batch = sp // 2, micro_batch // 2
    parallel, batch = replace(variant.parallel, sp=sp), replace(variant.batch, micro_batch=micro_batch)
    return replace(variant, parallel=parallel, batch=batch)


def _traced(traced: Traced, model: ModelFacts, variant: Variant) -> tuple[Instant, ...]:
    """Returns the instants that a trace of the model's own code found."""
    keeps = variant.release is GradRelease.AT_STEP
    peaks = traced.profile.moments(
        num_layers=model.num_hidden_layers,
        micro_batch=variant.batch.rows,
        grad_ckpt=variant.checkpointing.enabled,
    )
    return tuple(
        Instant(
            name=peak.name,
            activations=peak.activations,
            logits=peak.logits,
            grads=peak.grads if keeps else 0,
            gathered=0,
            layers_done=model.num_hidden_layers if peak.name == "embedding backward" else 0,
        )
        for peak in peaks
    )


@cache
def of_variant(model: ModelFacts, variant: Variant) -> tuple[Instant, ...]:
    """Returns the peaks: one tape with a layer of each kind, one more for each kind, extrapolated to the depth."""
    depth, period = layer_kinds(model, variant), variant.checkpointing.period
    least = dict.fromkeys(depth, period)
    if not variant.model.is_full or variant.batch.image_patches or not variant.checkpointing.enabled:
        # the first layer's input is the embedding, which lives on and may need no gradient; image features follow it
        first = next(iter(least))
        sees = 2 + max(1, vision.num_trained_levels(model, variant)) if variant.batch.image_patches else 2
        least[first] = max(period, sees)
    if variant.checkpointing.offload:
        least[next(reversed(least))] = max(period, variant.code.inputs_in_flight + 2)
    short = {kind: count + (depth[kind] - count) % period for kind, count in least.items()}  # in step with the pattern
    short = {kind: min(count, depth[kind]) for kind, count in short.items()}
    base, longer = _beyond_embedding(model, variant, short, depth)
    first = next(iter(short))
    values = {name: list(parts) for name, parts in base.items()}
    for kind, count in short.items():
        if depth[kind] == count:
            continue
        if kind != first:
            longer = peaks(model, variant, {**short, kind: count + period})
        for name, parts in longer.items():
            for index, (low, high) in enumerate(zip(base[name], parts, strict=True)):
                values[name][index] += (depth[kind] - count) // period * (high - low)
    return tuple(_instant(name, parts, model.num_hidden_layers) for name, parts in values.items())


def _beyond_embedding(
    model: ModelFacts, variant: Variant, short: dict[str, int], depth: dict[str, int]
) -> tuple[Peaks, Peaks]:
    """Returns the peaks of a model so deep that its forward peak lies in the layers, and with one period more of the
    first kind, as far as there are layers; changes `short` to that depth.

    With few layers it may be where ZeRO-3 gathers the embedding, which says nothing of a deeper model.
    """
    kind, period = next(iter(short)), variant.checkpointing.period
    base = longer = peaks(model, variant, short)
    while short[kind] + period <= depth[kind]:
        longer = peaks(model, variant, {**short, kind: short[kind] + period})
        if longer["forward"][_GATHERED] >= base["forward"][_GATHERED]:
            break
        short[kind] += period
        base = longer
    return base, longer


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


def _instant(name: str, parts: list[int], layers: int) -> Instant:
    activations, logits, grads, gathered = parts
    plain, _, place = name.partition("/")
    done = layers if plain in ("embedding backward", "vision backward") else 0
    if place:
        index = int(place.rpartition("/")[2])
        done = layers - 1 - index if index >= 0 else -1 - index
    return Instant(name=plain, activations=activations, logits=logits, grads=grads, gathered=gathered, layers_done=done)


def peaks(model: ModelFacts, variant: Variant, depth: dict[str, int]) -> Peaks:
    """Returns the peak of each instant of a model with that many layers of each kind, by part.

    The backward passes of the first and of the last layers of a kind are instants of their own, one for each place in
    the pattern of recomputed layers: between them the peak follows a straight line, so one of the two is the largest.
    """
    tape = Tape(release=variant.release, gathers=variant.gathers)
    tape.offloads_inputs, tape.num_in_flight = variant.checkpointing.offload, variant.code.inputs_in_flight
    tape.keeps_inputs = variant.gathers
    tape.stops_early, tape.plays_all_tiles = variant.code.stops_early, False
    play(Context(model, variant, tape), depth)
    tape_peaks = tape.ledger.peaks
    order = [kind for kind, count in depth.items() for _ in range(count)]
    named: dict[str, tuple[int, ...]] = {}
    for name, parts in tape_peaks.items():
        plain = " ".join(name.split()[:2]) if name.startswith("vision") else name
        if not name.startswith("layer backward") and sum(parts) > sum(named.get(plain, (-1,))):
            named[plain] = parts
    for kind in depth:
        places = [index for index, layer_kind in enumerate(order) if layer_kind == kind]
        edges = range(min(len(places), variant.checkpointing.period))
        for edge in (*edges, *(-1 - edge for edge in edges)):
            name = f"layer backward {places[edge]}"
            if name in tape_peaks:
                named[f"layer backward/{kind}/{edge}"] = tape_peaks[name]
    return named


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
    hidden = embedding.embedded(run, table, scales=code.scales_in_embedding)
    if code.scales_embedding:
        hidden = ops.unary(tape, hidden)
    seen = code.tower(run, hidden, images) if code.tower and images else None
    if seen:
        hidden = seen.hidden
    embeddings = hidden  # the frame holds them
    is_windowed = any(kind.endswith("windowed") for kind in depth)
    embedding.positions(run, by_row=code.rotates_by_row, by_kind=code.rotates_by_kind, is_windowed=is_windowed)
    idle = embedding.idle_mask(run)
    order = [kind for kind, count in depth.items() for _ in range(count)]
    for index, kind in enumerate(order):
        layer = _layer(run, code, kind)
        hidden = tape.checkpoint(layer, hidden) if variant.checkpointing.recomputes(index) else layer(hidden)
        hidden = output = marked(run, hidden, f"layer backward {index}")
        is_at_end = index == 0 or index >= model.num_hidden_layers - 2
        if seen and index < len(seen.levels) and (is_at_end or seen.levels[index].node is not None):
            # frozen ones between the first and the last two layers leave as much behind as layers without
            hidden = features.deepened(run, hidden, seen.levels[index], seen.mask)
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


def marked(run: Context, x: Tensor, name: str) -> Tensor:
    """Passes x through; when its gradient comes back, the instant `name` begins."""
    tape = run.tape
    if x.node is None:
        return x
    output = ops.view_without_node(x) if run.variant.holds_layers else None

    def backward(grad: Tensor) -> tuple[Tensor | None, ...]:
        tape.leave_layer()
        if output is not None:
            tape.kept_tensors += [output, ops.view(grad)]
        tape.ledger.enter(name)
        return (grad,)

    return Tensor(x.storage, x.numel, x.item, tape.node((x,), backward))
