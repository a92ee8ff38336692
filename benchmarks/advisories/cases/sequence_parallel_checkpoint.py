"""Whether ranks of Ulysses sequence parallelism load a checkpoint that was saved without it: DeepSpeed#8226.

Run by two ranks.
"""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from small_engine import LEARNING_RATE, SAMPLES, answer_or_end, network
from torch import distributed


def trained(mpu: Any) -> Any:
    """Returns an engine, with sequence parallelism over both ranks if it gets an mpu."""
    model = network()
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 0},
        "sequence_parallel_size": 2 if mpu else 1,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)[0]


def load(folder: str) -> str:
    """Loads the checkpoint, and returns what comes of it."""
    parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size=2)
    path, _ = trained(parallel_state_sp).load_checkpoint(folder, load_module_only=True)
    return "loads" if path else "finds nothing"


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    folders = [tempfile.mkdtemp()] if distributed.get_rank() == 0 else [""]
    distributed.broadcast_object_list(folders)
    trained(None).save_checkpoint(folders[0])
    answer_or_end("two ranks load what was saved without sequence parallelism", partial(load, folders[0]))
