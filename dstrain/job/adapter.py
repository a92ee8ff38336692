"""The saved adapter that a job continues from."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.errors import InvalidConfig
from dstrain.job.model_changes import ALL_EXPERTS

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

    `given` are the keys that the job sets. Raises InvalidConfig where they say something else than the adapter.
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
    """Returns the names of parameters as a job has them; PEFT may write that of each layer.

    >>> _names_in_layers(["model.layers.0.mlp.experts.down_proj", "model.layers.1.mlp.experts.down_proj"])
    ('mlp.experts.down_proj',)
    """
    return tuple(sorted({re.sub(r"^.*\blayers\.\d+\.", "", name) for name in names}))


def _sorted(value: Any) -> Any:
    return tuple(sorted(value)) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)
