"""Bounds, times and estimates of a search's candidates, each computed once; and whether a candidate fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dstrain.choices import LossKernel, Method, Offload, Optimizer, Precision
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.model.model_facts import Kind, ModelFacts
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration
from dstrain.plan.estimate import ASKED_GPU_RATIO, USABLE_GPU_RATIO, USABLE_HOST_RATIO, assess
from dstrain.plan.estimate_records import Estimate, Speed
from dstrain.plan.memory.layers.activations import has_layer_code
from dstrain.plan.memory.loading import loading, machine_of
from dstrain.plan.memory.memory import host_bytes
from dstrain.plan.memory.optimizer_states import STATES, master_item, stepped_bytes_per_param
from dstrain.plan.memory.outside import outside_bytes
from dstrain.plan.memory.params import Trained, is_inside, shard, trained_on_rank
from dstrain.plan.memory.peak import Detail
from dstrain.plan.memory.zero import partition_of, sharing_ranks, states, weight_bytes
from dstrain.plan.request import Request
from dstrain.plan.search.search_space import TIGHT, Candidate, data_parallel_ranks, space
from dstrain.plan.speed.efficiency import efficiency
from dstrain.plan.speed.step_time import difference_error_s, speed

LOGITS_BYTES = 8
"""Bytes of each logit that exist at once under the plain loss, at least: its fp32 copy and the log-softmax; the
half-precision logit itself besides. Source: Transformers 5.23 loss/loss_utils.py: ForCausalLMLoss. The chunked loss has
the logit and its gradient. Source: deepspeed 0.19.8 runtime/chunked_cross_entropy.py: _TritonCrossEntropy."""
LAYER_BYTES = {"eager": (14, 8), "adapted": (8, 6), "all adapted": (12, 8), "fused": (4, 4)}
"""Bytes that a layer keeps of each element of the hidden size, and of the MLP's inner width, at least.

Two norms, with their fp32 copies but where fused, and with the normalised copies of trained weights; gate, up,
activation and product, the last not before frozen weights; gate and up alone where fused. Each adapter keeps its input.
Source: tensors saved by Transformers 5.23's layers, counted (16 and 8 under full training); Liger-Kernel
ops/rms_norm.py and swiglu.py."""

SUB_GROUP_SIZES = (2**26, 2**28)
"""Elements of ZeRO-3's sub-groups on the rungs that a search tries (`search_space.sizes`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The minimum that a strategy needs, for any batch and any buffers."""

    fixed_bytes: int
    """On the GPU all the time, whatever the batch."""
    waiting_bytes: int
    """On the GPU besides from the second micro-batch of a step on: gradients to which others are added."""
    head_bytes: int
    """On the GPU in the backward pass of the head: its weight, if it is gathered for that."""
    unit_bytes: int
    """On the GPU in the backward pass of a layer: a gathered weight, and its gradient."""
    sample_bytes: int
    """On the GPU in either, for each sample of a micro-batch: what all layers keep but the one at work."""
    logits_bytes: int
    """On the GPU in the backward pass of the loss, for each sample."""
    layer_bytes: int
    """On the GPU in that of a layer, for each sample: what the layer has kept or made again."""
    step_bytes: int
    """On the GPU when the optimizer steps or the last gradient arrives."""
    load_bytes: int
    """On the GPU while the model is loaded, if 4-bit weights are loaded whole."""
    host_bytes: int
    """In the RAM of one node."""

    def device_bytes(self, micro_batch: int, grad_accum: int) -> int:
        """Returns the bytes on the GPU with this micro-batch and accumulation."""
        fixed = self.fixed_bytes + (self.waiting_bytes if grad_accum > 1 else 0)
        loss = max(self.head_bytes, micro_batch * self.logits_bytes)
        work = max(loss, self.unit_bytes + micro_batch * self.layer_bytes)
        return max(fixed + micro_batch * self.sample_bytes + work, self.step_bytes)


