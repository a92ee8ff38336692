"""Runs `train.py` with accelerate's FSDP2 on CPU ranks, where accelerate 1.15 has DDP in its place without a word.

What it runs is accelerate's own preparation and PyTorch's own sharding; only the list of devices that may have it, in
accelerate/state.py: AcceleratorState.__init__, lacks the CPU.
"""

from __future__ import annotations

import runpy
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import Trainer

_init = AcceleratorState.__init__
_save = Trainer.save_model


def init(self: Any, *arguments: Any, fsdp_plugin: Any = None, **options: Any) -> None:
    _init(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin


def save(self: Any, *arguments: Any, **options: Any) -> None:
    """Checks that every parameter is sharded, and saves nothing."""
    parameters = list(self.model.parameters())
    assert parameters
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
    print("sharded:", len(parameters), torch.distributed.get_world_size())


if __name__ == "__main__":
    AcceleratorState.__init__ = init
    Trainer.save_model = save  # type: ignore[method-assign]
    runpy.run_path("train.py", run_name="__main__")
