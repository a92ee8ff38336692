"""How often one backward counts the parameters that it uses, and its milliseconds, by layers: DeepSpeed#7886."""

from __future__ import annotations

import statistics
import time
from importlib import import_module

import torch
from small_engine import answer, engine

WIDTH, WARM, TIMED = 8, 2, 5
COUNTS = "count_used_parameters_in_backward"


def backward(stage: int, layers: int) -> list[float]:
    """Returns the calls in one backward, and its median milliseconds."""
    module = import_module(f"deepspeed.runtime.zero.{'stage3' if stage == 3 else 'stage_1_and_2'}")
    counts, calls = getattr(module, COUNTS), []

    def counted(parameters: list[torch.nn.Parameter]) -> int:
        calls.append(1)
        return int(counts(parameters))

    setattr(module, COUNTS, counted)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    trained = engine(model, {"stage": stage}, gradient_accumulation_steps=1)
    times = []
    for _ in range(WARM + TIMED):
        loss = trained(torch.ones(4, WIDTH)).sum()
        calls.clear()
        start = time.perf_counter()
        trained.backward(loss)
        times.append(1e3 * (time.perf_counter() - start))
        number = len(calls)
        trained.step()
    setattr(module, COUNTS, counts)
    return [number, round(statistics.median(times[WARM:]))]


if __name__ == "__main__":
    answer(
        {
            f"ZeRO-{stage}, {2 * layers} parameters: calls, ms": backward(stage, layers)
            for stage in (2, 3)
            for layers in (50, 200)
        }
    )