def bound(workload: Workload, way: Configuration) -> Bound:
    """Returns the bound of a strategy.

    On the GPU: context and NCCL, parameters and optimizer states of this rank; with them the layers' inputs
    (checkpointing) or most of what they save, and at the loss the logits or a gathered head, in the last layer most of
    what it saves, a gathered weight and its gradient; at the end, under ZeRO-3 always, the gradients; nothing smaller.
    In host RAM: master copy and moments.
    """
    model, cluster = workload.model, workload.cluster
    counts = trained_on_rank(model, way)
    ranks = sharing_ranks(cluster, way)
    held, partition = states(counts, way, ranks), partition_of(counts, way, ranks)
    is_here = not way.zero.is_offloaded
    # how much of a divided optimizer stays on the GPU depends on the buffers
    staying = held.optimizer if is_here else _staying_bytes(counts, way, partition)
    fixed = float(outside_bytes(cluster, way, workload.measured) + held.params + staying)
    head, unit = _gathered_bytes(model, way, ranks)
    if way.zero.hpz > 1:
        fixed += (0.99 * ranks * held.params - head - unit) / way.zero.hpz
    # ZeRO-1 without overlap reduces once, at the boundary of a step, and until then keeps whole gradients
    is_whole = way.zero.stage == 1 and not way.zero.overlap_comm
    grads = way.model.item * counts.trainable if is_whole else held.grads
    end = fixed + (grads if is_here else 0)
    all_layers, layer = _activation_bytes(model, way)
    return Bound(
        fixed_bytes=int(end if way.zero.stage == 3 else fixed),
        waiting_bytes=_waiting_bytes(counts, way, partition),
        head_bytes=head,
        unit_bytes=unit,
        sample_bytes=int(all_layers),
        logits_bytes=int(_logits_bytes(model, way)),
        layer_bytes=int(layer),
        step_bytes=int(end),
        load_bytes=_load_bytes(workload, counts, way),
        host_bytes=int(_host_bytes(cluster, way, counts, ranks)),
    )


def _load_bytes(workload: Workload, counts: Trained, way: Configuration) -> int:
    """Returns the bytes of loading if they may exceed training's: 4-bit weights are loaded whole."""
    if way.model.method is not Method.QLORA:
        return 0
    return loading(workload.model, counts, way, machine_of(workload, way)).device_bytes_per_gpu


def _waiting_bytes(counts: Trained, way: Configuration, partition: float) -> int:
    """Returns the gradients to which those of later micro-batches are added, as far as they come and go."""
    stage = way.zero.stage
    if stage == 3 or (way.zero.is_offloaded and stage != 1):
        return 0
    return int(way.model.item * (counts.trainable if stage < 2 else partition))


def _staying_bytes(counts: Trained, way: Configuration, partition: float) -> float:
    """Returns states and gradients of the sub-groups of a divided optimizer that stay on the GPU, with any buffers.

    Sub-groups reach their size with the parameter that exceeds it; those without decay, which are few, come last.
    Source: deepspeed 0.19.8 runtime/zero/stage3.py: _create_fp16_sub_groups, subgroup_to_device.
    """
    zero = way.zero
    if zero.stage < 3 or zero.offload is not Offload.OPTIMIZER or zero.offload_ratio == 1 or way.parallel.ep > 1:
        return 0.0
    largest = partition * counts.largest_trainable / counts.trainable
    elements = min(
        int((1 - zero.offload_ratio) * (0.99 * partition / (size + largest))) * size for size in SUB_GROUP_SIZES
    )
    return (_optimizer_bytes(way) + master_item(way.step.optimizer)) * elements


def _optimizer_bytes(way: Configuration) -> float:
    """Returns bytes of master copy and moments for each trained parameter, without Muon's moments."""
    optimizer = way.step.optimizer
    left_out = STATES[optimizer] if optimizer is Optimizer.MUON else 0
    return stepped_bytes_per_param(way) - left_out * master_item(optimizer)


def _activation_bytes(model: ModelFacts, way: Configuration) -> tuple[float, float]:
    """Returns the bytes that all layers but one keep of one sample, and those that the last one keeps or recomputes.

    Recomputed ones h of each token in half precision; others `LAYER_BYTES`, and queries, keys, values and outputs of
    attention.
    """
    tokens = way.batch.sample_tokens / way.parallel.sp
    checkpointing, depth = way.checkpointing, model.num_hidden_layers
    adapted = "all adapted" if way.model.lora.targets == ("all-linear",) and model.moe is None else "adapted"
    kernels = "fused" if way.kernels.liger else "eager" if way.model.is_full else adapted
    hidden, inner = LAYER_BYTES[kernels]
    attention = 4 * model.num_attention_heads * model.v_head_dim
    attention += 2 * model.num_key_value_heads * (model.head_dim + model.v_head_dim)
    kept = hidden * model.hidden_size + (attention + inner * _mlp_width(model)) / way.parallel.tp
    last = kept - inner * _mlp_width(model) / way.parallel.tp if checkpointing.tiled_mlp else kept
    recomputed = 0 if checkpointing.offload else 2 * model.hidden_size
    num_recomputed = round(checkpointing.share(depth) * depth)
    num_kept = max(0, depth - num_recomputed - 1)
    last = last if has_layer_code(model) else 0.0  # layers that are traced may be of kinds that keep less
    return (num_kept * kept + (depth - 1 - num_kept) * recomputed) * tokens, last * tokens


