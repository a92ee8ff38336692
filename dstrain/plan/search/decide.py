"""Makes the plan: surveys the best configurations, chooses the first, and gives reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dstrain.choices import Attention, Method, Offload, Optimizer, Precision
from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.cluster.cpu import QGZ, QWZ, limits_of
from dstrain.facts.model.kernel_packages import COST, FLA, kernel_packages
from dstrain.facts.model.model_facts import Kind, ModelFacts, Moe
from dstrain.facts.workload import Workload
from dstrain.plan import rope_scaling
from dstrain.plan.configuration import Configuration, flat
from dstrain.plan.estimate import USABLE_GPU_RATIO, assess, moved
from dstrain.plan.estimate_records import Estimate, Plan, Reason
from dstrain.plan.memory.params import adapted, linear_names
from dstrain.plan.request import Request
from dstrain.plan.search import compile_rules, learning_rate
from dstrain.plan.search.alternatives import eight_bit_instead, faster_but_too_large, neighbours
from dstrain.plan.search.buffer_sizes import TIGHT, least_offloaded, sized, sized_to_room
from dstrain.plan.search.evaluator import estimated, usable_ratio
from dstrain.plan.search.infeasible import does_not_fit, gpu_assumed, gpu_guessed, ram_assumed
from dstrain.plan.search.reasons import compared, percent, reasons
from dstrain.plan.search.search import DEFAULT_TOP, Ranking, search
from dstrain.plan.search.search_space import global_batch
from dstrain.plan.speed.step_time import forward_s
from dstrain.units import format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan with its reasons."""

    estimate: Estimate
    """The configuration, its memory and its speed."""
    reasons: tuple[Reason, ...]
    """Sentences with numbers; all proposals but the first are compared with the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The best plans, best first; if none fits, the nearest."""

    proposals: tuple[Proposal, ...]
    """The plans with their reasons."""
    fits: bool
    """Whether the first proposal fits."""
    rejected: tuple[Estimate, ...]
    """Estimates that would be faster than the first but do not fit, nearest to fitting first."""
    num_estimated: int
    """Configurations that were estimated."""
    num_excluded: int
    """Configurations excluded by a bound; together with the estimated ones, the whole space."""
    notes: tuple[str, ...]
    """Assumptions, and advice before training."""

    @property
    def first(self) -> Estimate:
        """The choice or, if nothing fits, the nearest estimate."""
        return self.proposals[0].estimate


STEADY_BATCH = 256
"""Samples of a step from which nothing is said of experts that train: a rule of thumb of guides to fine-tuning them."""


def decide(workload: Workload, request: Request) -> Plan:
    """Returns the fastest plan that fits.

    Raises DoesNotFit with the nearest changes that would fit, and InvalidConfig if the request contradicts itself or
    the GPU.
    """
    surveyed = survey(workload, request)
    if not surveyed.fits:
        raise does_not_fit(workload, request, surveyed.first)
    return plan_of(surveyed, workload.cluster, request)


def plan_of(surveyed: Survey, cluster: Cluster, request: Request) -> Plan:
    """Returns the first proposal of a survey as a plan."""
    return Plan(
        chosen=surveyed.first,
        rejected=surveyed.rejected,
        num_estimated=surveyed.num_estimated,
        global_batch=global_batch(cluster, surveyed.first.configuration),
        learning_rate=learning_rate.of_request(request, global_batch(cluster, surveyed.first.configuration)),
        reasons=surveyed.proposals[0].reasons,
        notes=surveyed.notes,
    )


def survey(workload: Workload, request: Request, *, top: int = DEFAULT_TOP) -> Survey:
    """Returns the `top` best plans with reasons; raises InvalidConfig if the request contradicts itself."""
    check(workload, request)
    ranking = search(workload, request, top=top)
    first, rung, assessed = _first(workload, request, ranking)
    cluster = workload.cluster
    error = first.memory.device_bytes_per_gpu - assessed(first.configuration).memory.device_bytes_per_gpu
    others = neighbours(workload, request, first, assess=lambda configuration: moved(assessed(configuration), error))
    others = others if first.fits else []
    eight_bit = eight_bit_instead(workload, request, first)
    why = reasons(workload, request, first, ranking=ranking, rung=rung, others=others, eight_bit=eight_bit)
    rest = [Proposal(estimate=estimate, reasons=compared(cluster, estimate, first)) for estimate in ranking.plans[1:]]
    return Survey(
        proposals=(Proposal(estimate=first, reasons=why), *rest),
        fits=first.fits,
        rejected=tuple(neighbour.estimate for neighbour in faster_but_too_large(cluster, first, others)),
        num_estimated=ranking.num_estimated,
        num_excluded=ranking.num_excluded,
        notes=_notes(workload, request, first),
    )


def choice(workload: Workload, request: Request) -> Estimate:
    """Returns the first plan of a survey without reasons; if nothing fits, a quick estimate of the nearest."""
    check(workload, request)
    ranking = search(workload, request, top=1)
    if not ranking.fits and ranking.rungs[0] is not None:
        return ranking.plans[0]
    return _first(workload, request, ranking)[0]  # one configuration may fit with small buffers


def _first(
    workload: Workload, request: Request, ranking: Ranking
) -> tuple[Estimate, int | None, Callable[[Configuration], Estimate]]:
    """Returns the first plan of a ranking in full, the rung of its buffers, and what estimates others like it."""
    ratio = usable_ratio(request)

    def assessed(configuration: Configuration) -> Estimate:
        return estimated(workload, configuration, usable_gpu_ratio=ratio)

    sketch, rung = _settled(workload.model, request, ranking, assess=assessed)
    first = assess(workload, sketch.configuration, usable_gpu_ratio=ratio)
    if sketch.fits and not first.fits:
        return ranking.plans[0], ranking.rungs[0], assessed
    return first, rung, assessed


def _settled(
    model: ModelFacts, request: Request, ranking: Ranking, *, assess: Callable[[Configuration], Estimate]
) -> tuple[Estimate, int | None]:
    """Returns the first of a ranking with its middle settings sized, and the rung of its buffers.

    Buffers grow into the memory left, and as little of a divided optimizer is offloaded as fits. One configuration that
    was asked for keeps its buffers, unless it fits only with small ones.
    """
    first, rung = ranking.plans[0], ranking.rungs[0]
    if rung is None:
        small = first if first.fits else assess(sized(model, first.configuration, TIGHT))
        return (first, None) if first.fits or not small.fits else (small, TIGHT)
    if not first.fits or request.is_one_configuration:
        return first, rung
    return sized_to_room(model, least_offloaded(first, assess=assess), rung, assess=assess)


def check(workload: Workload, request: Request) -> None:
    """Raises InvalidConfig for a request that the GPU or the model cannot satisfy."""
    model, cluster, gpu = workload.model, workload.cluster, workload.cluster.gpu
    if request.precision is Precision.BF16 and not gpu.has_bf16 and gpu.fp16_flops_per_s > 0:
        raise InvalidConfig(f"--precision bf16: {gpu.name} has no bf16", hint="Write --precision fp16.")
    asked = {
        "attn": request.attn,
        "precision": request.precision,
        "offload": request.offload,
        QWZ: request.qwz,
        QGZ: request.qgz,
        "activation_offload": request.activation_offload,
    }
    for limit in limits_of(asked) if gpu.is_cpu else ():
        if not limit.unless or limit.key == QGZ:  # on one node it does nothing, so that no request has it
            raise InvalidConfig(f"{limit.asked}: {limit.why}", hint=f"Write {limit.answer}.")
    if request.attn is Attention.FLASH_ATTENTION_2 and not gpu.has_flash_attention_2:
        raise InvalidConfig(
            f"--attn flash_attention_2: {gpu.name} is too old for FlashAttention-2",
            hint="Write --attn sdpa.",
        )
    if request.method is not Method.FULL and not adapted(model, request.lora):
        raise InvalidConfig(
            f"no linear layer of {model.name} is named {', '.join(request.lora.targets)}",
            hint=f"Its linear layers: {', '.join(linear_names(model))}; all-linear selects all that take one.",
        )
    if request.offload is Offload.NVME and cluster.nvme_path is None:
        raise InvalidConfig("--offload nvme needs a folder on an NVMe drive", hint="Add --nvme /path/on/nvme.")


_MUON = (
    "the orthogonalisation of Muon takes time that is not counted; matrices want a learning rate of their own,"
    " muon_learning_rate (DeepSpeed#7962: 1e-4 beside 2e-6)"
)


