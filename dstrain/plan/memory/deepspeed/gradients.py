"""Replays gradients under every ZeRO stage, one parameter at a time, from autograd to the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from dstrain.plan.memory.deepspeed.modules import Modules
from dstrain.plan.memory.deepspeed.settings import Settings
from dstrain.plan.memory.deepspeed.timeline import Block, Part, Timeline, rounded
from dstrain.plan.memory.layers.ops import FP32
from dstrain.plan.memory.zero import num_buckets

ALLREDUCE_ELEMENTS = 500_000_000
"""Elements of gradient that ZeRO-0 reduces at once. Source: deepspeed 0.19.8 runtime/engine.py:
MEMORY_OPT_ALLREDUCE_SIZE."""
NORM_ITEM = 8
"""Bytes of an element in a norm: fp64. Source: deepspeed 0.19.8 runtime/zero/utils.py: get_norm_dtype."""
NORM_ELEMENTS = 250_000_000
"""Elements of which ZeRO-3 takes the norm at once. Source: runtime/zero/stage3.py: _constant_buffered_norm2."""


class Reducer:
    """ZeRO-0: gradients rest whole on the parameters; when the last micro-batch is over they are reduced flat.

    Source: deepspeed 0.19.8 runtime/engine.py: buffered_allreduce_fallback, allreduce_no_retain.
    """

    def __init__(self, modules: Modules, settings: Settings, num_ranks: int, timeline: Timeline) -> None:
        self.num_ranks, self.timeline = num_ranks, timeline
        self.zero, self.micro_steps = settings.zero, settings.step.grad_accum
        self.bucket, self.is_offloaded = settings.zero.reduce_bucket_size, settings.zero.is_offloaded
        self.item, self.communicated = settings.model.item, settings.communicated
        self.accumulated, self.stepped = settings.accumulated, settings.stepped
        self.weights = modules.weights
        self.numel = [weight.numel for weight in modules.weights]
        self.sizes = modules.each(lambda weight: rounded(weight.numel * self.item))
        """Bytes of each whole gradient."""
        self.total = sum(weight.numel for weight in modules.weights if weight.trains)
        self.micro = 0

    @property
    def is_last(self) -> bool:
        """Whether the step follows this micro-batch."""
        return self.micro == self.micro_steps - 1

    def by_ranks(self, weights: list[int]) -> list[list[int]]:
        """Returns the parameters that all data-parallel ranks share, and the ones that differ between ranks."""
        kinds: dict[int, list[int]] = {}
        for weight in weights:
            kinds.setdefault(self.weights[weight].ep, []).append(weight)
        return list(kinds.values())

    def grad(self, weight: int) -> None:
        """Stores a gradient; later micro-batches' are added to the first."""
        if self.micro:
            self.timeline.passing(Part.GRADS, self.sizes[weight])
        else:
            self.timeline.add(Part.GRADS, self.sizes[weight])

    def end(self) -> None:
        """Ends the backward pass."""
        if self.is_last:
            flat = min(self.total, ALLREDUCE_ELEMENTS + max(self.numel)) * self.item
            self.timeline.passing(Part.BUFFERS, rounded(flat))
        self.micro += 1


class WideReducer(Reducer):
    """ZeRO-1 with fp32 accumulation: gradients rest on the parameters, and are added to fp32 copies that are resident.

    The fp32 copies are reduced in the training precision, several at once up to a limit.
    Source: deepspeed 0.19.8 runtime/bf16_optimizer.py: _setup_for_real_optimizer, _update_hp_grad, clear_lp_grads;
    runtime/engine.py: allreduce_no_retain, allreduce_bucket.
    """

    def __init__(self, modules: Modules, settings: Settings, num_ranks: int, timeline: Timeline) -> None:
        super().__init__(modules, settings, num_ranks, timeline)
        self.groups = layout(modules, num_ranks).whole
        self.largest = max((weight.numel for weight in modules.weights if weight.trains), default=0)

    def end(self) -> None:
        self.timeline.passing(Part.BUFFERS, rounded(self.largest * FP32))
        waiting: list[int] = []
        for index, size in enumerate(self.groups if self.is_last else ()):
            waiting.append(size)
            if sum(waiting) > ALLREDUCE_ELEMENTS or index == len(self.groups) - 1:
                flat = rounded(sum(waiting) * FP32) if len(waiting) > 1 else 0
                self.timeline.passing(Part.BUFFERS, flat + rounded(sum(waiting) * self.item))
                waiting.clear()
        self.micro += 1


