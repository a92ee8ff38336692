"""Computes the metrics of a logging window: tokens per second, MFU, data wait, memory (pure functions)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dstrain.choices import Method, Precision
from dstrain.facts.cluster.gpus import Gpu
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.monitor.expert_balance import curves
from dstrain.plan.speed.flops import flops_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The counters of one rank in one window; NaN for unknown values."""

    tokens: float
    """Tokens, without padding."""
    padding: float
    """Padding tokens."""
    squared_tokens: float
    """Sum of length² over samples; attention FLOPs are proportional to it."""
    window_s: float
    """Wall-clock seconds of the window."""
    wait_s: float
    """Seconds spent waiting for the data loader."""
    peak_bytes: float
    """Peak of allocated GPU memory."""
    reserved_bytes: float
    """Peak of GPU memory reserved by PyTorch's allocator."""
    outside_bytes: float
    """GPU memory in use at the end of the window and not reserved by PyTorch: context, NCCL, other processes."""
    alloc_retries: float
    """Cache flushes of the allocator since the start."""
    gpu_utilization: float
    """NVML's utilization, 0…1."""
    gpu_power_w: float
    """NVML's power draw."""
    host_bytes: float
    """Resident memory of this process."""
    host_used_share: float
    """Share of this node's RAM that is in use, 0…1."""
    samples: float = 0.0
    """Samples, without padding."""
    masked_samples: float = 0.0
    """Samples of which no token has a label."""
    targets: float = 0.0
    """Tokens with a label."""
    forward_s: float = math.nan
    """Seconds of a forward pass, on a GPU without the collectives in it: the lower quartile."""
    forward_s_per_token: float = math.nan
    """Those seconds over the tokens, padding included: the lower quartile."""
    cpu_wait_share: float = math.nan
    """Share of the forward passes' time for which the main thread was ready to run and others had its CPU, 0…1."""
    gpu_clock_mhz: float = math.nan
    """NVML's clock of the multiprocessors."""
    gpu_power_limit_w: float = math.nan
    """NVML's enforced power limit."""
    own_s: float = math.nan
    """Seconds of the window in which this rank waited neither for other ranks nor for data."""

    queued_s: float = math.nan
    """Seconds of the window in which the main thread had no CPU, those among them in which it was in a collective."""
    host_s: float = 0.0
    """Seconds of the window in which the device waited for this process (`meter.Meter`)."""
    other_s: float = 0.0
    """Seconds of the window between steps: callbacks, logging."""
    aside_s: float = 0.0
    """Seconds of checkpoints, evaluations and second tries, which are not in the window."""

    def numbers(self) -> list[float]:
        """Returns the fields in order, for a gather: (26,)."""
        return [float(getattr(self, name)) for name in self.__slots__]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Model FLOPs per token and the peak of the GPU, for MFU."""

    flops_per_token: float
    """Model FLOPs of one token without attention, forward and backward."""
    flops_per_token_and_context: float
    """Attention FLOPs of one token per token of its sample."""
    flops_per_s: float
    """Peak of one GPU in the precision in use."""


def hardware(model: ModelFacts, gpu: Gpu, *, method: Method, precision: Precision) -> Hardware | None:
    """Returns the inputs of MFU, or None if the GPU's peak is unknown; an estimate from its clocks does not count.

    The FLOPs are those of `plan.speed.flops`, which grow linearly with the sample's length, without recomputation (with
    it, the result would be HFU).
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
    ...     reserved_bytes=float("nan"), outside_bytes=float("nan"), alloc_retries=0,
    ...     gpu_utilization=float("nan"), gpu_power_w=float("nan"),
    ...     host_bytes=5, host_used_share=0.5)
    >>> metrics = summarize([one, one], steps=2, against=None)
    >>> metrics["tokens_per_s"], metrics["padding_share"], metrics["data_wait_share"], metrics["step_s"]
    (100.0, 0.5, 0.5, 1.0)
    """
    tokens = sum(reading.tokens for reading in readings)
    padding = sum(reading.padding for reading in readings)
    window_s = max(max(reading.window_s for reading in readings), 1e-9)
    metrics: dict[str, Any] = {
        "tokens": int(tokens),
        "tokens_per_s": tokens / window_s,
        "tokens_per_s_per_gpu": tokens / window_s / len(readings),
        "padding_share": padding / (tokens + padding) if tokens + padding else 0.0,
        "step_s": window_s / max(steps, 1),
        "data_wait_share": max(reading.wait_s / max(reading.window_s, 1e-9) for reading in readings),
        "data_wait_s_by_rank": [reading.wait_s / max(steps, 1) for reading in readings],
        "host_bytes_max": max(reading.host_bytes for reading in readings),
        "host_used_share": max(reading.host_used_share for reading in readings),
        "masked_share": sum(one.masked_samples for one in readings) / max(sum(one.samples for one in readings), 1),
    }
    for name in ("forward_s", "forward_s_per_token", "cpu_wait_share"):
        values = [getattr(reading, name) for reading in readings]
        if not any(map(math.isnan, values)):
            metrics[f"{name}_by_rank"] = values
    for name in ("own_s", "queued_s"):
        values = [getattr(reading, name) / max(steps, 1) for reading in readings]
        if len(values) > 1 and not any(map(math.isnan, values)):
            metrics[f"{name}_by_rank"] = values
    if against is not None and tokens:
        attention = against.flops_per_token_and_context * sum(reading.squared_tokens for reading in readings)
        flops = against.flops_per_token * tokens + attention
        metrics["mfu"] = flops / window_s / len(readings) / against.flops_per_s
    metrics |= _contents(readings) | _beside_computation(readings, max(steps, 1))
    return metrics | _memory(readings) | _nvml(readings)


def _contents(readings: Sequence[Reading]) -> dict[str, float]:
    """Returns the contents of the rows (`RowContents`); empty if samples were not counted."""
    tokens, samples, squared, targets = (
        sum(getattr(reading, name) for reading in readings)
        for name in ("tokens", "samples", "squared_tokens", "targets")
    )
    if not tokens or not samples:
        return {}
    return {"sample_tokens": tokens / samples, "attended_tokens": squared / tokens, "target_share": targets / tokens}


def _beside_computation(readings: Sequence[Reading], steps: int) -> dict[str, Any]:
    """Returns each rank's seconds of a step that are no computation, and the seconds of checkpoints and evaluations."""
    metrics: dict[str, Any] = {
        f"{name}_by_rank": [getattr(reading, name) / steps for reading in readings] for name in ("host_s", "other_s")
    }
    aside_s = max(reading.aside_s for reading in readings)
    return metrics | {"aside_s": aside_s} if aside_s else metrics


