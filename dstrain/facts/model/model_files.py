"""Reads a model folder: whether it has a tokenizer, and the names, shapes and dtypes of its weights.

A safetensors file begins with the length of its header (8 bytes, little-endian), then come the header as JSON and the
data. Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

from dstrain.errors import InvalidConfig

MODEL, ADAPTER = "model.safetensors", "adapter_model.safetensors"
"""What Transformers and PEFT call the file; `NAME.index.json` stands beside shards."""
INDEX = ".index.json"
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
"""What files of a tokenizer are called."""

_LENGTH_BYTES = 8
_AGAIN = "Download or save the model again."


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor of a file."""

    dtype: str
    """Its dtype, as safetensors calls it: `BF16`, `F32` …"""
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder holds files of a tokenizer."""
    return any(file for kind in TOKENIZER_FILES for file in folder.glob(kind))


def read(folder: Path, name: str = MODEL) -> dict[str, Tensor]:
    """Returns the tensors of a model or an adapter, in one file or in shards; none where there is neither.

    Raises InvalidConfig for a shard that is missing and for a file that is not whole.
    """
    index = folder / f"{name}{INDEX}"
    if (folder / name).is_file():
        return _header(folder / name)
    if not index.is_file():
        return {}
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise InvalidConfig(f"{index}: is no index of weights", hint=_AGAIN) from error
    missing = sorted(file for file in files if not (folder / file).is_file())
    if missing:
        rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InvalidConfig(f"{folder}: {missing[0]}{rest} is missing, which {index.name} names", hint=_AGAIN)
    tensors: dict[str, Tensor] = {}
    for file in sorted(files):
        tensors |= _header(folder / file)
    return tensors


def _header(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of one file. Raises InvalidConfig where its size is not what the header says."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > size:
                raise ValueError("the header is cut off")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {name: Tensor(dtype=row["dtype"], shape=tuple(row["shape"])) for name, row in header.items()}
        ends = {name: row["data_offsets"] for name, row in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidConfig(f"{path}: is no whole safetensors file: {error}", hint=_AGAIN) from None
    wanted = _LENGTH_BYTES + length + max((end for _, end in ends.values()), default=0)
    if size != wanted:
        raise InvalidConfig(f"{path}: has {size:,} bytes, and its header speaks of {wanted:,}", hint=_AGAIN)
    return tensors
