"""The engine's view of one micro-batch: modules start and end, gradients become ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

from dstrain.facts.model.model_facts import ModelFacts
from dstrain.plan.configuration import Checkpointing
from dstrain.plan.memory.deepspeed.modules import Module, Modules, Shape, modules
from dstrain.plan.memory.layers.tape import Key


class Event(IntEnum):
    """Kinds of events."""

    FETCH = 0
    """A module begins, forward or backward."""
    RELEASE = 1
    """A module ends, forward or backward."""
    GRAD = 2
    """The gradient of a parameter is complete."""
    MARK = 3
    """A moment of the tape begins."""
    KEEP = 4
    """A recomputation saves a parameter for the backward pass, as it is now."""
    DROP = 5
    """The backward pass that needs the saved parameters is over."""


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """One micro-batch."""

    modules: Modules
    """The model's modules."""
    members: tuple[tuple[int, ...], ...]
    """Parameters by the number of the module."""
    events: tuple[tuple[Event, int], ...]
    """Events in order of time, each with its module, parameter or mark."""
    marks: tuple[Key, ...]
    """The moments of the tape, by their number."""
    layers: Sequence[int]
    """The layers that are run."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch(Program):
    """All events of a micro-batch."""

    gradients: Program
    """The same without gathering: gradients, and the marks that follow them. Many micro-batches have it in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Settings of the forward and backward pass."""

    checkpointing: Checkpointing
    """Which layers are recomputed."""
    is_reentrant: bool
    """Whether recomputation is reentrant."""
    detached: frozenset[str]
    """Linear layers of the first decoder layer whose input needs no gradient."""
    layers: tuple[int, ...] | None = None
    """The layers that are run; None: all."""


@cache
def program(model: ModelFacts, shape: Shape, passes: Passes) -> MicroBatch:
    """Returns a micro-batch of the model.

    Modules run backward in reverse order of their call, as autograd's ready queue has it. A recomputation happens when
    the last module of a layer begins its backward pass, and stops inside that module; the reentrant kind runs to the
    end of the layer before any of its modules goes backward.
    Source: torch 2.13 csrc/autograd/engine.cpp; utils/checkpoint.py: _StopRecomputationError, CheckpointFunction;
    deepspeed 0.19.8 runtime/zero/parameter_offload.py: _register_deepspeed_module.
    """
    return _Writer(modules(model, shape), passes).write()


@cache
def _gradients(modules: Modules, events: tuple[tuple[Event, int], ...], marks: tuple[Key, ...]) -> Program:
    """Returns a program of gradients alone, once for all micro-batches that have the same ones in the same order."""
    return Program(modules, (), events, marks, ())


class _Writer:
    """Writes a program."""

    def __init__(self, modules: Modules, passes: Passes) -> None:
        self.modules = modules
        self.checkpointing, self.is_reentrant = passes.checkpointing, passes.is_reentrant
        self.detached = passes.detached
        self.layers: Sequence[int] = range(len(modules.layers)) if passes.layers is None else passes.layers
        self.events: list[tuple[Event, int]] = []
        self.marks: list[Key] = []
        self.members: dict[int, tuple[int, ...]] = {}
        self.again: Module | None = None

    def write(self) -> MicroBatch:
        """Returns the program."""
        modules = self.modules
        for module in modules.outer:
            self.put(Event.FETCH, module)
        self.forward(modules.embedding, -1, "forward")
        if modules.tower.children:
            self.mark("vision forward", -1, "")
            self.forward(modules.tower, -1, "vision forward")
        self.mark("forward", -1, "")
        self.forward(modules.rotary, -1, "forward")
        for index in self.layers:
            self.forward(modules.layers[index], index, "forward")
        self.forward(modules.norm, -1, "forward")
        base, *adapter = modules.head.children or (modules.head,)
        if adapter:
            self.put(Event.FETCH, modules.head)
        self.put(Event.FETCH, base)
        self.mark("head forward", -1, "")
        self.put(Event.RELEASE, base)
        for child in adapter:
            self.forward(child, -1, "forward")
        self.mark("loss forward", -1, "")
        self.backward_of_loss()
        for index in reversed(self.layers):
            self.layer_backward(modules.layers[index], index)
        self.tower_backward()
        if (
            self.trains(modules.embedding) or self.checkpointing.enabled
        ):  # else nothing before the first adapter has a gradient
            self.put(Event.FETCH, modules.embedding)
            self.mark("embedding backward", -1, "")
            self.grads(modules.embedding)
            if self.checkpointing.enabled:  # its output requires a gradient, an adapter around it or not
                for child in modules.embedding.children:
                    self.put(Event.FETCH, child)
        members = tuple(self.members.get(number, ()) for number in range(1 + max(self.members)))
        whole = (modules, members, tuple(self.events), tuple(self.marks), self.layers)
        return MicroBatch(*whole, gradients=self.gradients())

    def gradients(self) -> Program:
        """Returns gradients, and the first mark after each."""
        kept: list[tuple[Event, int]] = []
        marks: list[Key] = []
        for event, number in self.events:
            if event is Event.GRAD:
                kept.append((event, number))
            elif event is Event.MARK and kept and kept[-1][0] is Event.GRAD:
                kept.append((event, len(marks)))
                marks.append(self.marks[number])
        return _gradients(self.modules, tuple(kept), tuple(marks))

    def backward_of_loss(self) -> None:
        """Writes the backward pass from the loss to the norm after the last layer."""
        modules = self.modules
        for module in modules.outer[:-1]:
            self.put(Event.FETCH, module)
        self.mark("loss backward", -1, "")
        self.put(Event.FETCH, modules.head)
        base, *adapter = modules.head.children or (modules.head,)
        for child in reversed(adapter):
            self.backward(child, -1)
        if adapter:
            self.put(Event.FETCH, base)
        self.mark("head backward", -1, "")
        if base.weights != modules.embedding.weights:
            self.grads(base)
        self.put(Event.RELEASE, base)
        self.put(Event.FETCH, modules.outer[-1])
        self.backward(modules.norm, -1)

    def put(self, event: Event, module: Module) -> None:
        """Writes an event of a module; the end of one without parameters gives nothing back."""
        self.members[module.number] = module.weights
        if module.weights or event is Event.FETCH:
            self.events.append((event, module.number))

    def mark(self, what: str, layer: int, name: str) -> None:
        """Writes the beginning of a moment of the tape."""
        self.marks.append((what, layer, name))
        self.events.append((Event.MARK, len(self.marks) - 1))

    def postpone_mark(self) -> None:
        """Moves the last mark to here: later events belong to the time before it."""
        last = next(index for index in reversed(range(len(self.events))) if self.events[index][0] is Event.MARK)
        self.events.append(self.events.pop(last))

    def trains(self, module: Module) -> bool:
        """Returns whether a module's own parameters have gradients."""
        return any(self.modules.weights[index].trains for index in module.weights)

    def grads(self, module: Module) -> None:
        """Writes the gradients of a module."""
        for index in module.weights:
            if self.modules.weights[index].trains:
                self.events.append((Event.GRAD, index))

    def forward(self, module: Module, layer: int, direction: str, *, until: Module | None = None) -> bool:
        """Writes a forward pass, or a recomputation that stops inside the module `until`; returns whether it got there.

        An adapted linear layer holds the plain one first, then the adapter's modules.
        """
        self.put(Event.FETCH, module)
        base = _base(module)
        if base is not module:
            self.put(Event.FETCH, base)
        if direction == "recompute" and base.is_linear and not self.is_reentrant:
            self.events += [(Event.KEEP, index) for index in base.weights]
        if module.mark:
            self.mark(direction, layer, module.mark)
        elif module.is_block:
            self.postpone_mark()
        # PyTorch stops a recomputation by an exception: hooks behind the module do not run
        if module is until:
            return True
        if base is not module:
            self.put(Event.RELEASE, base)
        for child in module.children:
            if child is not base and self.forward(child, layer, direction, until=until):
                return True
        self.put(Event.RELEASE, module)
        if module.mark:
            self.mark(f"{direction} end", layer, module.mark)
        return False

    def layer_backward(self, layer: Module, index: int) -> None:
        """Writes a layer's backward pass."""
        self.put(Event.FETCH, layer)
        self.mark("layer backward", index, "")
        if self.checkpointing.recomputes(index) and self.is_reentrant:
            for child in layer.children:
                self.forward(child, index, "recompute")
        elif self.checkpointing.recomputes(index):
            self.again = layer
        first = 1 if index == 0 and self.detached else 0  # nothing passes the norm before the first adapter
        for child in reversed(layer.children[first:]):
            self.backward(child, index)
        self.put(Event.RELEASE, layer)

    def tower_backward(self) -> None:
        """Writes the backward pass of the vision tower, as far up as something trains."""
        children = self.modules.tower.children
        first = next((index for index, child in enumerate(children) if self.trains(child)), len(children))
        is_whole = first == 0
        for child in reversed(children[first:]):
            if is_whole or self.trains(child):
                if child.mark:
                    self.mark("vision backward", -1, child.mark)
                self.put(Event.FETCH, child)
                self.grads(child)
                self.put(Event.RELEASE, child)

    def backward(self, module: Module, layer: int) -> None:
        """Writes a module's backward pass; a frozen linear layer whose input needs no gradient has none."""
        base = _base(module)
        is_cut = layer == 0 and module.mark in self.detached
        if is_cut and base is module and not self.trains(module):
            return
        self.put(Event.FETCH, module)
        for child in reversed(module.children):
            if child is not base:
                self.backward(child, layer)
        if is_cut:
            self.put(Event.RELEASE, module)
            return
        if base is not module:
            self.put(Event.FETCH, base)
        if module.mark:
            self.mark("backward", layer, module.mark)
        elif module.is_block:
            self.postpone_mark()
        if module.mark or not module.children:
            self.recompute(module, layer)
        self.finish(module, base, layer)
        if module.mark:
            self.mark("after", layer, module.mark)

    def recompute(self, module: Module, layer: int) -> None:
        """Writes the recomputation of the layer, if it is still to come: its last module needs what was saved."""
        again, self.again = self.again, None
        if again is not None:
            any(self.forward(child, layer, "recompute", until=module) for child in again.children)

    def finish(self, module: Module, base: Module, layer: int) -> None:
        """Writes the end of a module's backward pass: frees its saved tensors and stores gradients."""
        keeps = self.checkpointing.recomputes(layer) and not self.is_reentrant
        if base.is_linear and keeps and module.mark:
            self.events += [(Event.DROP, index) for index in base.weights]
        self.grads(base)
        if base is not module:
            self.put(Event.RELEASE, base)
        self.put(Event.RELEASE, module)


def _base(module: Module) -> Module:
    """Returns the linear layer that an adapted one holds; any other module itself."""
    return module.children[0] if module.mark and module.children else module
