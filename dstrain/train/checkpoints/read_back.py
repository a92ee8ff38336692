"""Reads files of tensors back when they are written, and keeps their checksums."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft.peft_model
import safetensors.torch
import torch
import transformers.modeling_utils
import xxhash
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import (  # type: ignore[import-untyped]
    TorchCheckpointEngine,
)

from dstrain.checksums import HashingFile, checksum, of_next
from dstrain.errors import RunFailed

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
