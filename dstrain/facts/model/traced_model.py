"""Derives the facts of a model of an unknown family from the modules that Transformers builds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import MISSING, fields

from dstrain.errors import InvalidConfig
from dstrain.facts.model.model_facts import Kind, ModelFacts, Moe, TensorGroup, Vision
from dstrain.facts.model.trace_records import Description, Parameter
from dstrain.facts.model.vision_towers import frozen

NO_LIMIT = 2**31 - 1
"""`max_position_embeddings` of a model whose config has no such limit."""

_DTYPES = ("bfloat16", "float16", "float32")
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
_ATTENTION = re.compile(r"attn|attention|mixer")


def from_description(description: Description, *, name: str, source: str) -> ModelFacts:
    """Returns the facts in a description.

    Heads, widths and the vocabulary come from the usual keys of the config; parameters are exact. A mixture of experts
    is recognized if Transformers keeps its experts in 3-D parameters and the config has `num_experts_per_tok`. Raises
    InvalidConfig if the config lacks the basic sizes.
    """
    sizes = description.sizes
    missing = [key for key in ("hidden_size", "num_hidden_layers") if key not in sizes]
    if missing:
        raise InvalidConfig("\n".join(f'{name}: "{key}" is missing' for key in missing))
    groups = _groups(description)
    heads = sizes.get("num_attention_heads", 1)
    width, value_width = _head_widths(description, heads)
    return ModelFacts(
        name=name,
        source=source,
        model_type=description.model_type,
        hidden_size=sizes["hidden_size"],
        num_hidden_layers=sizes["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=sizes.get("num_key_value_heads", heads),
        head_dim=width,
        v_head_dim=value_width,
        rotary_dim=sizes.get("qk_rope_head_dim") or round(width * description.rotary_ratio),
        intermediate_size=sizes.get("intermediate_size") or _widest_mlp(groups, sizes["hidden_size"]),
        vocab_size=sizes.get("vocab_size") or max(group.shape[0] for group in groups if group.kind is Kind.EMBEDDING),
        max_position_embeddings=sizes.get("max_position_embeddings", NO_LIMIT),
        tie_word_embeddings=description.tie_word_embeddings,
        has_qk_norm=any(re.search(r"\bq_?(layer)?norm\.weight$", group.name) for group in groups),
        dtype=description.dtype if description.dtype in _DTYPES else "float32",
        moe=_moe(description, groups),
        vision=_vision(description),
        tensors=groups,
        layers_root=description.layers_root,
        num_scored_layers=description.num_scored_layers,
        linear_state_numel=description.linear_state_numel,
        has_sdpa=description.has_sdpa,
        has_flash=description.has_flash,
    )


def _head_widths(description: Description, heads: int) -> tuple[int, int]:
    """Returns the widths of a query head and of a value head; latent attention has its own keys for them."""
    sizes = description.sizes
    width = sizes.get("head_dim") or sizes["hidden_size"] // heads
    latent = [sizes.get(key, 0) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    return (latent[0] + latent[1], latent[2]) if all(latent) else (width, width)


def _groups(description: Description) -> tuple[TensorGroup, ...]:
    """Returns the parameters by name, kind and shape; indices in names become stars."""
    counts: dict[tuple[str, Kind, tuple[int, ...], bool], int] = {}
    for parameter in description.parameters:
        kind = _kind(parameter)
        name = parameter.name
        if parameter.layer is not None:
            name = name.removeprefix(f"{description.layers_root}.{parameter.layer}.")
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        key = (name, kind, parameter.shape, parameter.is_linear)
        counts[key] = counts.get(key, 0) + 1
    groups = (
        TensorGroup(name=name, kind=kind, shape=shape, count=count, is_linear=is_linear)
        for (name, kind, shape, is_linear), count in counts.items()
    )
    return tuple(frozen(group) if group.kind is Kind.VISION else group for group in groups)


def _kind(parameter: Parameter) -> Kind:
    """Returns the kind of a parameter, by its role and the parts of its name."""
    by_role = {"embedding": Kind.EMBEDDING, "head": Kind.HEAD, "norm": Kind.NORM, "vision": Kind.VISION}
    if parameter.role in by_role:
        return by_role[parameter.role]
    parts = parameter.name.split(".")
    if "experts" in parts:
        return Kind.EXPERT
    if _ROUTERS & set(parts[:-1]):
        return Kind.ROUTER
    return Kind.ATTENTION if any(_ATTENTION.search(part) for part in parts) else Kind.MLP


def _widest_mlp(groups: Sequence[TensorGroup], hidden_size: int) -> int:
    """Returns the inner width of the MLP from its matrices, by default the hidden size."""
    return max((max(group.shape) for group in groups if group.kind is Kind.MLP), default=hidden_size)


def _vision(description: Description) -> Vision | None:
    sizes = {"spatial_merge_size": 1, **description.vision_sizes}
    needed = {field.name for field in fields(Vision) if field.default is MISSING}
    return Vision(**sizes) if needed <= set(sizes) else None


def _moe(description: Description, groups: Sequence[TensorGroup]) -> Moe | None:
    per_token = description.sizes.get("num_experts_per_tok")
    down = next((group for group in groups if group.kind is Kind.EXPERT and group.name.endswith("down_proj")), None)
    if per_token is None or description.moe_block is None or down is None or len(down.shape) != 3:
        return None
    num_experts, *sides = down.shape
    hidden = description.sizes["hidden_size"]
    width = description.sizes.get("moe_intermediate_size") or next((side for side in sides if side != hidden), hidden)
    shared = [group for group in groups if "shared_expert" in group.name and group.name.endswith("up_proj.weight")]
    return Moe(
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=width,
        shared_intermediate_size=sum(group.shape[0] for group in shared),
        num_moe_layers=down.count,
        block_class=description.moe_block,
    )
