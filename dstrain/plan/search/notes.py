"""Notes of a plan: what it assumes, what it does not count, and what would make it faster."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from dstrain.choices import Attention, Method, Optimizer, Precision, Task
from dstrain.facts.attention_kernels import KERNELS, runs_on
from dstrain.facts.cluster.cluster import Origin
from dstrain.facts.model.model_facts import Kind, ModelFacts, Moe
from dstrain.facts.model.traits import COST, FLA, kernel_packages
from dstrain.facts.workload import Workload, seen_samples
from dstrain.job.limits import cpu_limits_of
from dstrain.plan import rope_scaling
from dstrain.plan.configuration import Configuration, changed, flat
from dstrain.plan.estimate import USABLE_GPU_RATIO
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.labels import bf16_losses
from dstrain.plan.memory.params import adapted_experts
from dstrain.plan.request import LrScaling, Request
from dstrain.plan.search import rules
from dstrain.plan.search.alternatives import liger_gain_ratio
from dstrain.plan.search.infeasible import gpu_assumed, gpu_guessed, ram_assumed
from dstrain.plan.search.reasons import faster, percent
from dstrain.plan.search.rules import unsuitable
from dstrain.plan.search.search_space import DEFAULT_GLOBAL_BATCH, batch_words, global_batch
from dstrain.plan.speed.step_time import forward_s, speed
from dstrain.units import counted, format_bytes, format_count

WORTH_ATTENTION = 0.03
"""Share of a step's time from which a plan names a faster kernel."""
WORTH_LIGER = 0.05
"""Gain from which a plan without Liger's kernels says what they would gain, as a ratio."""
LEARNING_RATES = {Method.FULL: 1e-5, Method.LORA: 1e-4, Method.QLORA: 2e-4}
"""Usual peak learning rates of supervised fine-tuning. Source: LLaMA-Factory's full examples (1e-5) and LoRA examples
(1e-4); QLoRA (arXiv 2305.14314), table 9 (2e-4 up to 13B)."""
PREFERENCE_RATES = {Method.FULL: 1e-6, Method.LORA: 5e-6, Method.QLORA: 5e-6}
"""Those of DPO. Source: trl 1.16 trainer/dpo_config.py (1e-6); LLaMA-Factory's LoRA example of DPO (5e-6)."""
STEADY_BATCH = 256
"""Samples of a step from which nothing is said of experts that train: a rule of thumb of guides to fine-tuning them."""


_MUON = (
    "matrices that Muon steps want a learning rate of their own, muon_learning_rate (DeepSpeed#7962: 1e-4 beside 2e-6)"
)


def notes(workload: Workload, request: Request, chosen: Estimate) -> tuple[str, ...]:
    """Returns the assumptions, and advice before training."""
    model, cluster = workload.model, workload.cluster
    found = [*_assumptions(workload, request, chosen), *_precision_notes(workload, chosen)]
    if chosen.speed is None:
        found.append(f"the speed of {cluster.gpu.name} is unknown, so no time is given")
    if model.traced is not None:
        found.append(model.traced.note)
    # the planning machine may lack them, and the ranks fall back to slow code without an error
    if (kernels := kernel_packages(model.model_type)) and not cluster.gpu.is_cpu:
        cost = f"; without, {COST}" if FLA in kernels else ""
        found.append(f"planned with the kernels of {' and '.join(kernels)} on every machine that trains{cost}")
    if request.has_open_attention:
        found += _attention_notes(workload, chosen)
    # only a plan that the request fixed can be this full
    share = chosen.memory.device_bytes_per_gpu / cluster.gpu.memory_bytes if cluster.gpu.memory_bytes else 0
    if chosen.fits and share > USABLE_GPU_RATIO:
        left = percent(1 - USABLE_GPU_RATIO)
        found.append(f"it fills {percent(share)} of the GPU; dstrain's own choices leave {left}")
    for limit in cpu_limits_of(flat(chosen.configuration)) if cluster.gpu.is_cpu else ():
        found.append(f"{limit.key} {limit.value} trains on a CPU only if {limit.unless}: {limit.why}")
    if request.task is Task.DPO:
        found += _reference_notes(workload, chosen)
    found += [*_optimizer_notes(workload, request, chosen), *_liger_notes(workload, request, chosen)]
    if (tower := _tower_note(model, request)) is not None:
        found.append(tower)
    if (packed_images := _packed_images(model, chosen.configuration)) is not None:
        found.append(packed_images)
    if (compiling := rules.compiling_note(workload, chosen.configuration)) is not None:
        found.append(compiling)
    if chosen.configuration.parallel.ep > 1:
        found.append(
            "computed as if every expert got as many tokens; GPUs with more popular ones need more memory and time"
        )
    if model.moe is not None and request.method is not Method.FULL:
        found.append(_adapters_note(model, chosen.configuration))
    return tuple(found)