def _nvml(readings: Sequence[Reading]) -> dict[str, Any]:
    """Returns NVML's figures of the GPUs: means over the ranks that know them, and each rank's if all do."""
    metrics: dict[str, Any] = {}
    for name in ("gpu_utilization", "gpu_power_w", "gpu_clock_mhz"):
        values = [getattr(reading, name) for reading in readings]
        known = [value for value in values if not math.isnan(value)]
        if known:
            metrics[name] = sum(known) / len(known)
        if len(known) == len(values) and name != "gpu_utilization":
            metrics[f"{name}_by_rank"] = values
    shares = [reading.gpu_power_w / reading.gpu_power_limit_w for reading in readings]
    if not any(map(math.isnan, shares)):
        metrics["gpu_power_share"] = sum(shares) / len(shares)
    return metrics


def _memory(readings: Sequence[Reading]) -> dict[str, Any]:
    """Returns the GPU memory of the ranks; nothing without GPUs."""
    peaks, reserved = ([getattr(reading, name) for reading in readings] for name in ("peak_bytes", "reserved_bytes"))
    if any(map(math.isnan, peaks)):
        return {}
    return {
        "peak_bytes_per_gpu": max(peaks),
        "peak_bytes_by_rank": peaks,
        "reserved_bytes_per_gpu": max(reserved),
        "reserved_bytes_by_rank": reserved,
        "outside_bytes_by_rank": [reading.outside_bytes for reading in readings],
        "alloc_retries": sum(reading.alloc_retries for reading in readings),
    }


def without_nonfinite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values in valid JSON: NaN and infinities become null, and `<name>_nonfinite` keeps them as text.

    >>> without_nonfinite({"loss": float("nan"), "step": 3})
    {'loss': None, 'loss_nonfinite': 'nan', 'step': 3}
    """
    finite: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            finite[name] = None
            finite[f"{name}_nonfinite"] = str(value)
        elif isinstance(value, list):
            finite[name] = [None if isinstance(v, float) and not math.isfinite(v) else v for v in value]
        else:
            finite[name] = value
    return finite


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the values that a chart can show, NaN included; figures of experts for each layer, too."""
    return curves(values) | {
        name: value for name, value in values.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }
