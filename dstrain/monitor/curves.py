"""Names the curves of every tracker: section, unit and meaning of each metric.

Loss and evaluations have the names that Transformers' own callbacks give them, so that runs of other tools overlay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dstrain.monitor.traffic import KINDS
from dstrain.units import GIB

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
