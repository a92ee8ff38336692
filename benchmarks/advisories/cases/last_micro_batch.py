"""The averaged gradient on two ranks before the step, in bf16 with fp32 accumulation under ZeRO-1: DeepSpeed#7985.

Every rank must hold the same average. Run by two ranks.
"""

from __future__ import annotations

import deepspeed
import torch
from small_engine import answer, engine, losses, network
from torch import distributed

BF16 = torch.bfloat16


def norms_by_rank(accumulation: int, *, is_immediate: bool) -> list[float]:
    """Returns on every rank the norm of each rank's accumulated gradient after the last backward."""
    trained = engine(
        network(BF16),
        {"stage": 1},
        bf16={"enabled": True, "immediate_grad_update": is_immediate},
        data_types={"grad_accum_dtype": "fp32"},
        gradient_accumulation_steps=accumulation,
    )
    batches = losses(trained, seed=1 + distributed.get_rank(), dtype=BF16)
    for micro in range(accumulation):
        trained.backward(next(batches))
        if micro < accumulation - 1:
            trained.step()
    flat = torch.cat([part.flatten() for part in trained.optimizer.fp32_groups_gradients_flat])
    found = [torch.zeros(1) for _ in range(distributed.get_world_size())]
    distributed.all_gather(found, flat.norm().reshape(1))
    trained.destroy()
    return [round(float(norm), 3) for norm in found]


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    values = {
        f"accumulation {n}, immediate_grad_update {str(is_immediate).lower()}": norms_by_rank(
            n, is_immediate=is_immediate
        )
        for n in (1, 4)
        for is_immediate in (False, True)
    }
    if distributed.get_rank() == 0:
        answer(values)
