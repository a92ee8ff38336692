"""The recorded runs: their causes and onsets, and which rules must name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dstrain.job.schema import HealthRule as Rule

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
    """As in `causes.CAUSES`, or that of the job."""
    named_by: frozenset[str]
    """Rules that name it; one of them must."""
    follows: frozenset[str] = frozenset()
    """Rules that are also broken by it."""
    injected: str = "none"
    """The fault that is injected into the ranks, a key of `causes.CAUSES`; `none`: the job itself causes it."""
    grows_over: int = 0
    """Steps in which it grows to its full size; 0: it begins at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One recorded run."""

    name: str
    cause: Cause | None
    """None: nothing is wrong."""
    half: int
    """0: the first run of a cause, after a look at which rules were repaired; 1: the second, which was in view too."""
    onset: int = 1
    """The first step with the cause; with overfitting, that after the best evaluation."""
    size: float = 0.0
    on_rank: int = 1
    job: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the job that differ from the others'."""
    resumed: Mapping[str, Any] = field(default_factory=dict)
    """Keys that change when the run is resumed; empty: it is not."""


def _cause(
    name: str,
    named_by: tuple[str, ...],
    follows: tuple[str, ...] = (),
    *,
    injected: str | None = None,
    grows_over: int = 0,
) -> Cause:
    """Returns a cause that is injected under its own name, unless it is another's."""
    return Cause(
        name=name,
        named_by=frozenset(named_by),
        follows=frozenset(follows),
        injected=name if injected is None else injected,
        grows_over=grows_over,
    )


_LATER = (Rule.ABOVE_GUESSING, Rule.ALWAYS_CLIPPED, Rule.OVERFITTING)
_ROUTING = (Rule.BUSIEST_EXPERT, Rule.DEAD_EXPERTS, Rule.LOSS_SPIKE)
CAUSES = (
    _cause("slow rank", (Rule.SLOW_RANK,), (Rule.SLOWDOWN,)),
    _cause("slow hosts", (Rule.SLOWDOWN,)),
    _cause("slow links", (Rule.SLOWDOWN,)),
    _cause("slow data", (Rule.DATA_WAIT,), (Rule.SLOWDOWN,)),
    _cause("memory leak", (Rule.MEMORY_GROWTH,)),
    _cause("NaN in a batch", ("nonfinite_loss", "nonfinite_grad_norm"), (Rule.LOSS_SPIKE, *_LATER)),
    _cause("random labels", (Rule.LOSS_SPIKE,), _LATER),
    _cause("learning rate x 100", (Rule.LOSS_SPIKE,), _LATER),
    _cause("wrong weights", (Rule.FIRST_LOSS,), (Rule.LOSS_SPIKE, *_LATER)),
    _cause("padding", (Rule.PADDING,), (Rule.SLOWDOWN,)),
    _cause("masked samples", (Rule.MASKED_SAMPLES,)),
    _cause("vanishing gradient", (Rule.VANISHED_GRADIENT,), (Rule.PLATEAU,)),
    _cause("slow disk", (Rule.SLOW_CHECKPOINT,)),
    _cause("overfitting", (Rule.OVERFITTING,), injected="none"),
    _cause("learning rate too low", (Rule.PLATEAU,), injected="none"),
    _cause("other data after a resume", (Rule.RESUMED_LOSS,), injected="none"),
    _cause("slow rank, ZeRO-3", (Rule.SLOW_RANK,), (Rule.SLOWDOWN,), injected="slow rank"),
    _cause("throttled links, ZeRO-3", (Rule.BUS_BANDWIDTH,), (Rule.SLOWDOWN,), injected="throttled links"),
    _cause("slow data, ZeRO-3", (Rule.DATA_WAIT,), (Rule.SLOWDOWN,), injected="slow data"),
    _cause("memory leak, ZeRO-3", (Rule.MEMORY_GROWTH,), injected="memory leak"),
    _cause("rank that slows", (Rule.SLOW_RANK,), (Rule.SLOWDOWN,), injected="slow rank", grows_over=100),
    _cause("data that slow", (Rule.DATA_WAIT,), (Rule.SLOWDOWN,), injected="slow data", grows_over=100),
    _cause("slow leak", (Rule.MEMORY_GROWTH,), injected="memory leak", grows_over=100),
    _cause("no labels", (Rule.MASKED_SAMPLES, "nonfinite_loss"), (Rule.VANISHED_GRADIENT,)),
    _cause("one token", (Rule.ZERO_LOSS,), (Rule.LOSS_SPIKE, Rule.VANISHED_GRADIENT)),
    _cause("clipping limit too low", (Rule.ALWAYS_CLIPPED,), injected="none"),
    _cause("preferred expert", (Rule.BUSIEST_EXPERT,), _ROUTING),
    _cause("starved experts", (Rule.DEAD_EXPERTS,), _ROUTING),
    _cause("uneven router", (Rule.DEAD_EXPERTS,), _ROUTING),
    _cause("fp16 overflow", (Rule.SKIPPED_STEPS,), (Rule.LOSS_SPIKE, *_LATER, "nonfinite_grad_norm")),
    _cause("rising learning rate", (Rule.LOSS_SPIKE,), _LATER, grows_over=100),
)
_BY_NAME = {cause.name: cause for cause in CAUSES}
LATE = MappingProxyType({"learning rate too low": "100 steps", "clipping limit too low": "100 steps"})
"""Causes that show later by their nature → what their rule waits for."""
_SAVES = {"save_steps": 20, "save_total_limit": 1, "max_steps": 160}
_SMALL = {"data": "few.jsonl", "eval_data": "eval.jsonl", "eval_steps": 10, "learning_rate": 3e-3}
_ZERO_3: dict[str, Any] = {"zero": 3}
_LONG: dict[str, Any] = {"max_steps": 240}
_SHORT: dict[str, Any] = {"max_steps": 140}
_BALANCED: dict[str, Any] = {"experts": 16, "router_aux_loss_coef": 0.02}
_EXPERTS: dict[str, Any] = {**_BALANCED, "experts": 8}
_FAST: dict[str, Any] = {"max_steps": 60, "learning_rate": 3e-2}
_FP16: dict[str, Any] = {"precision": "fp16", "max_steps": 140}
_FINE: dict[str, Any] = {"logging_steps": 2, "max_steps": 480}
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
        "overfitting": ((0.0, 11, _SMALL), (0.0, 16, {**_SMALL, "eval_steps": 15})),
        "learning rate too low": (
            (0.0, 1, {"learning_rate": 1e-9} | _FINE),
            (0.0, 1, {"learning_rate": 1e-8, "micro_batch": 8} | _FINE),
        ),
        "other data after a resume": (
            (0.0, 101, {"max_steps": 130, "save_steps": 100}),
            (0.0, 101, {"max_steps": 130, "save_steps": 100, "micro_batch": 8}),
        ),
        "slow rank, ZeRO-3": ((0.7, 111, _ZERO_3), (1.0, 121, _ZERO_3 | {"grad_accum": 2})),
        "throttled links, ZeRO-3": ((1e9, 111, _ZERO_3), (5e8, 121, _ZERO_3 | {"grad_accum": 2})),
        "slow data, ZeRO-3": ((0.4, 111, _ZERO_3), (0.6, 121, _ZERO_3 | {"packing": True})),
        "memory leak, ZeRO-3": ((6.0, 111, _ZERO_3), (10.0, 121, _ZERO_3)),
        "rank that slows": ((1.0, 106, _ZERO_3 | _LONG), (1.5, 116, _LONG)),
        "data that slow": ((0.6, 106, _ZERO_3 | _LONG), (0.8, 116, _LONG)),
        "slow leak": ((0.5, 106, _ZERO_3 | _LONG), (0.7, 116, _LONG)),
        "no labels": ((0.0, 111, _SHORT), (0.0, 121, _SHORT | {"grad_accum": 2})),
        "one token": ((5, 6, _FAST), (9, 11, _FAST | {"packing": True})),
        "clipping limit too low": (
            (0.0, 1, {"max_grad_norm": 0.05}),
            (0.0, 1, {"max_grad_norm": 0.1, "grad_accum": 2}),
        ),
        "preferred expert": ((4.0, 121, _BALANCED), (6.0, 126, _BALANCED | {"grad_accum": 2})),
        "starved experts": ((8.0, 121, _EXPERTS), (12.0, 126, _EXPERTS | {"packing": True})),
        "uneven router": ((1.0, 121, _EXPERTS), (1.5, 126, _EXPERTS | {"grad_accum": 2})),
        "fp16 overflow": ((1e9, 111, _FP16), (1e9, 121, _FP16 | {"grad_accum": 2})),
        "rising learning rate": (
            (1.06, 106, _LONG | {"lr_scheduler_type": "constant", "grad_accum": 2}),
            (1.07, 116, _LONG | {"lr_scheduler_type": "constant"}),
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
    {"zero": 3},
    {"zero": 3, "grad_accum": 2, "packing": True},
    {"zero": 3, "lr_scheduler_type": "linear", "warmup_ratio": 0.1},
    {"zero": 3, "grad_accum": 2, "logging_steps": 10, "max_steps": 400},
    {"micro_batch": 8},
    {"grad_accum": 2, "packing": True, "lr_scheduler_type": "linear"},
    {"learning_rate": 3e-4, "lr_scheduler_type": "constant"} | _FINE,
    {"learning_rate": 1e-3, "data": "few.jsonl"} | _FINE,
    _BALANCED,
    {"experts": 16, "packing": True, "grad_accum": 2},
)


def all_traces() -> Iterator[Trace]:
    """Yields the traces: two of each cause, one of each half, and clean ones."""
    for cause in _BY_NAME.values():
        for half, (size, onset, job) in enumerate(_SIZES[cause.name]):
            is_resumed = cause.name == "other data after a resume"
            yield Trace(
                name=f"{cause.name.replace(',', '').replace(' ', '-')}-{half}",
                cause=cause,
                half=half,
                onset=onset,
                size=size,
                on_rank=1 - half,
                job={"seed": 100 + half, **job},
                resumed={"seed": 7, "resume": "checkpoint-100"} if is_resumed else {},
            )
    for number, job in enumerate(_CLEAN):
        yield Trace(name=f"clean-{number}", cause=None, half=number % 2, job={"seed": number, "max_steps": 300, **job})
