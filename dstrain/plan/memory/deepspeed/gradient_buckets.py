"""Replays gradient buckets, one parameter at a time, from autograd to the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from dstrain.plan.memory.deepspeed.byte_account import ByteAccount, EngineEvent, Part, rounded
from dstrain.plan.memory.deepspeed.modules import Modules
from dstrain.plan.memory.layers.ops import FP32

ALLREDUCE_ELEMENTS = 500_000_000
"""Elements of gradient that ZeRO-0 reduces at once. Source: deepspeed 0.19.8 runtime/engine.py:
MEMORY_OPT_ALLREDUCE_SIZE."""
NORM_ITEM = 8
"""Bytes of an element in a norm: fp64. Source: deepspeed 0.19.8 runtime/zero/utils.py: get_norm_dtype."""
NORM_ELEMENTS = 250_000_000
"""Elements of which ZeRO-3 takes the norm at once. Source: runtime/zero/stage3.py: _constant_buffered_norm2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduces:
    """Settings of gradient reduction."""

    stage: int
    """ZeRO stage."""
    item: int
    """Bytes of one element of a gradient."""
    communicated: int
    """Bytes of one element while ranks exchange it: fp32 if they share sequences.
    Source: runtime/engine.py: communication_data_type; runtime/constants.py: SEQ_PARALLEL_COMMUNICATION_DATA_TYPE."""
    accumulated: int
    """Bytes of one element of accumulated gradients."""
    ranks: int
    """Ranks that share the optimizer."""
    bucket: int
    """`reduce_bucket_size`."""
    buckets: int
    """Number of buffers of that size."""
    overlaps: bool
    """Whether communication overlaps the backward pass, so that ZeRO-1 reduces before the pass is over."""
    stepped: int
    """Bytes of one element of the gradients that step the optimizer."""
    is_offloaded: bool
    """Whether gradients go to the host."""
    micro_steps: int
    """Micro-batches of one step."""
    is_wide: bool = False
    """Whether ZeRO-1 keeps whole fp32 gradients (`resident.is_wide`)."""


class Reducer:
    """ZeRO-0: gradients rest whole on the parameters; when the last micro-batch is over they are reduced flat.

    Source: deepspeed 0.19.8 runtime/engine.py: buffered_allreduce_fallback, allreduce_no_retain.
    """

    def __init__(self, modules: Modules, how: Reduces, account: ByteAccount) -> None:
        self.how, self.account = how, account
        self.weights = modules.weights
        self.numel = [weight.numel for weight in modules.weights]
        self.total = sum(weight.numel for weight in modules.weights if weight.trains)
        self.micro = 0

    @property
    def is_last(self) -> bool:
        """Whether the step follows this micro-batch."""
        return self.micro == self.how.micro_steps - 1

    def by_ranks(self, weights: list[int]) -> list[list[int]]:
        """Returns the parameters that all data-parallel ranks share, and the ones that differ between ranks."""
        kinds: dict[int, list[int]] = {}
        for weight in weights:
            kinds.setdefault(self.weights[weight].ep, []).append(weight)
        return list(kinds.values())

    def size(self, weight: int) -> int:
        """Returns the bytes of a whole gradient."""
        return rounded(self.numel[weight] * self.how.item)

    def grad(self, weight: int) -> None:
        """Stores a gradient; later micro-batches' are added to the first."""
        if self.micro:
            self.account.passing(Part.GRADS, self.size(weight))
        else:
            self.account.add(Part.GRADS, self.size(weight))

    def end(self) -> None:
        """Ends the backward pass."""
        if self.is_last:
            flat = min(self.total, ALLREDUCE_ELEMENTS + max(self.numel)) * self.how.item
            self.account.passing(Part.BUFFERS, rounded(flat))
        self.micro += 1


