"""The memory peak of one configuration: the largest of a few named instants, and its parts."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from dstrain.facts.cluster.gpus import Gpu
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.deepspeed import engine
from dstrain.plan.memory.layers.activations import has_layer_code
from dstrain.plan.memory.layers.attention import as_attended
from dstrain.plan.memory.loading import Loading, loading, machine_of
from dstrain.plan.memory.optimizer_states import stepped_bytes_per_param
from dstrain.plan.memory.outside import outside_bytes
from dstrain.plan.memory.params import Trained, trained, trained_on_rank
from dstrain.plan.memory.peak import Detail, Peak
from dstrain.plan.memory.reserved import Held, held_by_allocator, workspace_bytes
from dstrain.plan.memory.zero import States, muon_updates, pinned, sharing_ranks, states
from dstrain.units import GIB

BASELINE_HOST_BYTES_PER_RANK = 4 * GIB
"""Resident memory of a rank's Python process with torch, DeepSpeed and data loader: 3-5 GB observed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Parts of the peak in bytes; their sum is `device_bytes_per_gpu`."""

    params: int
    """Parameters of this rank's share."""
    grads: int
    """Gradients."""
    optimizer: int
    """Master copy and moments."""
    buffers: int
    """Buckets and temporaries of the engine."""
    gathered: int
    """Parameters that ZeRO-3 holds whole."""
    activations: int
    """Saved tensors and the working set of one layer."""
    logits: int
    """Logits and the copies of the loss."""
    workspace: int
    """cuBLAS workspaces."""
    fragmentation: int
    """Reserved by the allocator and unused."""
    context: int
    """CUDA context and NCCL, outside torch."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory that a configuration needs."""

    live_bytes_per_gpu: int
    """Live tensors at the peak (torch's max_memory_allocated)."""
    reserved_bytes_per_gpu: int
    """Held by the caching allocator (torch's max_memory_reserved)."""
    least_reserved_bytes_per_gpu: int = 0
    """At least this is held until the GPU has no more to give: streams share no free blocks, so that each keeps its own
    peak. Live bytes where these peaks are not known."""
    device_bytes_per_gpu: int
    """Device memory as nvidia-smi shows it."""
    retries_per_step: int
    """How often the caching allocator gives everything cached back to the driver in each step, as no block fits."""
    peak_instant: str
    """The instant of the peak."""
    breakdown_bytes: Breakdown
    """Parts of the peak."""
    host_bytes_per_node: int
    """Host RAM of one node, while training or loading, whichever takes more."""
    nvme_bytes_per_node: int
    """NVMe of one node."""
    checkpoint_bytes: int
    """One checkpoint on disk, all ranks together."""
    states: States
    """Model states of one rank."""
    load: Loading
    """Memory while the model is loaded."""

    @property
    def needed_bytes_per_gpu(self) -> int:
        """Device memory of the fuller of the two: training, or a load that does not fit."""
        return max(self.device_bytes_per_gpu, 0 if self.load.fits_gpu else self.load.device_bytes_per_gpu)


def memory(
    workload: Workload, configuration: Configuration, *, detail: Detail = Detail.REPLAYED, usable_bytes: int = 0
) -> Memory:
    """Returns the memory that a configuration needs, computed as precisely as `detail` says.

    Measurements of such a machine take the place of the replayed allocator and of the constants for CUDA's
    context and NCCL. If `detail` allows it, the replay stops at `usable_bytes`.
    The peak is the largest of: loss backward, layer backward, embedding backward, optimizer step; each holds the
    resident model states and the tensors of that instant, so that nothing is added that does not coexist.
    """
    model, cluster, measured = workload.model, workload.cluster, workload.measured
    configuration = as_attended(configuration, cluster.gpu)
    ranks = sharing_ranks(cluster, configuration)
    model_states = _states(model, configuration, ranks, detail)
    peak = _peak(workload, configuration, detail)
    live = peak.total + _workspaces(cluster.gpu)
    reserved_bytes = round((measured.reserved_ratio or 1.0) * live)
    held = Held(least=live, most=reserved_bytes, settled=reserved_bytes)
    if measured.reserved_ratio is None and not cluster.gpu.is_cpu:
        held = held_by_allocator(workload, configuration, ranks, peak, detail=detail, usable_bytes=usable_bytes)
    return assembled(workload, configuration, model_states, peak, held)


def _workspaces(gpu: Gpu) -> int:
    """Returns the bytes of the workspaces of both threads that compute."""
    return 0 if gpu.is_cpu else 2 * workspace_bytes(gpu)


def assembled(workload: Workload, configuration: Configuration, model_states: States, peak: Peak, held: Held) -> Memory:
    """Returns the memory of a configuration whose states and live peak are known, and what the allocator holds."""
    model, cluster = workload.model, workload.cluster
    workspace = _workspaces(cluster.gpu)
    live = peak.total + workspace
    parts = Breakdown(
        params=peak.params,
        grads=peak.grads,
        optimizer=peak.optimizer,
        buffers=peak.buffers,
        gathered=peak.gathered,
        activations=peak.activations,
        logits=peak.logits,
        workspace=workspace,
        fragmentation=held.settled - live,
        context=outside_bytes(cluster, configuration, workload.measured),
    )
    load = _load(workload, configuration, trained_on_rank(model, configuration))
    return Memory(
        live_bytes_per_gpu=live,
        reserved_bytes_per_gpu=held.most,
        least_reserved_bytes_per_gpu=held.least,
        device_bytes_per_gpu=parts.total,
        retries_per_step=held.retries_per_step,
        peak_instant=peak.name,
        breakdown_bytes=parts,
        host_bytes_per_node=host_bytes(workload, configuration, load),
        nvme_bytes_per_node=_nvme_bytes(workload, configuration),
        checkpoint_bytes=_checkpoint_bytes(model, configuration),
        states=model_states,
        load=load,
    )


