"""Rules about memory of GPUs and hosts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dstrain.job.monitor import HealthRule
from dstrain.monitor.health import outlook, signals
from dstrain.monitor.health.rule import Rule

MEMORY_RULES: Mapping[HealthRule, Rule] = MappingProxyType(
    {
        HealthRule.GPU_MEMORY_GROWTH: Rule(
            signal=signals.gpu_memory_growth,
            warn=3,
            outlook=outlook.gpu_memory_pace,
            problem="the GPU's peak has grown {value:.0f} times in a row, window by window or three by three",
            advice="Something keeps tensors: an own callback, or losses that are added up with their graph.",
            source="a peak settles within 20 windows; three records in a row then happen by chance once in 1,000 runs",
        ),
        HealthRule.HOST_MEMORY_GROWTH: Rule(
            signal=signals.host_memory_growth,
            warn=3,
            outlook=outlook.host_memory_pace,
            problem="a rank's RAM has grown {value:.0f} times in a row, window by window or three by three",
            advice="Look for what keeps data: workers of the data loader, or an own callback.",
            source="as gpu_memory_growth",
        ),
        HealthRule.HOST_MEMORY: Rule(
            signal=signals.host_memory,
            warn=0.85,
            critical=0.95,
            problem="{value:.0%} of a node's RAM is in use",
            advice="The kernel kills a process when none is left: fewer data workers, less offload, or more RAM.",
            source="the kernel's OOM killer",
        ),
        HealthRule.ALLOCATOR_RETRIES: Rule(
            signal=signals.allocator_retries,
            warn=1,
            problem="the allocator has flushed its cache {value:.0f} times in this window, for want of memory",
            advice="The GPU is full: PYTORCH_ALLOC_CONF=expandable_segments:True, a smaller micro_batch, or grad_ckpt.",
            source="DeepSpeed and torchtitan warn of the same counter",
        ),
        HealthRule.FRAGMENTATION: Rule(
            signal=signals.fragmentation,
            warn=0.20,
            problem="the allocator holds {value:.0%} of the GPU beyond the live peak",
            advice="PYTORCH_ALLOC_CONF=expandable_segments:True in env.",
            source="published runs: nvidia-smi over live bytes is 1.32 in the median and 1.69 in one of ten",
        ),
        HealthRule.MEMORY_IMBALANCE: Rule(
            signal=signals.memory_imbalance,
            warn=0.10,
            problem="one rank's peak is {value:.0%} above another's",
            advice="The fullest rank decides what fits. packing: true evens out lengths; with experts, the router may "
            "prefer a few.",
            source="ZeRO divides evenly: what differs is activations",
        ),
    }
)
