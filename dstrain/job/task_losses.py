"""The sections of a job file about the losses of its task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Lt

from dstrain.choices import DpoLoss
from dstrain.records import type_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Dpo:
    """The loss of `task: dpo`, by TRL's names."""

    __pydantic_config__ = type_config

    beta: Annotated[float, Gt(0)] = 0.1
    """How closely the model keeps to the reference, which is the model before training; `ipo` calls it tau."""
    loss_type: DpoLoss = DpoLoss.SIGMOID
    """`sigmoid`, `hinge`, `ipo` or `robust`."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """Share of pairs whose preference is wrong, for `robust`."""
    sft_weight: Annotated[float, Ge(0)] = 0.0
    """Weight of the chosen answer's own loss per token, which is added: `rpo_alpha` of ms-swift."""
