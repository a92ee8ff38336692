"""Compares the cost of two configurations."""

from __future__ import annotations

from dataclasses import dataclass

from dstrain.plan.estimate_records import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The difference that an edit makes; additional needs are positive."""

    device_bytes_per_gpu: int
    """Additional GPU memory in bytes."""
    host_bytes_per_node: int
    """Bytes of RAM of a node more."""
    step_ratio: float | None
    """Time of a step more, as a share of the time before; None if no speed is known."""
    tokens_ratio: float | None
    """Tokens a second more, as a share of those before; differs from the step's where a step has other samples."""
    fits_before: bool
    """Whether it fitted."""
    fits: bool
    """Whether it fits now."""


def effect(before: Estimate, after: Estimate) -> Effect:
    """Returns the additional memory and time of `after` over `before`."""
    slower = faster = None
    if before.speed is not None and after.speed is not None:
        slower = after.speed.step_s / before.speed.step_s - 1
        faster = after.speed.tokens_per_s_per_gpu / before.speed.tokens_per_s_per_gpu - 1
    return Effect(
        device_bytes_per_gpu=after.memory.device_bytes_per_gpu - before.memory.device_bytes_per_gpu,
        host_bytes_per_node=after.memory.host_bytes_per_node - before.memory.host_bytes_per_node,
        step_ratio=slower,
        tokens_ratio=faster,
        fits_before=before.fits,
        fits=after.fits,
    )
