"""Live bytes under DeepSpeed in closed form, for searches over thousands of configurations.

Exceeds the engine replayed parameter by parameter (`memory.deepspeed.engine`), which shown plans use, by at most 10 %.
Under ZeRO-3 it is only for models whose layers were traced: `engine.brief_peak` is exact for the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dstrain.facts.model.model_facts import Kind, ModelFacts
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.layers.activations import Instant, profile
from dstrain.plan.memory.params import shard, trained_on_rank
from dstrain.plan.memory.peak import Peak
from dstrain.plan.memory.zero import engine_buffers, gathered_bytes, states

AFTER_GRADIENTS = ("layer backward", "vision backward", "embedding backward")
"""Instants at which parameters already have gradients."""


def peak(model: ModelFacts, configuration: Configuration, ranks: int) -> Peak:
    """Returns the peak of one rank: the tape's instants, or a trace's, each with the engine's bytes in closed form."""
    counts = trained_on_rank(model, configuration)
    model_states = states(counts, configuration, ranks)
    resident = engine_buffers(counts, configuration, ranks).resident
    top = max(_instants(model, configuration, ranks), key=lambda instant: instant.total)
    return replace(top, params=model_states.params, optimizer=model_states.optimizer, buffers=top.buffers + resident)


def _instants(model: ModelFacts, configuration: Configuration, ranks: int) -> Iterator[Peak]:
    """Yields what is live at each instant beyond parameters, optimizer states and resident buffers."""
    counts = trained_on_rank(model, configuration)
    engine = engine_buffers(counts, configuration, ranks)
    head = model.vocab_size * model.hidden_size
    unit = {"layer backward": _largest_unit(shard(model, configuration.parallel))}
    for instant in profile(model, configuration):
        numel = unit.get(instant.name, head)
        yield Peak(
            name=instant.name,
            grads=_grads(model, configuration, ranks, instant),
            buffers=engine.backward if instant.name in AFTER_GRADIENTS else 0,
            gathered=gathered_bytes(counts, configuration, numel, head_numel=head),
            activations=instant.activations,
            logits=instant.logits,
        )
    yield Peak(name="optimizer step", grads=states(counts, configuration, ranks).grads, buffers=engine.step)


def _grads(model: ModelFacts, configuration: Configuration, ranks: int, instant: Instant) -> int:
    """Returns the gradients at an instant: autograd's or, instead, the engine's.

    The engine has all of it where micro-batches add up or ZeRO-3 holds it flat; else the buffer of ZeRO-1 and 2 appears
    with the first gradient. Of a single micro-batch ZeRO-1 keeps whole, layer by layer, what no bucket can hold.
    """
    stage = configuration.zero.stage
    counts = trained_on_rank(model, configuration)
    taken = states(counts, configuration, ranks).grads
    if stage == 0:
        return max(instant.grads, taken) if configuration.step.grad_accum > 1 else instant.grads
    is_after = instant.name in AFTER_GRADIENTS
    if configuration.step.grad_accum > 1 or stage == 3:
        return taken + (engine_buffers(counts, configuration, ranks).backward_grads if is_after or stage != 2 else 0)
    if not is_after:
        return 0
    if stage == 2 or not configuration.model.is_full:
        return taken
    tensors = shard(model, configuration.parallel).tensors
    large = sum(g.numel * g.count for g in tensors if g.numel > configuration.zero.reduce_bucket_size)
    done = instant.layers_done / model.num_hidden_layers
    return taken + round(configuration.model.item * large * done)


def _largest_unit(model: ModelFacts) -> int:
    """Returns the elements that one fetch of ZeRO-3 gathers: an MoE block is a leaf module, else the largest weight."""
    inner = [g for g in model.tensors if g.kind not in (Kind.EMBEDDING, Kind.HEAD, Kind.VISION)]
    if model.moe is None:
        return max(group.numel for group in inner)
    return sum(g.numel for g in inner if g.kind in (Kind.EXPERT, Kind.ROUTER))
