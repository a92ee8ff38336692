"""ZeRO-1 and 2: the position of each parameter in the flat partitions, and how its gradient gets there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from dstrain.plan.memory.deepspeed.byte_account import ByteAccount, EngineEvent, Part, rounded
from dstrain.plan.memory.deepspeed.gradient_buckets import NORM_ITEM, Reducer, Reduces
from dstrain.plan.memory.deepspeed.modules import Modules

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
    groups = modules.groups()
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
    """

    def __init__(self, modules: Modules, how: Reduces, account: ByteAccount, rank: int) -> None:
        super().__init__(modules, how, account)
        self.layout, self.rank = layout(modules, how.ranks), rank
        self.mine = self.layout.parameters_of(rank)
        self.is_wide = how.accumulated != how.item
        self.partition_bytes = rounded(sum(self.numel[weight] for weight in self.mine) * how.item)
        if self.is_wide:
            self.partition_bytes = sum(rounded(numel * how.accumulated) for numel in self.layout.partitions)
        self.buckets: list[EngineEvent] = []
        self.partition: EngineEvent | None = None
        self.sum: EngineEvent | None = None
        """The partition of the micro-batches before."""
        self.in_bucket: list[int] = []
        self.elements = 0
        self.grads: dict[int, EngineEvent] = {}
        """Whole gradients: those that rest on the parameters, and large ones in the bucket."""
        self.resting: set[int] = set()
        self.lingering: list[int] = []
        """Large gradients that remain until the end of the backward pass."""

    def grad(self, weight: int) -> None:
        if not self.buckets:
            size = rounded(self.how.bucket * self.how.item)
            self.buckets = [self.account.add(Part.BUFFERS, size) for _ in range(self.how.buckets)]
        if weight in self.resting:
            self.account.passing(Part.GRADS, self.size(weight))
        else:
            self.grads[weight] = self.account.add(Part.GRADS, self.size(weight))
        if self.how.stage == 2 or (self.how.overlaps and self.is_last):
            self._put(weight)
        else:
            self.resting.add(weight)

    def _put(self, weight: int) -> None:
        """Moves a gradient into the bucket, which is reduced first if it is full."""
        self.resting.discard(weight)
        if self.elements + self.numel[weight] > self.how.bucket:
            self._flush()
        if self.numel[weight] <= self.how.bucket:
            self.account.remove(self.grads.pop(weight))
        elif self.how.is_offloaded:
            self.account.passing(Part.BUFFERS, self.size(weight))
        self.in_bucket.append(weight)
        self.elements += self.numel[weight]

    def _flush(self) -> None:
        """Reduces the bucket, what other ranks have apart, and keeps the gradients of this rank."""
        for part in self.by_ranks(self.in_bucket):
            together: list[tuple[int, int]] = []
            pieces = self._pieces(part)
            for index, piece in enumerate(pieces):
                together.append(piece)
                if index == len(pieces) - 1 or sum(numel for _, numel in together) > self.how.bucket:
                    self._reduce(together)
                    together = []
        for weight in self.in_bucket:
            self._settle(weight)
        self.in_bucket.clear()
        self.elements = 0

    def _pieces(self, weights: list[int]) -> list[tuple[int, int]]:
        """Returns ranks and elements of gradients: neighbours of one rank are one piece.

        Those of this rank stay apart where they are added to an fp32 partition. Of ranks that have the same partition,
        of experts of their own, this one stands for all.
        """
        pieces: list[tuple[int, int]] = []
        for weight in weights:
            for at, numel in self.layout.slices[weight]:
                rank = self.rank if self.layout.is_of(self.rank, weight, at) else at * self.layout.ep[weight]
                if pieces and pieces[-1][0] == rank and not (self.is_wide and rank == self.rank):
                    pieces[-1] = (rank, pieces[-1][1] + numel)
                else:
                    pieces.append((rank, numel))
        if self.is_wide and any(rank == self.rank for rank, _ in pieces):
            self._make_partition()
        return pieces

    def _make_partition(self) -> None:
        if self.partition is None:
            self.partition = self.account.add(Part.GRADS, self.partition_bytes)

    def _reduce(self, pieces: list[tuple[int, int]]) -> None:
        how, total = self.how, sum(numel for _, numel in pieces)
        flat = rounded(total * how.item) if len(pieces) > 1 else 0
        if how.communicated != how.item:
            flat += rounded(total * how.communicated)
        copy = self.account.add(Part.BUFFERS, flat)
        if self.is_wide:
            largest = max((numel for rank, numel in pieces if rank == self.rank), default=0)
            self.account.passing(Part.BUFFERS, rounded(largest * how.accumulated))
        self.account.remove(copy)

    def _settle(self, weight: int) -> None:
        """Moves a reduced gradient to the host or into the partition, or drops it."""
        is_mine = weight in self.mine
        lingers = not is_mine and self.how.stage == 1
        if is_mine and self.how.is_offloaded:
            lingers = not self.is_last
            self._to_host(weight)
        elif is_mine and self.is_wide:
            lingers = True
        elif is_mine:
            self._make_partition()
        if self.numel[weight] > self.how.bucket:
            if lingers:
                self.lingering.append(weight)
            else:
                self.account.remove(self.grads.pop(weight))

    def _to_host(self, weight: int) -> None:
        """Computes the norm of this rank's part, and casts it for the optimizer on the way to the host."""
        if self.is_last:
            slices = self.layout.slices[weight]
            numel = next(numel for at, numel in slices if self.layout.is_of(self.rank, weight, at))
            self.account.passing(Part.BUFFERS, rounded(numel * NORM_ITEM))
            cast = self.how.stepped if self.how.stepped != self.how.item else 0
            self.account.passing(Part.BUFFERS, rounded(numel * cast))

    def end(self) -> None:
        if self.how.stage == 2 or self.is_last:
            if self.resting:
                for weight in self.layout.order:
                    self._put(weight)
            if self.in_bucket:
                self._flush()
            for weight in self.lingering:
                self.account.remove(self.grads.pop(weight))
            self.lingering.clear()
            for bucket in self.buckets:
                self.account.remove(bucket)
            self.buckets.clear()
            self._add_up()
        self.micro += 1

    def _add_up(self) -> None:
        """Adds the partition to the earlier micro-batches', and frees it; the first is kept."""
        if self.is_wide or self.partition is None:
            return
        if self.sum is None:
            self.sum = self.partition
        else:
            self.account.remove(self.partition)
        self.partition = None
