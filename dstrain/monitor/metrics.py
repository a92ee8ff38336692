"""Computes the metrics of a logging window, names their curves in trackers, and keeps them in files of JSON lines."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.choices import Method, Precision
from dstrain.facts.cluster.gpus import Gpu
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.monitor.expert_balance import curves
from dstrain.monitor.traffic import KINDS
from dstrain.plan.speed.flops import flops_per_token
from dstrain.units import GIB


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

    The FLOPs are from `plan.speed.flops`, which grow linearly with the sample's length, without recomputation (with
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
    # ranks wait for each other at the end of a window, so that the longest is the time of all
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
    # a rank is its place in the list, so that a list is whole or absent
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


_LAYER = "/layer_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A metric as trackers show it."""

    tag: str
    """Its name there: the section, a slash and the rest."""
    unit: str = ""
    label: str
    """Meaning, in English."""
    chinese: str
    """The same in Chinese."""
    per: float = 1.0
    """How many of the unit of `metrics.jsonl` make one of this unit."""


# fmt: off
_ROWS = (
    ("loss", "train/loss", "", "mean loss of a token with a label", "有标签 token 的平均 loss", 1),
    ("learning_rate", "train/learning_rate", "", "rate of the last step", "最后一步的学习率", 1),
    ("grad_norm", "train/grad_norm", "", "norm of the gradients before clipping", "裁剪前的梯度范数", 1),
    ("epoch", "train/epoch", "epochs", "passes over the data so far", "已遍历数据的轮数", 1),
    ("loss_scale", "train/loss_scale", "", "loss scale of fp16", "fp16 的 loss scale", 1),
    ("skipped_steps", "train/skipped_steps", "steps", "steps skipped so far, as gradients were not finite",
     "因梯度非有限而跳过的步数（累计）", 1),
    ("tokens_seen", "train/tokens_seen", "tokens", "tokens trained on so far", "已训练的 token 数", 1),
    ("tokens_per_s", "speed/tokens_per_s", "tokens/s", "tokens of all GPUs a second, without padding",
     "所有 GPU 每秒的 token 数，不含填充", 1),
    ("tokens_per_s_per_gpu", "speed/tokens_per_s_per_gpu", "tokens/s", "the same of one GPU",
     "单个 GPU 的同一数值", 1),
    ("mfu", "speed/mfu", "0…1", "model FLOPs over the peak of the GPU", "模型 FLOPs 与 GPU 峰值之比", 1),
    ("step_s", "speed/step_s", "s", "time of an optimizer step", "一个优化器步的时间", 1),
    ("data_wait_share", "speed/data_wait_share", "0…1", "share of time spent waiting for the data loader",
     "等待数据加载的时间占比", 1),
    ("comm_s", "speed/comm_s", "s", "time of a step that ranks wait for collectives", "每步等待集合通信的时间", 1),
    ("comm_share", "speed/comm_share", "0…1", "the same as a share of a step", "占一步时间的比例", 1),
    ("comm_bytes", "speed/comm_gib", "GiB", "bytes of a step's collectives", "每步集合通信的数据量", GIB),
    ("comm_calls", "speed/comm_calls", "calls", "collectives of a step", "每步集合通信的次数", 1),
    *(row for kind in KINDS for row in (
        (f"comm/{kind}_s", f"speed/comm/{kind}_s", "s", f"time of a step that ranks wait for {kind}",
         f"每步等待 {kind} 的时间", 1),
        (f"comm/{kind}_bytes", f"speed/comm/{kind}_gib", "GiB", f"bytes of a step's {kind}",
         f"每步 {kind} 的数据量", GIB),
        (f"comm/{kind}_calls", f"speed/comm/{kind}_calls", "calls", f"calls of {kind} in a step",
         f"每步 {kind} 的次数", 1),
    )),
    ("bus_bytes_per_s", "speed/bus_gb_per_s", "GB/s", "bus bandwidth of large collectives",
     "大集合通信的总线带宽", 1e9),
    ("bus_share", "speed/bus_share", "0…1", "the same over what the plan's links allow", "与方案中链路能力之比", 1),
    ("aside_s", "speed/aside_s", "s",
     "checkpoints, evaluations and second tries since the last point, not part of steps",
     "上一点以来保存、评估和重试的时间，不计入步", 1),
    ("checkpoint_s", "speed/checkpoint_s", "s", "time of the last checkpoint", "最近一次保存的时间", 1),
    ("checkpoint_share", "speed/checkpoint_share", "0…1", "the same over the time since the one before it",
     "占两次保存间隔的比例", 1),
    ("gpu_utilization", "speed/gpu_utilization", "0…1", "utilization of the GPUs by NVML", "NVML 的 GPU 利用率", 1),
    ("gpu_power_w", "speed/gpu_power_w", "W", "mean power of a GPU", "GPU 平均功率", 1),
    ("gpu_power_share", "speed/gpu_power_share", "0…1", "the same over its limit", "与功率上限之比", 1),
    ("gpu_clock_mhz", "speed/gpu_clock_mhz", "MHz", "mean clock of a GPU", "GPU 平均频率", 1),
    ("peak_bytes_per_gpu", "memory/peak_gib_per_gpu", "GiB", "peak of tensors on the fullest GPU",
     "最满 GPU 上张量的峰值", GIB),
    ("reserved_bytes_per_gpu", "memory/reserved_gib_per_gpu", "GiB", "peak that PyTorch held on it",
     "PyTorch 持有的峰值", GIB),
    ("alloc_retries", "memory/alloc_retries", "", "cache flushes of the allocator since the start",
     "分配器清空缓存的次数（累计）", 1),
    ("host_bytes_max", "memory/host_gib_max", "GiB", "RAM of the fullest rank's process",
     "占用最多的 rank 进程的内存", GIB),
    ("host_used_share", "memory/host_used_share", "0…1", "used share of the fullest node's RAM",
     "最满节点的内存使用率", 1),
    ("tokens", "rows/tokens", "tokens", "tokens since the last point, without padding",
     "上一点以来的 token 数，不含填充", 1),
    ("padding_share", "rows/padding_share", "0…1", "share of positions that are padding", "填充位置的占比", 1),
    ("target_share", "rows/target_share", "0…1", "share of tokens with a label", "有标签 token 的占比", 1),
    ("masked_share", "rows/masked_share", "0…1", "share of samples without any label", "没有任何标签的样本占比", 1),
    ("sample_tokens", "rows/sample_tokens", "tokens", "mean length of a sample", "样本的平均长度", 1),
    ("attended_tokens", "rows/attended_tokens", "tokens", "mean length of the sample that a token is in",
     "token 所在样本的平均长度", 1),
    ("expert_load_cv", "experts/load_cv", "", "deviation of the experts' load over its mean, mean of the layers",
     "专家负载的标准差与均值之比，各层平均", 1),
    ("expert_load_cv_worst_layer", "experts/load_cv_worst_layer", "", "the same of the worst layer",
     "最差一层的同一数值", 1),
    ("expert_load_max_over_mean", "experts/load_max_over_mean", "", "load of the busiest expert over the mean",
     "最忙专家的负载与均值之比", 1),
    ("expert_load_diversity", "experts/load_diversity", "0…1", "exp(entropy) of the load over the number of experts",
     "负载的 exp(熵) 与专家数之比", 1),
    ("dead_experts", "experts/dead", "experts", "experts that got no token, over all layers",
     "没有 token 的专家数，所有层", 1),
    ("experts", "experts/number", "experts", "experts of all layers", "所有层的专家数", 1),
)
# fmt: on
CURVES: Mapping[str, Curve] = MappingProxyType(
    {
        name: Curve(tag=tag, unit=unit, label=label, chinese=chinese, per=per)
        for name, tag, unit, label, chinese, per in _ROWS
    }
)
"""Metric of `metrics.jsonl` → its curve, in the order in which trackers get them."""
_ORDER = {name: number for number, name in enumerate(CURVES)}


