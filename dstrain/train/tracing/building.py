"""Builds models on the meta device with Transformers and PEFT, describes them, and makes their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from dstrain.choices import Attention, LossKernel, Method, Precision
from dstrain.errors import InvalidConfig, first_line
from dstrain.facts.model.traces import Description, Parameter, Question, Subject
from dstrain.facts.model.traits import Part, part_of
from dstrain.train.adapters import freeze_parts, with_adapter
from dstrain.train.arguments import recompute
from dstrain.train.checkpoints.saved_model import DTYPES, family_of
from dstrain.train.loss import replace_loss
from dstrain.train.tokenizer import OWN_CODE
from dstrain.train.tracing import images
from dstrain.train.tracing.anatomy import Anatomy, dissect


def load_config(subject: Subject, num_hidden_layers: int | None = None) -> Any:
    """Returns the config as Transformers reads it, shortened to its first layers if a number is given.

    A list with one entry a layer is shortened too, so that the layers left are those that the whole model begins with.
    """
    model_type = str(subject.config.get("model_type"))
    if model_type not in CONFIG_MAPPING and (subject.source is None or not subject.trust_remote_code):
        raise InvalidConfig(f'Transformers has no code for model_type "{model_type}"', hint=OWN_CODE)
    try:
        if model_type in CONFIG_MAPPING:
            config = CONFIG_MAPPING[model_type].from_dict(dict(subject.config))
        else:
            config = AutoConfig.from_pretrained(str(subject.source), trust_remote_code=True)
    except Exception as error:  # code of other people, which may raise anything
        raise InvalidConfig(f"Transformers cannot read the config: {first_line(error)}") from error
    text = config.get_text_config()
    if getattr(
        text, "per_layer_config", None
    ):  # Gemma 4's heads are wider in some layers: sizes are those of the others
        text.allow_global_per_layer_attribute_access = True
    if num_hidden_layers is not None:
        shorten(config, num_hidden_layers)
    return config


def shorten(config: Any, num_hidden_layers: int) -> None:
    """Leaves the first layers of a config."""
    text = config.get_text_config()
    for name, value in per_layer_lists(text).items():
        setattr(text, name, value[:num_hidden_layers])
    text.num_hidden_layers = num_hidden_layers


def per_layer_lists(text: Any) -> dict[str, list[Any]]:
    """Returns the lists of a config that have one entry a layer; token ids can be as many only by chance."""
    return {
        name: list(value)
        for name, value in sorted(vars(text).items())
        if isinstance(value, (list, tuple)) and len(value) == text.num_hidden_layers and "token" not in name
    }


def build(config: Any, subject: Subject, precision: Precision = Precision.BF16) -> Any:
    """Returns the model that the config describes, on the meta device, as `train.model` would load it."""
    family = family_of(config)
    options: dict[str, Any] = {"dtype": DTYPES[precision], "attn_implementation": "eager"}
    try:
        with torch.device("meta"), no_init_weights():
            options |= {"trust_remote_code": subject.trust_remote_code}
            model = family.from_config(config, **options)
        model.tie_weights()
    except Exception as error:  # code of other people, which may raise anything
        raise InvalidConfig(f"Transformers cannot build the model: {first_line(error)}") from error
    return model


def prepare(question: Question) -> Any:
    """Returns the model of a question, ready for a training pass: attention, adapter, checkpointing."""
    subject = question.subject
    config = load_config(subject, question.num_hidden_layers)
    model = build(config, subject, question.precision)
    _set_attention(model, question.attn)
    for each in (model.config, model.config.get_text_config()):
        each.use_cache = False
    freeze_parts(model, question.frozen_parts)
    if question.method is Method.LORA:
        dtype = DTYPES[question.precision]
        with torch.device("meta"):
            model = with_adapter(
                model, question.lora, grad_ckpt=question.grad_ckpt, dtype=dtype, low_cpu_mem_usage=True
            )
    if question.grad_ckpt:
        _recompute(model, question)
    model.train()
    return model


def with_loss(model: Any, question: Question) -> LossKernel:
    """Makes the model compute the loss of a question, or the next one that the model has; returns which."""
    losses = (LossKernel.FUSED, LossKernel.CHUNKED)
    for loss in losses[losses.index(question.loss) :] if question.loss in losses else ():
        try:
            replace_loss(model, loss)
        except InvalidConfig:
            continue
        return loss
    return LossKernel.FULL


def _set_attention(model: Any, attn: Attention) -> None:
    """Sets the implementation in every part of the model; its code reads the name when it runs.

    It cannot be given to `from_config`, which looks for the flash_attn package. A family without sdpa gets eager.
    """
    if attn is Attention.SDPA and not getattr(model, "_supports_sdpa", False):
        attn = Attention.EAGER
    if attn is Attention.FLASH_ATTENTION_2 and not getattr(model, "_supports_flash_attn", False):
        name = type(model).__name__
        raise InvalidConfig(f"Transformers' {name} does not support {attn.value}", hint="Use attn eager.")
    configs = [model.config, *(m.config for m in model.modules() if hasattr(m, "config"))]
    for config in {id(config): config for config in configs}.values():
        if hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = attn.value


def _recompute(model: Any, question: Question) -> None:
    """Switches checkpointing on as the Trainer does."""
    try:
        recompute(model, {"use_reentrant": question.is_reentrant})
    except ValueError as error:
        raise InvalidConfig(f"Transformers cannot recompute this model: {first_line(error)}") from error


def make_inputs(question: Question, model: Any) -> dict[str, Any]:
    """Returns the arguments of the model's forward pass. Call it under the tracker, so that they are counted.

    A mask of ones is left out, as Transformers drops it before the first layer.
    """
    shape = (question.micro_batch, question.seq_len)
    inputs: dict[str, Any] = {
        "input_ids": images.whole_numbers(shape),
        "labels": images.whole_numbers(shape),
    }
    if question.is_packed:
        inputs["position_ids"] = images.whole_numbers(shape)
        if question.attn in (Attention.FLASH_ATTENTION_2, Attention.SDPA):
            inputs |= _borders(question)
    elif question.has_padding:
        inputs["attention_mask"] = images.whole_numbers(shape)
    if question.image_patches:
        inputs |= images.inputs(question, model)
    return inputs


def _borders(question: Question) -> dict[str, Any]:
    """Returns the borders of packed samples as `train.data.collate` gives them to flash attention; one sample a row."""
    borders = torch.empty(question.micro_batch + 1, dtype=torch.int32, device="meta")
    length = question.seq_len
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": length, "max_length_k": length}


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
