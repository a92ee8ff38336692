"""Reads a model folder: whether it has a tokenizer, and the names, shapes and dtypes of its weights.

A safetensors file consists of the length of its header (8 bytes, little-endian), the header as JSON, and the data.
Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

from dstrain.errors import InvalidConfig
from dstrain.facts.model.model_facts import Kind, ModelFacts, TensorGroup

MODEL, ADAPTER = "model.safetensors", "adapter_model.safetensors"
"""File names of Transformers and PEFT; shards come with `NAME.index.json`."""
INDEX = ".index.json"
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
"""Patterns of the names of tokenizer files."""
PROCESSOR_FILES = (
    *("preprocessor_config.json", "processor_config.json"),
    *("video_preprocessor_config.json", "chat_template.json"),
)
"""Files of an image processor, without its tokenizer's; it has one of the first two.

Source: transformers 5.23 utils/__init__.py."""

_LENGTH_BYTES = 8
_AGAIN = "Download or save the model again."


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor of a file."""

    dtype: str
    """The dtype in safetensors' notation: `BF16`, `F32` …"""
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder contains tokenizer files."""
    return any(file for kind in TOKENIZER_FILES for file in folder.glob(kind))


def has_processor(folder: Path) -> bool:
    """Returns whether a folder contains the settings of a processor, which reads images."""
    return any((folder / name).is_file() for name in PROCESSOR_FILES[:2])


def lacks_processor(data: str, named: Iterable[str], model: str) -> str:
    """Returns the problem if data have `named`, columns of media, and the model has no processor for them."""
    return f"{data} has {' and '.join(named)}, but {model} has no processor for them"


def read(folder: Path, name: str = MODEL) -> dict[str, Tensor]:
    """Returns the tensors of a model or an adapter, in one file or in shards; none if there are no such files.

    Raises InvalidConfig for missing shards and damaged files.
    """
    index = folder / f"{name}{INDEX}"
    if (folder / name).is_file():
        return _header(folder / name)
    if not index.is_file():
        return {}
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise InvalidConfig(f"{index}: not an index of weights", hint=_AGAIN) from error
    missing = sorted(file for file in files if not (folder / file).is_file())
    if missing:
        rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InvalidConfig(f"{folder}: {missing[0]}{rest} missing, listed in {index.name}", hint=_AGAIN)
    tensors: dict[str, Tensor] = {}
    for file in sorted(files):
        tensors |= _header(folder / file)
    return tensors


def _header(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of one file. Raises InvalidConfig if its size disagrees with its header."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > size:
                raise ValueError("the header is truncated")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {name: Tensor(dtype=row["dtype"], shape=tuple(row["shape"])) for name, row in header.items()}
        ends = {name: row["data_offsets"] for name, row in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidConfig(f"{path}: not a complete safetensors file: {error}", hint=_AGAIN) from None
    expected = _LENGTH_BYTES + length + max((end for _, end in ends.values()), default=0)
    if size != expected:
        raise InvalidConfig(f"{path}: has {size:,} bytes instead of the {expected:,} in its header", hint=_AGAIN)
    return tensors


_MOST_NAMES = 1_000_000
"""Names of one tensor group that are listed; a regular expression takes about a second to miss in as many."""
_OUTSIDE = frozenset({Kind.EMBEDDING, Kind.HEAD, Kind.VISION})


def names_of(model: ModelFacts | None, source: str) -> tuple[str, ...] | None:
    """Returns the names of a model's parameters, or None if they are not known on this machine.

    Files are asked if there are no facts: Transformers renames what some of them hold (experts, vision towers). Facts
    do not say which layers have a tensor, so names of all layers are returned; a name beyond is certainly none.
    """
    if model is not None:
        names: list[str] = []
        for group in model.tensors:
            numbers = model.num_hidden_layers * group.count ** group.name.count("*")
            if numbers > _MOST_NAMES:
                return None
            names += _names(model, group)
        return tuple(dict.fromkeys(names))
    try:
        return tuple(read(Path(source))) or None
    except InvalidConfig:  # damaged files, which `run` reports
        return None


def _names(model: ModelFacts, group: TensorGroup) -> Iterator[str]:
    pattern = group.name.replace("*", "{}")
    for numbers in product(range(group.count), repeat=pattern.count("{}")):
        name = pattern.format(*numbers)
        yield name
        if group.kind not in _OUTSIDE:
            yield from (f"{model.layers_root}.{layer}.{name}" for layer in range(model.num_hidden_layers))
