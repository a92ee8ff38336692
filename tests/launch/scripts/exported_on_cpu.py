"""Runs `train.py` on CPU ranks and prints its losses with all digits; with accelerate's FSDP2, if it is asked for.

Accelerate 1.15 has DDP in the place of FSDP2 there, without a word. What this runs is accelerate's own preparation and
PyTorch's own sharding; only the list of devices that may have it, in accelerate/state.py: AcceleratorState.__init__,
lacks the CPU.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import Trainer

_init = AcceleratorState.__init__
_log = Trainer.log


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


def log(self: Any, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
    if "loss" in logs and self.is_world_process_zero():
        print("exact loss:", logs["loss"])
    _log(self, logs, *arguments, **options)


if __name__ == "__main__":
    Trainer.log = log  # type: ignore[method-assign]
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        AcceleratorState.__init__ = init
        Trainer.save_model = save  # type: ignore[method-assign]
    sys.path.insert(0, str(Path.cwd()))  # Python does so for a script that is run itself
    runpy.run_path("train.py", run_name="__main__")
    print("has a process group" if torch.distributed.is_initialized() else "without a process group")
