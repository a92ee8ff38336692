"""What a job changes in the model that it trains: an adapter, and rotary positions for longer sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from dstrain.choices import RopeType
from dstrain.job.data_source import Positive
from dstrain.records import type_config

Ratio = Annotated[float, Ge(0), Le(1)]
"""A share, 0…1."""


ALL_LINEAR = "all-linear"
"""The word for all linear layers among an adapter's `targets`, where it stands alone."""
ALL_EXPERTS = "experts"
"""The word for all stacked weights of experts among an adapter's `target_parameters`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """The adapter of `method: lora` and `method: qlora`."""

    __pydantic_config__ = type_config

    rank: Positive = 16
    """Rank of the two adapter matrices."""
    alpha: Positive = 32
    """Scale: the adapter's output is multiplied by alpha / rank."""
    dropout: Ratio = 0.0
    """Dropout before the adapter, 0…1; any value above 0 costs 3 bytes per input element of each adapted layer."""
    targets: tuple[str, ...] = ("all-linear",)
    """Modules that get an adapter, or `all-linear` (all linear layers except the head; in MoE models, attention)."""
    target_parameters: tuple[str, ...] = ()
    """Stacked weights of which each expert gets an adapter, such as `experts.down_proj`, or `experts` (all of them)."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that train whole beside the adapter and are saved with it, such as `embed_tokens` and `lm_head`."""

    def adapts_experts(self, name: str) -> bool:
        """Returns whether a stacked weight of experts, given by its name, gets an adapter for each expert.

        Source: peft 0.21 tuners/tuners_utils.py: _inject_parameters.

        >>> Lora(target_parameters=("experts",)).adapts_experts("model.layers.0.mlp.experts.gate_up_proj")
        True
        >>> Lora(target_parameters=("experts.down_proj",)).adapts_experts("mlp.experts.gate_up_proj")
        False
        """
        return any(
            f".{name}".endswith(f".{target}") or (target == ALL_EXPERTS and ".experts." in f".{name}")
            for target in self.target_parameters
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Rotary positions for more tokens than the model has, by the keys of Transformers and of model cards."""

    __pydantic_config__ = type_config

    rope_type: RopeType
    """`yarn`, `linear` or `dynamic` (NTK)."""
    factor: Annotated[float, Gt(1)]
    """Positions afterwards / original ones; choose the smallest that `seq_len` needs."""
    original_max_position_embeddings: Positive | None = None
    """Positions of the pretrained model; default: `max_position_embeddings` of its config.json."""

    def __str__(self) -> str:
        return f"{self.rope_type} × {self.factor:g}"
