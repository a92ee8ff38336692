"""How the code that trains computes layers, adapters and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dstrain.choices import Method
from dstrain.facts.model.traits import PLAIN, FusedParts
from dstrain.plan.speed.kernel_costs import Cost


def needs_reentrant(method: Method, zero_stage: int) -> bool:
    """Returns whether activation checkpointing takes its reentrant form: for adapters under ZeRO-3.

    With the other form, DeepSpeed 0.19.8 gives a layer's frozen parameters back once the module that caused the
    recomputation has gone backward, and gathers them a third time; DeepSpeed 0.19.2 raised CheckpointError (#8148).
    Source: deepspeed 0.19.8 runtime/zero/partitioned_param_coordinator.py: update_recompute_parameters.
    """
    return method is not Method.FULL and zero_stage == 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoop:
    """CPU cost of calling one expert after the other, launching nothing ahead."""

    kernels: tuple[float, float]
    """Kernels of one expert, forward and backward."""
    modules: int
    """Linears of one expert, each a module that ZeRO-3 gathers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """An engine that holds and shares the states in DeepSpeed's place."""

    step_bytes: Callable[..., float]
    """From configuration, work, parameters that this rank steps, and ranks that share the states, to the bytes that
    optimizer and sharding move on the GPU in a step."""
    units: Callable[..., tuple[float, tuple[float, float], float]]
    """From work and stage to the units that are gathered, the CPU seconds that each adds to a forward and to a backward
    pass, and the seconds by which the GPU waits for all of them in a pass."""
    cpu_step_ratio: float
    """DRAM traffic of an optimizer's step on the CPU over that with fp32 states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCode:
    """The defaults are what dstrain runs, Transformers 5.23 and PEFT 0.21; published runs of other code differ."""

    stops_early: bool = True
    """Whether a recomputation ends as soon as all that was saved exists again."""
    is_reentrant: bool = False
    """Whether checkpointing computes whole layers again, whatever is trained."""
    sharding: Sharding | None = None
    """The engine that shares the states; None: DeepSpeed."""
    collectives: Callable[..., Any] | None = None
    """From configuration, the parameters that the same ranks share (`collectives.Part`) and work, to their collectives;
    None: DeepSpeed's."""
    is_autocast: bool = False
    """Whether inputs and trained parameters are cast to the training precision for each use."""
    has_fp32_adapters: bool = False
    """Whether adapters stay in fp32, as PEFT makes them; DeepSpeed casts them with the model."""
    splits_packed_rows: bool = True
    """Whether SDPA is called for each of the samples that share a row; else it gets a mask of them."""
    attends_at_once: bool = True
    """Whether one kernel attends all these samples, as PyTorch has it on GPUs from compute capability 8.0 on."""
    skips_packed_masks: bool = False
    """Whether that mask costs no time, as kernels skip what it hides."""
    masks_padding: bool = False
    """Whether rows of a micro-batch come with a mask of their padding, which dstrain's ranks drop if it is last."""
    inputs_in_flight: int = 0
    """Offloaded inputs of layers that are still on the GPU: copied on a stream of their own, or needed first."""
    families_that_repeat_keys: tuple[str, ...] = ()
    """Model types that repeat keys and values before flash attention."""
    keeps_quantized_inputs: bool = False
    """Whether 4-bit linears keep their input."""
    has_fp32_residual: bool = False
    """Whether norms, and so the residual stream between 4-bit linears, are fp32."""
    expert_loop: ExpertLoop | None = None
    """The loop over experts; None: grouped matrix products."""
    mixtral: Callable[..., Any] | None = None
    """Mixtral's block of experts on the tape; None: grouped matrix products."""
    loss: Callable[..., Any] | None = None
    """From the context, hidden states, the head and whether logits are scaled, to the loss on the tape; None: the
    configuration's (`layers.losses`)."""
    tile_rows: Callable[[int, int, int], int] | None = None
    """From rows, hidden size and vocabulary to the tokens whose logits a fused loss has at a time."""
    loss_bytes_per_logit: float = 0.0
    """Bytes that the plain loss moves for each logit beyond Transformers 5's."""
    attention_speed: float = 1.0
    """Speed of its flash attention over FlashAttention-2's."""
    has_early_states: bool = True
    """Whether AdamW's states are allocated before the first step, as train/memory.py does, not in it."""
    fused: FusedParts = PLAIN
    """Parts that run on fused kernels without Liger."""
    adapter_costs: tuple[Cost, Cost] | None = None
    """Costs of the adapters' inputs and outputs if their products are fused into the linears' products."""
