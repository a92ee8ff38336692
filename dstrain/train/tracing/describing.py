"""Describes a model on the meta device: sizes, parameter tensors, and identical layers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from dstrain.errors import InvalidConfig
from dstrain.facts.model.trace_records import Description, Parameter, Subject
from dstrain.facts.model.traits import Part, part_of
from dstrain.train.tracing import images
from dstrain.train.tracing.anatomy import Anatomy, dissect
from dstrain.train.tracing.building import build, load_config, per_layer_lists

_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "v_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "moe_intermediate_size",
    "num_experts_per_tok",
)
"""Names under which Transformers' configs have sizes, or map their own names to."""

_VISION_SIZES = {
    "hidden_size": ("hidden_size",),
    "num_layers": ("depth", "num_hidden_layers"),
    "num_heads": ("num_heads", "num_attention_heads"),
    "intermediate_size": ("intermediate_size",),
    "patch_size": ("patch_size",),
    "spatial_merge_size": ("spatial_merge_size",),
}
"""Names of the sizes of Vision in the configs of towers."""


_UNSCORED = frozenset({"linear_attention", "conv", "moe", "mlp"})
"""Kinds of layers without scores of pairs of positions. Source: Transformers 5.23 configuration_utils.py:
ALLOWED_ATTN_LAYER_TYPES."""

_RECURRENT = frozenset({"linear_attention", "hybrid", "hybrid_sliding"})
"""Kinds of layers with a recurrent state."""

_LINEAR_STATES = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    ("linear_num_heads", "linear_head_dim", "linear_head_dim"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
)
"""Names of the heads, and of the two widths of their states: gated DeltaNet, Kimi Delta Attention, Mamba 2."""


def describe(subject: Subject) -> Description:
    """Returns the description of the whole model."""
    config = load_config(subject)
    model = build(config, subject)
    anatomy = dissect(model)
    text = config.get_text_config()
    return Description(
        model_type=str(subject.config.get("model_type", config.model_type)),
        sizes=_whole_numbers(text, {name: (name,) for name in _SIZES}),
        vision_sizes=_vision_sizes(model),
        rotary_ratio=_rotary_ratio(text),
        tie_word_embeddings=_is_tied(anatomy),
        dtype=_dtype(config, text),
        layers_root=anatomy.layers_root,
        layer_kinds=_kinds(anatomy, text),
        num_scored_layers=_num_scored_layers(text),
        linear_state_numel=_linear_state_numel(text),
        has_sdpa=bool(getattr(model, "_supports_sdpa", False)),
        has_flash=_has_flash(model),
        moe_block=_moe_block(anatomy),
        parameters=tuple(_parameters(model, anatomy)),
    )


def _has_flash(model: Any) -> bool:
    """Returns whether every part of a model takes FlashAttention, and no layer has heads of more than 256 elements."""
    widths = [width for part in model.modules() if isinstance(width := getattr(part, "head_dim", 0), int)]
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return all(part._supports_flash_attn for part in parts) and max(widths) <= 256


