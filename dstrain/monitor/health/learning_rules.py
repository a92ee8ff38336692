"""Rules about loss and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dstrain.job.monitor import HealthRule
from dstrain.monitor.health import signals
from dstrain.monitor.health.rule import Rule

LEARNING_RULES: Mapping[HealthRule, Rule] = MappingProxyType(
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
        HealthRule.REPEATED_SPIKES: Rule(
            signal=signals.repeated_spikes,
            harms_weights=True,
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
            normal=1.0,
            harms_weights=True,
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
        HealthRule.LOSS_SCALE: Rule(
            signal=signals.loss_scale,
            warn=3,
            critical=8,
            problem="the loss scale of fp16 was halved {value:.0f} times without growing again",
            advice="precision: bf16 where the GPU supports it; otherwise a lower learning_rate.",
            source="DeepSpeed's loss scaler: it halves at overflow and grows after 1,000 steps without one",
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
        HealthRule.UNEVEN_EXPERTS: Rule(
            signal=signals.uneven_experts,
            warn=1.5,
            critical=2.5,
            normal=1.0,
            problem="the load of experts is {value:.1f} times as uneven as at the start",
            advice="router_aux_loss_coef balances it; so do a lower learning_rate and a larger global batch.",
            source="Tinker's documentation on mixtures of experts: the trend counts, not the value",
        ),
        HealthRule.BUSIEST_EXPERT: Rule(
            signal=signals.busiest_expert,
            warn=2,
            critical=4,
            normal=1.0,
            problem="the busiest expert's share of its layer's tokens is {value:.1f} times that of the start",
            advice="expert_load_max_over_mean_by_layer in metrics.jsonl names the layer. router_aux_loss_coef balances "
            "the load; so does a lower learning_rate.",
            source="4 and 8 times the mean in a model that starts at 2 or less; as uneven_experts, the trend counts",
        ),
        HealthRule.DEAD_EXPERTS: Rule(
            signal=signals.dead_experts,
            warn=0.01,
            critical=0.10,
            problem="{value:.0%} of the experts get no token any more",
            advice="router_aux_loss_coef balances the load; experts that get no token do not learn.",
            source="NVIDIA NeMo AutoModel logs dead_expert_frac; the limits are a judgement",
        ),
    }
)