def _states(model: ModelFacts, configuration: Configuration, ranks: int, detail: Detail) -> States:
    """Returns the model states of one rank; a divided optimizer's by its sub-groups, and gradients across partitions of
    ZeRO-1 and 2 on both ranks, as in the engine."""
    counts, zero = trained_on_rank(model, configuration), configuration.zero
    closed = states(counts, configuration, ranks)
    if zero.stage in (1, 2) and not zero.is_offloaded:
        kept = max(engine.gradients_by_rank(model, configuration, ranks)) + muon_updates(counts, configuration, ranks)
        return replace(closed, grads=round(configuration.model.item * kept))
    if zero.offload_ratio == 1 or detail is not Detail.REPLAYED:
        return closed
    divided = engine.resident_of(model, configuration, ranks)
    return replace(closed, grads=divided.grads, optimizer=divided.optimizer)


def _load(workload: Workload, configuration: Configuration, counts: Trained) -> Loading:
    """Returns the peak while the model is loaded, with the processes of the node's ranks."""
    load = loading(workload.model, counts, configuration, machine_of(workload, configuration))
    baseline = workload.cluster.gpus_per_node * BASELINE_HOST_BYTES_PER_RANK
    return replace(load, host_bytes_per_node=baseline + load.host_bytes_per_node)


def _peak(workload: Workload, configuration: Configuration, detail: Detail) -> Peak:
    """Returns the peak of live bytes.

    The engine is played parameter by parameter. In a search a few layers stand for all under ZeRO-3. Of a model whose
    layers were traced, moments are known and no events.
    """
    model, cluster = workload.model, workload.cluster
    ranks = sharing_ranks(cluster, configuration)
    is_whole = detail is Detail.REPLAYED and configuration.zero.stage == 3 and has_layer_code(model)
    played = engine.peak if is_whole else engine.brief_peak
    return played(model, configuration, ranks, kernel_workspaces=not cluster.gpu.is_cpu)


def host_bytes(workload: Workload, configuration: Configuration, load: Loading | None = None) -> int:
    """Returns host RAM of one node while it trains or loads, whichever takes more: the processes, and
    offloaded states with pinned rounding. `load` is computed unless it is given."""
    model, ranks = workload.model, workload.cluster.gpus_per_node
    sharing = sharing_ranks(workload.cluster, configuration)
    counts = trained_on_rank(model, configuration)
    load = load or _load(workload, configuration, counts)
    offloaded = engine.host_of(model, configuration, sharing).taken
    training = ranks * (BASELINE_HOST_BYTES_PER_RANK + offloaded + waiting_bytes(model, configuration))
    return max(load.host_bytes_per_node, training)


def waiting_bytes(model: ModelFacts, configuration: Configuration) -> int:
    """Returns the host bytes of one rank's layers' inputs that wait for the backward pass; each has a pinned buffer.

    Source: Transformers 5.23 modeling_utils.py: _activation_checkpointing_enable (save_on_cpu).
    """
    c, depth = configuration, model.num_hidden_layers
    if not c.checkpointing.offload:
        return 0
    tokens = -(-c.batch.tokens // c.parallel.sp)
    return round(c.checkpointing.share(depth) * depth) * pinned(tokens * model.hidden_size * c.model.item)


def _nvme_bytes(workload: Workload, configuration: Configuration) -> int:
    """Returns the bytes of one node's files on NVMe."""
    model, cluster = workload.model, workload.cluster
    return engine.host_of(model, configuration, sharing_ranks(cluster, configuration)).nvme * cluster.gpus_per_node


def _checkpoint_bytes(model: ModelFacts, configuration: Configuration) -> int:
    """Returns the bytes of one checkpoint: DeepSpeed's files, and the model in its base's dtype, or the adapter in that
    of training. Source: Transformers 5.23 trainer.py: _save_checkpoint."""
    counts = trained(model, configuration.model.method, configuration.model.lora)
    saved = configuration.model.item * counts.trainable
    if configuration.model.is_full:
        saved = (4 if model.dtype == "float32" else 2) * (counts.trainable + counts.frozen)
    return saved + shard_bytes(configuration, trainable=counts.trainable, frozen=counts.frozen)


def shard_bytes(configuration: Configuration, *, trainable: int, frozen: int) -> int:
    """Returns the bytes of DeepSpeed's files in a checkpoint: master copy, states, and weights in the training
    precision, which ZeRO-3 omits of trained ones, and the Trainer of frozen ones under an adapter.

    Source: deepspeed 0.19.8 runtime/engine.py: save_checkpoint; files of runs on two CPU ranks.
    """
    whole = (trainable if configuration.zero.stage < 3 else 0) + (frozen if configuration.model.is_full else 0)
    stepped = round(stepped_bytes_per_param(configuration) * trainable)
    return configuration.model.item * whole + stepped