def _whole_numbers(config: Any, names: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """Returns the value of a config under the first of several names that has a whole number."""
    numbers = {}
    for name, candidates in names.items():
        value = next((value for key in candidates if (value := getattr(config, key, None)) is not None), None)
        if type(value) is int:
            numbers[name] = value
    return numbers


def _vision_sizes(model: Any) -> dict[str, int]:
    """Returns the sizes of a tower as far as they are known, its patches of a crop and of a token among them."""
    tower = getattr(model.config, "vision_config", None)
    if tower is None:
        return {}
    sizes = _whole_numbers(tower, _VISION_SIZES)
    full = getattr(tower, "fullatt_block_indexes", None)
    if full is not None:
        sizes["num_full_layers"] = len(full)
    try:
        return sizes | images.sizes(model)
    except InvalidConfig:  # its images cannot be traced
        return sizes


def _dtype(config: Any, text: Any) -> str:
    """Returns the dtype of the weights; packed ones, as in MXFP4, become bf16."""
    packed = "bfloat16" if getattr(config, "quantization_config", None) else "float32"
    return str(getattr(text, "dtype", None) or getattr(config, "dtype", None) or packed).removeprefix("torch.")


def _rotary_ratio(text: Any) -> float:
    """Returns the share of a head that is rotated; Transformers 5 keeps it in `rope_parameters`."""
    rope = getattr(text, "rope_parameters", None)
    share = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    return float(share or getattr(text, "partial_rotary_factor", None) or 1.0)


def _num_scored_layers(text: Any) -> int | None:
    """Returns the layers with scores of pairs of positions, or None if all have them or the config has no kinds."""
    kinds = getattr(text, "layer_types", None) or ()
    count = sum(kind not in _UNSCORED for kind in kinds)
    return count if count < len(kinds) else None


def _linear_state_numel(text: Any) -> int:
    """Returns the elements of all recurrent states; 0 if the config names them in a way that is not known here."""
    count = sum(kind in _RECURRENT for kind in getattr(text, "layer_types", None) or ())
    for names in _LINEAR_STATES:
        sizes = [size for name in names if isinstance(size := getattr(text, name, None), int)]
        if len(sizes) == len(names):
            return count * prod(sizes)
    return 0


def _is_tied(anatomy: Anatomy) -> bool:
    head = getattr(anatomy.head, "weight", None)
    return head is not None and head is getattr(anatomy.embedding, "weight", None)


def _parameters(model: Any, anatomy: Anatomy) -> list[Parameter]:
    owners = dict(model.named_modules())
    parameters = []
    for name, tensor in model.named_parameters():
        owner = owners[name.rpartition(".")[0]]
        inside = name.removeprefix(f"{anatomy.layers_root}.")
        layer = int(inside.split(".")[0]) if inside != name else None
        role = _role(name, owner, anatomy)
        is_linear = isinstance(owner, nn.Linear) and tensor.dim() == 2 and role != "embedding"
        parameters.append(Parameter(name=name, shape=tuple(tensor.shape), layer=layer, role=role, is_linear=is_linear))
    return parameters


def _role(name: str, owner: Any, anatomy: Anatomy) -> str:
    if anatomy.vision is not None and part_of(name) is not Part.LANGUAGE_MODEL:
        return "vision"  # with the aligner, which may stand beside the tower
    if owner is anatomy.embedding or isinstance(owner, nn.Embedding):
        return "embedding"
    if owner is anatomy.head:
        return "head"
    return "norm" if "norm" in type(owner).__name__.lower() else "other"


def _kinds(anatomy: Anatomy, text: Any) -> tuple[int, ...]:
    """Returns a number for each layer: the same for layers of the same modules, shapes and entries in the config."""
    lists = [value for value in per_layer_lists(text).values() if not _are_positions(value)]
    numbers: dict[str, int] = {}
    kinds = []
    for index, layer in enumerate(anatomy.layers):
        modules = [(name, type(module).__name__) for name, module in layer.named_modules()]
        shapes = [(name, tuple(tensor.shape)) for name, tensor in layer.named_parameters()]
        looks = repr((modules, shapes, [value[index] for value in lists]))
        kinds.append(numbers.setdefault(looks, len(numbers)))
    return tuple(kinds)


def _are_positions(values: list[Any]) -> bool:
    """Returns whether a list names layers by number, so that its entries differ without any difference."""
    return all(type(value) is int for value in values) and all(a < b for a, b in pairwise(values))


def _moe_block(anatomy: Anatomy) -> str | None:
    """Returns the class of the module that has experts, as Transformers 5 stores them, below it."""
    for layer in anatomy.layers:
        for module in layer.modules():
            if "experts" in dict(module.named_children()):
                return type(module).__name__
    return None