class ShardedReducer(Reducer):
    """ZeRO-3: gradients pass through one bucket that is always there into the rank's flat gradient, which is too.

    A full bucket is copied for the reduce-scatter, unless it holds one gradient that the ranks share evenly.
    Source: deepspeed 0.19.8 runtime/zero/stage3.py: __add_grad_to_ipg_bucket, __reduce_and_partition_ipg_grads,
    partition_grads; runtime/comm/coalesced_collectives.py: reduce_scatter_coalesced.
    """

    def __init__(self, modules: Modules, settings: Settings, num_ranks: int, timeline: Timeline) -> None:
        super().__init__(modules, settings, num_ranks, timeline)
        self.in_bucket: list[int] = []
        self.elements = 0
        self.large: dict[int, Block] = {}
        """Gradients that the bucket has no room for."""

    def grad(self, weight: int) -> None:
        gradient = self.timeline.add(Part.GRADS, self.sizes[weight])
        if self.in_bucket and self.elements + self.numel[weight] > self.bucket:
            self._flush()
        if self.elements + self.numel[weight] <= self.bucket:
            self.timeline.remove(gradient)
        else:
            self.large[weight] = gradient
        self.in_bucket.append(weight)
        self.elements += self.numel[weight]

    def _flush(self) -> None:
        for part in self.by_ranks(self.in_bucket):
            self._scatter(part)
        self.in_bucket.clear()
        self.elements = 0

    def _scatter(self, weights: list[int]) -> None:
        shares = [self.weights[weight].share(self.num_ranks) for weight in weights]
        padded = [self.weights[weight].padded(self.num_ranks) for weight in weights]
        large = [weight for weight in weights if self.numel[weight] > self.bucket]
        flat = 0
        if self.communicated != self.item:
            flat += sum(rounded(self.numel[weight] * self.communicated) for weight in large)
        if len(shares) > 1 or self.numel[weights[0]] != padded[0]:
            flat += rounded(sum(padded) * self.communicated)
        copy = self.timeline.add(Part.BUFFERS, flat)
        if self.accumulated != self.communicated:  # the partitions in another dtype take the flat copy's place
            wide = self.timeline.add(Part.BUFFERS, sum(rounded(share * self.accumulated) for share in shares))
            self.timeline.remove(copy)
            copy = wide
        if self.is_offloaded:
            self._to_host(max(shares))
        for weight in large:
            self.timeline.remove(self.large.pop(weight))
        self.timeline.remove(copy)

    def _to_host(self, share: int) -> None:
        """Copies a partition of the host's gradient to the GPU, computes its norm, and casts it for the optimizer."""
        brought = self.timeline.add(Part.BUFFERS, rounded(share * self.accumulated))
        if self.is_last:
            self.timeline.passing(Part.BUFFERS, rounded(min(share, NORM_ELEMENTS) * NORM_ITEM))
            self.timeline.passing(
                Part.BUFFERS, rounded(share * self.stepped) if self.accumulated != self.stepped else 0
            )
        self.timeline.remove(brought)

    def end(self) -> None:
        if self.in_bucket:
            self._flush()
        self.micro += 1


ALIGNMENT = 2
"""Elements to which each partition is aligned. Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py:
nccl_start_alignment_factor."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where each trainable parameter lies in the flat partitions."""

    order: tuple[int, ...]
    """Trainable parameters, group by group."""
    numel: tuple[int, ...]
    """Elements of each."""
    slices: dict[int, tuple[tuple[int, int], ...]]
    """Parameter → the partitions that it touches, and its elements there."""
    partitions: tuple[int, ...]
    """Elements of one rank's partition of each optimizer group."""
    whole: tuple[int, ...]
    """Elements of each group on one rank, padded."""
    ep: dict[int, int]
    """Parameter → neighbouring ranks that have the same partition, of experts of their own."""

    def is_of(self, rank: int, weight: int, partition: int) -> bool:
        """Returns whether a rank has a partition of a parameter's group."""
        return partition == rank // self.ep[weight]

    def parameters_of(self, rank: int) -> set[int]:
        """Returns the parameters that touch the partition of a rank."""
        return {weight for weight in self.order if any(self.is_of(rank, weight, at) for at, _ in self.slices[weight])}

    def elements_by_rank(self, ranks: int) -> list[int]:
        """Returns the elements of the parameters that touch the partition of each rank."""
        elements = [0] * ranks
        for weight, numel in zip(self.order, self.numel, strict=True):
            ep = self.ep[weight]
            for at, _ in self.slices[weight]:
                for rank in range(at * ep, min(ranks, (at + 1) * ep)):
                    elements[rank] += numel
        return elements


