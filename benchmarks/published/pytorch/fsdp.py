"""Traces a run under FSDP's full sharding: all-gathers and reduce-scatters in their own streams.

A unit is the root (embedding, last norm, head) or a decoder layer. The root stays whole from the first forward to the
end of the backward pass, a layer while it works; under checkpointing it is gathered twice on the way back, for the
recomputation and for the backward pass.

Source: torch 2.13 distributed/fsdp/_runtime_utils.py: _unshard, _reshard, _post_backward_hook, _reduce_grad;
_flat_param.py: unshard, _use_low_precision_shard; _init_utils.py: _init_param_handle_from_module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.published.pytorch.element_sizes import Script, elements, step
from benchmarks.published.pytorch.unsharded import plain_variant
from benchmarks.published.pytorch.weights import Weight, weights
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.caching_allocator import Event
from dstrain.plan.memory.deepspeed.allocations import REDUCE, UNSHARD
from dstrain.plan.memory.layers.ops import FP32
from dstrain.plan.memory.layers.recording import Recording, record
from dstrain.plan.memory.layers.tape import GradRelease, Key, TapeEvent

IN_FLIGHT = 2
"""Gathered units that may wait to be given back: a third gather waits for the GPU to be done with the first of them.
Source: torch 2.13 distributed/fsdp/_limiter_utils.py: _FreeEventQueue."""
PRE_UNSHARD = 3
"""The stream where a shard is cast before it is gathered."""
ROOT = 0
"""The number of the root unit; layers follow."""


def steps(
    model: ModelFacts, configuration: Configuration, num_ranks: int, workspace_bytes: int, *, rank: int = 0
) -> Iterator[list[Event]]:
    """Yields the events before the first step, then those of each step."""
    run = _Run(model, configuration, num_ranks)
    run.wrap()
    run.script.allocate(workspace_bytes)
    yield run.script.take()
    recording = record(model, plain_variant(configuration, GradRelease.AFTER_LAYER))
    groups = run.pieces(rank)
    is_first = True
    while True:
        for _ in range(min(configuration.step.grad_accum, 2)):
            run.micro_batch(recording, workspace_bytes if is_first else 0)
        step(run.script, groups, run.sizes, is_first=is_first)
        is_first = False
        yield run.script.take()


class _Run:
    """Writes the events of one rank."""

    def __init__(self, model: ModelFacts, configuration: Configuration, ranks: int) -> None:
        self.ranks, self.checkpointing = ranks, configuration.checkpointing
        self.sizes = elements(configuration)
        model_weights = weights(model, configuration.model, configuration.code)
        self.units: list[tuple[Weight, ...]] = [(*model_weights.before, *model_weights.after), *model_weights.layers]
        self.is_full = configuration.model.is_full
        self.is_wide = self.is_full and configuration.code.is_autocast
        self.is_hosted = configuration.zero.offloads_params
        self.bytes = [self._flat_bytes(unit) for unit in self.units]
        self.script = Script()
        self.whole: dict[int, int] = {}
        self.leaving: list[int] = []
        self.grads: list[int] = []

    def _flat_bytes(self, unit: Sequence[Weight]) -> float:
        """Returns the bytes of a gathered unit; an adapter's tensors are units of their own, too small to matter."""
        if self.is_full:
            return sum(weight.numel for weight in unit) * self.sizes.compute
        return sum(self.sizes.frozen_bytes(weight) for weight in unit if not weight.trains)

    def wrap(self) -> None:
        """Writes how units are made: every tensor of one, all of them flat, this rank's shard; then autocast's copies.

        Source: accelerate 1.0 accelerator.py: prepare_model, which makes shards fp32 under mixed precision.
        """
        script, shards = self.script, {}
        for index in (*range(1, len(self.units)), ROOT):
            tensors = script.allocate_all(
                self.sizes.frozen_bytes(weight) for weight in self.units[index] if self.is_full or not weight.trains
            )
            flat = script.allocate(self.bytes[index])
            script.free(*tensors)
            shards[index] = script.allocate(self.bytes[index] / self.ranks)
            script.free(flat)
            if not self.is_full and not self.is_hosted:
                script.allocate_all(w.numel * self.sizes.trained / self.ranks for w in self.units[index] if w.trains)
        for index, shard in list(shards.items()) if self.is_wide else ():
            wide = script.allocate(self.bytes[index] / self.ranks * FP32 / self.sizes.compute)
            script.free(shard)
            shards[index] = wide
        if self.is_hosted:
            script.free(*shards.values())

    def micro_batch(self, recording: Recording, workspace_bytes: int) -> None:
        """Writes forward and backward; the gradient shards of the step before go first."""
        self.script.free(*self.grads)
        self.grads.clear()
        self.gather(ROOT)
        _Passes(self, recording, workspace_bytes).write()
        if self.is_full:
            flat = self.script.allocate(self.bytes[ROOT])
            self.script.events += recording.freed
            self.reduce(ROOT)
            self.script.free(flat)
        else:
            self.script.events += recording.freed
        self.release(ROOT)

    def gather(self, unit: int) -> None:
        """Writes a gather: what the GPU is done with is given back; a shard in RAM is copied first, then cast under
        autocast."""
        share = self.bytes[unit] / self.ranks
        copied = share * (FP32 / self.sizes.compute if self.is_wide else 1)
        for size in [copied] * self.is_hosted + [share] * self.is_wide:
            self.script.free(self.script.allocate(size, PRE_UNSHARD))
        while len(self.leaving) >= IN_FLIGHT:
            self.script.free(self.leaving.pop(0))
        self.whole[unit] = self.script.allocate(self.bytes[unit], UNSHARD)

    def release(self, unit: int) -> None:
        """Marks a unit as unused; its block becomes free once the GPU reaches this point."""
        self.leaving.append(self.whole.pop(unit))

    def reduce(self, unit: int) -> None:
        """Writes a reduce-scatter: this rank's gradient shard, under autocast cast to fp32, stays to the step or goes
        to RAM."""
        if not self.is_full:
            return
        shard = self.script.allocate(self.bytes[unit] / self.ranks, REDUCE)
        if self.is_wide:
            narrow, shard = (
                shard,
                self.script.allocate(self.bytes[unit] / self.ranks * FP32 / self.sizes.compute, REDUCE),
            )
            self.script.free(narrow)
        if self.is_hosted:
            self.script.free(shard)
        else:
            self.grads.append(shard)

    def pieces(self, rank: int) -> list[list[float]]:
        """Returns the elements of a rank's piece of every trained tensor by parameter group.

        A unit's tensors lie one behind the other, cut into equal shards. Source: _flat_param.py: _get_shard_metadata.
        """
        groups: dict[bool, list[float]] = {True: [], False: []}
        for unit in (*self.units[1:], self.units[ROOT]):
            if not self.is_full:
                groups[True] += [weight.numel / self.ranks for weight in unit if weight.trains]
                continue
            size = sum(weight.numel for weight in unit) / self.ranks
            start, begin, end = 0.0, rank * size, (rank + 1) * size
            for weight in unit:
                numel = min(end, start + weight.numel) - max(begin, start)
                if numel > 0:
                    groups[weight.decays].append(numel)
                start += weight.numel
        return list(groups.values())