def _tower_note(model: ModelFacts, request: Request) -> str | None:
    """Names the parts of a tower that are not counted; None if all of it is, or the model has none."""
    if model.vision is None or request.image_patches:
        return None
    tower = f"vision tower ({format_count(model.num_params_of(Kind.VISION))} parameters)"
    return f"no images are counted (--image-patches); the {tower} is frozen"  # a trained one has no plan without images


def _adapters_note(model: ModelFacts, configuration: Configuration) -> str:
    """Explains adapters beside experts, and the cost a layer of adapters on experts."""
    groups = adapted_experts(model, configuration.model.lora)
    if not groups:
        return "experts get no adapter, unless the job has lora: target_parameters; all-linear means those of attention"
    layer = configuration.model.item * sum(group.numel for group in groups)
    kept = "" if configuration.checkpointing.enabled else f", and the copies of all {groups[0].count} layers stay"
    return (
        f"PEFT adds the adapters of experts to a copy of a layer's weights in every pass: {format_bytes(layer)}, and as"
        f" much for its gradient{kept}"
    )


def _packed_images(model: ModelFacts, c: Configuration) -> str | None:
    """Returns how many images a packed row is planned with; None of other rows."""
    if model.vision is None or not c.batch.packing or not c.batch.image_patches:
        return None
    per_token, side = model.vision.spatial_merge_size**2, model.vision.patch_size
    samples = seen_samples(c.batch.seq_len, c.batch.image_patches, per_token, is_packed=True)
    patches = samples * c.batch.image_patches
    return (
        f"a packed row has room for the images of {counted(samples, 'sample')} ({patches:,} patches, "
        f"{format_count(patches * side**2)} pixels): memory counts all of them, time too unless the data are known"
    )


def _optimizer_notes(workload: Workload, request: Request, chosen: Estimate) -> Iterator[str]:
    """Yields the needs of the optimizer and of 4-bit weights, and losses that are not counted."""
    for choice in (request.method, request.optimizer):
        if choice in (Method.QLORA, Optimizer.ADAMW_8BIT):
            yield f"{choice} needs bitsandbytes on the machine that trains: pip install 'dstrain[qlora]'"
    if request.optimizer is Optimizer.MUON:
        yield _MUON
    if request.optimizer is Optimizer.ADAMW_BF16:
        rate = learning_rate(request, global_batch(workload.cluster, chosen.configuration))
        yield f"in bf16 {bf16_losses(rate, None)} (arXiv 2010.06192); adamw_8bit is as small and keeps fp32 weights"


def _liger_notes(workload: Workload, request: Request, chosen: Estimate) -> list[str]:
    """Names the needs of Liger's kernels, or their gain on known GPUs."""
    if request.liger:
        return ["liger needs liger-kernel on the machine that trains: pip install 'dstrain[kernels]'"]
    is_known = chosen.fits and workload.cluster.gpu_origin is not Origin.ASSUMED
    gain = liger_gain_ratio(workload, request, chosen) if is_known else None
    if gain is None or gain <= WORTH_LIGER:
        return []
    return [f"--liger would be {faster(gain)}, by Liger's kernels (dstrain[kernels])"]


def _reference_notes(workload: Workload, chosen: Estimate) -> list[str]:
    """Returns the cost of the reference, which is computed before the first step and kept in no second model."""
    configuration = chosen.configuration
    forward = forward_s(workload, configuration)
    if forward is None or chosen.speed is None:
        return ["before step 1, a pass over all samples computes the reference"]
    share = configuration.step.grad_accum * forward / chosen.speed.step_s
    return [f"before step 1, a pass over all samples computes the reference: {percent(share)} of an epoch's time"]


def _assumptions(workload: Workload, request: Request, chosen: Estimate) -> list[str]:
    """Returns the assumptions about machines, positions and batch."""
    model, cluster, configuration = workload.model, workload.cluster, chosen.configuration
    notes = []
    if cluster.gpu_origin is Origin.ASSUMED:
        notes.append(gpu_assumed(cluster))
    if not cluster.gpu.is_listed and chosen.speed is not None:
        notes.append(gpu_guessed(cluster))
    is_away = configuration.zero.is_offloaded or configuration.checkpointing.offload
    if cluster.host_memory_origin is Origin.ASSUMED and is_away:
        notes.append(ram_assumed(cluster))
    if cluster.num_nodes > 1 and cluster.inter_link_origin is Origin.ASSUMED and chosen.speed is not None:
        notes.append(f"assumed: {cluster.inter_link.name} between nodes; change it with --interconnect")
    if (scaling := configuration.batch.rope_scaling) is not None:
        notes += rope_scaling.notes(model, request.rope_scaling, scaling)
    if request.global_batch is None and request.micro_batch is None:
        notes.append(f"assumed: {batch_words(workload, configuration)} a step; change it with --global-batch")
    if model.moe is not None and configuration.model.is_full:
        notes += _experts_notes(model.moe, global_batch(cluster, configuration), configuration)
    notes += _calibration_notes(workload, chosen)
    batch = global_batch(cluster, configuration)
    return notes + _scaling_notes(request, batch, batch_words(workload, configuration))


