"""Collectives of a step: bytes, ranks, timing, and duration."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from dstrain.facts.cluster.cluster import Cluster
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.params import NF4_BYTES_PER_PARAM, NF4_SCALE_BYTES_PER_PARAM
from dstrain.plan.memory.zero import sharing_ranks
from dstrain.plan.speed.efficiency import Efficiency
from dstrain.plan.speed.traffic import Work


class Wire(StrEnum):
    """Link between two neighbours of a ring."""

    NVLINK = "NVLink"
    PCIE = "PCIe"
    NETWORK = "network"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Protocol:
    """How data and flags travel: low latency costs bandwidth."""

    hop_s: dict[Wire, float]
    """Seconds from one rank to the next, in a ring or down a tree."""
    bandwidth: float
    """Share of the bus bandwidth."""
    needs_nvlink: bool = False
    """Whether it is used with NVLink alone."""


_RING = (
    _Protocol(hop_s={Wire.NVLINK: 0.47e-6, Wire.PCIE: 1.0e-6, Wire.NETWORK: 2.7e-6}, bandwidth=1 / 4),  # LL
    _Protocol(
        hop_s={Wire.NVLINK: 1.9e-6, Wire.PCIE: 2.5e-6, Wire.NETWORK: 4.0e-6}, bandwidth=0.92, needs_nvlink=True
    ),  # LL128
    _Protocol(hop_s={Wire.NVLINK: 3.4e-6, Wire.PCIE: 5.7e-6, Wire.NETWORK: 9.6e-6}, bandwidth=1.0),  # Simple
)
_TREE = (
    _Protocol(hop_s={Wire.NVLINK: 0.52e-6, Wire.PCIE: 1.0e-6, Wire.NETWORK: 5.0e-6}, bandwidth=0.9 / 3.8),
    _Protocol(
        hop_s={Wire.NVLINK: 1.2e-6, Wire.PCIE: 1.9e-6, Wire.NETWORK: 8.5e-6}, bandwidth=0.9 * 0.915, needs_nvlink=True
    ),
    _Protocol(hop_s={Wire.NVLINK: 28e-6, Wire.PCIE: 28e-6, Wire.NETWORK: 50e-6}, bandwidth=0.9),
)

START_S = 20e-6
"""Time of the smallest collective before its first hop, launch and wait included. Source: nccl-tests of 8 bytes take
some 25 µs on eight A100, from memory, and 40 to 42 µs on eight RTX 4090 (nccl#1530), hops included."""


def collective_s(nbytes: float, bus_bytes_per_s: float, *, ranks: int, nodes: int, passes: int, wire: Wire) -> float:
    """Returns the seconds of one collective by the best protocol.

    `nbytes` is the whole tensor; `passes` is 1 for a gather or a scatter, 2 for an all-reduce, which may go up and down
    a tree instead of twice round the ring. `wire` joins the ranks of a node, on each of `nodes`.
    """
    moved = passes * nbytes * (ranks - 1) / ranks / bus_bytes_per_s
    between = passes * (nodes - 1)
    inside = passes * (ranks - 1) - between
    times = [
        inside * p.hop_s[wire] + between * p.hop_s[Wire.NETWORK] + moved / p.bandwidth
        for p in _RING
        if wire is Wire.NVLINK or not p.needs_nvlink
    ]
    if passes == 2:
        down = ranks / nodes - 1
        levels = math.log2(nodes)
        times += [
            2 * (down * p.hop_s[wire] + levels * p.hop_s[Wire.NETWORK]) + moved / p.bandwidth
            for p in _TREE
            if wire is Wire.NVLINK or not p.needs_nvlink
        ]
    return START_S + min(times)


class Phase(StrEnum):
    """The phase of a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    LAST_BACKWARD = "last backward"
    STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Equal collectives of one phase, all together."""

    phase: Phase
    """When: in every forward or backward pass, in the last backward pass of a step, or after it."""
    num_bytes: float
    """Bytes of the whole tensors that are gathered, scattered or reduced; for an all-to-all, all that one rank has."""
    messages: float
    """Number of collectives."""
    ranks: int
    """Ranks that take part."""
    passes: int = 1
    """Times that the bytes go round: 1 for a gather, a scatter or an all-to-all, 2 for an all-reduce."""
    stride: int = 1
    """Distance of neighbours in the numbering of ranks."""
    is_hidden: bool = False
    """Whether computation continues meanwhile."""
    is_ring: bool = True
    """Whether the ranks of a node share their adapters; in an all-to-all each uses only its own."""

    def spans_nodes(self, cluster: Cluster) -> bool:
        """Returns whether the ranks are on more than one node."""
        return self.ranks * self.stride > cluster.gpus_per_node

    def seconds(self, cluster: Cluster, rates: Efficiency) -> float:
        """Returns how long they take, by NCCL's own model (`collective_s`).

        A ring that spans nodes crosses between two of them on as many adapters as it has ranks in each, so its bus
        bandwidth is their sum, or that inside the node if it is lower. Source: nccl-tests doc/PERFORMANCE.md.
        """
        bus, nodes = rates.intra_bus_bytes_per_s, 1
        if self.spans_nodes(cluster):
            neighbours = max(1, cluster.gpus_per_node // self.stride)
            nodes = -(-self.ranks // neighbours)
            bus = min(bus, rates.inter_bus_bytes_per_s * (neighbours if self.is_ring else 1))
        if not self.is_ring or not self.messages:
            moved = self.num_bytes * (self.ranks - 1) / self.ranks
            return self.passes * moved / bus + self.messages * START_S
        wire = Wire.PCIE if cluster.intra_link.name.startswith("pcie") else Wire.NVLINK
        size = self.num_bytes / self.messages
        once = collective_s(size, bus, ranks=self.ranks, nodes=nodes, passes=self.passes, wire=wire)
        return self.messages * once


def collectives(cluster: Cluster, configuration: Configuration, work: Work) -> list[Collective]:
    """Returns the collectives of a step of `configuration`."""
    c = configuration
    sent: list[Collective] = []
    for part in _parts(cluster, c, work):
        if part.ranks > 1:
            sent += (c.code.collectives or of_deepspeed)(c, part, work)
    if c.parallel.sp > 1:
        sent += _sequence_parallel(c, work)
    if c.parallel.tp > 1:
        sent += _tensor_parallel(c, work)
    if c.parallel.ep > 1:
        sent += _expert_parallel(c, work)
    return sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Parameters that the same ranks share out."""

    trainable: float
    """Elements on one rank before ZeRO shares them out."""
    frozen: float
    quantized: float
    ranks: int
    stride: int
    """Distance of these ranks in the numbering of all."""

    def send(self, phase: Phase, num_bytes: float, messages: float, **options: Any) -> Collective:
        """Returns a collective of these ranks."""
        group = {"ranks": self.ranks, "stride": self.stride}
        return Collective(phase=phase, num_bytes=num_bytes, messages=messages, **group | options)


def _parts(cluster: Cluster, c: Configuration, work: Work) -> list[Part]:
    """Returns the parameters of a rank under AutoTP; AutoEP's experts are counted apart."""
    tp, ep, counts = c.parallel.tp, c.parallel.ep, work.counts
    ranks = sharing_ranks(cluster, c)
    experts = work.num_expert_params if ep > 1 else 0
    replicated = Part(
        trainable=(counts.trainable - experts) / tp,
        frozen=counts.frozen / tp,
        quantized=counts.quantized / tp,
        ranks=ranks,
        stride=tp,
    )
    if not experts:
        return [replicated]
    return [replicated, Part(trainable=experts / ep, frozen=0, quantized=0, ranks=ranks // ep, stride=ep)]


def of_deepspeed(c: Configuration, part: Part, work: Work) -> list[Collective]:
    """Returns the collectives of DeepSpeed's ranks that share these parameters."""
    return _sharded(c, part, work) if c.zero.stage == 3 else _replicated(c, part)


def _replicated(c: Configuration, part: Part) -> list[Collective]:
    """Returns the traffic of ZeRO-0 to 2: gradients, and after the step the parameters that other ranks updated.

    DeepSpeed all-reduces every bucket and keeps its own part, where ZeRO only needs a reduce-scatter:
    `use_multi_rank_bucket_allreduce` is on unless somebody turns it off. ZeRO-2 does so for every micro-batch, ZeRO-1
    for the last one, ZeRO-0 after it. Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: average_tensor;
    runtime/engine.py: allreduce_gradients.
    """
    stage, size = c.zero.stage, c.model.item * part.trainable
    if stage == 2:
        when, is_hidden = Phase.BACKWARD, c.zero.overlap_comm
    elif stage == 1 and c.zero.overlap_comm:
        when, is_hidden = Phase.LAST_BACKWARD, True
    else:
        when, is_hidden = Phase.STEP, False
    # a bucket is sent as soon as it is full, and the last one as it is
    messages = 1 + part.trainable / max(1, c.zero.reduce_bucket_size)
    reduced = part.send(when, size, messages, passes=2, is_hidden=is_hidden)
    gathered = part.send(Phase.STEP, size, 1)
    return [reduced, gathered] if stage > 0 else [reduced]


def _sharded(c: Configuration, part: Part, work: Work) -> list[Collective]:
    """Returns the traffic of ZeRO-3 per micro-batch: two gathers and a reduce-scatter.

    Checkpointing computes again while the backward pass has the parameters. DeepSpeed keeps what is used again within
    `max_reuse_distance` elements: around the turn from forward to backward, half of that. With hpZ the backward pass
    gathers inside groups of `hpz` ranks, with qwZ both passes gather one byte an element.
    Source: ZeRO (arXiv 1910.02054), 7.2.2; deepspeed 0.19.8 runtime/zero/partitioned_param_coordinator.py:
    __params_to_release; ZeRO++ (arXiv 2306.10209), 3.1 and 3.2.
    """
    hidden = c.zero.overlap_comm
    numel = part.trainable + part.frozen
    four_bit = (NF4_BYTES_PER_PARAM - NF4_SCALE_BYTES_PER_PARAM) * part.quantized
    size = (1 if c.zero.qwz else c.model.item) * numel + four_bit
    elements = numel + part.quantized
    # a gather has at most a prefetch bucket; a layer has about nine tensors, and none is gathered in pieces
    per_layer = min(9.0, max(1.0, elements / work.num_layers / max(1, c.zero.prefetch_bucket_size)))
    again = 1 - min(1.0, c.zero.max_reuse_distance / 2 / max(1.0, elements))
    messages = 1 + per_layer * work.num_layers
    group = c.zero.hpz if 1 < c.zero.hpz < part.ranks else part.ranks
    gathers = [
        part.send(Phase.FORWARD, size, messages, is_hidden=hidden),
        part.send(Phase.BACKWARD, again * size, again * messages, ranks=group, is_hidden=hidden),
    ]
    scatters = 1 + part.trainable / max(1, c.zero.reduce_bucket_size)
    return [*gathers, part.send(Phase.BACKWARD, c.model.item * part.trainable, scatters, is_hidden=hidden)]


def _sequence_parallel(c: Configuration, work: Work) -> list[Collective]:
    """Returns Ulysses' all-to-alls: queries, keys, values and outputs of each layer, the same way back in the backward
    pass, once more where the layer is computed again.

    Source: DeepSpeed-Ulysses (arXiv 2309.14509), 3.2; deepspeed 0.19.8 sequence/layer.py: _SeqAllToAll.
    """
    tp = c.parallel.tp
    # outputs are as wide as queries, and values as keys: twice both
    size = c.model.item * c.batch.tokens / c.parallel.sp * 2 * (work.query_width + work.key_width) / tp
    times = 1 + c.checkpointing.share(work.num_layers)
    messages = 4 * work.num_layers
    return [
        Collective(
            phase=Phase.FORWARD,
            num_bytes=size,
            messages=messages,
            ranks=c.parallel.sp,
            stride=tp,
            is_ring=False,
        ),
        Collective(
            phase=Phase.BACKWARD,
            num_bytes=times * size,
            messages=times * messages,
            ranks=c.parallel.sp,
            stride=tp,
            is_ring=False,
        ),
    ]


def _tensor_parallel(c: Configuration, work: Work) -> list[Collective]:
    """Returns AutoTP's all-reduces of the residual stream: two in each layer's forward, two in its backward pass, and
    attention's once more if the layer is recomputed.

    Source: Megatron-LM (arXiv 1909.08053), section 3; deepspeed 0.19.8 module_inject/layers.py.
    """
    tp = c.parallel.tp
    size = c.model.item * c.batch.tokens / c.parallel.sp * work.layer_width
    times = 2 + c.checkpointing.share(work.num_layers)
    return [
        Collective(phase=Phase.FORWARD, num_bytes=2 * size, messages=2 * work.num_layers, ranks=tp, passes=2),
        Collective(
            phase=Phase.BACKWARD,
            num_bytes=times * size,
            messages=times * work.num_layers,
            ranks=tp,
            passes=2,
        ),
    ]


def _expert_parallel(c: Configuration, work: Work) -> list[Collective]:
    """Returns AutoEP's all-to-alls: tokens to the ranks of their experts and back, the same in the backward pass, once
    more where the layer is computed again; and how many tokens go where, for which the CPU waits.

    Source: deepspeed 0.19.8 module_inject/auto_ep_layer.py: _forward, compute_split_plan.
    """
    size = c.model.item * c.batch.tokens * work.routed_width
    again = c.checkpointing.share(work.num_layers)
    layers, ranks = work.num_moe_layers, c.parallel.ep
    forward = Collective(phase=Phase.FORWARD, num_bytes=2 * size, messages=3 * layers, ranks=ranks, is_ring=False)
    messages = (2 + 3 * again) * layers
    return [forward, replace(forward, phase=Phase.BACKWARD, num_bytes=2 * size * (1 + again), messages=messages)]