@cache
def layout(modules: Modules, ranks: int) -> Layout:
    """Returns the partitions: each group is padded to a multiple of `ALIGNMENT` for each rank and cut evenly.

    Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: flatten_dense_tensors_aligned, get_data_parallel_partitions.
    """
    slices: dict[int, tuple[tuple[int, int], ...]] = {}
    partitions, whole = [], []
    groups = modules.groups
    for group in groups:
        total = sum(modules.weights[index].numel for index in group)
        count = modules.weights[group[0]].partners(ranks)
        size = -(-total // (ALIGNMENT * count)) * ALIGNMENT
        partitions.append(size)
        whole.append(size * count)
        start = 0
        for index in group:
            end = start + modules.weights[index].numel
            owners = range(start // size, (end - 1) // size + 1)
            slices[index] = tuple((r, min(end, (r + 1) * size) - max(start, r * size)) for r in owners)
            start = end
    order = tuple(index for group in groups for index in group)
    numel = tuple(modules.weights[index].numel for index in order)
    ep = {index: modules.weights[index].ep for index in order}
    return Layout(order, numel, slices, tuple(partitions), tuple(whole), ep)


class PartitionedReducer(Reducer):
    """Gradients pass through buckets into the partition of the rank that updates them.

    A gradient that lies across two partitions is kept whole by both ranks. A bucket with gradients of more than one
    rank is reduced as a flat copy; a gradient larger than the bucket goes by itself. ZeRO-1 does all that when the last
    micro-batch is over, or during its backward pass where communication overlaps; until then gradients rest whole on
    the parameters. Where fp32 is added up, the partition is fp32 and allocated as a whole.
    Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: setup_buckets, average_tensor, reduce_ipg_grads,
    reduce_independent_p_g_buckets_and_remove_grads, copy_grads_in_partition, independent_gradient_partition_epilogue.

    Plays several ranks at once, known by their place in `ranks`: they differ in what is of their own partition.
    """

    def __init__(
        self, modules: Modules, settings: Settings, num_ranks: int, timeline: Timeline, ranks: Sequence[int]
    ) -> None:
        super().__init__(modules, settings, num_ranks, timeline)
        self.layout, self.ranks = layout(modules, num_ranks), ranks
        self.is_wide = self.accumulated != self.item
        self.owners: dict[int, list[int]] = {}
        """Parameters that touch the partition of one of the ranks, with these."""
        self.partition_bytes: list[int] = []
        for place, rank in enumerate(ranks):
            mine = self.layout.parameters_of(rank)
            for weight in mine:
                self.owners.setdefault(weight, []).append(place)
            size = rounded(sum(self.numel[weight] for weight in mine) * self.item)
            # what adds up in fp32 is one flat tensor for each group of parameters, not a gradient each
            if self.is_wide:
                size = sum(rounded(numel * self.accumulated) for numel in self.layout.partitions)
            self.partition_bytes.append(size)
        self.buckets: list[Block] = []
        self.partitions: dict[int, Block] = {}
        self.sums: dict[int, Block] = {}
        """The partitions of the micro-batches before."""
        self.in_bucket: list[int] = []
        self.elements = 0
        self.grads: dict[int, Block] = {}
        """Whole gradients: those that rest on the parameters, and large ones in the bucket."""
        self.resting: set[int] = set()
        self.lingering: list[tuple[Block, int]] = []
        """Large gradients that remain until the end of the backward pass, each on one rank."""

    def grad(self, weight: int) -> None:
        if not self.buckets:
            size = rounded(self.bucket * self.item)
            self.buckets = [self.timeline.add(Part.BUFFERS, size) for _ in range(num_buckets(self.zero))]
        if weight in self.resting:
            self.timeline.passing(Part.GRADS, self.sizes[weight])
        else:
            self.grads[weight] = self.timeline.add(Part.GRADS, self.sizes[weight])
        if self.zero.stage == 2 or (self.zero.overlap_comm and self.is_last):
            self._put(weight)
        else:
            self.resting.add(weight)

    def _put(self, weight: int) -> None:
        """Moves a gradient into the bucket, which is reduced first if it is full."""
        self.resting.discard(weight)
        if self.elements + self.numel[weight] > self.bucket:
            self._flush()
        if self.numel[weight] <= self.bucket:
            self.timeline.remove(self.grads.pop(weight))
        elif self.is_offloaded:
            self.timeline.passing(Part.BUFFERS, self.sizes[weight])
        self.in_bucket.append(weight)
        self.elements += self.numel[weight]

    def _flush(self) -> None:
        """Reduces the bucket, what other ranks have apart, and keeps the gradients of each rank's own partition."""
        for part in self.by_ranks(self.in_bucket):
            # fp32 partitions are added to piece by piece, so that each rank reduces other pieces; else all do the same
            for place in range(len(self.ranks)) if self.is_wide else (None,):
                self._reduce_pieces(part, place)
        for weight in self.in_bucket:
            self._settle(weight)
        self.in_bucket.clear()
        self.elements = 0

    def _reduce_pieces(self, weights: list[int], place: int | None) -> None:
        """Reduces gradients by partition, neighbours together; on one rank, or on all."""
        own = None if place is None else self.ranks[place] // self.layout.ep[weights[0]]
        pieces = self._pieces(weights, own)
        if place is not None and any(at == own for at, _ in pieces):
            self._make_partition(place)
        start = total = 0
        for index, (_, numel) in enumerate(pieces):
            total += numel
            if index == len(pieces) - 1 or total > self.bucket:
                largest = max((size for at, size in pieces[start : index + 1] if at == own), default=0)
                self._reduce(total, index + 1 - start, largest, place)
                start, total = index + 1, 0

    def _pieces(self, weights: list[int], own: int | None) -> list[tuple[int, int]]:
        """Returns partitions and elements of gradients: neighbours of one partition are one piece.

        A rank's own ones stay apart if they are added to an fp32 partition.
        """
        pieces: list[tuple[int, int]] = []
        for weight in weights:
            for at, numel in self.layout.slices[weight]:
                if pieces and pieces[-1][0] == at != own:
                    pieces[-1] = (at, pieces[-1][1] + numel)
                else:
                    pieces.append((at, numel))
        return pieces

    def _make_partition(self, place: int) -> None:
        if place not in self.partitions:
            self.partitions[place] = self.timeline.add(Part.GRADS, self.partition_bytes[place], place)

    def _reduce(self, total: int, num_pieces: int, largest: int, place: int | None) -> None:
        """Reduces pieces in one collective; the `largest` of the rank's own is made fp32."""
        flat = rounded(total * self.item) if num_pieces > 1 else 0
        if self.communicated != self.item:
            flat += rounded(total * self.communicated)
        copy = self.timeline.add(Part.BUFFERS, flat, place)
        if self.is_wide:
            self.timeline.passing(Part.BUFFERS, rounded(largest * self.accumulated), place)
        self.timeline.remove(copy)

    def _settle(self, weight: int) -> None:
        """Moves a reduced gradient to the host or into the partition, or drops it."""
        owners = self.owners.get(weight, ())
        for place in owners:
            if self.is_offloaded:
                self._to_host(weight, place)
            elif not self.is_wide:
                self._make_partition(place)
        if self.numel[weight] <= self.bucket:
            return
        gradient = self.grads.pop(weight)
        for place in range(len(self.ranks)):
            lingers = self.zero.stage == 1
            if place in owners:
                lingers = not self.is_last if self.is_offloaded else self.is_wide
            if lingers:
                self.lingering.append((gradient, place))
            else:
                self.timeline.remove(gradient, place)

    def _to_host(self, weight: int, place: int) -> None:
        """Computes the norm of a rank's part, and casts it for the optimizer on the way to the host."""
        if self.is_last:
            slices, rank = self.layout.slices[weight], self.ranks[place]
            numel = next(numel for at, numel in slices if self.layout.is_of(rank, weight, at))
            self.timeline.passing(Part.BUFFERS, rounded(numel * NORM_ITEM), place)
            cast = self.stepped if self.stepped != self.item else 0
            self.timeline.passing(Part.BUFFERS, rounded(numel * cast), place)

    def end(self) -> None:
        if self.zero.stage == 2 or self.is_last:
            if self.resting:  # ZeRO-1 without overlap reduces group by group, not in the order of the backward pass
                for weight in self.layout.order:
                    self._put(weight)
            if self.in_bucket:
                self._flush()
            for gradient, place in self.lingering:
                self.timeline.remove(gradient, place)
            self.lingering.clear()
            for bucket in self.buckets:
                self.timeline.remove(bucket)
            self.buckets.clear()
            if not self.is_wide:
                self._add_up()
        self.micro += 1

    def _add_up(self) -> None:
        """Adds the partitions to the earlier micro-batches', and frees them; the first ones are kept."""
        for place, partition in self.partitions.items():
            if self.sums.setdefault(place, partition) != partition:
                self.timeline.remove(partition)
        self.partitions.clear()
