"""The tensors of a model that get an adapter, and those that train whole beside it."""

from __future__ import annotations

from collections.abc import Sequence

from dstrain.facts.model.model_facts import Kind, ModelFacts, TensorGroup
from dstrain.job.model_changes import ALL_LINEAR, Lora


def adapted(model: ModelFacts, lora: Lora) -> list[TensorGroup]:
    """Returns the linears and embeddings that get an adapter: by name, or every linear in the decoder layers.

    In a mixture of experts, `all-linear` means attention's linears, as dstrain tells PEFT, which would add the experts.
    A head that is tied to the embedding has no tensor, but an adapter of its own. What trains whole has no adapter.
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