class WideReducer(Reducer):
    """ZeRO-1 with fp32 accumulation: gradients rest on the parameters, and are added to fp32 copies that are resident.

    The fp32 copies are reduced in the training precision, several at once up to a limit.
    Source: deepspeed 0.19.8 runtime/bf16_optimizer.py: _setup_for_real_optimizer, _update_hp_grad, clear_lp_grads;
    runtime/engine.py: allreduce_no_retain, allreduce_bucket.
    """

    def __init__(self, modules: Modules, how: Reduces, account: ByteAccount, groups: tuple[int, ...]) -> None:
        super().__init__(modules, how, account)
        self.groups = groups
        self.largest = max((weight.numel for weight in modules.weights if weight.trains), default=0)

    def end(self) -> None:
        self.account.passing(Part.BUFFERS, rounded(self.largest * FP32))
        waiting: list[int] = []
        for index, size in enumerate(self.groups if self.is_last else ()):
            waiting.append(size)
            if sum(waiting) > ALLREDUCE_ELEMENTS or index == len(self.groups) - 1:
                flat = rounded(sum(waiting) * FP32) if len(waiting) > 1 else 0
                self.account.passing(Part.BUFFERS, flat + rounded(sum(waiting) * self.how.item))
                waiting.clear()
        self.micro += 1


class ShardedReducer(Reducer):
    """ZeRO-3: gradients pass through one bucket that is always there into the rank's flat gradient, which is too.

    A full bucket is copied for the reduce-scatter, unless it holds one gradient that the ranks share evenly.
    Source: deepspeed 0.19.8 runtime/zero/stage3.py: __add_grad_to_ipg_bucket, __reduce_and_partition_ipg_grads,
    partition_grads; runtime/comm/coalesced_collectives.py: reduce_scatter_coalesced.
    """

    def __init__(self, modules: Modules, how: Reduces, account: ByteAccount) -> None:
        super().__init__(modules, how, account)
        self.in_bucket: list[int] = []
        self.elements = 0
        self.large: dict[int, EngineEvent] = {}
        """Gradients that the bucket has no room for."""

    def grad(self, weight: int) -> None:
        gradient = self.account.add(Part.GRADS, self.size(weight))
        if self.in_bucket and self.elements + self.numel[weight] > self.how.bucket:
            self._flush()
        if self.elements + self.numel[weight] <= self.how.bucket:
            self.account.remove(gradient)
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
        how = self.how
        shares = [self.weights[weight].share(how.ranks) for weight in weights]
        padded = [self.weights[weight].padded(how.ranks) for weight in weights]
        large = [weight for weight in weights if self.numel[weight] > how.bucket]
        flat = 0
        if how.communicated != how.item:
            flat += sum(rounded(self.numel[weight] * how.communicated) for weight in large)
        if len(shares) > 1 or self.numel[weights[0]] != padded[0]:
            flat += rounded(sum(padded) * how.communicated)
        copy = self.account.add(Part.BUFFERS, flat)
        if how.accumulated != how.communicated:  # the partitions in another dtype take the flat copy's place
            wide = self.account.add(Part.BUFFERS, sum(rounded(share * how.accumulated) for share in shares))
            self.account.remove(copy)
            copy = wide
        if how.is_offloaded:
            self._to_host(max(shares))
        for weight in large:
            self.account.remove(self.large.pop(weight))
        self.account.remove(copy)

    def _to_host(self, share: int) -> None:
        """Copies a partition of the host's gradient to the GPU, computes its norm, and casts it for the optimizer."""
        how, brought = self.how, self.account.add(Part.BUFFERS, rounded(share * self.how.accumulated))
        if self.is_last:
            self.account.passing(Part.BUFFERS, rounded(min(share, NORM_ELEMENTS) * NORM_ITEM))
            self.account.passing(Part.BUFFERS, rounded(share * how.stepped) if how.accumulated != how.stepped else 0)
        self.account.remove(brought)

    def end(self) -> None:
        if self.in_bucket:
            self._flush()
        self.micro += 1
