"""Stretches the rotary positions in the configuration of a model, before the model is built from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dstrain.choices import Method, RopeType
from dstrain.errors import InvalidConfig
from dstrain.job.model_changes import RopeScaling
from dstrain.job.schema import Job
from dstrain.paths import write_atomic
from dstrain.records import load_json, to_json

_FILE = "rope_scaling.json"
"""The scaling in the folder of an adapter: PEFT stores nothing of the base model's configuration but its name, and
Transformers takes a folder with a config.json for a whole model."""
BESIDE_ADAPTER = (
    f"the adapter needs its base model with the rope_scaling in {_FILE} beside it, which PEFT does not store: merge "
    "both with dstrain export, or write it into the config.json of the base"
)
"""The line that ends the training of an adapter on stretched positions."""


def scale(config: Any, scaling: RopeScaling | None) -> None:
    """Writes a scaling into a configuration of Transformers 5, which keeps it in `rope_parameters` whatever the name in
    config.json; of a multimodal model into the text's, with types for layers (Gemma 3) into full attention's.

    `max_position_embeddings` becomes the new length, as in the model cards, except for `dynamic`, which computes from
    the original length there. Raises InvalidConfig if the model has other positions, is scaled already, or would not
    read the scaling back from its own config.json.
    Source: Transformers 5.23 modeling_rope_utils.py: standardize_rope_params, _compute_dynamic_ntk_parameters.
    """
    if scaling is None:
        return
    text = config.get_text_config()
    parameters = _parameters(text)
    kind = parameters.get("rope_type")
    if kind != "default":
        problem = "has no rotary positions" if kind is None else f"already has rope_type {kind} in its config.json"
        raise InvalidConfig(f"rope_scaling: the model ({config.model_type}) {problem}", hint="Remove rope_scaling.")
    original = scaling.original_max_position_embeddings or text.max_position_embeddings
    values = {"rope_type": str(scaling.rope_type), "factor": scaling.factor}
    if scaling.rope_type is RopeType.YARN:
        values["original_max_position_embeddings"] = original
    parameters.update(values)
    is_dynamic = scaling.rope_type is RopeType.DYNAMIC
    text.max_position_embeddings = original if is_dynamic else int(scaling.factor * original)
    _require_readable(config, parameters, scaling)


def _parameters(text: Any) -> dict[str, Any]:
    """Returns the rotary parameters inside a configuration of a language model; empty if it has none."""
    parameters: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    full: dict[str, Any] = parameters.get("full_attention", parameters)
    return full


def _require_readable(config: Any, parameters: dict[str, Any], scaling: RopeScaling) -> None:
    """Raises InvalidConfig if the class of a configuration refuses or changes a scaling as it reads it."""
    try:
        read = _parameters(type(config).from_dict(config.to_dict()).get_text_config())
        problem = "" if read == parameters else "reads it back otherwise"
    except Exception as error:  # the code of a model may raise anything
        problem = str(error).partition("\n")[0]
    if problem:
        raise InvalidConfig(
            f"rope_scaling: {type(config).__name__} takes no rope_type {scaling.rope_type}: {problem}",
            hint="Remove rope_scaling, or choose another rope_type.",
        )


def write_beside_adapter(folder: Path, job: Job) -> None:
    """Writes the scaling that the base model of an adapter needs to the adapter's folder; nothing for a whole model."""
    if job.rope_scaling is not None and job.method is not Method.FULL:
        write_atomic(folder / _FILE, to_json(job.rope_scaling))


def read_beside_adapter(folder: Path) -> RopeScaling | None:
    """Returns the scaling that the base model of an adapter needs, or None."""
    return load_json(RopeScaling, folder / _FILE) if (folder / _FILE).is_file() else None
