"""Bytes per element of PyTorch's own states, and the optimizer's part of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.published.pytorch.weights import Weight
from benchmarks.published.training_code import published
from dstrain.choices import Optimizer
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.caching_allocator import Event
from dstrain.plan.memory.deepspeed.allocations import MAIN
from dstrain.plan.memory.layers.ops import FP32
from dstrain.plan.memory.params import NF4_BYTES_PER_PARAM


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Bytes of one element."""

    compute: int
    """Of a frozen parameter, and of tensors in forward and backward."""
    quantized: float
    """Of a parameter in 4 bits, with its scales."""
    trained: int
    """Of a trained parameter at rest, and of its gradient."""
    states: tuple[float, ...]
    """Of each of the optimizer's states."""
    temporary: int
    """Of temporaries that the optimizer allocates for a whole group at once."""

    def frozen_bytes(self, weight: Weight) -> float:
        """Returns the bytes of a weight that does not train."""
        return weight.numel * (self.quantized if weight.is_quantized else self.compute)


def elements(configuration: Configuration) -> Elements:
    """Returns the bytes of one element: PEFT keeps adapters in fp32, autocast trained parameters.

    torch's foreach AdamW makes a square root of all second moments of a group at once, the fused one nothing. Source:
    torch 2.13 optim/adamw.py: _multi_tensor_adamw; bitsandbytes 0.49 optim/optimizer.py: Optimizer2State.
    """
    compute = configuration.model.item
    has_adapter = not configuration.model.is_full
    is_wide = published(configuration.code).has_peft if has_adapter else configuration.code.is_autocast
    trained = FP32 if is_wide else compute
    states: dict[Optimizer, tuple[float, ...]] = {
        Optimizer.ADAMW: (trained, trained),
        Optimizer.ADAMW_8BIT: (1 + 4 / 256, 1 + 4 / 256),
        Optimizer.LION: (trained,),
    }
    hosted = configuration.zero.is_offloaded
    foreach = (
        configuration.step.optimizer is Optimizer.ADAMW and not published(configuration.code).fuses_step and not hosted
    )
    return Elements(
        compute=compute,
        quantized=NF4_BYTES_PER_PARAM + published(configuration.code).scale_bytes,
        trained=trained,
        states=() if hosted else states.get(configuration.step.optimizer, ()),
        temporary=trained if foreach else 0,
    )


class Script:
    """Writes events for the allocator; an id is what `allocate` returns."""

    def __init__(self, first_id: int = -1) -> None:
        self.events: list[Event] = []
        self._next = first_id

    def allocate(self, size: float, stream: int = MAIN) -> int:
        """Allocates; ids are negative, unlike a recording's."""
        key, self._next = self._next, self._next - 1
        nbytes = round(size)
        if nbytes:
            self.events.append((key, nbytes, stream) if stream else (key, nbytes))
        return key

    def free(self, *keys: int) -> None:
        """Frees, in this order."""
        self.events += [(key, 0) for key in keys]

    def take(self) -> list[Event]:
        """Returns the events since the last call."""
        taken, self.events = self.events, []
        return taken

    def allocate_all(self, sizes: Iterable[float], stream: int = MAIN) -> list[int]:
        """Allocates each size in order."""
        return [self.allocate(size, stream) for size in sizes]


def step(script: Script, groups: Sequence[Sequence[float]], sizes: Elements, *, is_first: bool) -> None:
    """Writes an optimizer step; `groups` are the elements of the tensors by parameter group.

    The first step allocates the states, tensor by tensor.
    Source: torch 2.13 optim/adamw.py: _init_group, step.
    """
    for numels in groups:
        if is_first:
            for numel in numels:
                script.allocate_all(numel * state for state in sizes.states)
        script.free(*script.allocate_all(numel * sizes.temporary for numel in numels))