def _gathered_bytes(model: ModelFacts, way: Configuration, ranks: int) -> tuple[int, int]:
    """Returns the fewest bytes that ZeRO-3 gathers for the head, and for the last module of a layer together with its
    gradient: one weight of an MLP, or the experts of a layer, which are gathered together."""
    if way.zero.stage < 3 or not has_layer_code(model):
        return 0, 0
    tensors = shard(model, way.parallel).tensors
    moe, item = model.moe is not None, way.model.item
    inner = [group for group in tensors if group.kind is (Kind.EXPERT if moe else Kind.MLP) and is_inside(group)]
    numel = sum(group.numel for group in inner) if moe else min(group.numel for group in inner if group.is_linear)
    quantized = 4 if way.model.method is Method.QLORA and not moe else 1
    are_alone = ranks // way.parallel.ep <= 1 and not way.zero.offloads_params
    gathered = 0 if are_alone else item * numel // quantized
    is_trained = way.model.is_full and all(group.num_trained == group.numel * group.count for group in inner)
    grad = item * min(group.numel for group in inner if len(group.shape) > 1) if is_trained else 0
    head = 0 if ranks == 1 and not way.zero.offloads_params else item * model.vocab_size * model.hidden_size
    return head, gathered + grad


def _mlp_width(model: ModelFacts) -> int:
    """Returns the narrowest MLP that a token of this model meets in a layer."""
    if model.moe is None:
        return model.intermediate_size
    routed = model.moe.experts_per_token * model.moe.intermediate_size + model.moe.shared_intermediate_size
    every_layer = model.moe.num_moe_layers == model.num_hidden_layers
    return routed if every_layer else min(routed, model.intermediate_size)


def _logits_bytes(model: ModelFacts, way: Configuration) -> float:
    """Returns the logits, and their copies, that exist at once; none of losses that have them tile by tile."""
    if way.kernels.loss is LossKernel.FULL:
        logit_bytes = LOGITS_BYTES + (0 if way.model.precision is Precision.FP32 else way.model.item)
    elif way.kernels.loss is LossKernel.CHUNKED:
        logit_bytes = 2 * way.model.item
    else:
        return 0.0
    return logit_bytes * way.batch.sample_tokens / way.parallel.sp * model.vocab_size / way.parallel.tp


def _host_bytes(cluster: Cluster, way: Configuration, counts: Trained, ranks: int) -> float:
    """Returns offloaded optimizer states, and parameters, of the ranks of one node."""
    states = _optimizer_bytes(way) * partition_of(counts, way, ranks)
    if way.zero.offload is Offload.OPTIMIZER:
        return cluster.gpus_per_node * states * way.zero.offload_ratio
    if way.zero.offload is Offload.PARAMS:
        return cluster.gpus_per_node * (states + weight_bytes(counts, way, ranks))
    return 0.0


SATURATING_TOKENS = 4096
"""Tokens of a micro-batch from which matrix products run near their best; a smaller one loses speed first.
Source: achievable-FLOP/s sweeps of stas00/ml-engineering (2,048 and more for h of 4,096 and more)."""
LARGEST_TOKENS = 16384
"""Tokens of a micro-batch beyond which larger ones are no faster."""

Key = tuple[float, ...]
"""Sort key of candidates: seconds per sample or, if speed is unknown, the order of lost speed."""


