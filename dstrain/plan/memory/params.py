"""Counts trainable parameters, and the tensors that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

from dstrain.choices import Method
from dstrain.facts.model.model_facts import Kind, ModelFacts, TensorGroup
from dstrain.job.model_changes import Lora
from dstrain.plan.configuration import Configuration, Parallel
from dstrain.plan.memory.adapters import adapted, adapted_experts, adapter_sizes, kept_whole, lora_params
from dstrain.plan.memory.optimizer_states import muon_flops

NF4_BYTES_PER_PARAM = 0.5 + 1 / 64 + 4 / (64 * 256)
"""NF4 with double quantisation: 4 bits, one 8-bit scale for 64 weights, one fp32 scale for 256 of those.
Source: QLoRA (arXiv 2305.14314), section 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The parameters of a run, in elements, split by what happens to them."""

    trainable: int
    """Elements with gradients and optimizer states, on one rank before ZeRO shares them out."""
    frozen: int
    """Elements kept in the compute dtype, without gradients."""
    quantized: int
    """Frozen elements of linears kept in 4 bits."""
    largest_trainable: int
    """Elements of the largest trainable tensor, whose gradient exists whole for a moment."""
    matrices: int = 0
    """Trainable elements in matrices of layers, which Muon steps."""
    muon_flops: int = 0
    """FLOPs of one step in which Muon orthogonalises them; 0 for an adapter, whose matrices are thin."""
    elsewhere: int = 0
    """Trainable elements of the experts that other ranks of an expert-parallel group have."""
    flat_groups: tuple[tuple[int, ...], ...] = ()
    """Elements of every trainable tensor, in the order in which ZeRO-1 and 2 lay out each optimizer group; empty where
    the order is not known."""
    expert_group: tuple[int, ...] = ()
    """The same of experts that differ among `ep` neighbouring ranks, which are a group of their own."""
    ep: int = 1
    """Ranks of an expert-parallel group."""

    @property
    def everywhere(self) -> int:
        """Trainable elements that all data-parallel ranks share out."""
        return self.trainable + self.elsewhere

    def gradient_shares(self, num_ranks: int) -> list[int]:
        """Returns the elements of gradient that each rank keeps for the step under ZeRO-1 and 2.

        Each group is cut into equal partitions; a tensor that lies across a cut is kept whole on both sides, because a
        partition refers to slices of whole gradients. Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py:
        get_flat_partition(return_tensor_list=True).

        >>> groups = ((2, 6, 2),)
        >>> Trained(trainable=10, frozen=0, quantized=0, largest_trainable=6, flat_groups=groups).gradient_shares(2)
        [8, 8]
        """
        if not self.flat_groups:
            return [-(-self.everywhere // num_ranks)] * num_ranks
        shares = _whole_shares(self.flat_groups, num_ranks)
        if not self.expert_group:
            return shares
        of_experts = _whole_shares((self.expert_group,), max(1, num_ranks // self.ep))
        return [share + of_experts[min(rank // self.ep, len(of_experts) - 1)] for rank, share in enumerate(shares)]


@cache
def _whole_shares(flat_groups: tuple[tuple[int, ...], ...], num_ranks: int) -> list[int]:
    shares = [0] * num_ranks
    for group in flat_groups:
        partition = -(-sum(group) // (2 * num_ranks)) * 2
        start = 0
        for numel in group:
            for rank in range(start // partition, (start + numel - 1) // partition + 1):
                shares[rank] += numel
            start += numel
    return shares


def _flat_groups(model: ModelFacts, *, ep: int = 1) -> tuple[tuple[int, ...], ...]:
    """Returns the trainable tensors of full training by optimizer group, in the model's order: decayed, then the rest,
    then experts, if ranks share them.

    Source: Transformers 5.23 trainer.py: get_decay_parameter_names (biases and norms are not decayed);
    dstrain/train/expert_parallel.py: part_experts.
    """
    layers = model.num_hidden_layers
    before = [(g, 0) for g in model.tensors if g.kind is Kind.EMBEDDING]
    inside = [g for g in model.tensors if is_inside(g)]
    after = [g for g in model.tensors if g.kind is Kind.HEAD or (g.kind is Kind.NORM and not is_inside(g))]
    decayed: list[int] = []
    rest: list[int] = []
    experts: list[int] = []
    middle = [(g, layer) for layer in range(layers) for g in inside if is_in_layer(g, layer, layers)]
    for group, layer in [*tower_tensors(model), *before, *middle, *((g, 0) for g in after)]:
        if trains_in_full(group, layer, layers):
            is_shared = ep > 1 and group.kind is Kind.EXPERT
            (experts if is_shared else decayed if decays(group) else rest).append(group.numel)
    return tuple(decayed), tuple(rest), tuple(experts)


def decays(group: TensorGroup) -> bool:
    """Returns whether the optimizer decays a tensor: not biases and norms."""
    is_norm = group.kind is Kind.NORM or (group.kind is Kind.VISION and len(group.shape) == 1)
    return not is_norm and not group.name.endswith("bias")


def tower_tensors(model: ModelFacts) -> list[tuple[TensorGroup, int]]:
    """Returns the tensors of the vision tower in the model's order, each with its number in its group: block by block
    what has a star in its name.
    """
    tower = [group for group in model.tensors if group.kind is Kind.VISION]
    ordered: list[tuple[TensorGroup, int]] = []
    for _, members in groupby(tower, lambda group: group.name.partition("*")[0]):
        repeated = list(members)
        count = repeated[0].count if "*" in repeated[0].name else 1
        ordered += [(group, index) for index in range(count) for group in repeated]
    return ordered


def is_inside(group: TensorGroup) -> bool:
    """Returns whether a tensor is one of a decoder layer's; those outside the layers have their full name."""
    outside = (Kind.EMBEDDING, Kind.HEAD, Kind.VISION)
    return group.kind not in outside and not group.name.startswith("model.")


