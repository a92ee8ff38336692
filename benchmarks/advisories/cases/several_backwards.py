"""Gradient norms of three steps whose own loop calls backward() four times: DeepSpeed#7981."""

from __future__ import annotations

from small_engine import answer, engine, losses, network

STEPS, BACKWARDS = 3, 4


def norms(stage: int, *, offloads: bool) -> list[float]:
    """Returns the gradient norm of each step of a loop that sets the accumulation boundary itself."""
    zero = {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offloads else {})
    trained = engine(network(), zero, gradient_accumulation_steps=1)
    found, batches = [], losses(trained)
    for _ in range(STEPS):
        for micro in range(BACKWARDS):
            trained.set_gradient_accumulation_boundary(micro == BACKWARDS - 1)
            trained.backward(next(batches))
        trained.step()
        found.append(round(float(trained.get_global_grad_norm()), 3))
    return found


if __name__ == "__main__":
    answer(
        {
            f"ZeRO-{stage}, {'optimizer on the CPU' if offloads else 'no offload'}": norms(stage, offloads=offloads)
            for stage in (1, 2)
            for offloads in (False, True)
        }
    )