def _notes(workload: Workload, request: Request, chosen: Estimate) -> tuple[str, ...]:
    """Returns the assumptions, and advice before training."""
    model, cluster = workload.model, workload.cluster
    notes = [*_assumptions(workload, request, chosen), *_precision_notes(workload, chosen)]
    if chosen.speed is None:
        notes.append(f"the speed of {cluster.gpu.name} is unknown, so no time is given")
    if model.traced is not None:
        notes.append(model.traced.note)
    if (kernels := kernel_packages(model.model_type)) and not cluster.gpu.is_cpu:
        cost = f"; without, {COST}" if FLA in kernels else ""
        notes.append(f"planned with the kernels of {' and '.join(kernels)} on every machine that trains{cost}")
    share = chosen.memory.device_bytes_per_gpu / cluster.gpu.memory_bytes if cluster.gpu.memory_bytes else 0
    if chosen.fits and share > USABLE_GPU_RATIO:
        left = percent(1 - USABLE_GPU_RATIO)
        notes.append(f"it fills {percent(share)} of the GPU; dstrain's own choices leave {left}")
    for limit in limits_of(flat(chosen.configuration)) if cluster.gpu.is_cpu else ():
        notes.append(f"{limit.key} {limit.value} trains on a CPU only if {limit.unless}: {limit.why}")
    if request.task.has_own_loss:
        notes += _reference_notes(workload, chosen)
    for choice in (request.method, request.optimizer):
        if choice in (Method.QLORA, Optimizer.ADAMW_8BIT):
            notes.append(f"{choice} needs bitsandbytes on the machine that trains: pip install 'dstrain[qlora]'")
    if request.optimizer is Optimizer.MUON:
        notes.append(_MUON)
    if model.vision is not None and not request.image_patches:
        frozen = format_count(model.num_params_of(Kind.VISION))
        notes.append(f"no images are counted (--image-patches); the vision tower ({frozen} parameters) is frozen")
    if (compiling := compile_rules.note(workload, chosen.configuration)) is not None:
        notes.append(compiling)
    if chosen.configuration.parallel.ep > 1:
        notes.append(
            "computed as if every expert got as many tokens; GPUs with more popular ones need more memory and time"
        )
    if model.moe is not None and request.method is not Method.FULL:
        notes.append("experts are 3-D tensors in Transformers 5: adapters go to the linear layers of attention")
    return tuple(notes)


def _reference_notes(workload: Workload, chosen: Estimate) -> list[str]:
    """Returns what the reference costs, which is computed before the first step and kept in no second model."""
    forward = forward_s(workload, chosen.configuration)
    if forward is None or chosen.speed is None:
        return ["before step 1, a forward pass over all pairs computes the reference"]
    share = forward * chosen.configuration.step.grad_accum / chosen.speed.step_s
    return [f"before step 1, a forward pass over all pairs computes the reference: {percent(share)} of an epoch's time"]


def _assumptions(workload: Workload, request: Request, chosen: Estimate) -> list[str]:
    """Returns the assumptions about machines, positions and batch."""
    model, cluster, configuration = workload.model, workload.cluster, chosen.configuration
    notes = []
    if cluster.gpu_origin is Origin.ASSUMED:
        notes.append(gpu_assumed(cluster))
    if not cluster.gpu.is_listed and chosen.speed is not None:
        notes.append(gpu_guessed(cluster))
    if cluster.host_memory_origin is Origin.ASSUMED and configuration.zero.is_offloaded:
        notes.append(ram_assumed(cluster))
    if (scaling := configuration.batch.rope_scaling) is not None:
        notes += rope_scaling.notes(model, request.rope_scaling, scaling)
    if request.global_batch is None and request.micro_batch is None:
        samples = global_batch(cluster, configuration)
        notes.append(f"assumed: {samples} samples a step; change it with --global-batch")
    if model.moe is not None and configuration.model.is_full:
        notes += _experts_notes(model.moe, global_batch(cluster, configuration), configuration)
    return notes + learning_rate.notes(request, global_batch(cluster, configuration))


def _experts_notes(moe: Moe, samples: int, configuration: Configuration) -> list[str]:
    """Returns what a small batch gives to experts and routers that train."""
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
    is_old = not cluster.gpu.has_bf16 and not cluster.gpu.is_cpu
    if configuration.model.precision is Precision.FP16 and is_old:
        notes.append(
            f"{cluster.gpu.name} has neither bf16 nor FlashAttention-2: fp16 with loss scaling and sdpa are used"
        )
    if configuration.model.precision is Precision.FP16 and model.dtype == "bfloat16":
        notes.append(f"{model.name} was trained in bf16: fp16 may overflow; watch the loss scale")
    if configuration.zero.qgz and configuration.model.precision is not Precision.FP16:
        notes.append("--qgz sends gradients as fp16: those below 6e-8 become zero")
    return notes