class _Passes:
    """Writes forward and backward between the root's gather and its release."""

    def __init__(self, run: _Run, recording: Recording, workspace_bytes: int) -> None:
        self.run, self.recording, self.workspace_bytes = run, recording, workspace_bytes
        self.forward = self.back = -1
        """The current layer."""
        self.is_again = False
        """Whether the layer is being recomputed."""
        self.reducing: list[TapeEvent] = []
        """Frees of flat gradients that the stream that reduces them still reads."""

    def write(self) -> None:
        """Writes both passes."""
        at = 0
        for moment in self.recording.moments:
            self.events(self.recording.events[at : moment.place], moment.key)
            self.mark(moment.key)
            at = moment.place
        self.end_layer()
        self.run.script.events += self.reducing

    def events(self, events: Sequence[TapeEvent], key: Key) -> None:
        """Writes the tape's events up to a mark: when a layer is over, the last one frees its flat gradient."""
        is_end = self.back >= 0 and key[0] in ("layer backward", "embedding backward")
        if is_end and events and not events[-1][1] and any(e[0] == events[-1][0] and e[1] for e in events):
            self.reducing.append(events[-1])
            events = events[:-1]
        self.run.script.events += events

    def mark(self, key: Key) -> None:
        """Writes what FSDP does at a mark."""
        what, layer, _ = key
        if what == "forward" and layer > self.forward:
            self.end_forward()
            self.forward = layer
            self.run.gather(layer + 1)
        elif what == "loss forward":
            self.end_forward()
        elif what == "head backward":
            self.run.script.allocate(self.workspace_bytes)
        elif what == "layer backward":
            self.end_layer()
            self.back, self.is_again = layer, self.run.checkpointing.recomputes(layer)
            self.run.gather(layer + 1)
        elif what == "backward" and layer == self.back:
            self.recomputed()
        elif what == "embedding backward":
            self.end_layer()

    def recomputed(self) -> None:
        """Starts a layer's backward pass; the gradients of the previous layer are reduced by then."""
        if self.is_again:
            self.run.release(self.back + 1)
            self.run.gather(self.back + 1)
        self.is_again = False
        self.run.script.events += self.reducing
        self.reducing = []

    def end_forward(self) -> None:
        """Ends a layer's forward pass."""
        if self.forward + 1 in self.run.whole and self.forward >= 0:
            self.run.release(self.forward + 1)

    def end_layer(self) -> None:
        """Ends a layer's backward pass."""
        if self.back >= 0:
            self.run.release(self.back + 1)
            self.run.reduce(self.back + 1)
        self.back = -1
