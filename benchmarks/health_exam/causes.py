"""All causes of trouble by name, and how one is put into a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.health_exam import delays, faults
from benchmarks.health_exam.injection import First, Injection, Steps


def nothing(_: Injection) -> None:
    """Leaves a run as it is."""


CAUSES: Mapping[str, Callable[[Injection], None]] = {
    "none": nothing,
    "slow rank": delays.slow_rank,
    "slow hosts": delays.slow_everywhere,
    "slow links": delays.slow_links,
    "throttled links": delays.throttled_links,
    "slow data": delays.slow_data,
    "memory leak": faults.leak,
    "NaN in a batch": faults.bad_batch,
    "random labels": faults.bad_labels,
    "learning rate x 100": faults.high_rate,
    "rising learning rate": faults.rising_rate,
    "wrong weights": faults.wrong_weights,
    "padding": faults.padding,
    "masked samples": faults.masked,
    "no labels": faults.no_labels,
    "one token": faults.known_answer,
    "preferred expert": faults.preferred_expert,
    "starved experts": faults.starved_experts,
    "uneven router": faults.uneven_router,
    "fp16 overflow": faults.overflow,
    "vanishing gradient": faults.vanishing,
    "slow disk": delays.slow_disk,
}
"""Cause → what it does to a rank; others, such as overfitting, are made by the job alone."""


def inject(trainer: Any, rank: int, settings: Mapping[str, Any]) -> None:
    """Puts a cause into this rank."""
    injection = Injection(
        trainer=trainer,
        rank=rank,
        onset=settings["onset"],
        size=settings["size"],
        on_rank=settings["on_rank"],
        grows_over=settings.get("grows_over", 0),
    )
    trainer.add_callback(Steps(injection, lambda: None))
    if settings.get("is_first"):
        trainer.add_callback(First())
    CAUSES[settings["cause"]](injection)
