"""Memory while the model is loaded and the engine is set up, before the first step."""

from __future__ import annotations

from dataclasses import dataclass

from dstrain.choices import Method, Precision
from dstrain.facts.model.model_facts import Kind, ModelFacts
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.outside import outside_bytes
from dstrain.plan.memory.params import NF4_BYTES_PER_PARAM, Trained
from dstrain.plan.memory.zero import sharing_ranks

_DTYPES = {Precision.BF16: "bfloat16", Precision.FP16: "float16", Precision.FP32: "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Memory at its fullest before the first step."""

    device_bytes_per_gpu: int
    """On each GPU, CUDA context and NCCL included."""
    host_bytes_per_node: int
    """In the RAM of one node. Pages of weight files do not count: the kernel drops them at need."""
    fits_gpu: bool
    """Whether the GPU holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a model is loaded."""

    num_ranks: int
    """Ranks that share states."""
    ranks_per_node: int
    gpu_bytes: int
    """Memory of one GPU."""
    outside_bytes: int
    """Memory of one GPU outside of PyTorch."""


def machine_of(workload: Workload, configuration: Configuration) -> Machine:
    """Returns the machine on which a workload's model is loaded."""
    cluster = workload.cluster
    return Machine(
        num_ranks=sharing_ranks(cluster, configuration),
        ranks_per_node=cluster.gpus_per_node,
        gpu_bytes=cluster.gpu.memory_bytes,
        outside_bytes=outside_bytes(cluster, configuration, workload.measured),
    )


def loading(model: ModelFacts, counts: Trained, configuration: Configuration, machine: Machine) -> Loading:
    """Returns the peak at load, with P trainable and F frozen parameters of s bytes, Q in 4 bits, over N ranks.

    GPU: s(P + F) and Q, without ZeRO-3 and under QLoRA with it too, because 4-bit weights are loaded whole and
    partitioned later, each made of a weight of s bytes that is sent there alone; ZeRO-1 and 2 add a flat copy sP. If
    that does not fit, both copies are in RAM: 2sP for each rank.
    RAM without ZeRO-3: weights are mapped files, unless their dtype changes (s(P + F) for each rank) or experts are
    merged (those, and the tensor being merged, for each rank). ZeRO-3: rank 0 merges one tensor at a time (twice the
    merged one), and each rank's share sP/N passes through RAM; adapters are whole on each rank until the engine shares
    them: sP on the GPU, or in RAM if parameters are offloaded (peft 0.21 tuners/lora/layer.py:
    _move_adapter_to_device_of_base_layer).
    Source: Transformers 5.23 core_model_loading.py: convert_and_load_state_dict_in_model (one thread if weights are
    quantised); integrations/bitsandbytes.py: Bnb4bitQuantize; integrations/deepspeed.py:
    _load_state_dict_into_zero3_model; quantizers/quantizer_bnb_4bit.py: update_device_map; deepspeed 0.19.8
    runtime/zero/stage_1_and_2.py: __init__ (flatten_on_accelerator); runtime/zero/utils.py: defragment.
    Distance: `docs/accuracy.md`.

    >>> from dstrain.facts.model import aliases, families
    >>> from dstrain.plan.configuration import DEFAULTS, changed
    >>> qwen3_8b = families.from_config(aliases.resolve("qwen3-8b")[1].config, name="qwen3-8b", source="qwen3-8b")
    >>> counts = Trained(trainable=qwen3_8b.num_params, frozen=0, quantized=0, largest_trainable=0)
    >>> small = Machine(num_ranks=8, ranks_per_node=8, gpu_bytes=24 * 2**30, outside_bytes=0)
    >>> found = loading(qwen3_8b, counts, changed(DEFAULTS, zero_stage=2), small)
    >>> found.device_bytes_per_gpu == 2 * 8_190_735_360, found.host_bytes_per_node == 8 * 2 * 2 * 8_190_735_360
    (True, True)
    """
    if configuration.zero.stage == 3 and configuration.model.method is not Method.QLORA:
        return _partitioned(model, counts, configuration, machine)
    return _whole(model, counts, configuration, machine)


def _partitioned(model: ModelFacts, counts: Trained, configuration: Configuration, machine: Machine) -> Loading:
    """Returns the peak where ZeRO-3 partitions each weight as it is loaded."""
    s, here = configuration.model.item, not configuration.zero.offloads_params
    sizes = (s * counts.trainable, _weights(counts, configuration))
    share, on_gpu = (here * (size + s * counts.elsewhere) // machine.num_ranks for size in sizes)
    adapters = 0 if configuration.model.is_full else s * counts.trainable  # PEFT makes them whole, where weights are
    on_gpu += here * (adapters - adapters // machine.num_ranks)
    in_ram = max(2 * _merged(model, configuration), machine.ranks_per_node * (share + (not here) * adapters))
    return _loading(on_gpu + _replaced(model, configuration), in_ram, machine)


def _whole(model: ModelFacts, counts: Trained, configuration: Configuration, machine: Machine) -> Loading:
    """Returns the peak where each rank loads all weights that it computes with."""
    s, weights = configuration.model.item, _weights(counts, configuration)
    is_cast = model.dtype != _DTYPES[configuration.model.precision] or configuration.parallel.tp > 1
    merging = _merged(model, configuration) + s * model.num_params_of(Kind.EXPERT)
    copied = weights + s * counts.elsewhere if is_cast else merging
    if configuration.model.method is Method.QLORA:
        copied = 0
    flat = s * counts.trainable * (configuration.zero.stage in (1, 2))
    if flat and machine.outside_bytes + weights + flat > machine.gpu_bytes:
        return _loading(weights, machine.ranks_per_node * max(copied, 2 * flat), machine)
    on_gpu = max(weights + flat, weights - s * counts.trainable + _quantised_at_once(model, configuration))
    return _loading(on_gpu, machine.ranks_per_node * copied, machine)


def _merged(model: ModelFacts, configuration: Configuration) -> int:
    """Returns the bytes of the largest tensor that is merged from a checkpoint's experts."""
    sizes = (group.numel for group in model.tensors if group.kind is Kind.EXPERT)
    return configuration.model.item * max(sizes, default=0)


def _quantised_at_once(model: ModelFacts, configuration: Configuration) -> int:
    """Returns the bytes of the largest weight that is sent to the GPU to be quantised there."""
    if configuration.model.method is not Method.QLORA:
        return 0
    sizes = (group.numel for group in model.tensors if group.is_quantizable)
    return configuration.model.item * max(sizes, default=0)


def _replaced(model: ModelFacts, configuration: Configuration) -> int:
    """Returns the bytes on the GPU while one layer's experts, gathered, are replaced with this rank's: a copy of them,
    and another with gate and up apart.

    Source: deepspeed 0.19.8 module_inject/auto_ep_layer.py: __init__; moe/ep_repack.py: _repack_fused_3d.
    """
    ep = configuration.parallel.ep
    if ep == 1:
        return 0
    layer = sum(group.numel for group in model.tensors if group.kind is Kind.EXPERT)
    return configuration.model.item * (layer + 2 * layer // ep)


def _weights(counts: Trained, configuration: Configuration) -> int:
    """Returns the bytes of the weights that one rank loads, of which tensor parallelism has cut its part in RAM."""
    four_bit = NF4_BYTES_PER_PARAM * counts.quantized
    return round(configuration.model.item * (counts.trainable + counts.frozen) + four_bit)


def _loading(on_gpu: int, in_ram: int, machine: Machine) -> Loading:
    device = machine.outside_bytes + on_gpu
    return Loading(device_bytes_per_gpu=device, host_bytes_per_node=in_ram, fits_gpu=device <= machine.gpu_bytes)
