"""Elements in the fp32 copies of the optimizer without ZeRO when most weights are frozen: DeepSpeed#8029."""

from __future__ import annotations

import torch
from small_engine import HIDDEN, answer, engine, network


def elements() -> int:
    """Returns the elements of the fp32 copies, of a network with one trained bias in bf16."""
    model = network(torch.bfloat16)
    for weight in model.parameters():
        weight.requires_grad = weight.shape == (HIDDEN,)
    trained = engine(model, {"stage": 0}, gradient_accumulation_steps=1, bf16={"enabled": True})
    return sum(copy.numel() for group in trained.optimizer.fp32_groups for copy in group)


if __name__ == "__main__":
    answer(
        {
            "weights in all": sum(weight.numel() for weight in network().parameters()),
            "trained weights": HIDDEN,
            "weights with a copy in fp32": elements(),
        }
    )
