"""Computes the metrics of one logging window: tokens per second, MFU, data wait, non-finite values (pure functions)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dstrain.choices import Method, Precision
from dstrain.facts.cluster.gpus import Gpu
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.plan.speed.flops import flops_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one rank saw in one window; NaN where it cannot tell."""

    tokens: float
    """Tokens without padding."""
    padding: float
    """Tokens that only fill rows."""
    squared_tokens: float
    """Sum over samples of length²: what attention costs."""
    window_s: float
    """Wall-clock seconds of the window."""
    wait_s: float
    """Seconds in which the rank waited for its data loader."""
    peak_bytes: float
    """Most memory that PyTorch's allocator had given out on the GPU."""
    reserved_bytes: float
    """Most memory that PyTorch's allocator held."""
    alloc_retries: float
    """Times the allocator had to flush its cache, since the start."""
    gpu_utilization: float
    """NVML's utilisation, 0…1."""
    gpu_power_w: float
    """NVML's power draw in watts."""
    host_bytes: float
    """Resident memory of the process."""

    def numbers(self) -> list[float]:
        """Returns the fields in order, for a gather."""
        return [float(getattr(self, name)) for name in self.__slots__]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What MFU is measured against."""

    flops_per_token: float
    """Model FLOPs of one token without attention, forward and backward."""
    flops_per_token_and_context: float
    """Attention FLOPs of one token for each token of its sample."""
    flops_per_s: float
    """Peak of one GPU in the precision in use."""


def hardware(model: ModelFacts, gpu: Gpu, *, method: Method, precision: Precision) -> Hardware | None:
    """Returns what MFU needs, or None where the GPU's peak is not known: a guess from its clocks does not count.

    The FLOPs are `plan.flops`, which grow linearly with the sample's length. Recomputation is not counted (with it, the
    figure would be HFU).
    """
    peaks = {
        Precision.BF16: gpu.bf16_flops_per_s,
        Precision.FP16: gpu.fp16_flops_per_s,
        Precision.FP32: gpu.fp32_flops_per_s,
    }
    peak = peaks[precision]
    if not peak or not gpu.is_listed:
        return None
    without_attention = flops_per_token(model, method=method, seq_len=0)
    return Hardware(
        flops_per_token=without_attention,
        flops_per_token_and_context=flops_per_token(model, method=method, seq_len=1) - without_attention,
        flops_per_s=peak,
    )


def summarize(readings: Sequence[Reading], *, steps: int, against: Hardware | None) -> dict[str, Any]:
    """Returns the metrics of one window of `steps` steps from every rank's reading.

    >>> one = Reading(tokens=100, padding=100, squared_tokens=1e4, window_s=2, wait_s=1, peak_bytes=float("nan"),
    ...     reserved_bytes=float("nan"), alloc_retries=0, gpu_utilization=float("nan"), gpu_power_w=float("nan"),
    ...     host_bytes=5)
    >>> found = summarize([one, one], steps=2, against=None)
    >>> found["tokens_per_s"], found["padding_share"], found["data_wait_share"], found["step_s"]
    (100.0, 0.5, 0.5, 1.0)
    """
    tokens = sum(reading.tokens for reading in readings)
    padding = sum(reading.padding for reading in readings)
    window_s = max(max(reading.window_s for reading in readings), 1e-9)
    found: dict[str, Any] = {
        "tokens": int(tokens),
        "tokens_per_s": tokens / window_s,
        "tokens_per_s_per_gpu": tokens / window_s / len(readings),
        "padding_share": padding / (tokens + padding) if tokens + padding else 0.0,
        "step_s": window_s / max(steps, 1),
        "data_wait_share": max(reading.wait_s / max(reading.window_s, 1e-9) for reading in readings),
        "host_bytes_max": max(reading.host_bytes for reading in readings),
    }
    if against is not None and tokens:
        attention = against.flops_per_token_and_context * sum(reading.squared_tokens for reading in readings)
        flops = against.flops_per_token * tokens + attention
        found["mfu"] = flops / window_s / len(readings) / against.flops_per_s
    peaks = [reading.peak_bytes for reading in readings]
    if not any(map(math.isnan, peaks)):
        found["peak_bytes_per_gpu"] = max(peaks)
        found["peak_bytes_by_rank"] = peaks
        found["reserved_bytes_per_gpu"] = max(reading.reserved_bytes for reading in readings)
        found["alloc_retries"] = sum(reading.alloc_retries for reading in readings)
    for name in ("gpu_utilization", "gpu_power_w"):
        known = [value for value in (getattr(reading, name) for reading in readings) if not math.isnan(value)]
        if known:
            found[name] = sum(known) / len(known)
    return found


def without_nonfinite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values as JSON can hold them: a NaN becomes null, and `<name>_nonfinite` says what it was.

    >>> without_nonfinite({"loss": float("nan"), "step": 3})
    {'loss': None, 'loss_nonfinite': 'nan', 'step': 3}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            found[name] = None
            found[f"{name}_nonfinite"] = str(value)
        elif isinstance(value, list):
            found[name] = [None if isinstance(v, float) and not math.isfinite(v) else v for v in value]
        else:
            found[name] = value
    return found


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the values that a chart can draw, NaN included."""
    return {
        name: value for name, value in values.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }
