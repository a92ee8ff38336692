"""Lets `torch.load` take tensors and plain values alone, in DeepSpeed's own loaders too: a pickle can run any code."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

import torch

from dstrain.errors import InvalidConfig

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
