"""Lower bounds of a configuration's memory, cheap enough to rule out most candidates."""

from __future__ import annotations

from dataclasses import dataclass

from dstrain.choices import LossKernel, Method, Offload, Optimizer, Precision
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.model.model_facts import Kind, ModelFacts
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.layers.activations import has_layer_code
from dstrain.plan.memory.loading import loading, machine_of
from dstrain.plan.memory.optimizer_states import STATES, master_item, stepped_bytes_per_param
from dstrain.plan.memory.outside import outside_bytes
from dstrain.plan.memory.params import NF4_BYTES_PER_PARAM, Trained, is_inside, shard, trained_on_rank
from dstrain.plan.memory.zero import partition_of, sharing_ranks

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
"""Elements of ZeRO-3's sub-groups on the rungs that a search tries (`buffer_sizes.sizes`)."""


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
    s = way.model.item
    weights = s * (counts.trainable + counts.frozen) + NF4_BYTES_PER_PARAM * counts.quantized
    shared = (weights + s * counts.elsewhere) / ranks
    params = 0.0 if way.zero.offloads_params else shared if way.zero.stage == 3 else weights
    partition = partition_of(counts, way, ranks)
    states = _optimizer_bytes(way) * partition
    is_whole = way.zero.stage == 0 or (way.zero.stage == 1 and not way.zero.overlap_comm)
    grads = way.model.item * (counts.trainable if is_whole else partition)
    is_here = not way.zero.is_offloaded
    staying = states if is_here else _staying_bytes(counts, way, partition)
    fixed = outside_bytes(cluster, way, workload.measured) + params + staying
    head, unit = _gathered_bytes(model, way, ranks)
    if way.zero.hpz > 1:
        fixed += (0.99 * weights - head - unit) / way.zero.hpz
    end = fixed + (grads if is_here else 0.0)
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
        host_bytes=int(_host_bytes(cluster, way, states, shared)),
    )


def _load_bytes(workload: Workload, counts: Trained, way: Configuration) -> int:
    """Returns what loading takes where it may take more than training: 4-bit weights are loaded whole."""
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
    """Returns bytes of master copy and moments for each trained parameter, without those of Muon."""
    optimizer = way.step.optimizer
    left_out = STATES[optimizer] if optimizer is Optimizer.MUON else 0
    return stepped_bytes_per_param(way) - left_out * master_item(optimizer)


def _activation_bytes(model: ModelFacts, way: Configuration) -> tuple[float, float]:
    """Returns what all layers but one keep of one sample, and what that one keeps or makes again.

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
    """Returns what ZeRO-3 gathers at least for the head, and for the last module of a layer with a gradient that it
    makes: one weight of an MLP, or the experts of a layer, which are gathered together."""
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


def _host_bytes(cluster: Cluster, way: Configuration, states: float, weights: float) -> float:
    """Returns offloaded optimizer states, and parameters, of the ranks of one node."""
    if way.zero.offload is Offload.OPTIMIZER:
        return cluster.gpus_per_node * states * way.zero.offload_ratio
    if way.zero.offload is Offload.PARAMS:
        return cluster.gpus_per_node * (states + weights)
    return 0.0
