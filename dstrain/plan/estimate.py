"""Estimates any configuration: a candidate of the search, or a ds_config.json written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from dstrain.choices import Method, Offload, Optimizer, Precision
from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.ds_config import OLD_OFFLOADS, ZERO, offload_device
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import BF16_STATES, DEFAULTS, Choice, Configuration, OptimizerStep, Zero, choices
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.memory.memory import Memory, memory
from dstrain.plan.memory.params import trained
from dstrain.plan.memory.peak import Detail
from dstrain.plan.named_parts import require_targets
from dstrain.plan.request import Request
from dstrain.plan.speed.flops import flops_per_token
from dstrain.plan.speed.step_time import delayed, speed

N = TypeVar("N", int, float)

USABLE_GPU_RATIO = 0.90
"""Share of the GPU that a plan may fill while the machine is not calibrated.
Source: Fujii et al. (arXiv 2411.06465)
saw no out-of-memory below 80 % of a coarser estimate, without context and fragmentation, which ours counts."""
ASKED_GPU_RATIO = 1.0
"""The same for one configuration that was asked for: there the question is whether it runs, not whether to choose it.
"""
USABLE_HOST_RATIO = 0.90
"""Share of a node's RAM that a plan may fill; the operating system and the page cache keep the rest."""


def assess(
    workload: Workload,
    configuration: Configuration,
    *,
    detail: Detail = Detail.REPLAYED,
    usable_gpu_ratio: float = USABLE_GPU_RATIO,
) -> Estimate:
    """Estimates the memory and speed of a configuration, and whether it fits.

    A search asks first for quick estimates, in which a closed form stands for the allocator's replay.
    """
    usable_gpu = round(usable_gpu_ratio * workload.cluster.gpu.memory_bytes)
    return estimate_of(
        workload, configuration, memory(workload, configuration, detail=detail, usable_bytes=usable_gpu), usable_gpu
    )


def estimate_of(workload: Workload, configuration: Configuration, needs: Memory, usable_gpu: int) -> Estimate:
    """Returns the estimate of a configuration whose memory is known."""
    model, cluster = workload.model, workload.cluster
    known = speed(workload, configuration)
    usable_host = round(USABLE_HOST_RATIO * cluster.host_memory_bytes)
    return Estimate(
        configuration=configuration,
        memory=needs,
        usable_bytes_per_gpu=usable_gpu,
        usable_bytes_per_host=usable_host,
        fits_gpu=needs.load.fits_gpu and needs.device_bytes_per_gpu <= usable_gpu,
        fits_host=needs.host_bytes_per_node <= usable_host,
        speed=delayed(known, needs.retries_per_step) if known is not None else None,
        flops_per_token=flops_per_token(model, method=configuration.model.method, seq_len=configuration.batch.seq_len),
        num_params=model.num_params,
        num_active_params=model.num_active_params,
        num_trainable_params=trained(model, configuration.model.method, configuration.model.lora).trainable,
    )


def moved(base: Estimate, count: int) -> Estimate:
    """Returns the estimate with `count` bytes more on the GPU: by what the exact one of a neighbour was off.

    Errors of closed forms are nearly the same for two configurations that differ in one choice.
    """
    needs = replace(
        base.memory,
        live_bytes_per_gpu=base.memory.live_bytes_per_gpu + count,
        reserved_bytes_per_gpu=base.memory.reserved_bytes_per_gpu + count,
        device_bytes_per_gpu=base.memory.device_bytes_per_gpu + count,
    )
    fits_gpu = needs.load.fits_gpu and needs.device_bytes_per_gpu <= base.usable_bytes_per_gpu
    return replace(base, memory=needs, fits_gpu=fits_gpu)


def estimate(workload: Workload, request: Request, ds_config: Mapping[str, Any]) -> Estimate:
    """Returns the estimate of any DeepSpeed configuration under a complete request, ours or not.

    Raises InvalidConfig for what no plan can have, such as an adapter of modules that the model does not have.
    """
    if request.method is not Method.FULL:
        require_targets(workload.model, request.lora)
    return assess(workload, effective(workload.model, request, ds_config))


OPTIMIZER_TYPES: Mapping[str, Optimizer] = MappingProxyType(
    {
        "adam": Optimizer.ADAMW,
        "adamw": Optimizer.ADAMW,
        "lion": Optimizer.LION,
        "muon": Optimizer.MUON,
        "sgd": Optimizer.SGD,
    }
)
"""Types of the engine's `optimizer` section in lower case → what they are planned as.
Source: deepspeed 0.19.8 runtime/config.py: DEEPSPEED_OPTIMIZERS; runtime/engine.py: _configure_basic_optimizer."""
_LARGEST = 2**62
"""No size of a buffer is more, in elements: beyond it there is no address."""


def effective(model: ModelFacts, request: Request, ds_config: Mapping[str, Any]) -> Configuration:
    """Resolves `ds_config` as DeepSpeed 0.19 and Transformers 5 do: defaults filled in, "auto" resolved.

    Raises InvalidConfig for a value that means nothing to the engine.
    Source: deepspeed 0.19.8 runtime/zero/config.py; Transformers 5.23 integrations/deepspeed.py:
    trainer_config_process (reduce bucket h², prefetch 0.9·h², persistence 10·h).
    """
    try:
        return _effective(model, request, ds_config)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise InvalidConfig(
            f"the configuration cannot be understood: {error}", hint="dstrain lint says where."
        ) from None


