"""Speed of PyTorch's own sharding (DDP, FSDP) and of one GPU without it: collectives, optimizer step, and units."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.published.training_code import PublishedCode, StateDtypes, published
from dstrain.choices import Optimizer
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.params import NF4_BYTES_PER_PARAM
from dstrain.plan.speed.collectives import Collective, Part, Phase, of_deepspeed
from dstrain.plan.speed.optimizer_step import KERNEL_BYTES_PER_PARAM
from dstrain.plan.speed.traffic import Work
from dstrain.plan.training_code import Sharding, TrainingCode

UNFUSED_FACTOR = 3.0
"""Bytes of PyTorch's foreach AdamW relative to its fused one: eight passes of two to four tensors each. Source:
torch 2.13 optim/adamw.py: _multi_tensor_adamw."""
CLIPPING_ELEMENTS = 4.0
"""Elements moved for each gradient that PyTorch clips: norm and scaling. Source: torch nn/utils/clip_grad.py."""
UNIT_S = (0.8e-3, 1.3e-3)
"""CPU time that PyTorch's full sharding adds to each unit, a layer or one matrix of an adapter, in a forward and in a
backward pass. Source: two gloo ranks take 3.5 and 6.1 ms, gloo's own messages included (torch 2.13, one core each); on
GPUs, LoRA runs that wait for the CPU (Mixtral, 289 units, fms-acceleration a100_80gb.csv) take 2.9 ms over three
passes."""
UNIT_WAIT_S = 0.4e-3
"""Time by which the GPU waits for each matrix of an adapter that is a unit of its own, in each pass, however far the
CPU could be ahead: the rate limiter lets it gather two units ahead. Source: LoRA on two GPUs against one (Mistral 7B,
256 such units, and Llama 2 70B in 4 bits, 640; fms-acceleration a100_80gb.csv); torch 2.13
distributed/fsdp/_runtime_utils.py: _unshard."""


def with_states(code: TrainingCode, states: StateDtypes) -> PublishedCode:
    """Returns the code with the states that DeepSpeed (`mixed`) or PyTorch holds."""
    own = replace(published(code), state_dtypes=states)
    if states is StateDtypes.MIXED:
        return own
    ratio = 0.5 if states is StateDtypes.PURE_BF16 else 1.0
    return replace(
        own,
        sharding=Sharding(step_bytes=_step_bytes, units=_units, cpu_step_ratio=ratio),
        collectives=_collectives,
        is_autocast=states is StateDtypes.AUTOCAST,
        has_fp32_adapters=own.has_peft,
    )


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Collectives of DeepSpeed whose updated parameters are broadcast: `TrainingCode.collectives`."""

    ranks: int
    """Ranks that share the optimizer states and broadcast what each has updated, one after the other."""

    def __call__(self, c: Configuration, part: Part, work: Work) -> list[Collective]:
        """Returns the collectives of one part. Full sharding has no parameters to broadcast: it gathers them."""
        if c.zero.stage == 3:
            return of_deepspeed(c, part, work)
        reduced, *gathered = of_deepspeed(c, part, work)
        return [reduced, *(replace(each, messages=self.ranks, ranks=self.ranks) for each in gathered)]


def _collectives(c: Configuration, part: Part, work: Work) -> list[Collective]:
    """Returns the collectives of one part, all hidden.

    DDP reduces during the last backward pass. Sharded gradients and states: parameters are gathered before the forward
    pass, and gradients scattered in the backward pass. Full sharding gathers in both passes.
    """
    size: float = c.model.item * part.trainable
    layers = work.num_layers + 1
    if c.zero.stage == 3:
        gathered = c.model.item * (part.trainable + part.frozen) + NF4_BYTES_PER_PARAM * part.quantized
        messages = layers + 2 * work.num_adapters
        return [
            part.send(Phase.FORWARD, gathered, messages, is_hidden=True),
            part.send(Phase.BACKWARD, gathered, messages, is_hidden=True),
            part.send(Phase.BACKWARD, size, layers, is_hidden=True),
        ]
    if c.zero.stage > 0:
        forward = part.send(Phase.FORWARD, c.model.item * (part.trainable + part.frozen), layers, is_hidden=True)
        return [forward, part.send(Phase.BACKWARD, size, layers, is_hidden=True)]
    if c.code.is_autocast:
        size = 4 * part.trainable
    buckets = 1 + part.trainable / max(1, c.zero.reduce_bucket_size)
    return [part.send(Phase.LAST_BACKWARD, size, buckets, passes=2, is_hidden=True)]


def _step_bytes(c: Configuration, work: Work, stepped: float, ranks: int) -> float:
    """Returns the bytes that the optimizer, of `stepped` parameters, clipping, sums of gradients and casts move."""
    kernel = KERNEL_BYTES_PER_PARAM[c.step.optimizer]
    if c.step.optimizer is Optimizer.ADAMW and not published(c.code).fuses_step:
        kernel *= UNFUSED_FACTOR
    counts, sharers = work.counts, c.parallel.tp * (ranks if c.zero.stage else 1)
    size = 4 if c.code.is_autocast else 2
    accumulated = (c.step.grad_accum - 1) * 1.5 * size * 2 * counts.trainable / sharers
    casts = 0.0
    if c.code.is_autocast:
        share = 1 + c.checkpointing.share(work.num_layers)
        casts = 6.0 * (counts.trainable + counts.frozen) / sharers * c.step.grad_accum * share
    return stepped * (kernel * size / 4 + CLIPPING_ELEMENTS * size) + accumulated + casts


def _units(work: Work, stage: int) -> tuple[float, tuple[float, float], float]:
    """Returns the units of full sharding, the CPU seconds of each in both passes, and the GPU's wait in a pass."""
    count = work.num_layers + 1 + 2 * work.num_adapters
    return (count, UNIT_S, UNIT_WAIT_S * 2 * work.num_adapters) if stage == 3 else (count, (0.0, 0.0), 0.0)
