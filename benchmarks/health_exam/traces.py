"""The recorded runs: their causes and onsets, and which rules must name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dstrain.job.monitor import HealthRule as Rule

JOB: Mapping[str, Any] = MappingProxyType(
    {
        "seq_len": 64,
        "micro_batch": 4,
        "max_steps": 160,
        "logging_steps": 5,
        "learning_rate": 1e-3,
        "warmup_ratio": 0.0,
        "max_grad_norm": 5.0,
        "precision": "fp32",
        "save_steps": 100_000,
    }
)
"""Keys of the job of every run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A cause of trouble."""

    name: str
    """As in `injection.CAUSES`, or that of the job."""
    named_by: frozenset[str]
    """Rules that name it; one of them must."""
    follows: frozenset[str] = frozenset()
    """Rules that are also broken by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One recorded run."""

    name: str
    cause: Cause | None
    """None: nothing is wrong."""
    half: int
    """0: the first run of a cause, after a look at which rules were repaired; 1: the second, which was in view too."""
    onset: int = 1
    """The first step with the cause."""
    size: float = 0.0
    on_rank: int = 1
    injected: str = "none"
    """What is put into the ranks: a key of `injection.CAUSES`."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the job that differ from the others'."""
    holds: frozenset[str] = frozenset()
    """Rules that the run breaks anyway."""
    resumed: Mapping[str, Any] = field(default_factory=dict)
    """Keys that change when the run is resumed; empty: it is not."""


def _cause(name: str, named_by: tuple[str, ...], follows: tuple[str, ...] = ()) -> Cause:
    return Cause(name=name, named_by=frozenset(named_by), follows=frozenset(follows))


