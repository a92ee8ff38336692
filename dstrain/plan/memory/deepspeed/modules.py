"""Builds the modules of a model with their parameters, in call order, with a job's adapter; ZeRO gathers and reduces
them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property

from dstrain.choices import Method
from dstrain.facts.model.model_facts import Kind, ModelFacts, TensorGroup
from dstrain.job.model_changes import Lora
from dstrain.plan.memory.params import (
    adapted,
    adapted_experts,
    adapter_sizes,
    decays,
    is_in_layer,
    is_inside,
    kept_whole,
    tower_tensors,
    trains_in_full,
)


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


@dataclass(frozen=True, eq=False)
class Modules:
    """All modules of a model. No slots: cached properties need `__dict__`."""

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

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The trainable parameters by optimizer group: decayed, the rest, and experts that ranks share.

        Source: Transformers 5.23 trainer.py: get_decay_parameter_names (biases and norms are not decayed);
        dstrain/train/parts/expert_parallel.py: part_experts; deepspeed 0.19.8 runtime/zero/stage3.py.
        """
        kinds: dict[tuple[bool, bool], list[int]] = {(False, True): [], (False, False): [], (True, True): []}
        for index, weight in enumerate(self.weights):
            if weight.trains:
                kinds[weight.ep > 1, weight.decays].append(index)
        return tuple(tuple(group) for group in kinds.values() if group)

    @cached_property
    def counted(self) -> dict[Weight, int]:
        """The parameters that differ, each with how many there are of it: layers are alike."""
        return Counter(self.weights)

    @cached_property
    def kinds(self) -> list[int]:
        """The place of each parameter among those that differ."""
        places = {weight: place for place, weight in enumerate(self.counted)}
        return [places[weight] for weight in self.weights]

    def each(self, size: Callable[[Weight], int]) -> list[int]:
        """Returns a size of every parameter, computed once for those that are alike."""
        sizes = [size(weight) for weight in self.counted]
        return [sizes[kind] for kind in self.kinds]


_BEFORE_MLP = ("post_attention_layernorm", "post_self_attn_layernorm", "pre_feedforward_layernorm")
"""Norms of a layer between attention and MLP. Source: Transformers 5.23, modeling code of the families on the tape."""


def call_order(paths: list[str], linears: list[str]) -> list[str]:
    """Returns modules by their call: linear layers as the tape calls them, norms where their names say."""
    place = {name: index for index, name in enumerate(linears)}
    mlp = min((place[path] for path in paths if path in place and path.startswith("mlp")), default=len(linears))

    def key(path: str) -> tuple[float, int]:
        if path in place:
            return (place[path], 0)
        if path == "input_layernorm":
            return (-1, 0)
        if path in _BEFORE_MLP:
            return (mlp - 0.5, _BEFORE_MLP.index(path))
        last = path.rpartition(".")[2].partition("_norm")[0].partition("_layernorm")[0]
        after = [place[linear] for linear in linears if linear.rpartition(".")[2].startswith(last)]
        if "norm" in path and after:
            return (after[0] + 0.25, 0)
        return (len(linears) - (0.25 if path.startswith("mlp") else 0), 0)

    return sorted(paths, key=key)


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
            for _ in range(max(1, group.count // self.model.num_hidden_layers)):  # experts of traced models are apart
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
        integrations/deepspeed.py: set_z3_leaf_modules; dstrain/train/model.py.
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
