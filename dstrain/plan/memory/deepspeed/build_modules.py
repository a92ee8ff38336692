"""Builds the modules of a model in call order, with what a job trains of them and with its adapter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from dstrain.choices import Method
from dstrain.facts.model.model_facts import Kind, ModelFacts, TensorGroup
from dstrain.job.model_changes import Lora
from dstrain.plan.memory.adapters import adapted, adapted_experts, adapter_sizes, kept_whole
from dstrain.plan.memory.deepspeed.call_order import call_order
from dstrain.plan.memory.deepspeed.modules import Module, Modules, Weight
from dstrain.plan.memory.params import decays, is_in_layer, is_inside, tower_tensors, trains_in_full

QUANTIZED_PER_ELEMENT = 4
"""Quantised elements in the bytes of one in bf16, which bitsandbytes stores them as. Source: dstrain/train/model.py:
bnb_4bit_quant_storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Settings that determine the modules of a run."""

    method: Method
    """Trained parameters: all, or an adapter."""
    lora: Lora
    """The adapter."""
    linears: tuple[tuple[str, int], ...]
    """Linear layers of the decoder layers in order of their call → elements of the weight on one rank."""
    tp: int = 1
    """Ranks that share the head; each has the whole embedding, unless the two are tied."""
    ep: int = 1
    """Ranks that share the experts."""
    tiled_mlp: bool = False
    """Whether MLPs are computed for a part of the tokens at a time, and so gathered whole."""


@cache
def modules(model: ModelFacts, shape: Shape) -> Modules:
    """Returns the modules of a model."""
    return _Builder(model, shape).build()


class _Builder:
    """Numbers parameters and modules."""

    def __init__(self, model: ModelFacts, shape: Shape) -> None:
        self.model, self.shape = model, shape
        self.is_full = shape.method is Method.FULL
        self.linears = dict(shape.linears)
        wrapped = [] if self.is_full else [*adapted(model, shape.lora), *adapted_experts(model, shape.lora)]
        self.adapted = {group.name: group for group in wrapped}
        self.weights: list[Weight] = []
        self.count = 0

    def build(self) -> Modules:
        """Returns the modules; parameters are numbered in the model's order."""
        model, tied = self.model, self.model.tie_word_embeddings
        outer = tuple(self.module() for _ in range(2 if self.is_full else 4))
        tower = self.tower()
        embedding = self.outside(Kind.EMBEDDING)
        layers = tuple(self.layer(index) for index in range(model.num_hidden_layers))
        norm = self.outside(Kind.NORM)
        head = self.tied(embedding) if tied else self.outside(Kind.HEAD)
        return Modules(tuple(self.weights), outer, tower, embedding, self.module(), layers, norm, head)

    def module(
        self,
        weights: Iterable[int] = (),
        children: Iterable[Module] = (),
        mark: str = "",
        *,
        is_linear: bool = False,
        is_block: bool = False,
    ) -> Module:
        """Returns a module with a new number."""
        self.count += 1
        return Module(self.count - 1, tuple(weights), tuple(children), mark, is_linear, is_block)

    def tower(self) -> Module:
        """Returns the vision tower: the modules that have parameters, in the model's order."""
        owners: dict[str, list[int]] = {}
        for group, index in tower_tensors(self.model):
            owner = group.name.replace("*", str(index)).rpartition(".")[0]
            number = self.weight(group.numel, self.trains(group, index), decays=decays(group))
            owners.setdefault(owner, []).append(number)
        ends = {f"model.visual.blocks.{index}.mlp.linear_fc2": str(index) for index in range(len(owners))}
        return self.module(children=[self.module(numbers, mark=ends.get(name, "")) for name, numbers in owners.items()])

    def outside(self, kind: Kind) -> Module:
        """Returns embedding, last norm, or head."""
        groups = [g for g in self.model.tensors if g.kind is kind and (kind is not Kind.NORM or not is_inside(g))]
        is_shared = kind is Kind.HEAD or (kind is Kind.EMBEDDING and self.model.tie_word_embeddings)
        share = self.shape.tp if is_shared else 1
        numbers = [
            self.weight(group.numel // share, self.trains(group, 0), decays=decays(group))
            for group in groups
            for _ in range(group.count)
        ]
        if not self.is_full and set(groups) & set(kept_whole(self.model, self.shape.lora)):
            numbers = [self.weight(g.numel, True, decays=True) for g in groups]  # the copy is called in its place
        return self.around(self.module(numbers, is_linear=kind is Kind.HEAD), groups[0] if groups else None)

    def tied(self, embedding: Module) -> Module:
        """Returns the head that has the weight of the embedding, and perhaps an adapter of its own."""
        (base,) = embedding.children or (embedding,)
        return self.around(self.module(base.weights, is_linear=True), self.adapted.get("lm_head.weight"))

    def around(self, base: Module, group: TensorGroup | None) -> Module:
        """Returns embedding, last norm, or head, with the adapter's modules if it has one.

        An embedding's matrices belong to no module that is called: ZeRO-3 gives them to the module around the base.
        Source: peft 0.21 tuners/lora/layer.py: Embedding; deepspeed 0.19.8 runtime/zero/parameter_offload.py:
        ZeROOrderedDict.
        """
        if group is None or group.name not in self.adapted:
            return base
        matrices = [self.weight(numel, True, decays=True) for numel in adapter_sizes(group, self.shape.lora)]
        if group.kind is Kind.EMBEDDING:
            return self.module(matrices, children=(base,))
        return self.module(children=(base, self.module(), *(self.module((n,), is_linear=True) for n in matrices)))

    def trains(self, group: TensorGroup, layer: int) -> bool:
        """Returns whether a tensor of the model itself trains."""
        return self.is_full and trains_in_full(group, layer, self.model.num_hidden_layers)

    def weight(self, numel: int, trains: bool, *, decays: bool, ep: int = 1, is_matrix: bool = False) -> int:
        """Returns the number of a new parameter."""
        self.weights.append(Weight(numel, trains, decays, ep, is_matrix))
        return len(self.weights) - 1

    def layer(self, index: int) -> Module:
        """Returns a decoder layer."""
        model = self.model
        groups = [g for g in model.tensors if is_inside(g) and is_in_layer(g, index, model.num_hidden_layers)]
        members: dict[str, list[TensorGroup]] = {}
        for group in groups:
            members.setdefault(group.name.rpartition(".")[0], []).append(group)
        leaves = {path: self.leaf(path, group, index) for path, group in members.items()}
        order = call_order(list(members), list(self.linears))
        gathers_mlp = self.shape.tiled_mlp or any(group.kind is Kind.EXPERT for group in groups)
        return self.module(children=self.nested(order, leaves, gathers_mlp=gathers_mlp))

    def leaf(self, path: str, members: list[TensorGroup], layer: int) -> Module:
        """Returns the module that owns parameters, with an adapter's modules beside it."""
        linear = path in self.linears
        numbers = []
        for group in members:
            numel = self.linears[path] if linear and group.name.endswith(".weight") else group.numel
            if self.shape.method is Method.QLORA and group.is_linear:
                numel //= QUANTIZED_PER_ELEMENT
            ep = self.shape.ep if group.kind is Kind.EXPERT else 1
            trains, is_matrix = self.trains(group, layer), len(group.shape) > 1
            numbers.append(self.weight(numel, trains, decays=decays(group), ep=ep, is_matrix=is_matrix))
        sizes = [adapter_sizes(group, self.shape.lora) for group in members if group.name in self.adapted]
        matrices = [self.weight(numel, trains=True, decays=True, is_matrix=True) for pair in sizes for numel in pair]
        if not matrices or members[0].kind is Kind.EXPERT:  # experts and their adapters are gathered together
            return self.module([*numbers, *matrices], mark=path if linear else "", is_linear=linear)
        down, up = matrices
        base = self.module(numbers, is_linear=True)
        adapter = (self.module(), self.module((down,), is_linear=True), self.module((up,), is_linear=True))
        return self.module(children=(base, *adapter), mark=path)

    def nested(self, order: list[str], leaves: dict[str, Module], *, gathers_mlp: bool) -> list[Module]:
        """Returns the children of a layer: attention and MLP hold what is named below them.

        A mixture of experts is a leaf of ZeRO-3: it is gathered whole, and so is a tiled MLP. Source: Transformers 5.23
        integrations/deepspeed.py: set_z3_leaf_modules; dstrain/train/tiled_mlp.py.
        """
        children: list[Module] = []
        while order:
            top = order[0].split(".")[0]
            inside = [path for path in order if path.split(".")[0] == top]
            order = [path for path in order if path not in inside]
            if inside == [top]:
                children.append(leaves[top])
            elif gathers_mlp and top == "mlp":
                inner = sorted(weight for path in inside for weight in _every_weight(leaves[path]))
                children.append(self.module(inner, is_block=True))
            else:
                children.append(self.module(children=list(self.with_activation(inside, leaves))))
        return children

    def with_activation(self, paths: list[str], leaves: dict[str, Module]) -> Iterable[Module]:
        """Yields modules, and the activation function after the gate: it has no parameters, but ZeRO-3 acts at it."""
        for path in paths:
            yield leaves[path]
            if path.endswith(("gate_proj", "gate_up_proj")):
                yield self.module()


def _every_weight(module: Module) -> Iterable[int]:
    yield from module.weights
    for child in module.children:
        yield from _every_weight(child)
