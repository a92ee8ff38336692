"""The peak of one configuration: the largest of a few named instants, and what it consists of."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dstrain.choices import Method, StateDtypes
from dstrain.facts.cluster import Cluster
from dstrain.facts.model import Kind, ModelFacts
from dstrain.plan import plain
from dstrain.plan.activations import activations
from dstrain.plan.configuration import Configuration
from dstrain.plan.engine import deepspeed
from dstrain.plan.params import trained
from dstrain.plan.peak import Peak
from dstrain.plan.tape.profile import is_known
from dstrain.plan.zero import States, engine_buffers, gathered_bytes, pinned_waste, states
from dstrain.units import GIB, MIB

CONTEXT_BYTES = round(0.65 * GIB)
"""CUDA context and kernel modules of one process: 0.47-0.92 GiB on A100 and H100. Source: stas00/ml-engineering."""
NCCL_BYTES = 1 * GIB
"""NCCL communicators and their buffers, 0.55-2.0 GiB with two ranks or more. Source: stas00/ml-engineering."""
FRAGMENTATION_RATIO = 0.03
"""Reserved by the caching allocator beyond live bytes with expandable segments: 0.1-3.1 % in a replay of training
steps through a model of the allocator."""
BASELINE_HOST_BYTES_PER_RANK = 4 * GIB
"""Resident memory of a rank's Python process with torch, DeepSpeed and data loader: 3-5 GB observed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """What the peak consists of, in bytes; the sum is `device_bytes_per_gpu`."""

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
    """What a configuration needs."""

    live_bytes_per_gpu: int
    """Live tensors at the peak (torch's max_memory_allocated)."""
    reserved_bytes_per_gpu: int
    """Held by the caching allocator (torch's max_memory_reserved)."""
    device_bytes_per_gpu: int
    """What nvidia-smi shows."""
    peak_instant: str
    """When the peak is."""
    breakdown_bytes: Breakdown
    """What the peak consists of."""
    host_bytes_per_node: int
    """Host RAM of one node."""
    nvme_bytes_per_node: int
    """NVMe of one node."""
    checkpoint_bytes: int
    """One checkpoint on disk, all ranks together."""
    states: States
    """Model states of one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instant:
    """Live bytes of one instant, by part."""

    name: str
    grads: int = 0
    buffers: int = 0
    gathered: int = 0
    activations: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        return self.grads + self.buffers + self.gathered + self.activations + self.logits


def memory(model: ModelFacts, cluster: Cluster, configuration: Configuration, *, is_exact: bool = True) -> Memory:
    """Returns what a configuration needs on `cluster`; closed forms stand for DeepSpeed's engine unless `is_exact`.

    The peak is the largest of: loss backward, layer backward, embedding backward, optimizer step; each holds the
    resident model states and what lives at that instant, so that nothing is added that does not coexist.
    """
    counts = trained(model, configuration.method, configuration.lora)
    held = states(counts, configuration, cluster.num_gpus)
    peak = _peak(model, cluster, configuration, is_exact=is_exact)
    on_gpu = cluster.gpu.name != "cpu"
    workspace = _workspace_bytes(cluster) if on_gpu else 0
    live = peak.total + workspace
    fragmentation = round(FRAGMENTATION_RATIO * live) if on_gpu else 0
    context = (CONTEXT_BYTES + (NCCL_BYTES if cluster.num_gpus > 1 else 0)) if on_gpu else 0
    parts = Breakdown(
        params=peak.params,
        grads=peak.grads,
        optimizer=peak.optimizer,
        buffers=peak.buffers,
        gathered=peak.gathered,
        activations=peak.activations,
        logits=peak.logits,
        workspace=workspace,
        fragmentation=fragmentation,
        context=context,
    )
    return Memory(
        live_bytes_per_gpu=live,
        reserved_bytes_per_gpu=live + fragmentation,
        device_bytes_per_gpu=parts.total,
        peak_instant=peak.name,
        breakdown_bytes=parts,
        host_bytes_per_node=_host_bytes(model, cluster, configuration, held),
        nvme_bytes_per_node=held.nvme * cluster.gpus_per_node,
        checkpoint_bytes=_checkpoint_bytes(model, configuration),
        states=held,
    )


def _peak(model: ModelFacts, cluster: Cluster, configuration: Configuration, *, is_exact: bool) -> Peak:
    """Returns the peak of live bytes by who holds the states: DeepSpeed, or PyTorch itself.

    DeepSpeed's engine is played parameter by parameter, which takes some 50 ms; the closed forms that stand for it in a
    search are within 4 % of that. A model whose layer code was traced has no parameters to play it with.
    """
    ranks = cluster.num_gpus // configuration.tp  # sequence-parallel ranks share states as data-parallel ones do
    if configuration.state_dtypes is not StateDtypes.MIXED:
        return plain.peak(model, configuration, ranks)
    if is_exact and is_known(model):
        return deepspeed.peak(model, configuration, ranks, kernel_workspaces=cluster.gpu.name != "cpu")
    counts = trained(model, configuration.method, configuration.lora)
    held = states(counts, configuration, ranks)
    resident = engine_buffers(counts, configuration, ranks).resident
    top = max(_instants(model, cluster, configuration), key=lambda instant: instant.total)
    return Peak(
        name=top.name,
        params=held.params,
        grads=top.grads,
        optimizer=held.optimizer,
        buffers=top.buffers + resident,
        gathered=top.gathered,
        activations=top.activations,
        logits=top.logits,
    )


def _workspace_bytes(cluster: Cluster) -> int:
    """Returns two cuBLAS workspaces (forward and autograd thread): 8.125 MiB each, 32 MiB from Hopper on.

    Source: torch 2.13 aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    return 2 * (32 * MIB if cluster.gpu.compute_capability >= (9, 0) else round(8.125 * MIB))


