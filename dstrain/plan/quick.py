"""Live bytes under DeepSpeed in closed form, for a search that has thousands of configurations to weigh.

Within 4 % of the engine played parameter by parameter (`plan.engine`), on which the plans that are shown rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dstrain.choices import Method
from dstrain.facts.model import Kind, ModelFacts
from dstrain.plan.activations import activations
from dstrain.plan.configuration import Configuration
from dstrain.plan.params import trained
from dstrain.plan.peak import Peak
from dstrain.plan.tape.profile import profile
from dstrain.plan.zero import engine_buffers, gathered_bytes, states


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instant:
    """Live bytes of one instant, by part."""

    name: str
    grads: int = 0
    buffers: int = 0
    gathered: int = 0
    activations: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        return self.grads + self.buffers + self.gathered + self.activations + self.logits


def peak(model: ModelFacts, configuration: Configuration, ranks: int) -> Peak:
    """Returns the peak of one rank: the largest of a few named instants, each with what lives then."""
    counts = trained(model, configuration.method, configuration.lora)
    held = states(counts, configuration, ranks)
    resident = engine_buffers(counts, configuration, ranks).resident
    find = _instants if model.traced is None else _traced_instants
    top = max(find(model, configuration, ranks), key=lambda instant: instant.total)
    return Peak(
        name=top.name,
        params=held.params,
        grads=top.grads,
        optimizer=held.optimizer,
        buffers=top.buffers + resident,
        gathered=top.gathered,
        activations=top.activations,
        logits=top.logits,
    )


def _instants(model: ModelFacts, configuration: Configuration, ranks: int) -> list[_Instant]:
    counts = trained(model, configuration.method, configuration.lora)
    held = states(counts, configuration, ranks)
    engine = engine_buffers(counts, configuration, ranks)
    acts = activations(model, configuration)
    s = configuration.precision.num_bytes
    vocabulary = model.vocab_size * model.hidden_size
    carried = held.grads if configuration.zero_stage == 3 or configuration.grad_accum > 1 else 0
    head_grad = s * vocabulary if configuration.method is Method.FULL else 0
    tied_grad = head_grad if model.tie_word_embeddings else 0
    backward_grads = held.grads + engine.backward_grads
    layer = gathered_bytes(counts, configuration, _largest_unit(model))
    head = gathered_bytes(counts, configuration, vocabulary)
    return [
        _Instant(
            name="loss backward",
            grads=carried + (engine.backward_grads if configuration.grad_accum > 1 else 0),
            gathered=head,
            activations=acts.kept + acts.outside,
            logits=acts.loss,
        ),
        _Instant(
            name="layer backward",
            grads=backward_grads + tied_grad,
            buffers=engine.backward,
            gathered=layer,
            activations=acts.kept + acts.layer + acts.layer_work,
        ),
        _Instant(
            name="embedding backward",
            grads=backward_grads + head_grad + 2 * tied_grad,
            buffers=engine.backward,
            gathered=head,
        ),
        _Instant(name="optimizer step", grads=held.grads, buffers=engine.step),
    ]


def _traced_instants(model: ModelFacts, configuration: Configuration, ranks: int) -> list[_Instant]:
    """Returns the same of a traced model: its activations as they were traced, the engine's bytes in closed form."""
    layer, embedding, step = _instants(model, configuration, ranks)[1:]
    before = _instants(model, configuration, ranks)[0]
    engine = {"layer backward": layer, "vision backward": layer, "embedding backward": embedding}
    found = [
        replace(engine.get(each.name, before), name=each.name, activations=each.activations, logits=each.logits)
        for each in profile(model, configuration)
    ]
    return [*found, step]


def _largest_unit(model: ModelFacts) -> int:
    """Returns the elements that one fetch of ZeRO-3 gathers: an MoE block is a leaf module, else the largest weight."""
    inner = [g for g in model.tensors if g.kind not in (Kind.EMBEDDING, Kind.HEAD, Kind.VISION)]
    if model.moe is None:
        return max(group.numel for group in inner)
    return sum(g.numel for g in inner if g.kind in (Kind.EXPERT, Kind.ROUTER))