@dataclass(slots=True)
class Evaluator:
    """Caches the bounds, times and estimates of the candidates of one search."""

    workload: Workload
    usable_ratio: float
    configurations: dict[Candidate, Configuration] = field(default_factory=dict)
    bounds: dict[int, tuple[Bound, Configuration]] = field(default_factory=dict)
    """By the identity of the way, which is kept so that no other one gets it."""
    speeds: dict[Candidate, Speed | None] = field(default_factory=dict)
    hosts: dict[tuple[object, ...], int] = field(default_factory=dict)
    estimates: dict[Candidate, Estimate] = field(default_factory=dict)
    exact: set[Candidate] = field(default_factory=set)
    """Candidates whose estimates are exact."""
    smallest: dict[int, Candidate] = field(default_factory=dict)
    """The candidate of least micro-batch and buffers, by the identity of its way: if it does not fit, none of the way
    does. ZeRO-3's alone, without hpZ, which needs no more memory to accumulate gradients."""
    failing: set[Candidate] = field(default_factory=set)
    """Candidates that do not fit, although their estimates may not tell."""

    def space(self, request: Request) -> list[Candidate]:
        """Returns the candidates of a request."""
        candidates = space(self.workload, request)
        for candidate in candidates:
            if candidate.way.zero.stage == 3 and candidate.way.zero.hpz == 1:
                known = self.smallest.setdefault(id(candidate.way), candidate)
                if (candidate.micro_batch, candidate.rung or 0) < (known.micro_batch, known.rung or 0):
                    self.smallest[id(candidate.way)] = candidate
        return candidates

    def configuration(self, candidate: Candidate) -> Configuration:
        """Returns the whole configuration of a candidate, written out once."""
        if candidate not in self.configurations:
            self.configurations[candidate] = candidate.configuration(self.workload.model)
        return self.configurations[candidate]

    def bound(self, candidate: Candidate) -> Bound:
        """Returns the bound of a candidate's way, computed once."""
        if id(way := candidate.way) not in self.bounds:
            self.bounds[id(way)] = bound(self.workload, way), way
        return self.bounds[id(way)][0]

    def time(self, candidate: Candidate) -> Key:
        """Returns the seconds of one sample of a step, by which plans of different batches compare; the place in the
        order of lost speed if the GPU's speed is unknown."""
        if candidate not in self.speeds:
            self.speeds[candidate] = speed(self.workload, self.configuration(candidate))
        known = self.speeds[candidate]
        if known is None:
            return lost_speed(self.workload.cluster, candidate)
        return (known.step_s / self.samples(candidate),)

    def difference_error_s(self, first: Candidate, second: Candidate) -> float:
        """Returns how far the difference of two candidates' seconds per sample may be off."""
        rates = efficiency(self.workload.cluster, self.workload.measured)
        one, other = self.speeds[first], self.speeds[second]
        assert one is not None
        assert other is not None
        return difference_error_s(one, other, rates, scales=(1 / self.samples(first), 1 / self.samples(second)))

    def samples(self, candidate: Candidate) -> int:
        """Returns the samples of a step."""
        return data_parallel_ranks(self.workload.cluster, candidate.way) * candidate.micro_batch * candidate.grad_accum

    def live_bytes(self, candidate: Candidate) -> int:
        """Returns the live bytes of a candidate on one GPU, as its estimate has them now."""
        return self.estimate(candidate).memory.live_bytes_per_gpu

    def may_fit(self, candidate: Candidate) -> bool:
        """Returns whether the bound leaves room; an excluded candidate needs no estimate."""
        least, cluster = self.bound(candidate), self.workload.cluster
        device = least.device_bytes(candidate.micro_batch, candidate.grad_accum)
        fits_gpu = device <= self.usable_ratio * cluster.gpu.memory_bytes
        fits_gpu = fits_gpu and least.load_bytes <= cluster.gpu.memory_bytes
        return fits_gpu and least.host_bytes <= USABLE_HOST_RATIO * cluster.host_memory_bytes

    def fits(self, candidate: Candidate) -> bool:
        """Returns whether a candidate fits by an exact estimate, which is made only if a quick one does not tell.

        What fits is replayed in full; a replay of what does not fit ends as soon as that is known.
        """
        if candidate in self.exact:
            return self.estimates[candidate].fits
        if self.seems_to_fit(candidate) and (
            not self._is_open(candidate) or self._assessed(candidate, Detail.USABLE).fits_gpu
        ):
            return self.verify(candidate).fits
        self.failing.add(candidate)
        return False

    def verify(self, candidate: Candidate) -> Estimate:
        """Returns the exact estimate, which from then on is the candidate's.

        Replays the allocator only if the GPU could hold the least that it may take, but not the most.
        """
        if candidate not in self.exact:
            if self._is_open(candidate):
                self.estimates[candidate] = self._assessed(candidate, Detail.REPLAYED)
            self.exact.add(candidate)
        return self.estimates[candidate]

    def _is_open(self, candidate: Candidate) -> bool:
        """Returns whether live bytes alone do not decide if the candidate fits."""
        estimate = self.estimate(candidate)
        is_room = estimate.memory.load.fits_gpu and least_bytes(estimate) <= estimate.usable_bytes_per_gpu
        return is_room and not estimate.fits_gpu

    def seems_to_fit(self, candidate: Candidate) -> bool:
        """Returns whether the candidate fits or, before it is verified, its live bytes leave that open."""
        if candidate in self.exact:
            return self.estimates[candidate].fits
        return candidate not in self.failing and self.has_host_room(candidate) and self.seems_to_fit_gpu(candidate)

    def seems_to_fit_gpu(self, candidate: Candidate) -> bool:
        """Returns the same of the GPU alone."""
        least = self.smallest.get(id(candidate.way), candidate)
        if least is not candidate and not self.seems_to_fit_gpu(least):
            return False
        estimate = self.estimate(candidate)
        if candidate in self.exact:
            return estimate.fits_gpu
        return estimate.memory.load.fits_gpu and least_bytes(estimate) <= estimate.usable_bytes_per_gpu

    def has_host_room(self, candidate: Candidate) -> bool:
        """Returns whether the RAM of a node holds what a candidate needs there."""
        return self.host_bytes(candidate) <= USABLE_HOST_RATIO * self.workload.cluster.host_memory_bytes

    def host_bytes(self, candidate: Candidate) -> int:
        """Returns the host RAM of one node, which is exact: the same for all batches whose inputs do not wait there."""
        way = candidate.way
        waiting = (way.checkpointing, candidate.micro_batch) if way.checkpointing.offload else None
        key = (id(way.zero), way.parallel, candidate.rung, candidate.pin_memory, candidate.grad_accum > 1, waiting)
        if key not in self.hosts:
            self.hosts[key] = host_bytes(self.workload, self.configuration(candidate))
        return self.hosts[key]

    def estimate(self, candidate: Candidate) -> Estimate:
        """Returns the estimate, made once."""
        if candidate not in self.estimates:
            self.estimates[candidate] = self._assessed(candidate, Detail.QUICK)
        return self.estimates[candidate]

    def _assessed(self, candidate: Candidate, detail: Detail) -> Estimate:
        written = self.configuration(candidate)
        return assess(self.workload, written, detail=detail, usable_gpu_ratio=self.usable_ratio)