def _instants(model: ModelFacts, cluster: Cluster, configuration: Configuration) -> list[_Instant]:
    counts = trained(model, configuration.method, configuration.lora)
    held = states(counts, configuration, cluster.num_gpus)
    engine = engine_buffers(counts, configuration, cluster.num_gpus)
    acts = activations(model, configuration)
    s = configuration.precision.num_bytes
    vocabulary = model.vocab_size * model.hidden_size
    carried = held.grads if configuration.zero_stage == 3 or configuration.grad_accum > 1 else 0
    head_grad = s * vocabulary if configuration.method is Method.FULL else 0
    tied_grad = head_grad if model.tie_word_embeddings else 0
    backward_grads = held.grads + engine.backward_grads
    layer = gathered_bytes(counts, configuration, _largest_unit(model))
    head = gathered_bytes(counts, configuration, vocabulary)
    return [
        _Instant(
            name="loss backward",
            grads=carried + (engine.backward_grads if configuration.grad_accum > 1 else 0),
            gathered=head,
            activations=acts.kept + acts.outside,
            logits=acts.loss,
        ),
        _Instant(
            name="layer backward",
            grads=backward_grads + tied_grad,
            buffers=engine.backward,
            gathered=layer,
            activations=acts.kept + acts.layer + acts.layer_work,
        ),
        _Instant(
            name="embedding backward",
            grads=backward_grads + head_grad + 2 * tied_grad,
            buffers=engine.backward,
            gathered=head,
        ),
        _Instant(name="optimizer step", grads=held.grads, buffers=engine.step),
    ]


def _largest_unit(model: ModelFacts) -> int:
    """Returns the elements that one fetch of ZeRO-3 gathers: an MoE block is a leaf module, else the largest weight."""
    inner = [g for g in model.tensors if g.kind not in (Kind.EMBEDDING, Kind.HEAD, Kind.VISION)]
    if model.moe is None:
        return max(group.numel for group in inner)
    return sum(g.numel for g in inner if g.kind in (Kind.EXPERT, Kind.ROUTER))


def _host_bytes(model: ModelFacts, cluster: Cluster, configuration: Configuration, held: States) -> int:
    """Returns host RAM of one node: the processes, the offloaded states with pinned rounding, or loading if larger.

    Without ZeRO-3 every rank loads the whole model; with it rank 0 alone holds the whole checkpoint.
    Source: Transformers 5.23 integrations/deepspeed.py: _load_state_dict_into_zero3_model.
    """
    s = configuration.precision.num_bytes
    ranks = cluster.gpus_per_node
    whole = s * model.num_params
    loading = whole if configuration.zero_stage == 3 else whole * ranks
    counts = trained(model, configuration.method, configuration.lora)
    offloaded = held.host + held.staging + pinned_waste(counts, configuration, cluster.num_gpus)
    return ranks * BASELINE_HOST_BYTES_PER_RANK + max(loading, ranks * offloaded)


def _checkpoint_bytes(model: ModelFacts, configuration: Configuration) -> int:
    """Returns the bytes of one checkpoint: parameters, master copy and moments, and the gathered model of ZeRO-3.

    Frozen weights are left out under an adapter. Source: deepspeed 0.19.8 runtime/engine.py: save_checkpoint;
    Transformers 5.23 trainer.py: _save_checkpoint.
    """
    s = configuration.precision.num_bytes
    counts = trained(model, configuration.method, configuration.lora)
    saved = counts.trainable + (counts.frozen if configuration.method is Method.FULL else 0)
    return s * saved * 2 + 12 * counts.trainable
