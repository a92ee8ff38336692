"""Counts trainable parameters, and the tensors that hold them: of the model and of its adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

from dstrain.choices import Method
from dstrain.facts.model.model_facts import Kind, ModelFacts, TensorGroup
from dstrain.job.model_changes import ALL_LINEAR, Lora
from dstrain.plan.configuration import Configuration, Parallel
from dstrain.plan.memory.optimizer_states import muon_flops


def adapted(model: ModelFacts, lora: Lora) -> list[TensorGroup]:
    """Returns the linears and embeddings that get an adapter: by name, or every linear in the decoder layers.

    In a mixture of experts, `all-linear` means attention's linears, as dstrain tells PEFT, which would add the experts.
    A head that is tied to the embedding has no tensor, but an adapter of its own. Tensors that train whole have none.
    Source: peft 0.21 tuners_utils.py: _maybe_include_all_linear_layers (the output layer is left out), inject_adapter.
    """
    linears = [group for group in model.tensors if group.is_linear and group.kind is not Kind.VISION]
    if lora.targets == (ALL_LINEAR,):
        kinds = (Kind.ATTENTION,) if model.moe is not None else (Kind.ATTENTION, Kind.MLP)
        return [group for group in linears if group.kind in kinds]
    whole = kept_whole(model, lora)
    named = [*linears, *(group for group in model.tensors if group.kind is Kind.EMBEDDING)]
    if model.tie_word_embeddings and not whole:
        shape = (model.vocab_size, model.hidden_size)
        named.append(TensorGroup(name="lm_head.weight", kind=Kind.HEAD, shape=shape, count=1, is_linear=True))
    return [group for group in named if group not in whole and is_target(group.name.removesuffix(".weight"), lora)]


def named_targets(model: ModelFacts, targets: Sequence[str]) -> tuple[str, ...]:
    """Returns targets with the names that `all-linear` means in its place: PEFT takes it alone, not beside others.

    Names are the last words of modules, or all words below the layer if other modules share the last one.
    """
    meant = adapted(model, Lora())
    paths = [group.name.removesuffix(".weight") for group in meant]
    short = tuple(dict.fromkeys(path.rpartition(".")[2] for path in paths))
    names = short if adapted(model, Lora(targets=short)) == meant else tuple(paths)
    return tuple(dict.fromkeys(name for target in targets for name in (names if target == ALL_LINEAR else (target,))))


def adapted_experts(model: ModelFacts, lora: Lora) -> list[TensorGroup]:
    """Returns the stacked weights of experts of which each expert gets an adapter."""
    return [group for group in stacked_experts(model) if lora.adapts_experts(group.name)]


def stacked_experts(model: ModelFacts) -> list[TensorGroup]:
    """Returns the weights that hold the matrices of all experts of a layer: (experts, out, in)."""
    return [group for group in model.tensors if group.kind is Kind.EXPERT and len(group.shape) == 3]


def adapter_sizes(group: TensorGroup, lora: Lora) -> tuple[int, int]:
    """Returns the elements of the two matrices of an adapter, of a linear layer, an embedding or all experts of a
    layer: the inputs' and the outputs'. The inputs of an embedding are the vocabulary.

    Source: peft 0.21 tuners/lora/layer.py: ParamWrapper.update_layer, Embedding.update_layer.
    """
    *experts, outputs, inputs = reversed(group.shape) if group.kind is Kind.EMBEDDING else group.shape
    rank = lora.rank * (experts[0] if experts else 1)
    return rank * inputs, rank * outputs


def is_target(name: str, lora: Lora) -> bool:
    """Returns whether a target of an adapter is the end of a module's name: `q_proj` and `self_attn.q_proj` are."""
    return any(f".{name}".endswith(f".{target}") for target in lora.targets)


def kept_whole(model: ModelFacts, lora: Lora) -> list[TensorGroup]:
    """Returns the embedding and the head if they train whole beside an adapter (`modules_to_save`), as copies.

    A tied head is the embedding, and PEFT ties their copies. Source: peft 0.21 utils/other.py: _set_trainable;
    LoraConfig.ensure_weight_tying.
    """
    groups = [group for group in model.tensors if group.kind in (Kind.EMBEDDING, Kind.HEAD)]
    names = {group.name: [group.name.removesuffix(".weight")] for group in groups}
    if model.tie_word_embeddings:
        for group in groups:
            names[group.name].append("lm_head")
    return [group for group in groups if any(n.endswith(lora.modules_to_save) for n in names[group.name])]


def linear_names(model: ModelFacts) -> list[str]:
    """Returns the names that an adapter's targets may have, sorted."""
    groups = (g for g in model.tensors if g.kind is Kind.EMBEDDING or (g.is_linear and g.kind is not Kind.VISION))
    return sorted({group.name.removesuffix(".weight").split(".")[-1] for group in groups})


def lora_params(model: ModelFacts, lora: Lora) -> int:
    """Returns the parameters of the adapters: rank × (inputs + outputs) for every adapted linear, embedding and expert.

    Source: LoRA (arXiv 2106.09685), section 4.1.
    """
    groups = (*adapted(model, lora), *adapted_experts(model, lora))
    return sum(sum(adapter_sizes(group, lora)) * group.count for group in groups)


NF4_SCALE_BYTES_PER_PARAM = 1 / 64 + 4 / (64 * 256)
"""Scales of NF4 weights, which are no parameters: each rank of ZeRO-3 has them whole, and none are gathered."""
NF4_BYTES_PER_PARAM = 0.5 + NF4_SCALE_BYTES_PER_PARAM
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

    @property
    def everywhere(self) -> int:
        """Trainable elements that all data-parallel ranks share out."""
        return self.trainable + self.elsewhere


def decays(group: TensorGroup) -> bool:
    """Returns whether the optimizer decays a tensor: not biases and norms."""
    is_norm = group.kind is Kind.NORM or (group.kind is Kind.VISION and len(group.shape) == 1)
    return not is_norm and not group.name.endswith("bias")


def tower_tensors(model: ModelFacts) -> list[tuple[TensorGroup, int]]:
    """Returns the tensors of the vision tower in the model's order, each with its number in its group: tensors with a
    star in their name block by block.
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
    return replace(counts, elsewhere=trained(model, method, lora).trainable - counts.trainable)


@cache
def trained(model: ModelFacts, method: Method, lora: Lora) -> Trained:
    """Returns the trained and the frozen parameters; full training excludes what a job freezes."""
    if method is Method.FULL:
        groups = [group for group in model.tensors if group.num_trained]
        trainable = sum(group.num_trained for group in groups)
        largest = max((group.numel for group in groups), default=0)
        # Muon steps the matrices inside the layers alone
        matrices = [group for group in groups if is_inside(group) and len(group.shape) > 1]
        return Trained(
            trainable=trainable,
            frozen=model.num_params - trainable,
            quantized=0,
            largest_trainable=largest,
            matrices=sum(group.num_trained for group in matrices),
            muon_flops=sum(muon_flops(*group.shape[-2:]) * group.num_trained // group.numel for group in matrices),
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
