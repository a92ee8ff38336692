"""The rules of a healthy run: a signal, the values from which it is a warning or critical, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dstrain.choices import HealthRule
from dstrain.monitor.health import signals
from dstrain.monitor.health.history import History


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule."""

    signal: Callable[[History], float | None]
    """Measures; None: nothing to say yet."""
    warn: float
    """The signal from which it is a warning."""
    critical: float | None = None
    """The signal from which it is critical; None: never."""
    is_low: bool = False
    """Whether small signals are the bad ones."""
    problem: str
    """What is wrong, with the signal as `{value}`."""
    advice: str
    """What to do."""
    source: str
    """Where the limits come from."""


RULES: Mapping[HealthRule, Rule] = MappingProxyType(
    {
        HealthRule.LOSS_SPIKE: Rule(
            signal=signals.loss_spike,
            warn=6,
            critical=60,
            problem="the loss is {value:.0f} standard deviations above its median",
            advice="One spike that recovers is normal. If they repeat, lower learning_rate, or look at the samples of "
            "that step: dstrain data show.",
            source="OLMo-core: 6 σ over 128 steps; here by the MAD, which spikes do not move",
        ),
        HealthRule.REPEATED_SPIKES: Rule(
            signal=signals.repeated_spikes,
            warn=2,
            critical=3,
            problem="{value:.0f} of the last 50 losses are spikes",
            advice="Lower learning_rate, or max_grad_norm if gradients spike as well.",
            source="as loss_spike; three in 50 do not recover on their own",
        ),
        HealthRule.DIVERGENCE: Rule(
            signal=signals.divergence,
            warn=1.2,
            critical=1.5,
            problem="for 100 steps the loss has been at least {value:.2f} times its best",
            advice="Resume from an earlier checkpoint with a lower learning_rate.",
            source="a moving average of 50 steps; spikes that recover within 100 steps do not count",
        ),
        HealthRule.ZERO_LOSS: Rule(
            signal=signals.zero_loss,
            warn=1,
            critical=3,
            problem="{value:.0f} of the last 3 losses are 0 or nearly 0",
            advice="Labels are missing or the answer is in the prompt: look at a sample with dstrain data show.",
            source="LLaMA-Factory#7263, axolotl#3453: packing or labels that leave nothing to learn",
        ),
        HealthRule.FIRST_LOSS: Rule(
            signal=signals.first_loss,
            warn=1.5,
            problem="the first loss is {value:.1f} times that of a model that guesses, ln(vocabulary)",
            advice="Weights or tokenizer do not belong together, or the chat template is another model's.",
            source="a model that guesses has a loss of ln(vocabulary); trained ones begin far below",
        ),
        HealthRule.OVERFITTING: Rule(
            signal=signals.overfitting,
            warn=0.02,
            critical=0.05,
            problem="the evaluation loss has risen twice and is {value:.1%} above its best, while the loss falls",
            advice="Keep the checkpoint of the best evaluation; train fewer epochs, or on more data.",
            source="early stopping with a patience of two evaluations",
        ),
        HealthRule.GRADIENT_SPIKE: Rule(
            signal=signals.gradient_spike,
            warn=6,
            problem="the gradient norm is {value:.0f} standard deviations above its median",
            advice="Clipping bounds one spike (max_grad_norm); if they repeat, lower learning_rate.",
            source="OLMo-core: 6 σ over 128 steps",
        ),
        HealthRule.REPEATED_GRADIENT_SPIKES: Rule(
            signal=signals.repeated_gradient_spikes,
            warn=3,
            problem="{value:.0f} of the last 20 gradient norms are above ten times the median",
            advice="Lower learning_rate, or look for bad samples.",
            source="Megatron-LM counts ten times the largest value as a spike",
        ),
        HealthRule.LARGE_GRADIENT: Rule(
            signal=signals.large_gradient,
            warn=100,
            problem="the gradient norm is {value:.0f}",
            advice="Lower learning_rate; check precision (fp16 overflows) and the labels.",
            source="axolotl's training_stability page: 0.1 to 10 is usual, above 100 unstable",
        ),
        HealthRule.ALWAYS_CLIPPED: Rule(
            signal=signals.clipped_share,
            warn=0.9,
            problem="{value:.0%} of the last 100 steps were clipped",
            advice="Each step then has the same length whatever the gradient: lower learning_rate, or raise "
            "max_grad_norm to the usual norm of this model.",
            source="clipping is for the exception: above nine in ten it decides the length of every step",
        ),
        HealthRule.VANISHED_GRADIENT: Rule(
            signal=signals.vanished_gradient,
            warn=1e-4,
            critical=0.0,
            is_low=True,
            problem="the gradient norm is {value:.0e} of what it was in the first windows",
            advice="Nothing is learned: is learning_rate 0 or everything frozen, or are no labels left?",
            source="LLaMA-Factory#9298: norms of 0",
        ),
        HealthRule.SKIPPED_STEPS: Rule(
            signal=signals.skipped_steps,
            warn=3,
            critical=20,
            problem="{value:.0f} of the last 100 steps were skipped, because gradients were not finite",
            advice="precision: bf16 where the GPU supports it; otherwise a lower learning_rate.",
            source="DeepSpeed's loss scaler grows once in 1,000 steps: more than a few skips say that it collapses",
        ),
        HealthRule.SLOWDOWN: Rule(
            signal=signals.slowdown,
            warn=1.15,
            critical=1.5,
            problem="steps take {value:.2f} times as long as before",
            advice="dstrain doctor compares the nodes: another process, a throttled GPU, a slow link or disk.",
            source="Greyhound (USENIX ATC 2025): slow machines and links cost 1.34 times the time on average",
        ),
        HealthRule.DATA_WAIT: Rule(
            signal=signals.data_wait,
            warn=0.05,
            critical=0.20,
            problem="ranks wait for data {value:.0%} of the time",
            advice="Raise dataloader_num_workers.",
            source="5 % is what a faster loader could gain at most",
        ),
        HealthRule.PADDING: Rule(
            signal=signals.padding,
            warn=0.20,
            critical=0.50,
            problem="{value:.0%} of all tokens are padding",
            advice="packing: true trains only on tokens of samples.",
            source="trl#3526: packing is up to 3.7 times as fast",
        ),
        HealthRule.GPU_MEMORY_GROWTH: Rule(
            signal=signals.gpu_memory_growth,
            warn=10,
            problem="the GPU's peak has grown in {value:.0f} of the last 12 windows",
            advice="Something keeps tensors: an own callback, or losses that are added up with their graph.",
            source="a peak settles within a few windows; ten growths in a row do not happen by chance",
        ),
        HealthRule.HOST_MEMORY_GROWTH: Rule(
            signal=signals.host_memory_growth,
            warn=10,
            problem="a rank's RAM has grown in {value:.0f} of the last 12 windows",
            advice="Look for what keeps data: workers of the data loader, or an own callback.",
            source="as gpu_memory_growth",
        ),
        HealthRule.HOST_MEMORY: Rule(
            signal=signals.host_memory,
            warn=0.85,
            critical=0.95,
            problem="{value:.0%} of a node's RAM is in use",
            advice="The kernel kills a process when none is left: fewer data workers, less offload, or more RAM.",
            source="the kernel's OOM killer",
        ),
        HealthRule.ALLOCATOR_RETRIES: Rule(
            signal=signals.allocator_retries,
            warn=1,
            problem="the allocator has flushed its cache {value:.0f} times in this window, for want of memory",
            advice="The GPU is full: PYTORCH_ALLOC_CONF=expandable_segments:True, a smaller micro_batch, or grad_ckpt.",
            source="DeepSpeed and torchtitan warn of the same counter",
        ),
        HealthRule.FRAGMENTATION: Rule(
            signal=signals.fragmentation,
            warn=0.20,
            problem="the allocator holds {value:.0%} of the GPU beyond the live peak",
            advice="PYTORCH_ALLOC_CONF=expandable_segments:True in env.",
            source="published runs: nvidia-smi over live bytes is 1.32 in the median and 1.69 in one of ten",
        ),
        HealthRule.MEMORY_IMBALANCE: Rule(
            signal=signals.memory_imbalance,
            warn=0.10,
            problem="one rank's peak is {value:.0%} above another's",
            advice="The fullest rank decides what fits. packing: true evens out lengths; with experts, the router may "
            "prefer a few.",
            source="ZeRO divides evenly: what differs is activations",
        ),
    }
)
