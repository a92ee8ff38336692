"""How far three steps move the weights in bf16 without ZeRO, against ZeRO-1 and torch alone: DeepSpeed#7839."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from small_engine import LEARNING_RATE, answer, engine, losses, network

STEPS = 3
BF16 = torch.bfloat16


def _distance(model: torch.nn.Module) -> float:
    """Returns the norm of a network's weights minus those at the start."""
    pairs = zip(model.parameters(), network(BF16).parameters(), strict=True)
    return float(f"{torch.cat([(now - before).flatten().float() for now, before in pairs]).norm():.3g}")


def by_engine(stage: int, kind: Any = torch.optim.SGD, **config: Any) -> list[float]:
    """Returns the distance from the start after each step of DeepSpeed's engine."""
    model = network(BF16)
    bf16 = {"enabled": True}
    trained = engine(model, {"stage": stage}, kind, bf16=bf16, gradient_accumulation_steps=1, **config)
    found, batches = [], losses(trained, dtype=BF16)
    for _ in range(STEPS):
        trained.backward(next(batches))
        trained.step()
        found.append(_distance(trained.module))
    return found


def by_torch(kind: Any = torch.optim.SGD) -> list[float]:
    """Returns the same of torch's optimizer alone, with fp32 weights beside those in bf16."""
    model, found = network(BF16), []
    masters: list[Any] = [weight.detach().float().requires_grad_() for weight in model.parameters()]
    optimizer, batches = kind(masters, lr=LEARNING_RATE), losses(model, dtype=BF16)
    for _ in range(STEPS):
        model.zero_grad()
        next(batches).backward()
        for master, weight in zip(masters, model.parameters(), strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        optimizer.step()
        for master, weight in zip(masters, model.parameters(), strict=True):
            weight.data.copy_(master)
        found.append(_distance(model))
    return found


if __name__ == "__main__":
    answer(
        {
            f"{kind.__name__}, {name}": moved(kind)
            for kind in (torch.optim.SGD, torch.optim.AdamW)
            for name, moved in (
                ("torch alone", by_torch),
                ("ZeRO-1", partial(by_engine, 1)),
                ("no ZeRO", partial(by_engine, 0)),
            )
        }
    )
