"""The tape: tensors without data, their bytes and lifetime, and layer code run on them forward and backward.

A tensor here is a size and a reference to its storage; Python's reference counting frees a storage when the last tensor
that uses it goes, exactly when PyTorch's does. So layer code written like Transformers' has the same bytes live at the
same time, without PyTorch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from contextlib import suppress
from enum import IntEnum
from sys import getrefcount
from typing import NamedTuple

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


TapeEvent = tuple[Hashable, int]
"""An allocation `(id, bytes)` or a free `(id, 0)`, on the main stream."""
Key = tuple[str, int, str]
"""Phase (`forward`, `forward end`, `recompute`, `recompute end`, `backward`, `after`), its layer (-1: outside of the
layers) and the module; or an instant of the tape with layer and an empty name."""
END: Key = ("backward end", -1, "")
"""The mark after the backward pass."""


class Moment(NamedTuple):
    """The time from one mark to the next, in bytes by part of the tape."""

    key: Key
    """The mark."""
    place: int
    """Events of the recording before the mark."""
    begin: tuple[int, ...]
    """Live bytes at the mark."""
    peak: tuple[int, ...]
    """Peak of live bytes until the next mark."""


class Ledger:
    """Live bytes by part; every allocation and free, and every mark with the live bytes at it and their peak."""

    __slots__ = ("_mark", "_moments", "events", "highest", "layer", "live", "next_id", "parts", "peak")

    def __init__(self) -> None:
        self.live = self.next_id = 0
        self.parts = [0] * len(Part)
        self.events: list[TapeEvent] = []
        self.layer = -1
        """The current decoder layer."""
        self.peak = -1
        """The peak of live bytes since the last mark."""
        self.highest: tuple[int, ...] = ()
        """Its parts."""
        self._mark: tuple[Key, int, tuple[int, ...]] | None = None
        self._moments: list[Moment] = []

    @property
    def instant(self) -> str:
        """Name and number of the last mark."""
        what, layer, name = self._mark[0] if self._mark else END
        return f"{what} {layer if layer >= 0 else name}".rstrip()

    def enter(self, what: str, layer: int = -1, name: str = "") -> None:
        """Marks this place."""
        if what == "layer backward":
            self.layer = layer
        self._leave()
        self._mark = ((what, layer, name), len(self.events), tuple(self.parts))
        self.peak, self.highest = self.live, self._mark[2]

    def _leave(self) -> None:
        if self._mark is not None:
            self._moments.append(Moment(*self._mark, self.highest))
            self._mark = None

    def moments(self) -> list[Moment]:
        """Returns the live bytes, mark by mark, and none at the end."""
        self._leave()
        nothing = (0,) * len(Part)
        return [*self._moments, Moment(END, len(self.events), nothing, nothing)]

    def take(self) -> list[TapeEvent]:
        """Returns the events so far and starts a new list."""
        taken, self.events = self.events, []
        return [*taken]


class Storage:
    """Bytes that are live as long as a reference exists."""

    __slots__ = ("id", "ledger", "nbytes", "part")

    def __init__(self, ledger: Ledger, nbytes: int, part: Part) -> None:
        nbytes = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        self.ledger, self.nbytes, self.part = ledger, nbytes, part
        ledger.live += nbytes
        ledger.parts[part] += nbytes
        if ledger.live > ledger.peak:
            ledger.peak, ledger.highest = ledger.live, tuple(ledger.parts)
        self.id = ledger.next_id
        ledger.next_id += 1
        ledger.events.append((self.id, nbytes))

    def __del__(self) -> None:
        ledger = self.ledger
        ledger.live -= self.nbytes
        ledger.parts[self.part] -= self.nbytes
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


Tensors = tuple[Tensor | None, ...]


class RecomputedEnough(Exception):
    """Raised once a recomputation has restored all saved tensors: PyTorch's checkpointing stops there too."""


class Frame:
    """One checkpointed call: its saved tensors are recomputed when the backward pass first asks for them."""

    __slots__ = ("again", "is_filled", "result", "slots", "used")

    def __init__(self, again: Callable[[], Tensor]) -> None:
        self.again = again
        self.slots: list[Tensors | None] = []
        self.used = 0
        self.is_filled = False
        self.result: Tensor | None = None


class Saved:
    """Tensors that one operation keeps for its backward pass, or a promise to recompute them."""

    __slots__ = ("frame", "index", "tape", "tensors")

    def __init__(self, tape: Tape, tensors: Tensors | None, frame: Frame | None = None, index: int = 0) -> None:
        self.tape, self.tensors, self.frame, self.index = tape, tensors, frame, index

    def take(self) -> Tensors:
        """Returns the tensors; the first to ask makes the whole frame recompute."""
        if self.frame is None:
            tensors = self.tensors
        else:
            if not self.frame.is_filled:
                self.tape.refill(self.frame)
            tensors = self.frame.slots[self.index]
            self.frame.slots[self.index] = None
        assert tensors is not None
        return tensors


