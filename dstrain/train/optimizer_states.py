"""Allocates the optimizer states before the first step, or memory in their place."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3  # type: ignore[import-untyped]


def allocate_states(engine: Any) -> None:
    """Allocates the states of PyTorch's AdamW, which its first step would allocate between what lives then.

    The free memory is in one piece then, for all steps that follow. A resumed run has loaded the states; other
    optimizers make theirs in the first step. Source: torch 2.13 optim/adam.py: _init_group.
    """
    inner = _inner(engine)
    if type(inner) is torch.optim.AdamW and not inner.defaults["amsgrad"]:
        is_on_device = inner.defaults["fused"] or inner.defaults["capturable"]
        for master in _without_states(engine):
            step = torch.zeros((), dtype=torch.float32, device=master.device if is_on_device else "cpu")
            moments = {name: torch.zeros_like(master.data) for name in ("exp_avg", "exp_avg_sq")}
            inner.state[master] = {"step": step, **moments}


def _inner(engine: Any) -> Any:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _without_states(engine: Any) -> list[torch.Tensor]:
    """Returns the master copies on the engine's device that have no optimizer states yet."""
    inner = _inner(engine)
    masters = [parameter for group in inner.param_groups for parameter in group["params"]]
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        masters = engine.optimizer.fp32_partitioned_groups_flat
    device = torch.device(engine.device).type
    return [master for master in masters if master.device.type == device and not inner.state.get(master)]


def states_to_come(engine: Any, *, bytes_per_state: int | None) -> int:
    """Returns the bytes of Adam's two moments that the first step will allocate on the engine's device.

    `bytes_per_state`: bytes of a number of a state; None: those of its parameter's.
    """
    return sum(2 * master.numel() * (bytes_per_state or master.element_size()) for master in _without_states(engine))


def reserved_for_first_step(engine: Any, *, bytes_per_state: int | None) -> torch.Tensor:
    """Returns memory for the states that the first step will allocate, so that it is missing in the passes before."""
    count = states_to_come(engine, bytes_per_state=bytes_per_state)
    return torch.empty(count, dtype=torch.uint8, device=engine.device)
