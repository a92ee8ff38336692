"""The modules of a model with their parameters, which ZeRO gathers and reduces."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter tensor."""

    numel: int
    """Its elements on one rank; of a quantised one, as many as the training precision has in its bytes."""
    trains: bool
    """Whether it has a gradient."""
    decays: bool
    """Whether it is in the first of the Trainer's two parameter groups."""
    ep: int = 1
    """Of the data-parallel ranks, one of this many has this parameter; the others have other experts."""
    is_matrix: bool = False
    """Whether it is a matrix of a layer, which Muon steps."""

    def share(self, ranks: int) -> int:
        """Returns the elements of one rank's partition, of that many data-parallel ranks."""
        return -(-self.numel // self.partners(ranks))

    def padded(self, ranks: int) -> int:
        """Returns the elements of all partitions together."""
        return self.share(ranks) * self.partners(ranks)

    def partners(self, ranks: int) -> int:
        """Returns the number of ranks that have this parameter; one at least, also of more experts than ranks."""
        return max(1, ranks // self.ep)


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """A module that is called: its parameters, and the modules inside."""

    number: int
    """Unique number of the module."""
    weights: tuple[int, ...]
    """Its own parameters; of a leaf of ZeRO-3, those inside too."""
    children: tuple[Module, ...] = ()
    """Modules inside, in order of their call; none of a leaf."""
    mark: str = ""
    """The name of the linear layer, where the tape marks it."""
    is_linear: bool = False
    """Whether autograd keeps the weight for the backward pass."""
    is_block: bool = False
    """Whether it is a mixture of experts or a tiled MLP, which the tape has no mark for."""


@dataclass(frozen=True, slots=True, eq=False)
class Modules:
    """All modules of a model."""

    weights: tuple[Weight, ...]
    """Every parameter tensor, in the model's order; tied ones once."""
    outer: tuple[Module, ...]
    """Modules around the decoder, without parameters of their own, outermost first."""
    tower: Module
    """The vision tower; without modules inside if the model has none."""
    embedding: Module
    """The embedding of tokens."""
    rotary: Module
    """The rotary embedding, without parameters."""
    layers: tuple[Module, ...]
    """Decoder layers."""
    norm: Module
    """The norm after the last layer."""
    head: Module
    """The head; its weight is the embedding's if they are tied."""

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Returns the trainable parameters by optimizer group: decayed, the rest, and experts that ranks share."""
        return _groups(self)

    def shares(self, ranks: int) -> tuple[int, ...]:
        """Returns the elements of each parameter's partition, of that many data-parallel ranks."""
        return _shares(self, ranks)

    def counted(self) -> tuple[tuple[Weight, int], ...]:
        """Returns the parameters that differ, each with how many there are of it: layers are alike."""
        return _counted(self)

    def kinds(self) -> tuple[int, ...]:
        """Returns the place of each parameter among those that differ."""
        return _kinds(self)


@cache
def _groups(modules: Modules) -> tuple[tuple[int, ...], ...]:
    """Source: Transformers 5.23 trainer.py: get_decay_parameter_names (biases and norms are not decayed);
    dstrain/train/expert_parallel.py: part_experts; deepspeed 0.19.8 runtime/zero/stage3.py."""
    kinds: dict[tuple[bool, bool], list[int]] = {(False, True): [], (False, False): [], (True, True): []}
    for index, weight in enumerate(modules.weights):
        if weight.trains:
            kinds[weight.ep > 1, weight.decays].append(index)
    return tuple(tuple(group) for group in kinds.values() if group)


@cache
def _shares(modules: Modules, ranks: int) -> tuple[int, ...]:
    shares = [weight.share(ranks) for weight, _ in modules.counted()]
    return tuple(shares[kind] for kind in modules.kinds())


@cache
def _counted(modules: Modules) -> tuple[tuple[Weight, int], ...]:
    return tuple(Counter(modules.weights).items())


@cache
def _kinds(modules: Modules) -> tuple[int, ...]:
    places = {weight: place for place, (weight, _) in enumerate(modules.counted())}
    return tuple(places[weight] for weight in modules.weights)
