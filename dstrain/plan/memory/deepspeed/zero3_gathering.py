"""Replays ZeRO-3's parameter coordinator, module by module.

Every module that begins gathers its parameters and then as many more elements as `prefetch_bucket_size`, whatever is
on its way already, while fewer than `max_live_parameters` are whole; so prefetching runs ahead to that limit. A module
that ends gives its parameters back unless they are used again within `max_reuse_distance` elements.

Source: deepspeed 0.19.8 runtime/zero/partitioned_param_coordinator.py: fetch_sub_module, __params_to_release;
runtime/zero/partition_parameters.py: all_gather_coalesced, AllGatherCoalescedHandle.wait.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from dstrain.plan.memory.deepspeed.modules import Weight
from dstrain.plan.memory.deepspeed.program import Event, Program
from dstrain.plan.memory.deepspeed.settings import Settings
from dstrain.plan.memory.deepspeed.timeline import Block, Part, Timeline, rounded

_NEVER = -(1 << 60)


class _Group:
    """Parameters that are gathered in one collective."""

    __slots__ = ("flat", "is_waited", "members", "waiting")

    def __init__(self, members: list[int], flat: list[Block]) -> None:
        self.members, self.flat = members, flat
        self.waiting = len(members)
        self.is_waited = False


@dataclass(frozen=True, slots=True, eq=False)
class _Schedule:
    """The order in which a program uses parameters, whatever the settings."""

    queue: list[tuple[int, int]]
    """Parameters, each with the step that uses it."""
    uses: dict[int, list[int]]
    """The steps that use each parameter."""
    passed: list[int]
    """How many elements pass before each step."""


@cache
def _schedule(program: Program) -> _Schedule:
    order = [number for event, number in program.events if event is Event.FETCH]
    queue = [(weight, step) for step, number in enumerate(order) for weight in sorted(set(program.members[number]))]
    uses: dict[int, list[int]] = defaultdict(list)
    for weight, step in queue:
        uses[weight].append(step)
    weights = program.modules.weights
    passed = (sum(weights[weight].numel for weight in program.members[number]) for number in order)
    return _Schedule(queue, uses, [0, *accumulate(passed)])


class Coordinator:
    """The coordinator of one rank; parameters are `whole`, on their way, or neither."""

    def __init__(self, program: Program, settings: Settings, num_ranks: int, timeline: Timeline) -> None:
        self.num_ranks, self.item, self.zero = num_ranks, settings.model.item, settings.zero
        self.timeline, self.members = timeline, program.members
        self.prefetch, self.max_live = self.zero.prefetch_bucket_size, self.zero.max_live_parameters
        self.numel = [weight.numel for weight in program.modules.weights]
        self.persists = [numel <= self.zero.param_persistence_threshold for numel in self.numel]
        schedule = _schedule(program)
        self.queue, self.uses, self.passed = schedule.queue, schedule.uses, schedule.passed
        self.sizes = program.modules.each(self._size)
        self.whole = list(self.persists)
        self.flying: dict[int, _Group] = {}
        self.active: dict[int, set[int]] = {weight: set() for weight in self.uses}
        self.saved: set[int] = set()
        """Parameters that a recomputation has saved as they are."""
        self.blocks: dict[int, Block] = {}
        """Where parameters are whole, or gathered without a buffer; one that persists has none of the timeline's."""
        self.orphans: dict[int, Block] = {}
        """Saved parameters that have been released since: the saved copy stays alive."""
        self.secondary: set[int] = set()
        """Parameters with a secondary partition."""
        self.reset()

    def _size(self, weight: Weight) -> int:
        """Returns the bytes of a whole parameter: one rank has it whole anyway."""
        if weight.partners(self.num_ranks) == 1 and not self.zero.offloads_params:
            return 0
        return rounded(weight.padded(self.num_ranks) * self.item)

    def reset(self) -> None:
        """Begins a micro-batch: parameters on their way are taken and given back; whole ones stay so, uncounted."""
        # prefetching has run past the end of the micro-batch before: nobody used what it gathered last
        for weight, group in list(self.flying.items()):
            self._wait(group)
            self._land(weight)
            if not self.active[weight]:
                self._give_back(weight)
        self.step = self.at = self.available = 0
        self.fetched_for = [_NEVER] * len(self.numel)
        self.next_use = [0] * len(self.numel)

    def fetch(self, number: int) -> None:
        """Begins a module."""
        needed = self.members[number]
        if needed:
            whole, flying = self.whole, self.flying
            missing = [weight for weight in needed if not whole[weight] and weight not in flying]
            if missing:
                self._gather(sorted(missing))
            for weight in needed:
                self.active[weight].add(number)
                if weight in flying:
                    self._wait(flying[weight])
                    self._land(weight)
            self._drop(needed)
        room = min(self.max_live - self.available, self.prefetch)
        if room > 0 and self.at < len(self.queue):
            self._prefetch(room)
        self.step += 1

    def _drop(self, needed: tuple[int, ...]) -> None:
        """Takes from the queue what a module uses for the first time since it was fetched."""
        queue, at, fetched_for = self.queue, self.at, self.fetched_for
        # prefetching may have gone past this module already; only the rest of its parameters is still in the queue
        new = {weight for weight in needed if fetched_for[weight] < self.step}
        dropped: set[int] = set()
        while at < len(queue) and len(dropped) < len(new):
            weight, step = queue[at]
            at += 1
            fetched_for[weight] = step
            dropped.add(weight)
        self.at = at

    def _prefetch(self, room: int) -> None:
        """Gathers what comes next, up to so many elements."""
        queue, at, fetched_for = self.queue, self.at, self.fetched_for
        end, whole, flying = len(queue), self.whole, self.flying
        ahead: list[int] = []
        numel = 0
        while at < end and numel < room:
            weight, step = queue[at]
            at += 1
            if step > fetched_for[weight]:
                fetched_for[weight] = step
            if not whole[weight] and weight not in flying and weight not in ahead:
                ahead.append(weight)
                numel += self.numel[weight]
        self.at = at
        if ahead:
            self._gather(sorted(ahead))

    def _gather(self, weights: list[int]) -> None:
        """Starts a collective: into a single parameter itself, else into a flat buffer; one rank just copies.

        With qwZ the buffer has one byte per element, also for a single parameter.
        """
        self.available += sum(self.numel[weight] for weight in weights)
        flat: list[Block] = []
        total = sum(self.sizes[weight] for weight in weights)
        if self.zero.qwz and self.num_ranks > 1:
            flat.append(self.timeline.add(Part.GATHERED, total // self.item))
        elif len(weights) == 1 or self.num_ranks == 1:
            for weight in weights:
                self.blocks[weight] = self.timeline.add(Part.GATHERED, self.sizes[weight])
        else:
            flat.append(self.timeline.add(Part.GATHERED, total))
        group = _Group(weights, flat)
        for weight in weights:
            self.flying[weight] = group

    def _wait(self, group: _Group) -> None:
        """Ends a collective: parameters are copied out of the buffer, all at once; with qwZ, of its fp16 values."""
        if group.is_waited:
            return
        group.is_waited = True
        if self.zero.qwz and group.flat:
            _, _, quantized, _ = group.flat[0]
            group.flat.append(self.timeline.add(Part.GATHERED, 2 * quantized))
        for weight in group.members:
            if group.flat:
                self.blocks[weight] = self.timeline.add(Part.GATHERED, self.sizes[weight])
            self.whole[weight] = True

    def _land(self, weight: int) -> None:
        """Takes a parameter from its collective; the flat buffer goes with the last one."""
        group = self.flying.pop(weight)
        group.waiting -= 1
        if not group.waiting:
            for block in group.flat:
                self.timeline.remove(block)

    def release(self, number: int) -> None:
        """Ends a module."""
        for weight in self.members[number]:
            active = self.active[weight]
            active.discard(number)
            if not active and self.whole[weight] and not self.persists[weight] and not self._is_used_soon(weight):
                self._give_back(weight)

    def _is_used_soon(self, weight: int) -> bool:
        if self.fetched_for[weight] > self.step:
            return True
        uses, index = self.uses[weight], self.next_use[weight]
        while index < len(uses) and uses[index] < self.step:
            index += 1
        self.next_use[weight] = index
        if index == len(uses):
            return False
        return self.passed[uses[index]] - self.passed[self.step] < self.zero.max_reuse_distance

    def _give_back(self, weight: int) -> None:
        """Frees a parameter, unless a recomputation has saved it; ZeRO++ keeps a part of it till the step."""
        self.whole[weight] = False
        self.available -= self.numel[weight]
        block = self.blocks.pop(weight)
        if weight in self.saved:
            self.saved.remove(weight)
            self.orphans[weight] = block
        else:
            self.timeline.remove(block)
        if self.zero.hpz > 1 and weight not in self.secondary:
            self.secondary.add(weight)
            self.timeline.add(Part.GATHERED, self.sizes[weight] // self.zero.hpz)

    def keep(self, weight: int) -> None:
        """Keeps a parameter that a recomputation saves."""
        self.saved.add(weight)

    def drop(self, weight: int) -> None:
        """Frees what a recomputation saved."""
        self.saved.discard(weight)
        if weight in self.orphans:
            self.timeline.remove(self.orphans.pop(weight))

    def leave(self) -> None:
        """Ends the backward pass: modules whose input needs no gradient give their parameters back now."""
        for weight, active in self.active.items():
            if active:
                active.clear()
                if self.whole[weight] and not self.persists[weight]:
                    self._give_back(weight)