def tag_of(name: str) -> str:
    """Returns the name of a metric's curve; a metric outside the table is named as by Transformers' `rewrite_logs`.

    >>> [tag_of(name) for name in ("loss", "eval_loss", "rewards/margins", "expert_load_cv/layer_07")]
    ['train/loss', 'eval/loss', 'train/rewards/margins', 'experts_load_cv/layer_07']
    """
    metric, layer, number = name.partition(_LAYER)
    if metric in CURVES:
        tag = CURVES[metric].tag
        return f"{tag.replace('/', '_', 1)}{layer}{number}" if layer else tag
    for section in ("eval", "test"):
        if name.startswith(f"{section}_"):
            return f"{section}/{name.removeprefix(f'{section}_')}"
    return f"train/{name}"


def points(values: Mapping[str, float]) -> dict[str, float]:
    """Returns the values of a window by the names of their curves, in the units of the table.

    >>> points({"host_bytes_max": 2**31, "loss": 1.5})
    {'train/loss': 1.5, 'memory/host_gib_max': 2.0}
    """
    names = sorted(values, key=lambda name: _ORDER.get(name, len(_ORDER)))
    return {tag_of(name): values[name] / curve.per if (curve := CURVES.get(name)) else values[name] for name in names}


class JsonlFile:
    """A file of JSON lines that is only appended to."""

    def __init__(self, path: Path) -> None:
        """The file is created with the first line."""
        self.path = path

    def append(self, record: Mapping[str, Any]) -> None:
        """Appends one line; NaN and infinities are written as null (`without_nonfinite`)."""
        line = json.dumps(without_nonfinite(record), ensure_ascii=False, allow_nan=False) + "\n"
        with self.path.open("ab") as file:
            if file.tell() and not self._ends_whole():
                file.write(b"\n")  # ends a line that was truncated by a kill
            file.write(line.encode())

    def _ends_whole(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a file without truncated lines; none if the file is missing."""
    records = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def current_steps(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the logged steps of a run without those that were repeated after a resume.

    >>> current_steps([{"step": 1}, {"step": 2}, {"event": "resume", "from_step": 1}, {"step": 2, "loss": 3}])
    [{'step': 1}, {'step': 2, 'loss': 3}]
    """
    kept: list[dict[str, Any]] = []
    for record in records:
        if record.get("event") == "resume":
            kept = [old for old in kept if old["step"] <= record["from_step"]]
        elif "event" not in record and "step" in record:
            kept.append(record)
    return kept
