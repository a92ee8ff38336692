"""Gradient norms of three steps with the optimizer on the CPU and not, by accumulation steps: DeepSpeed#7967."""

from __future__ import annotations

from small_engine import answer, engine, losses, network

STEPS = 3


def norms(stage: int, *, offloads: bool, accumulation: int) -> list[float]:
    """Returns the gradient norm of each step."""
    zero = {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offloads else {})
    trained = engine(network(), zero, gradient_accumulation_steps=accumulation)
    found, batches = [], losses(trained)
    for _ in range(STEPS):
        for _ in range(accumulation):
            trained.backward(next(batches))
            trained.step()
        found.append(round(float(trained.get_global_grad_norm()), 3))
    return found


if __name__ == "__main__":
    questions = [(2, False, n) for n in (1, 2, 4, 8)] + [(2, True, n) for n in (1, 2, 4, 8)]
    questions += [(1, True, 8), (3, True, 8)]
    answer(
        {
            f"ZeRO-{stage}, {'optimizer on the CPU' if offloads else 'no offload'}, accumulation {n}": norms(
                stage, offloads=offloads, accumulation=n
            )
            for stage, offloads, n in questions
        }
    )