def _calibration_notes(workload: Workload, chosen: Estimate) -> list[str]:
    """Names the source of the user's calibration, and the links without a rate."""
    cluster = workload.cluster
    entry = workload.calibration.of(cluster.gpu.name)
    if entry.source is None or chosen.speed is None:
        return []
    has_used = {"intra_link": cluster.num_gpus > 1, "inter_link": cluster.num_nodes > 1}
    unknown = [link for link in entry.of_others(**workload.links) if has_used[link]]
    others = [f"; its rate of {getattr(entry, link)} does not count for {workload.links[link]}" for link in unknown]
    return [f"calibrated: {entry.source}{''.join(others)}"]


def _experts_notes(moe: Moe, samples: int, configuration: Configuration) -> list[str]:
    """Explains the effect of a small batch on experts and routers that train."""
    tokens = samples * configuration.batch.seq_len * moe.experts_per_token // moe.num_experts
    if samples >= STEADY_BATCH:
        return []
    return [
        f"an expert sees {tokens:,} tokens of a step at most; --global-batch {STEADY_BATCH} or more steadies routers"
    ]


def _precision_notes(workload: Workload, chosen: Estimate) -> list[str]:
    """Returns the consequences of half precision without bf16, and of gradients sent as fp16."""
    model, cluster, configuration = workload.model, workload.cluster, chosen.configuration
    notes = []
    if configuration.model.precision is Precision.FP16 and cluster.gpu.lacks_bf16:
        notes.append(
            f"{cluster.gpu.name} has neither bf16 nor FlashAttention-2: fp16 with loss scaling and sdpa are used"
        )
    if configuration.model.precision is Precision.FP16 and model.dtype == "bfloat16":
        notes.append(f"{model.name} was trained in bf16: fp16 may overflow; watch the loss scale")
    return notes


def _attention_notes(workload: Workload, chosen: Estimate) -> list[str]:
    """Names the gain of the best FlashAttention of the GPU, if it is not planned and worth saying."""
    configuration, gpu = chosen.configuration, workload.cluster.gpu
    if chosen.speed is None or gpu.is_cpu or configuration.kernels.attn is not Attention.SDPA:
        return []
    wrong = unsuitable(workload, configuration)
    best = next((k.attn for k in KERNELS if k.attn not in wrong and runs_on(gpu, k.attn)), None)
    faster = speed(workload, changed(configuration, attn=best)) if best is not None else None
    saved = 1 - faster.step_s / chosen.speed.step_s if faster is not None else 0.0
    if saved <= WORTH_ATTENTION:
        return []
    return [f"planned with sdpa, which all machines have; a step with {best} takes {percent(saved)} less time"]


def learning_rate(request: Request, num_samples: int) -> float:
    """Returns the peak learning rate for that many samples of a step: the usual one of the method, or scaled.

    The usual ones are taken to be for the default of `DEFAULT_GLOBAL_BATCH` samples, which is a judgement, as is that
    a packed row counts as one sample.
    Source: Goyal et al. (arXiv 1706.02677), linear, for SGD; Malladi et al. (arXiv 2205.10287), square root, for Adam.
    """
    usual = (PREFERENCE_RATES if request.task is Task.DPO else LEARNING_RATES)[request.method]
    ratio = num_samples / DEFAULT_GLOBAL_BATCH
    factor = {None: 1.0, LrScaling.LINEAR: ratio, LrScaling.SQRT: math.sqrt(ratio)}[request.lr_scaling]
    return float(f"{usual * factor:.3g}")


def _scaling_notes(request: Request, num_samples: int, words: str) -> list[str]:
    """Returns the effect of scaling if a step has another number of samples, or packed rows, than by default.

    >>> _scaling_notes(Request(), 256, "256 samples")
    ['learning rate 1e-05 is meant for 64 samples a step; for 256 samples, --lr-scaling linear gives 4e-05, sqrt 2e-05']
    """
    if num_samples == DEFAULT_GLOBAL_BATCH:
        return []
    usual, linear, root = (
        f"{learning_rate(replace(request, lr_scaling=scaling), num_samples):g}" for scaling in (None, *LrScaling)
    )
    meant = (
        f"learning rate {usual} is meant for {DEFAULT_GLOBAL_BATCH} {'rows' if request.packing else 'samples'} a step"
    )
    if request.lr_scaling is not None:
        return [f"{meant}; for {words} it is {learning_rate(request, num_samples):g} ({request.lr_scaling})"]
    return [f"{meant}; for {words}, --lr-scaling linear gives {linear}, sqrt {root}"]
