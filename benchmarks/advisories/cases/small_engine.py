"""What the cases share: a two-layer network under DeepSpeed's engine on the CPU, and the same data for all releases.

The cases run in environments that have torch and one DeepSpeed, and no dstrain.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import distributed

# collectives over shared memory are compiled first, which takes a minute; Gloo's give the same sums
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

INPUTS, HIDDEN, OUTPUTS, SAMPLES = 32, 64, 8, 4
LEARNING_RATE = 0.1


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Returns a network with the same weights in every process."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(INPUTS, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, OUTPUTS)
    return torch.nn.Sequential(*layers).to(dtype)


def engine(model: torch.nn.Module, zero: Mapping[str, Any], kind: Any = torch.optim.SGD, **config: Any) -> Any:
    """Returns DeepSpeed's engine with an optimizer of torch, which needs no extension; without gradient clipping."""
    settings = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_clipping": 0.0,
        "zero_optimization": dict(zero),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    optimizer = kind(model.parameters(), lr=LEARNING_RATE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings | config)[0]


def losses(engine: Any, seed: int = 1, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    """Yields the loss of one micro-batch after another, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        inputs = torch.randn(SAMPLES, INPUTS, generator=generator).to(dtype)
        targets = torch.randn(SAMPLES, OUTPUTS, generator=generator) * 3
        yield torch.nn.functional.mse_loss(engine(inputs).float(), targets)


def answer_or_end(label: str, step: Callable[[], str]) -> None:
    """Answers with what a step of all ranks returns, or with the error of the first rank that has one, which ends."""
    try:
        value = step()
    except (AssertionError, IndexError, RuntimeError) as error:
        answer({label: f"{type(error).__name__}: {str(error).splitlines()[0]}"})
        raise
    distributed.barrier()
    if distributed.get_rank() == 0:
        answer({label: value})


def answer(values: Mapping[str, Any]) -> None:
    """Writes the values of a case, by label, to the file that the command line names."""
    Path(sys.argv[1]).write_text(json.dumps(values), encoding="utf-8")
