"""Changes of a job to its model: adapters, also saved ones, and positions for longer sequences."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

from dstrain.choices import RopeType
from dstrain.errors import InvalidConfig
from dstrain.job.data_source import Positive
from dstrain.records import type_config

Ratio = Annotated[float, Ge(0), Le(1)]
"""A share, 0…1."""


ALL_LINEAR = "all-linear"
"""The word for all linear layers in an adapter's `targets`, if it stands alone."""
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
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Dropout before the adapter, below 1; any value above 0 costs 3 bytes per input element of each adapted layer."""
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


if TYPE_CHECKING:
    from dstrain.job.model_changes import Lora

CONFIG = "adapter_config.json"
"""The file in which PEFT describes an adapter."""
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    **dict.fromkeys(("use_dora", "use_rslora", "use_qalora", "lora_bias", "fan_in_fan_out"), (None, False)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), (None, {})),
    **dict.fromkeys(
        (
            *("layers_to_transform", "layer_replication", "trainable_token_indices"),
            *("alora_invocation_tokens", "eva_config", "corda_config", "megatron_config"),
        ),
        (None, []),
    ),
}
"""Keys of PEFT's LoraConfig, and the values with which its adapter is one of a job."""


def read_adapter(folder: Path) -> dict[str, Any]:
    """Returns PEFT's description of an adapter.

    Raises InvalidConfig unless it is a LoRA adapter that a job can have.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        hint = "Name a local folder that PEFT wrote, such as `final` or a checkpoint of a LoRA run."
        raise InvalidConfig(f"adapter: {folder / CONFIG}: {reason}", hint=hint) from None
    other = [key for key, plain in _PLAIN.items() if config.get(key, plain[0]) not in plain]
    other += ["lora_alpha"] if config.get("lora_alpha", 8) % 1 else []
    other += ["target_modules"] if not isinstance(config.get("target_modules"), list) else []
    if other:
        said = ", ".join(f"{key} {json.dumps(config.get(key))}" for key in other)
        raise InvalidConfig(
            f"adapter: {folder} has {said}, which dstrain does not train",
            hint="Merge it into its base model, and name that as `model`.",
        )
    return dict(config)


def shape_of_adapter(folder: Path, lora: Lora, *, given: Collection[str]) -> dict[str, Any]:
    """Returns the keys of the section `lora` that the adapter in a folder determines.

    `given` are the keys that the job sets. Raises InvalidConfig if they contradict the adapter.
    """
    config = read_adapter(folder)
    shape = {
        "rank": config.get("r", 8),
        "alpha": int(config.get("lora_alpha", 8)),
        "targets": _last_names(config["target_modules"]),
        "target_parameters": _names_in_layers(config.get("target_parameters") or ()),
        "modules_to_save": _last_names(config.get("modules_to_save") or ()),
    }
    wanted: dict[str, Any] = {key: getattr(lora, key) for key in shape if key in given}
    if wanted.get("targets") == ("all-linear",):
        del wanted["targets"]  # what that means depends on the model
    if wanted.get("target_parameters") == (ALL_EXPERTS,) and shape["target_parameters"]:
        del wanted["target_parameters"]
    differing = [key for key, value in wanted.items() if _sorted(value) != shape[key]]
    if differing:
        theirs, ours = (", ".join(f"{key} {_shown(values[key])}" for key in differing) for values in (shape, wanted))
        raise InvalidConfig(
            f"adapter: {folder} has {theirs}; lora in the job has {ours}", hint="Remove them from lora."
        )
    return shape if "dropout" in given else shape | {"dropout": config.get("lora_dropout", 0.0)}


def _last_names(names: Collection[str]) -> tuple[str, ...]:
    """Returns the names of modules as a job has them; PEFT may write the module of each layer."""
    return tuple(sorted({name.rpartition(".")[2] for name in names}))


def _names_in_layers(names: Collection[str]) -> tuple[str, ...]:
    """Returns parameter names as a job has them; PEFT may list each layer's.

    >>> _names_in_layers(["model.layers.0.mlp.experts.down_proj", "model.layers.1.mlp.experts.down_proj"])
    ('mlp.experts.down_proj',)
    """
    return tuple(sorted({re.sub(r"^.*\blayers\.\d+\.", "", name) for name in names}))


def _sorted(value: Any) -> Any:
    return tuple(sorted(value)) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)
