"""Files of tensors: loads them without running code, reads back written ones, and finds values that are not finite.

`torch.load` takes tensors and plain values alone, in DeepSpeed's own loaders too: a pickle can run any code.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import peft.peft_model
import safetensors.torch
import torch
import transformers.modeling_utils
import xxhash
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import (  # type: ignore[import-untyped]
    TorchCheckpointEngine,
)

from dstrain.errors import InvalidConfig, RunFailed
from dstrain.train.checkpoints.checkpoints import HashingFile, checksum, of_next

_TYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
        "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
        "deepspeed.utils.tensor_fragment": ("fragment_address",),
    }
)
"""Module → the types of DeepSpeed in a checkpoint, which hold numbers. Source: deepspeed 0.19.8 runtime/zero."""
_FORCE, TRUST = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""PyTorch's variables; the second one is for files that their user trusts. Source: torch 2.13 serialization.py: load"""


def load_only_tensors() -> None:
    """Holds for all loads of this process and its children, unless the user trusts pickles by PyTorch's variable."""
    if not os.environ.get(TRUST):
        os.environ[_FORCE] = "1"
        types = [getattr(import_module(module), name) for module, names in _TYPES.items() for name in names]
        torch.serialization.add_safe_globals(types)


@contextmanager
def naming_pickles(folder: Path) -> Iterator[None]:
    """Turns the error of a file that holds more than tensors into InvalidConfig with what to type."""
    try:
        yield
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is None:
            raise InvalidConfig(f"{folder}: a file is damaged: it is no file of tensors") from None
        raise InvalidConfig(
            f"{folder}: a file holds more than tensors and plain values, which may run code: {named[1]}",
            hint=f"dstrain writes no such files. If you wrote it yourself: {TRUST}=1 before the command.",
        ) from None


_CALLERS: tuple[Any, ...] = (transformers.modeling_utils, peft.peft_model)
"""Modules that write models and adapters by their `safe_save_file`. Source: transformers 5.23, peft 0.19."""


@contextmanager
def reading_back(engine: Any = None) -> Iterator[dict[Path, str]]:
    """Reads each file of tensors back that is written within it, and yields their checksums by path.

    These are the files of models, of adapters, and of DeepSpeed's `engine`. Raises RunFailed for a file with
    bytes that differ from the live tensors.
    """
    checksums: dict[Path, str] = {}
    writer: Any = getattr(engine, "checkpoint_engine", None)

    def save_model(tensors: Mapping[str, torch.Tensor], filename: Any, metadata: Any = None) -> None:
        safetensors.torch.save_file(dict(tensors), filename, metadata=metadata)
        checksums[Path(filename)] = _same_tensors(Path(filename), tensors)

    def save_states(state_dict: Any, path: Any) -> None:
        with Path(path).open("wb") as file:
            hashing: Any = HashingFile(file)
            torch.save(state_dict, hashing, _use_new_zipfile_serialization=writer.zipfile_serialization)
        if checksum(Path(path)) != hashing.checksum:
            raise _other(path, "it")
        checksums[Path(path)] = hashing.checksum

    replaced = {module: module.safe_save_file for module in _CALLERS}
    for module in replaced:
        module.safe_save_file = save_model
    if type(writer) is TorchCheckpointEngine:
        writer.save = save_states
    try:
        yield checksums
    finally:
        for module, function in replaced.items():
            module.safe_save_file = function
        if type(writer) is TorchCheckpointEngine:
            del writer.save  # restores the method of the class


def _same_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Returns the checksum of a file of safetensors. Raises RunFailed unless it has these tensors, to the last bit.

    Source: https://huggingface.co/docs/safetensors: eight bytes of length, a header in JSON, the tensors one by one.
    """
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        head = file.read(8)
        header = file.read(int.from_bytes(head, "little"))
        digest.update(head + header)
        places = {name: place["data_offsets"] for name, place in json.loads(header).items() if name != "__metadata__"}
        if places.keys() != tensors.keys():
            raise _other(path, f"{min(places.keys() ^ tensors.keys())}, in one of file and model alone,")
        for name, (begin, end) in sorted(places.items(), key=lambda place: place[1]):
            if of_next(file, end - begin, digest) != _of_tensor(tensors[name]):
                raise _other(path, name)
        digest.update(file.read())
    return digest.hexdigest()


def _of_tensor(tensor: torch.Tensor) -> str:
    data: Any = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_128(data).hexdigest()


def _other(path: Any, name: str) -> RunFailed:
    return RunFailed(
        f"{path} was read back, and {name} has other bytes than were written",
        hint="The disk or its file system does not keep what is written: look into dmesg, and set another output_dir.",
    )


Named = tuple[str, torch.Tensor]


def nonfinite_weights(model: Any, *, only_trained: bool = False) -> list[str]:
    """Returns the names of weights with values that are not finite; parts on NVMe are not looked at."""
    return _broken(
        (name, _valid(parameter, getattr(parameter, "ds_tensor", parameter)))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or not only_trained
    )


def nonfinite_states(model: Any, optimizer: Any) -> list[str]:
    """Returns the names of states of the optimizer with values that are not finite, likewise."""
    return _broken(_states(optimizer, {id(parameter): name for name, parameter in model.named_parameters()}))


def _valid(parameter: Any, part: torch.Tensor) -> torch.Tensor:
    """Returns a part of a parameter without the padding behind it, which ZeRO-3 leaves uninitialised.

    Source: deepspeed 0.19.8 runtime/zero/partition_parameters.py: _partition_param.
    """
    if not hasattr(parameter, "ds_tensor"):
        return part.detach()
    size = parameter.ds_tensor.ds_numel
    rest = parameter.ds_numel - parameter.ds_zero_partition_rank * size
    return part.detach().reshape(-1)[: max(0, min(size, rest))]


def _states(optimizer: Any, names: dict[int, str]) -> Iterator[Named]:
    """Yields the states of the optimizer inside DeepSpeed's: of flat groups of weights, or of single weights."""
    flat = {id(group): number for number, group in enumerate(getattr(optimizer, "fp32_partitioned_groups_flat", []))}
    for number, (weights, states) in enumerate(getattr(optimizer, "optimizer", optimizer).state.items()):
        for kind, state in states.items():
            if not isinstance(state, torch.Tensor) or state.numel() < weights.numel():
                continue  # a count of steps, or swapped out
            if id(weights) not in flat:
                yield f"{kind} of {names.get(id(weights), f'group {number}')}", state
                continue
            begin = 0
            for parameter in optimizer.fp16_groups[flat[id(weights)]]:
                part = state.reshape(-1)[begin : begin + parameter.ds_tensor.ds_numel]
                begin += parameter.ds_tensor.ds_numel
                yield f"{kind} of {names.get(id(parameter), 'a weight')}", _valid(parameter, part)


def _broken(tensors: Iterable[Named]) -> list[str]:
    """Returns the names of tensors with values that are not finite; their largest values take no memory to find."""
    kept = [(name, tensor) for name, tensor in tensors if tensor.numel() and tensor.dtype in _CHECKED]
    largest = [torch.linalg.vector_norm(tensor, ord=float("inf")).float().cpu() for _, tensor in kept]
    if not largest:
        return []
    is_finite = torch.stack(largest).isfinite().tolist()
    return [name for (name, _), finite in zip(kept, is_finite, strict=True) if not finite]


_CHECKED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