_LOSS = (Rule.LOSS_SPIKE, Rule.GRADIENT_SPIKE)
_LATER = (
    *(Rule.REPEATED_SPIKES, Rule.REPEATED_GRADIENT_SPIKES, Rule.DIVERGENCE, Rule.LARGE_GRADIENT),
    *(Rule.ALWAYS_CLIPPED, Rule.OVERFITTING),
)
CAUSES = (
    _cause("slow rank", (Rule.SLOW_RANK,), (Rule.SLOWDOWN,)),
    _cause("slow hosts", (Rule.SLOWDOWN,)),
    _cause("slow links", (Rule.SLOW_LINKS,), (Rule.SLOWDOWN,)),
    _cause("slow data", (Rule.DATA_WAIT,), (Rule.SLOWDOWN,)),
    _cause("memory leak", (Rule.HOST_MEMORY_GROWTH,)),
    _cause("NaN in a batch", ("nonfinite_loss", "nonfinite_grad_norm"), (*_LOSS, *_LATER)),
    _cause("random labels", _LOSS, _LATER),
    _cause("learning rate x 100", _LOSS, _LATER),
    _cause("wrong weights", (Rule.FIRST_LOSS,), (*_LOSS, *_LATER)),
    _cause("padding", (Rule.PADDING,), (Rule.SLOWDOWN,)),
    _cause("masked samples", (Rule.MASKED_SAMPLES,)),
    _cause("vanishing gradient", (Rule.VANISHED_GRADIENT,), (Rule.PLATEAU,)),
    _cause("slow disk", (Rule.SLOW_CHECKPOINT,), (Rule.CHECKPOINT_TIME,)),
    _cause("overfitting", (Rule.OVERFITTING,), (Rule.DIVERGENCE,)),
    _cause("learning rate too low", (Rule.PLATEAU,)),
    _cause("other data after a resume", (Rule.RESUMED_LOSS,)),
)
_BY_NAME = {cause.name: cause for cause in CAUSES}
LATE = MappingProxyType({"overfitting": "the second evaluation that rises", "learning rate too low": "100 steps"})
"""Causes that show later by their nature → what their rule waits for."""
_SAVES = {"save_steps": 20, "save_total_limit": 1, "max_steps": 160}
_SMALL = {"data": "few.jsonl", "eval_data": "eval.jsonl", "eval_steps": 10, "learning_rate": 3e-3}
_SIZES: Mapping[str, tuple[tuple[float, int, Mapping[str, Any]], ...]] = MappingProxyType(
    {
        "slow rank": ((0.6, 111, {}), (1.0, 121, {"lr_scheduler_type": "linear"})),
        "slow hosts": ((1.0, 126, {}), (0.8, 131, {"grad_accum": 2})),
        "slow links": ((0.8, 126, {}), (1.5, 131, {"grad_accum": 2})),
        "slow data": ((0.3, 116, {}), (0.6, 121, {"packing": True})),
        "memory leak": ((6.0, 111, {}), (10.0, 121, {"lr_scheduler_type": "linear"})),
        "NaN in a batch": ((0.0, 111, {"max_steps": 140}), (0.0, 117, {"max_steps": 140, "grad_accum": 2})),
        "random labels": ((0.0, 111, {"max_steps": 140}), (0.0, 118, {"max_steps": 140, "grad_accum": 2})),
        "learning rate x 100": ((100.0, 111, {}), (100.0, 121, {"lr_scheduler_type": "constant"})),
        "wrong weights": ((8.0, 1, {"max_steps": 40}), (5.0, 1, {"max_steps": 40, "packing": True})),
        "padding": ((2.0, 111, {"max_steps": 140}), (3.0, 121, {"max_steps": 140, "micro_batch": 8})),
        "masked samples": ((0.0, 111, {"max_steps": 140}), (0.0, 116, {"max_steps": 140, "grad_accum": 2})),
        "vanishing gradient": ((1e-6, 111, {"max_steps": 140}), (0.0, 121, {"max_steps": 140})),
        "slow disk": ((0.3, 101, _SAVES), (0.6, 121, _SAVES)),
        "overfitting": ((0.0, 1, _SMALL), (0.0, 1, {**_SMALL, "eval_steps": 15})),
        "learning rate too low": (
            (0.0, 1, {"learning_rate": 1e-9, "logging_steps": 2}),
            (0.0, 1, {"learning_rate": 1e-8, "micro_batch": 8, "logging_steps": 2}),
        ),
        "other data after a resume": (
            (0.0, 101, {"max_steps": 130, "save_steps": 100}),
            (0.0, 101, {"max_steps": 130, "save_steps": 100, "micro_batch": 8}),
        ),
    }
)
"""Cause → size, onset and job of its two runs."""
_CLEAN: tuple[Mapping[str, Any], ...] = (
    {},
    {"grad_accum": 2},
    {"packing": True},
    {"lr_scheduler_type": "constant"},
    {"lr_scheduler_type": "linear", "warmup_ratio": 0.1},
    {"grad_accum": 4, "logging_steps": 2, "max_steps": 150},
    {"packing": True, "grad_accum": 2},
    {"learning_rate": 1e-4},
    {"eval_data": "eval.jsonl", "eval_steps": 50, "micro_batch": 8},
    {"zero": 3, "logging_steps": 10},
)


def all_traces() -> Iterator[Trace]:
    """Yields the traces: two of each cause, one of each half, and clean ones."""
    for cause in _BY_NAME.values():
        for half, (size, onset, job) in enumerate(_SIZES[cause.name]):
            is_resumed = cause.name == "other data after a resume"
            yield Trace(
                name=f"{cause.name.replace(' ', '-')}-{half}",
                cause=cause,
                half=half,
                onset=onset,
                size=size,
                on_rank=1 - half,
                injected=cause.name if cause.name not in (*LATE, "other data after a resume") else "none",
                job={"seed": 100 + half, **job},
                holds=frozenset({Rule.CHECKPOINT_TIME} if "save_steps" in job else ()),
                resumed={"seed": 7, "resume": "checkpoint-100"} if is_resumed else {},
            )
    for number, job in enumerate(_CLEAN):
        yield Trace(name=f"clean-{number}", cause=None, half=number % 2, job={"seed": number, "max_steps": 300, **job})
