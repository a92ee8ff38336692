"""Tensors without data: their bytes, and their lifetime.

A tensor here is a size and a reference to its storage; Python's reference counting frees a storage when the last tensor
that uses it goes, exactly when PyTorch's does. So layer code written like Transformers' has the same bytes live at the
same time, without PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

BLOCK_BYTES = 512
"""Allocations are rounded up to this. Source: torch 2.13 c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize."""

Backward = Callable[["Tensor"], tuple["Tensor | None", ...]]


class Part(IntEnum):
    """Purpose of a storage."""

    ACTIVATIONS = 0
    LOGITS = 1
    GRADS = 2
    GATHERED = 3


class GradRelease(IntEnum):
    """How long autograd keeps the gradient of a parameter: to the step, to the end of its layer, or not at all."""

    AT_STEP = 0
    AFTER_LAYER = 1
    AT_ONCE = 2


class Ledger:
    """Live bytes by part, and the largest total of each named instant with its parts."""

    __slots__ = ("events", "instant", "live", "next_id", "parts", "peak", "peaks")

    def __init__(self, *, record: bool = False) -> None:
        self.live = 0
        self.parts = [0] * len(Part)
        self.instant = "forward"
        self.peak = -1
        self.peaks: dict[str, tuple[int, ...]] = {}
        self.events: list[tuple[int, int]] | None = [] if record else None
        self.next_id = 0

    def enter(self, instant: str) -> None:
        """Attributes peaks to `instant` from now on; an instant may be entered again."""
        if instant != self.instant or self.peak < 0:
            self.instant = instant
            known = self.peaks.get(instant)
            self.peak = -1 if known is None else sum(known)
        if self.live > self.peak:
            self.peak = self.live
            self.peaks[self.instant] = tuple(self.parts)


class Storage:
    """Bytes that are live as long as a reference exists."""

    __slots__ = ("id", "ledger", "nbytes", "part")

    def __init__(self, ledger: Ledger, nbytes: int, part: Part) -> None:
        nbytes = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        self.ledger, self.nbytes, self.part = ledger, nbytes, part
        ledger.live += nbytes
        ledger.parts[part] += nbytes
        if ledger.live > ledger.peak:
            ledger.peak = ledger.live
            ledger.peaks[ledger.instant] = tuple(ledger.parts)
        if ledger.events is not None:
            self.id = ledger.next_id
            ledger.next_id += 1
            ledger.events.append((self.id, nbytes))

    def __del__(self) -> None:
        ledger = self.ledger
        ledger.live -= self.nbytes
        ledger.parts[self.part] -= self.nbytes
        if ledger.events is not None:
            ledger.events.append((self.id, 0))


class Tensor:
    """A view of a storage: elements, bytes of each, and the node that made it (None: needs no gradient)."""

    __slots__ = ("item", "node", "numel", "storage")

    def __init__(self, storage: Storage | None, numel: int, item: int, node: Node | None = None) -> None:
        self.storage, self.numel, self.item, self.node = storage, numel, item, node


class View(Tensor):
    """A gradient that PyTorch has as a view of another shape: nothing is added to it in place.

    Source: torch 2.13 csrc/autograd/input_buffer.cpp: can_accumulate_inplace (a view's base refers to its storage too).
    """

    __slots__ = ()


class Node:
    """One operation of the graph: computes the gradients of its inputs from its output's."""

    __slots__ = ("backward", "inputs", "order")

    def __init__(self, order: int, inputs: tuple[Node | None, ...], backward: Backward | None) -> None:
        self.order, self.inputs, self.backward = order, inputs, backward


class Param(Node):
    """A parameter tensor as the end of the graph: gradients come to rest here."""

    __slots__ = ("is_root", "numel", "pending", "trains", "uses")

    def __init__(self, numel: int, *, trains: bool, is_root: bool = False) -> None:
        super().__init__(1 << 62, (), None)
        self.numel, self.trains, self.is_root = numel, trains, is_root
        self.uses = 0
        self.pending: Tensor | None = None