def layers_of(group: TensorGroup, num_layers: int) -> range:
    """Returns the layers that have a tensor: the first ones are dense where only some have experts."""
    is_late = group.kind in (Kind.EXPERT, Kind.ROUTER) or "shared_expert" in group.name
    return range(num_layers - group.count, num_layers) if is_late else range(group.count)


def is_in_layer(group: TensorGroup, layer: int, num_layers: int) -> bool:
    """Returns whether a layer has the tensor."""
    return layer in layers_of(group, num_layers)


def trains_in_full(group: TensorGroup, layer: int, num_layers: int) -> bool:
    """Returns whether the tensor of a layer trains if all of the model does; `layer` is 0 outside the layers."""
    return not group.frozen or layers_of(group, num_layers).index(layer) not in group.frozen


def shard(model: ModelFacts, parallel: Parallel) -> ModelFacts:
    """Returns the part of a model that one rank of a tensor- or expert-parallel group holds.

    AutoTP cuts linears, the head, and an embedding tied to that; AutoEP deals out the experts, with gate and up apart.
    Source: deepspeed 0.19.8 module_inject/tp_plan_converter.py: convert; moe/ep_experts.py: GroupedExperts.
    """
    if parallel.ep > 1:
        return _expert_shard(model, parallel.ep)
    return model if parallel.tp == 1 else _shard(model, parallel.tp)


@cache
def _expert_shard(model: ModelFacts, ep: int) -> ModelFacts:
    def cut(group: TensorGroup) -> Iterator[TensorGroup]:
        if group.kind is not Kind.EXPERT or len(group.shape) != 3:
            yield group
            return
        experts, outputs, inputs = group.shape
        path = group.name.rpartition(".")[0]
        is_down = group.name.endswith("down_proj")
        for name in ("w2",) if is_down else ("w1", "w3"):
            shape = (experts // ep, outputs if is_down else outputs // 2, inputs)
            yield replace(group, name=f"{path}.{name}", shape=shape)

    return replace(model, tensors=tuple(part for group in model.tensors for part in cut(group)))


@cache
def _shard(model: ModelFacts, tp: int) -> ModelFacts:
    def cut(group: TensorGroup) -> TensorGroup:
        tied = group.kind is Kind.EMBEDDING and model.tie_word_embeddings
        if group.kind is Kind.VISION or not (group.is_linear or group.kind is Kind.HEAD or tied):
            return group
        return replace(group, shape=(group.shape[0] // tp, *group.shape[1:]))

    return replace(model, tensors=tuple(map(cut, model.tensors)))


def trained_on_rank(model: ModelFacts, configuration: Configuration) -> Trained:
    """Returns the trained and the frozen parameters of one tensor- or expert-parallel rank."""
    method, lora, parallel = configuration.model.method, configuration.model.lora, configuration.parallel
    sharded = shard(model, parallel)
    counts = trained(sharded, method, lora)
    if parallel.ep == 1:
        return counts
    elsewhere = trained(model, method, lora).trainable - counts.trainable
    *groups, experts = _flat_groups(sharded, ep=parallel.ep) if method is Method.FULL else ((),)
    return replace(counts, elsewhere=elsewhere, flat_groups=tuple(groups), expert_group=experts, ep=parallel.ep)


@cache
def trained(model: ModelFacts, method: Method, lora: Lora) -> Trained:
    """Returns the trained and the frozen parameters; full training excludes what a job freezes."""
    if method is Method.FULL:
        groups = [group for group in model.tensors if group.num_trained]
        trainable = sum(group.num_trained for group in groups)
        largest = max((group.numel for group in groups), default=0)
        matrices = [group for group in groups if is_inside(group) and len(group.shape) > 1]
        return Trained(
            trainable=trainable,
            frozen=model.num_params - trainable,
            quantized=0,
            largest_trainable=largest,
            matrices=sum(group.num_trained for group in matrices),
            muon_flops=sum(muon_flops(*group.shape[-2:]) * group.num_trained // group.numel for group in matrices),
            flat_groups=_flat_groups(model)[:2],
        )
    copies = [group.numel for group in kept_whole(model, lora)]
    adapters = lora_params(model, lora) + sum(copies)
    wrapped = (*adapted(model, lora), *adapted_experts(model, lora))
    largest = max((*copies, *(max(adapter_sizes(group, lora)) for group in wrapped)), default=0)
    quantized = 0
    if method is Method.QLORA:
        quantized = sum(group.numel * group.count for group in model.tensors if group.is_quantizable)
    return Trained(
        trainable=adapters,
        frozen=model.num_params - quantized,
        quantized=quantized,
        largest_trainable=largest,
        matrices=lora_params(model, lora),
    )