def lost_speed(cluster: Cluster, candidate: Candidate) -> tuple[float, ...]:
    """Returns the place of a candidate in the order of lost speed, where no time can be predicted.

    Outermost first: what leaves the GPU; SP and TP; micro-batches from the one that saturates the GPU down to 1;
    without and with checkpointing, of few layers first, and with inputs that stay; the stages, ZeRO-1 before 2 where it
    reduces less often, ZeRO-0 last; roomy and then tight buffers; then larger micro-batches, up to `LARGEST_TOKENS`.
    """
    way = candidate.way
    tokens = way.batch.seq_len / way.parallel.sp
    saturating = 2 ** max(0, math.ceil(math.log2(SATURATING_TOKENS / tokens)))
    # ZeRO-2 reduces in every micro-batch, ZeRO-1 once in a step
    stages = (1, 2, 3, 0) if candidate.grad_accum > 1 and cluster.num_gpus > 1 else (2, 1, 3, 0)
    return (
        candidate.micro_batch * tokens > LARGEST_TOKENS and candidate.micro_batch > 1,
        list(Offload).index(way.zero.offload),
        way.parallel.sp * way.parallel.tp,
        -min(candidate.micro_batch, saturating),
        way.checkpointing.enabled,
        -way.checkpointing.every_n_layers,
        way.checkpointing.offload,
        way.checkpointing.tiled_mlp,
        stages.index(way.zero.stage),
        way.zero.hpz,
        way.zero.offload_ratio,
        candidate.rung == TIGHT,
        not candidate.pin_memory,
        -candidate.micro_batch,
    )


def least_bytes(estimate: Estimate) -> int:
    """Returns a lower bound of the GPU bytes: streams at their own peaks if known, else all live bytes."""
    return estimate.memory.breakdown_bytes.context + estimate.memory.least_reserved_bytes_per_gpu


def estimated(
    workload: Workload, configuration: Configuration, *, usable_gpu_ratio: float = USABLE_GPU_RATIO
) -> Estimate:
    """Returns the estimate with an upper bound of what the allocator holds beyond live bytes."""
    return assess(workload, configuration, detail=Detail.QUICK, usable_gpu_ratio=usable_gpu_ratio)


def usable_ratio(request: Request) -> float:
    """Returns the share of a GPU that a plan may fill: all of it if the request is one configuration."""
    return ASKED_GPU_RATIO if request.is_one_configuration else USABLE_GPU_RATIO
