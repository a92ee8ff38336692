"""Completes a saved model with unchanged values of its base model, and verifies it by reading it back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from dstrain.choices import Precision
from dstrain.errors import InvalidConfig, RunFailed
from dstrain.facts.model.model_files import ADAPTER, Tensor, read
from dstrain.paths import write_atomic
from dstrain.train.checkpoints.checkpoints import content_damage

DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16, Precision.FP32: torch.float32}
_SAFETENSORS_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_KEPT = ("use_cache", "dtype")
"""Keys of config.json that training changes in memory; saved models keep the base's values."""


def base_config(source: str, *, trust_remote_code: bool) -> dict[str, Any]:
    """Returns the configuration of the base model, in the form of config.json."""
    config: dict[str, Any] = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code).to_dict()
    return config


def base_dtype(base: Mapping[str, Any]) -> torch.dtype | None:
    """Returns the dtype of the base model's weights, or None if unknown."""
    name = base.get("dtype")
    dtype = getattr(torch, str(name).removeprefix("torch."), None) if name is not None else None
    return dtype if isinstance(dtype, torch.dtype) else None


def converted(state: Mapping[str, Any], model: Any, trained: torch.dtype, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the weights of one dtype in another one; weights that the model's family keeps in fp32 are unchanged.

    Conversion happens in host memory, since a GPU has no room for a second copy.
    """
    kept = [re.compile(rf"(^|\.){re.escape(name)}(\.|$)") for name in model._get_dtype_plan(dtype)]
    shared: dict[tuple[Any, ...], Any] = {}  # tied weights stay one tensor

    def convert(name: str, tensor: Any) -> Any:
        if tensor.dtype is not trained or any(pattern.search(name) for pattern in kept):
            return tensor
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if place not in shared:
            shared[place] = tensor.to("cpu", dtype)
        return shared[place]

    return {name: convert(name, tensor) for name, tensor in state.items()} if trained is not dtype else dict(state)


def without_copies(state: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Returns the weights without those that are tied to another of them: ZeRO-3 gathers each name on its own."""
    return {name: tensor for name, tensor in state.items() if model.all_tied_weights_keys.get(name) not in state}


def restore_config(folder: Path, base: Mapping[str, Any]) -> None:
    """Restores the base's values in the config.json of a saved model, if it has one."""
    path = folder / "config.json"
    if path.is_file():
        saved = json.loads(path.read_text(encoding="utf-8"))
        write_atomic(path, json.dumps(_restored(saved, base), indent=2, sort_keys=True) + "\n")


def _restored(saved: dict[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    whole = {
        key: _restored(value, base[key]) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        for key, value in saved.items()
        if key not in _KEPT
    }
    had = {key: base[key] for key in _KEPT if key in saved and base.get(key) is not None}
    return whole | {key: str(value).removeprefix("torch.") if key == "dtype" else value for key, value in had.items()}


def family_of(config: Any) -> Any:
    """Returns the class that loads a model of this configuration. Raises InvalidConfig for a model of sound."""
    if hasattr(config, "vision_config"):
        return AutoModelForImageTextToText
    if hasattr(config, "audio_config"):
        problem = f"{config.model_type} is a family of models that hear, which dstrain does not train"
        raise InvalidConfig(problem, hint="Name a language model, or a vision-language model.")
    return AutoModelForCausalLM


def require_whole_model(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Raises RunFailed unless `from_pretrained` finds every parameter in a folder with the right shape and dtype.

    It loads onto the meta device, which reads only the headers of files.
    """
    unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]  # otherwise ZeRO-3 partitions this model
    try:
        tensors = read(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        _, report = family_of(config).from_pretrained(
            folder,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=trust_remote_code,
        )
    except Exception as error:  # the code of a model may raise anything
        raise _broken(folder, str(error).partition("\n")[0]) from error
    problems = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    problems += [f"{name[0]} has another shape" for name in sorted(report["mismatched_keys"])]
    problems += [f"{name} is empty" for name, tensor in tensors.items() if not tensor.num_elements]
    problems += _other_dtypes(tensors, getattr(config, "dtype", None))
    _raise_first(folder, problems)


def _other_dtypes(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> list[str]:
    """Returns problems with dtypes other than the configuration's and fp32, which some families keep."""
    names = set(_SAFETENSORS_NAMES.values())
    wanted = _SAFETENSORS_NAMES.get(dtype) if dtype is not None else None
    others = [name for name, tensor in tensors.items() if tensor.dtype in names - {wanted, "F32"}]
    if wanted is not None and tensors and all(tensor.dtype != wanted for tensor in tensors.values()):
        others = list(tensors)
    return [f"{name} is {tensors[name].dtype}, but config.json says {dtype}" for name in others] if wanted else []


def shape_of(parameter: Any) -> tuple[int, ...]:
    """Returns the shape of a parameter, also of one that ZeRO-3 has partitioned, which is empty itself."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def require_whole_adapter(folder: Path, model: Any) -> None:
    """Raises RunFailed unless the adapter in a folder has every trained parameter with its shape."""
    try:
        tensors = read(folder, ADAPTER)
    except InvalidConfig as error:
        raise _broken(folder, error.problem) from error
    adapter = f".{model.active_adapter}"
    problems = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        tensor = tensors.get(name.replace(f".modules_to_save{adapter}", "").replace(adapter, ""))
        shape = shape_of(parameter)
        if tensor is None:
            problems.append(f"{name} is missing")
        elif tensor.shape != shape:
            problems.append(f"{name} has shape {tensor.shape} instead of {shape}")
    _raise_first(folder, problems)


def require_same_files(folder: Path, checksums: Mapping[str, str]) -> None:
    """Raises RunFailed if files that were copied to a folder are not those with these checksums."""
    copied = {name: value for name, value in checksums.items() if (folder / name).is_file()}
    problem = content_damage(folder, copied)
    if problem is not None:
        raise _broken(folder, f"it {problem}")


def _raise_first(folder: Path, problems: list[str]) -> None:
    if problems:
        raise _broken(folder, problems[0] + (f", and {len(problems) - 1} more" if len(problems) > 1 else ""))


def _broken(folder: Path, problem: str) -> RunFailed:
    return RunFailed(
        f"{folder} does not hold the trained model: {problem}",
        hint="Export the newest complete checkpoint: dstrain export CHECKPOINT OUT",
    )