class TiledGrads:
    """Gradients of parameters that several tiles use, each in the same order: they add up until the last tile."""

    __slots__ = ("is_last", "kept", "place")

    def __init__(self) -> None:
        self.kept: list[Tensor | None] = []
        self.place = 0
        self.is_last = False

    def begin(self, *, is_last: bool) -> None:
        """Begins a tile."""
        self.place, self.is_last = 0, is_last

    def add(self, grad: Tensor) -> Tensor | None:
        """Returns the sum over all tiles, in the last of them."""
        if self.place == len(self.kept):
            self.kept.append(grad)
        self.place += 1
        if not self.is_last:
            return None
        whole, self.kept[self.place - 1] = self.kept[self.place - 1], None
        return whole


class Tape:
    """Runs operations on sizes.

    `release` says how long parameter gradients stay where autograd leaves them; `gathers` whether a module's
    parameters are whole only while it works (ZeRO-3); `plays_all_tiles` whether each of several equal tiles is run.
    """

    __slots__ = (
        "_in_flight",
        "_order",
        "_recording",
        "_refilling",
        "_tiled",
        "gathers",
        "grad_enabled",
        "grads",
        "keeps_inputs",
        "kept_tensors",
        "ledger",
        "num_in_flight",
        "offloads_inputs",
        "part",
        "plays_all_tiles",
        "release",
        "stops_early",
    )

    def __init__(self, *, release: GradRelease = GradRelease.AT_STEP, gathers: bool = False) -> None:
        self.ledger = Ledger()
        self.release, self.gathers = release, gathers
        self.stops_early = self.plays_all_tiles = True
        self.offloads_inputs = False
        self.num_in_flight = 0
        """Offloaded inputs that are still on the GPU."""
        self.keeps_inputs = False
        self._in_flight: list[Storage] = []
        self.grad_enabled = True
        self.part = Part.ACTIVATIONS
        self.grads: list[Tensor] = []
        self.kept_tensors: list[Tensor] = []
        self._order = 0
        self._recording: Frame | None = None
        self._refilling: Frame | None = None
        self._tiled: TiledGrads | None = None

    @property
    def is_recomputing(self) -> bool:
        """Whether a checkpointed call is being run again."""
        return self._refilling is not None

    def new(self, numel: int, item: int, node: Node | None = None) -> Tensor:
        """Allocates a tensor."""
        return Tensor(Storage(self.ledger, numel * item, self.part), numel, item, node)

    def grad(self, numel: int, item: int) -> Tensor:
        """Allocates the gradient of a parameter."""
        return Tensor(Storage(self.ledger, numel * item, Part.GRADS), numel, item)

    def gathered(self, numel: int, item: int) -> Storage | None:
        """Allocates a gathered parameter, which lives as long as the result; None if parameters are always whole."""
        return Storage(self.ledger, numel * item, Part.GATHERED) if self.gathers else None

    def needs(self, *inputs: Tensor | Param) -> bool:
        """Returns whether an operation on these is recorded."""
        if not self.grad_enabled:
            return False
        return any((operand.trains if isinstance(operand, Param) else operand.node is not None) for operand in inputs)

    def save(self, *tensors: Tensor | None) -> Saved:
        """Keeps tensors for the backward pass; inside a checkpoint a promise, in its recomputation the tensors."""
        frame = self._refilling
        if frame is not None:
            index = frame.used
            # as PyTorch does: without the history of the recomputation
            frame.slots[index] = tuple(
                tensor and Tensor(tensor.storage, tensor.numel, tensor.item) for tensor in tensors
            )
            frame.used += 1
            if frame.used == len(frame.slots) and self.stops_early:
                raise RecomputedEnough
            return Saved(self, None, frame, index)
        frame = self._recording
        if frame is None:
            return Saved(self, tensors)
        frame.slots.append(None)
        return Saved(self, None, frame, len(frame.slots) - 1)

    def node(self, inputs: tuple[Tensor | Param, ...], backward: Backward) -> Node:
        """Records an operation; `backward` gives one gradient, or None, for each input."""
        self._order += 1
        ends: list[Node | None] = []
        for operand in inputs:
            if isinstance(operand, Param):
                ends.append(operand if operand.trains else None)
                if operand.trains and self._refilling is None:
                    operand.uses += 1
            else:
                ends.append(operand.node)
        return Node(self._order, tuple(ends), backward)

    def checkpoint(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Runs `function` so that only its input is kept, and what it saves is made again in the backward pass.

        The older, reentrant way (`stops_early` false) makes all of it again and keeps the result as long.
        Source: torch 2.13 utils/checkpoint.py: _checkpoint_without_reentrant_generator, CheckpointFunction.
        """
        frame = Frame(self._fetching(function, x) if self.offloads_inputs else lambda: function(x))
        outer, self._recording = self._recording, frame
        result = function(x)
        self._recording = outer
        return result

    def _fetching(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
        """Returns the recomputation of a call whose input left the GPU, and comes back for it."""
        numel, item, node = x.numel, x.item, x.node
        assert x.storage is not None
        if self.num_in_flight:
            self._in_flight = [*self._in_flight, x.storage][-self.num_in_flight :]
        return lambda: function(self.new(numel, item, node))

    def refill(self, frame: Frame) -> None:
        """Runs a checkpointed call again, as far as something was saved."""
        outer, self._refilling = self._refilling, frame
        frame.is_filled = True
        self.grad_enabled = True
        with suppress(RecomputedEnough):  # nothing saved: nothing to make again
            if frame.slots:
                result = frame.again()
                frame.result = Tensor(result.storage, result.numel, result.item)
        self._refilling = outer

    def backward(self, loss: Tensor) -> None:
        """Runs the graph backward: the operation recorded last first, gradients of one tensor summed on arrival.

        Source: torch 2.13 csrc/autograd/engine.cpp: ready queue by sequence number; input_buffer.cpp: accumulate.
        """
        root = loss.node
        assert root is not None
        self._in_flight.clear()
        arrived: dict[Node, Tensor] = {root: Tensor(Storage(self.ledger, loss.item, self.part), 1, loss.item)}
        del loss, root
        self._propagate(arrived)

    def tile_backward(self, tile: Callable[[], tuple[Tensor, Tensor]], *, number: int, count: int) -> None:
        """Runs a part of the graph forward and backward, within the backward pass, as tile `number` of `count`.

        `tile` returns the result of the forward pass and its gradient; the result lives as long as the backward pass.
        """
        self._tiled = self._tiled or TiledGrads()
        self._tiled.begin(is_last=number == count - 1)
        self.grad_enabled = True
        output, grad = tile()
        assert output.node is not None
        arrived, output.node = {output.node: grad}, None
        del grad
        self._propagate(arrived)
        if self._tiled.is_last:
            self._tiled = None

    def _propagate(self, arrived: dict[Node, Tensor]) -> None:
        """Runs the graph backward from the node whose gradient has arrived."""
        self.grad_enabled = False
        queue = [(-node.order, node) for node in arrived]
        while queue:
            _, node = heapq.heappop(queue)
            grad = arrived.pop(node)
            assert node.backward is not None
            results = node.backward(grad)
            del grad
            node.backward = None
            inputs, node.inputs = node.inputs, ()
            for end, result in zip(inputs, results, strict=True):
                if end is None or result is None:
                    continue
                if isinstance(end, Param):
                    self._rest(end, result)
                elif end in arrived:
                    arrived[end] = self._sum(arrived.pop(end), result)
                else:
                    arrived[end] = result
                    heapq.heappush(queue, (-end.order, end))
            del results, result, end, inputs, node
            self.grad_enabled = False

    def _sum(self, old: Tensor, new: Tensor) -> Tensor:
        """Returns the sum of two gradients, in place where nobody else sees the first and it is no view."""
        if type(old) is not View and getrefcount(old.storage) <= 2:
            return old
        return self.like(old)

    def leave_layer(self) -> None:
        """Reduces the gradients of the layer before: a flat copy of them all, then both go."""
        if self.release is not GradRelease.AFTER_LAYER or not self.grads:
            return
        flat = self.grad(sum(grad.numel for grad in self.grads), self.grads[0].item)
        self.grads.clear()
        del flat

    def like(self, tensor: Tensor) -> Tensor:
        """Allocates a tensor of the same size and part, without history."""
        assert tensor.storage is not None
        storage = Storage(self.ledger, tensor.numel * tensor.item, tensor.storage.part)
        return Tensor(storage, tensor.numel, tensor.item)

    def _rest(self, param: Param, grad: Tensor) -> None:
        """Takes the gradient of one use of a parameter; it is complete when all uses have given theirs."""
        if self._tiled is not None:
            whole = self._tiled.add(grad)
            if whole is None:
                return
            grad = whole
        param.uses -= 1
        if param.pending is not None:
            grad = self.like(grad)
        param.pending = grad
        if param.uses == 0:
            if param.is_root and self.release is not GradRelease.AT_ONCE:
                self.kept_tensors.append(grad)
            elif self.release is not GradRelease.AT_ONCE:
                self.grads.append(grad)
            param.pending = None
