"""The health rules: signals, limits, and what to do; and the watch that applies them to each window."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Any

from dstrain.job.schema import HealthAction, HealthLimits, HealthRule
from dstrain.monitor.health import signals
from dstrain.monitor.health.history import Facts, History
from dstrain.monitor.health.nonfinite import Finding


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
    normal: float = 0.0
    """The signal of a run without the trouble."""
    rank: Callable[[History], int] | None = None
    """Returns the rank to blame; None: it is no single one's fault."""
    problem: str
    """The problem, with the signal as `{value}` and the rank to blame as `{rank}`."""
    outlook: Callable[[History, float], str] | None = None
    """Returns the meaning of the signal in figures, as the end of the sentence of `problem`; empty if unknown."""
    harms_weights: bool = False
    """Whether checkpoints from after the best step of the loss should not be trained on."""
    advice: str
    """The remedy."""
    source: str
    """Where the limits come from."""


RULES: Mapping[HealthRule, Rule] = MappingProxyType(
    {
        HealthRule.LOSS_SPIKE: Rule(
            signal=signals.loss_spike,
            harms_weights=True,
            warn=6,
            critical=60,
            problem="the loss is {value:.0f} standard deviations above its median",
            advice="One spike that recovers is normal. If they repeat, lower learning_rate, or look at the samples of "
            "that step: dstrain data show.",
            source="OLMo-core: 6 σ over 128 steps; here by the MAD, which spikes do not move",
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
        HealthRule.ABOVE_GUESSING: Rule(
            signal=signals.above_guessing,
            warn=1.5,
            critical=3.0,
            normal=1.0,
            harms_weights=True,
            problem="the loss is {value:.1f} times that of a model that guesses, ln(vocabulary), or its own first one",
            advice="The run diverges: start again, or from a checkpoint before it, with a lower learning_rate.",
            source="as first_loss; a trained model stays far below",
        ),
        HealthRule.OVERFITTING: Rule(
            signal=signals.overfitting,
            warn=0.02,
            critical=0.05,
            problem="the evaluation loss rises and is {value:.1%} above its best, while the loss falls",
            advice="Keep the checkpoint of the best evaluation; train fewer epochs, or on more data.",
            source="early stopping with a patience of two evaluations, or of one that is clearly worse",
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
            normal=1.0,
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
        HealthRule.PLATEAU: Rule(
            signal=signals.plateau,
            warn=0.01,
            is_low=True,
            normal=0.1,
            problem="the loss has fallen by at most {value:.1%} since the start",
            advice="learning_rate may be too low, most weights frozen, or there is nothing more to learn.",
            source="axolotl's training_stability page: raise learning_rate; here noise counts as a fall; "
            "1 % is a judgement",
        ),
        HealthRule.RESUMED_LOSS: Rule(
            signal=signals.resumed_loss,
            warn=0.001,
            critical=0.01,
            problem="the first loss after the resume differs by {value:.1%} from that of the same steps before",
            advice="Data, seed or batch size have changed, or the checkpoint is damaged: compare the job with before.",
            source="resuming repeats the batches, so that only rounding differs",
        ),
        HealthRule.MASKED_SAMPLES: Rule(
            signal=signals.masked_samples,
            warn=0.05,
            critical=0.5,
            problem="{value:.0%} of the samples have no label, so that nothing is learned from them",
            advice="Answers are cut off by seq_len, or the template masks them: dstrain data show.",
            source="LLaMA-Factory#7263, axolotl#3453; a sample without labels costs the time of one with labels",
        ),
        HealthRule.BUSIEST_EXPERT: Rule(
            signal=signals.busiest_expert,
            warn=2,
            critical=4,
            normal=1.0,
            problem="the busiest expert's share of its layer's tokens is {value:.1f} times that of the start",
            advice="expert_load_max_over_mean_by_layer in metrics.jsonl names the layer. router_aux_loss_coef balances "
            "the load; so do a lower learning_rate and a larger global batch.",
            source="4 and 8 times the mean in a model that starts at 2 or less: the trend counts, not the value",
        ),
        HealthRule.DEAD_EXPERTS: Rule(
            signal=signals.dead_experts,
            warn=0.01,
            critical=0.10,
            problem="{value:.0%} of the experts get no token any more",
            advice="router_aux_loss_coef balances the load; experts that get no token do not learn.",
            source="NVIDIA NeMo AutoModel logs dead_expert_frac; the limits are a judgement",
        ),
        HealthRule.SLOWDOWN: Rule(
            signal=signals.slowdown,
            warn=1.15,
            critical=1.5,
            normal=1.0,
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
            outlook=signals.packing_gain,
            problem="{value:.0%} of all tokens are padding",
            advice="packing: true puts several samples into a row.",
            source="trl#3526: packing is up to 3.7 times as fast",
        ),
        HealthRule.SLOW_RANK: Rule(
            signal=signals.slow_rank,
            warn=0.18,
            critical=0.33,
            rank=signals.slowest_rank,
            problem="rank {rank} works {value:.0%} longer than the fastest rank, communication not counted",
            advice="All ranks wait for it: dstrain doctor compares the nodes (clocks, other processes, CPU).",
            source="NVIDIA's NVRx: a rank at 0.75 of the fastest one's speed is a straggler; a warning from 0.85",
        ),
        HealthRule.BUS_BANDWIDTH: Rule(
            signal=signals.bus_bandwidth,
            warn=0.6,
            critical=0.3,
            is_low=True,
            normal=1.0,
            problem="large collectives reach {value:.0%} of the bandwidth that the plan expects of the links",
            advice="dstrain doctor --network measures the links; NCCL_DEBUG=INFO names the transport in the log.",
            source="swanlab#1825 and LLaMA-Factory#5014: NCCL over sockets where InfiniBand is",
        ),
        HealthRule.SLOW_CHECKPOINT: Rule(
            signal=signals.slow_checkpoint,
            warn=2,
            critical=5,
            normal=1.0,
            problem="the newest checkpoint took {value:.1f} times as long as those before",
            advice="The disk of output_dir is slower than before: is it full, or do others write to it?",
            source="as slowdown, with room for the noise of a shared disk",
        ),
        HealthRule.MEMORY_GROWTH: Rule(
            signal=signals.memory_growth,
            warn=3,
            outlook=signals.memory_pace,
            problem="memory has grown {value:.0f} times in a row, window by window or three by three",
            advice="Something keeps data or tensors: workers of the data loader, an own callback, or losses that are "
            "added up with their graph.",
            source="a peak settles within 20 windows; three records in a row then happen by chance once in 1,000 runs",
        ),
    }
)
"""The rules of a healthy run: about loss and gradients first, then speed, then memory."""

_QUIET_S = 600.0
"""Seconds between two messages of a rule, unless it gets worse than what was told."""
_LEAVES_AT = 0.8
"""Share of the way from normal to a limit below which a rule is no longer broken: a signal around it is told once."""


class Level(IntEnum):
    """How bad it is."""

    FINE = 0
    WARNING = 1
    CRITICAL = 2


@dataclass(slots=True)
class _State:
    level: Level = Level.FINE
    told: float = float("-inf")
    """When the last message was."""
    told_level: Level = Level.FINE


@dataclass(slots=True)
class Watch:
    """The rules of one run."""

    limits: Mapping[HealthRule, HealthLimits]
    """Of the job: rules that are disabled or have other limits."""
    facts: Facts
    clock: Callable[[], float] = time.monotonic
    """Returns seconds."""
    history: History = field(init=False)
    _states: dict[HealthRule, _State] = field(init=False)

    def __post_init__(self) -> None:
        """Begins with an empty history."""
        self.history = History(self.facts)
        self._states = {name: _State() for name in RULES if self._limits(name).enabled}

    def see(self, step: int, values: Mapping[str, Any]) -> list[Finding]:
        """Returns the findings to report after a logged window or an evaluation."""
        self.history.add({**values, "step": step})
        found = (self._judge(name, RULES[name], state, step) for name, state in self._states.items())
        return [finding for finding in found if finding is not None]

    def _limits(self, name: HealthRule) -> HealthLimits:
        return self.limits.get(name, HealthLimits())

    def _judge(self, name: HealthRule, rule: Rule, state: _State, step: int) -> Finding | None:
        value = rule.signal(self.history)
        if value is None:
            return None
        asked = self._limits(name)
        warn = rule.warn if asked.warn is None else asked.warn
        critical = rule.critical if asked.critical is None else asked.critical
        level = _level(value, warn, critical, is_low=rule.is_low)
        if level is Level.FINE:
            # just below its limit a rule stays broken, so that a signal around it is told once
            if _has_left(value, warn, rule):
                state.level = Level.FINE
            return None
        is_worse, state.level = level > state.level, max(level, state.level)
        now = self.clock()
        if not is_worse or (level <= state.told_level and now - state.told < _QUIET_S):
            return None
        state.told, state.told_level = now, level
        # without a critical limit the warning is the worst, and the action of the job belongs to it
        is_highest = level is Level.CRITICAL or critical is None
        rank = rule.rank(self.history) if rule.rank is not None else None
        outlook = rule.outlook(self.history, value) if rule.outlook is not None else ""
        problem = "; ".join(filter(None, (rule.problem.format(value=value, rank=rank), outlook)))
        return Finding(
            rule=name.value,
            step=step,
            value=f"{value:.6g}",
            message=f"step {step}: {problem}. {rule.advice}",
            severity=level.name.lower(),
            rank=rank,
            since=self.history.last_good_step if rule.harms_weights else None,
            action=asked.action if is_highest else HealthAction.TELL,
        )


def _level(value: float, warn: float, critical: float | None, *, is_low: bool) -> Level:
    def is_reached(limit: float) -> bool:
        return value <= limit if is_low else value >= limit

    if critical is not None and is_reached(critical):
        return Level.CRITICAL
    return Level.WARNING if is_reached(warn) else Level.FINE


def _has_left(value: float, warn: float, rule: Rule) -> bool:
    sign = -1 if rule.is_low else 1
    return sign * (value - rule.normal) < _LEAVES_AT * sign * (warn - rule.normal)
