"""Traces a run of DeepSpeed: the engine's buckets, gathered parameters and states around the tape's tensors.

Gathered parameters come from the stream of all-gathers, and what a reduction makes from its own, where communication
overlaps; a block that computation has used can be given away again when the GPU has got past it.

Source: deepspeed 0.19.8 runtime/zero/partitioned_param_coordinator.py: fetch_sub_module; partition_parameters.py:
free_param; stage3.py: reduce_and_partition_stream; stage_1_and_2.py: reduction_stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from dstrain.facts.model.model_facts import ModelFacts
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.caching_allocator import Event
from dstrain.plan.memory.deepspeed import engine, replay
from dstrain.plan.memory.deepspeed.byte_account import ByteAccount, Part
from dstrain.plan.memory.deepspeed.optimizer_step import step_bytes
from dstrain.plan.memory.deepspeed.program import Event as EngineEvent
from dstrain.plan.memory.deepspeed.program import Program
from dstrain.plan.memory.deepspeed.resident import resident
from dstrain.plan.memory.deepspeed.settings import Settings, settings_of
from dstrain.plan.memory.deepspeed.zero3_gathering import Coordinator
from dstrain.plan.memory.layers.tensor import GradRelease
from dstrain.plan.memory.traces.event_writer import MAIN, REDUCE, UNSHARD, Script
from dstrain.plan.memory.traces.record_pass import Passes, record
from dstrain.plan.memory.traces.recording import Recording

IN_FLIGHT = 2
"""Gathered blocks given back that computation has yet to get past. The host waits only for gathers, of which two may be
under way, so that it may run further ahead; nothing has been measured. Source: deepspeed 0.19.8
runtime/zero/partitioned_param_coordinator.py: __max_ongoing_fetch_events."""

MICRO_STEPS = 2
"""Micro-batches of a step that are replayed: the first, and one that finds gradients, which ZeRO-3 has room for from
the beginning."""


def steps(
    model: ModelFacts, configuration: Configuration, num_ranks: int, workspace_bytes: int
) -> Iterator[list[Event]]:
    """Yields what happens before the first step, then step after step, on the first rank."""
    ranks = max(1, num_ranks // configuration.parallel.tp)
    most = 1 if configuration.zero.stage == 3 else MICRO_STEPS
    settings = settings_of(configuration, micro_steps=most)
    found = engine.programmed(model, settings, engine.played(model, configuration).anatomy)
    held = resident(found.modules, settings, ranks)
    script = Script()
    script.allocate_all((held.params, held.grads, held.optimizer, held.buffers, held.gathered))
    script.allocate(workspace_bytes)
    yield script.take()
    passes = Passes(
        release=GradRelease.AT_ONCE,
        stops_early=not settings.is_reentrant,
        keeps_inputs=configuration.zero.stage == 3,
    )
    recording = record(model, configuration, passes)
    while True:
        micro_batches = _MicroBatches(script, found, recording, settings, ranks, workspace_bytes)
        kept = micro_batches.write()
        for grads, buffers in step_bytes(found.modules, settings, ranks, 0, kept):
            script.free(script.allocate(max(0, grads - kept)), script.allocate(buffers))
        micro_batches.account.close()
        workspace_bytes = 0
        yield script.take()


class _Written(ByteAccount):
    """An account that writes its changes down."""

    __slots__ = ("_held", "_leaving", "_script", "_streams")

    def __init__(self, script: Script, *, overlaps: bool) -> None:
        super().__init__()
        self._script = script
        self._streams = {Part.GRADS: MAIN, Part.BUFFERS: REDUCE, Part.GATHERED: UNSHARD} if overlaps else {}
        self._held: dict[tuple[Part, int], list[int]] = defaultdict(list)
        self._leaving: list[int] = []

    def add(self, part: Part, size: int) -> None:
        super().add(part, size)
        if size:
            if part is Part.GATHERED:
                self._forget(IN_FLIGHT)
            self._held[part, size].append(self._script.allocate(size, self._streams.get(part, MAIN)))

    def remove(self, part: Part, size: int) -> None:
        super().remove(part, size)
        while size:
            most = size if self._held.get((part, size)) else self._largest(part, size)
            if not most:
                self._split(part, size)
                return
            self._free(part, self._held[part, most].pop(0))
            size -= most

    def _largest(self, part: Part, size: int) -> int:
        """Returns the size of the largest block of up to `size`, 0 where there is none."""
        found = (each for (kind, each), keys in self._held.items() if kind is part and keys and each <= size)
        return max(found, default=0)

    def _split(self, part: Part, size: int) -> None:
        """Takes a part of a block that was allocated as one: the rest goes on as another."""
        whole = min(each for (kind, each), keys in self._held.items() if kind is part and keys)
        self._free(part, self._held[part, whole].pop(0))
        self._held[part, whole - size].append(self._script.allocate(whole - size, self._streams.get(part, MAIN)))

    def _free(self, part: Part, key: int) -> None:
        if part is Part.GATHERED:
            self._leaving.append(key)
        else:
            self._script.free(key)

    def _forget(self, count: int) -> None:
        while len(self._leaving) > count:
            self._script.free(self._leaving.pop(0))

    def close(self) -> None:
        """Frees everything."""
        self._forget(0)
        for keys in self._held.values():
            self._script.free(*keys)
            keys.clear()


class _MicroBatches:
    """Writes the micro-batches of one step down."""

    def __init__(
        self,
        script: Script,
        found: Program,
        recording: Recording,
        settings: Settings,
        ranks: int,
        workspace_bytes: int,
    ) -> None:
        self.script, self.found, self.recording = script, found, recording
        self.workspace_bytes = workspace_bytes
        self.account = _Written(script, overlaps=settings.zero.overlap_comm)
        self.reducer = replay.reducer_of(found.modules, settings, ranks, 0, self.account)
        self.coordinator: Coordinator | None = None
        if settings.zero.stage == 3:
            self.coordinator = Coordinator(found, replay.gathers_of(settings, ranks), self.account)
        self.places = {key: place for place, key in reversed(recording.marks)}

    def write(self) -> int:
        """Writes them and returns the bytes of gradient that are left for the step."""
        for micro in range(self.reducer.how.micro_steps):
            if self.coordinator and micro:
                self.coordinator.reset()
            self._micro_batch()
        return self.account.parts[Part.GRADS]

    def _micro_batch(self) -> None:
        actions = replay.actions_of(self.reducer, self.coordinator)
        at = 0
        for event, number in self.found.events if self.coordinator else self.found.gradients:
            action = actions[event]
            if action is not None:
                action(number)
                continue
            place = self.places.get(self.found.marks[number], at)
            if event is EngineEvent.MARK and place > at:
                self.script.events += self.recording.events[at:place]
                at = place
            if self.workspace_bytes and self.found.marks[number][0] == "head backward":
                self.script.allocate(self.workspace_bytes)
                self.workspace_bytes = 0
        self.script.events += self.recording.events[at:]
        self.script.events += self.recording.freed
        self.reducer.end()
        if self.coordinator:
            self.coordinator.leave()