def _effective(model: ModelFacts, request: Request, ds_config: Mapping[str, Any]) -> Configuration:
    zero = _zero(model, ds_config.get("zero_optimization") or {})
    asked = request.of_model(model)
    tp = int((ds_config.get("tensor_parallel") or {}).get("autotp_size") or asked.parallel.tp)
    experts = ds_config.get("expert_parallel") or {}
    ep = int((experts.get("enabled") and experts.get("autoep_size")) or asked.parallel.ep)
    return replace(
        asked,
        step=_step(asked, ds_config, zero),
        parallel=replace(
            asked.parallel,
            tp=_within("autotp_size", tp, 1, _LARGEST),
            ep=_within("autoep_size", ep, 1, _LARGEST),
        ),
        zero=zero,
    )


def auto_sizes(hidden_size: int) -> Mapping[str, int]:
    """Returns Transformers' values for "auto", by the key of `zero_optimization`: h², 0.9·h² and 10·h elements.

    Source: Transformers 5.23 integrations/deepspeed.py: trainer_config_process.
    """
    return {
        "reduce_bucket_size": hidden_size**2,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }


def _zero(model: ModelFacts, section: Mapping[str, Any]) -> Zero:
    """Returns ZeRO's settings from the section `zero_optimization`."""
    stage = _within("zero_optimization.stage", int(section.get("stage", 0)), 0, 3)
    auto = auto_sizes(model.hidden_size)
    single = [choice for choice in choices().values() if choice.is_of_zero and len(choice.keys) == 1]
    settings = {choice.field: _setting(choice, section, auto) for choice in single if choice.least_stage <= stage}
    settings |= {"stage": stage, "offload": _offload({ZERO: section}), "hpz": max(1, settings.get("hpz", 1))}
    if section.get("overlap_comm") is None:  # DeepSpeed's default depends on the stage
        settings["overlap_comm"] = stage == 3
    return Zero(**settings)


def _setting(choice: Choice, section: Mapping[str, Any], auto: Mapping[str, int]) -> Any:
    """Returns a setting of ZeRO with one key, which the engine knows without `stage3_` too."""
    default, path = choice.of(DEFAULTS), choice.keys[0].removeprefix(f"{ZERO}.")
    outer, _, key = path.rpartition(".")
    inner = (section.get(outer) or {}) if outer else section
    value = inner.get(key, inner.get(key.removeprefix("stage3_"), default))
    if isinstance(default, bool):
        return bool(value)
    if value == "auto":
        return auto.get(key, default)
    if isinstance(default, float):
        return _within(path, float(value), 0, 1)
    return round(_within(path, float(value), 0, _LARGEST))


def _within(name: str, value: N, least: float, most: float) -> N:
    """Returns the value. Raises ValueError if it is out of range or not a number."""
    if not least <= value <= most:
        raise ValueError(f"{name} is {value:g}")
    return value


def optimizer_type(ds_config: Mapping[str, Any]) -> str | None:
    """Returns the type of the engine's own optimizer, which takes the place of the job's; None without one."""
    section = ds_config.get("optimizer")
    named = section.get("type") if isinstance(section, Mapping) else None
    return named if isinstance(named, str) else None


def unplanned_optimizer(ds_config: Mapping[str, Any]) -> str | None:
    """Returns as what the engine's optimizer is planned, in words, if its own states are not counted."""
    named = optimizer_type(ds_config)
    if named is None or named.lower() in OPTIMIZER_TYPES:
        return None
    return f"{named} is planned as AdamW: its own states and time are not counted"


def _step(asked: Configuration, ds_config: Mapping[str, Any], zero: Zero) -> OptimizerStep:
    """Returns the step with the optimizer of the configuration or else of the job, and the dtypes in which gradients
    are summed and AdamW's states are kept, as far as the configuration names them.

    Of the other optimizers states in bf16 are counted as if they were not: more than they take. ZeRO-1 that adds up in
    fp32 has another engine, without them. Source: deepspeed 0.19.8 runtime/engine.py: _do_optimizer_sanity_check.
    """
    named = (ds_config.get("data_types") or {}).get("grad_accum_dtype")
    summed = Precision(named) if named in tuple(Precision) else None
    bf16, optimizer = ds_config.get("bf16") or {}, asked.step.optimizer
    if (own := optimizer_type(ds_config)) is not None:
        optimizer = OPTIMIZER_TYPES.get(own.lower(), Optimizer.ADAMW)
    keeps_bf16 = {Optimizer.ADAMW: False, Optimizer.ADAMW_BF16: True}.get(optimizer)
    if keeps_bf16 is not None:
        least = 2 if summed is Precision.FP32 and not zero.is_offloaded else 1
        has_keys = all(bf16.get(key, keeps_bf16) is True for key in BF16_STATES)
        keeps_bf16 = has_keys and asked.model.precision is Precision.BF16 and zero.stage >= least
        optimizer = Optimizer.ADAMW_BF16 if keeps_bf16 else Optimizer.ADAMW
    return replace(asked.step, grad_accum_dtype=summed, optimizer=optimizer)


def _offload(config: Mapping[str, Any]) -> Offload:
    """Returns the offload that takes effect.

    A mixture is taken as the nearest way that needs more: parameters alone as nothing, an optimizer on NVMe without
    parameters as one on the CPU, an optimizer on the CPU with parameters on NVMe as both on the CPU.
    """
    optimizer, params = (offload_device(config, name) for name in OLD_OFFLOADS)
    if optimizer == "none":
        return Offload.NONE
    if params == "none":
        return Offload.OPTIMIZER
    return Offload.NVME if optimizer == params == "nvme" else Offload.PARAMS


def supported_precision(cluster: Cluster) -> Precision:
    """Returns the precision a GPU trains in: bf16 if supported, fp16 before Ampere, fp32 on a CPU."""
    if cluster.gpu.has_bf16:
        return Precision.BF16
    return Precision.FP16 if cluster.gpu.lacks_bf16 else Precision.FP32
