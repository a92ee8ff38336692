"""Whether ZeRO-3 with hpZ partitions a parameter of one element over four ranks: DeepSpeed#8210.

Run by four ranks.
"""

from __future__ import annotations

import deepspeed
import torch
from small_engine import SAMPLES, answer_or_end, engine
from torch import distributed


def train() -> str:
    """Trains a step, and returns what comes of it."""
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": distributed.get_world_size()},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Linear(8, 1)
    trained = engine(model, config["zero_optimization"], gradient_accumulation_steps=1)
    trained.backward(trained(torch.ones(SAMPLES, 8)).sum())
    trained.step()
    return "trains"


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    answer_or_end("a step of a layer with one bias", train)
