"""Live bytes without DeepSpeed, as exported jobs and most published runs have them: one GPU, DDP, or FSDP."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.named_peaks import Instant, profile
from benchmarks.published.training_code import published
from dstrain.choices import LossKernel, Method, Optimizer
from dstrain.facts.model.model_facts import Kind, ModelFacts
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.layers.ops import FP32
from dstrain.plan.memory.params import NF4_BYTES_PER_PARAM, Trained, is_inside, trained
from dstrain.plan.memory.peak import Peak
from dstrain.plan.memory.reserved import ADAPTER_LOGITS, FIXED_HOLES, FIXED_LOGITS, FULL_LOGITS, kind_of
from dstrain.plan.memory.zero import States


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Bytes of one element."""

    compute: int
    """Of what forward and backward work with."""
    param: int
    """Of a trainable parameter at rest."""
    grad: int
    """Of its gradient."""
    states: float
    """Of its optimizer states."""
    step: int
    """Of the temporaries that the optimizer makes of all parameters at once."""


def peak(model: ModelFacts, configuration: Configuration, num_ranks: int) -> Peak:
    """Returns the peak of live bytes of one rank, with P trainable and F frozen parameters over N ranks.

    One GPU and DDP keep all states. FSDP's full sharding keeps 1/N, plus the root unit (embedding, head, last norm) in
    forward and backward, plus the current layer. The optimizer step adds the temporaries of torch's foreach
    implementation: 2 + 2 + 4 + 2 = 10 B a parameter in bf16, 20 in fp32; published A100 peaks are 10·P and 20·P/N.
    Source: torch 2.13 optim/adamw.py: _multi_tensor_adamw; distributed/fsdp/_flat_param.py.
    """
    counts = trained(model, configuration.model.method, configuration.model.lora)
    sizes = _sizes(configuration)
    share, held = num_ranks if configuration.zero.stage == 3 else 1, states(model, configuration, num_ranks)
    profiled = profile(model, configuration)
    instants = [_during(model, configuration, counts, instant, share, num_ranks) for instant in profiled]
    temporary = round(sizes.step * counts.trainable / (num_ranks if configuration.zero.stage >= 1 else 1))
    instants.append(Peak(name="optimizer step", grads=held.grads, buffers=temporary if held.optimizer else 0))
    return replace(max(instants, key=lambda instant: instant.total), params=held.params, optimizer=held.optimizer)


def _frozen_bytes(model: ModelFacts, configuration: Configuration, counts: Trained) -> float:
    """Returns the bytes of the base under an adapter; 4 bits hold experts too if they are linears."""
    frozen, quantized = counts.frozen, counts.quantized
    if configuration.model.method is Method.QLORA and published(configuration.code).has_linear_experts:
        experts = model.num_params_of(Kind.EXPERT, Kind.ROUTER)
        frozen, quantized = frozen - experts, quantized + experts
    per_quantized = NF4_BYTES_PER_PARAM + published(configuration.code).scale_bytes
    return configuration.model.item * frozen + per_quantized * quantized


def states(model: ModelFacts, configuration: Configuration, num_ranks: int) -> States:
    """Returns the model states of one rank when the optimizer steps."""
    counts, sizes = trained(model, configuration.model.method, configuration.model.lora), _sizes(configuration)
    share = num_ranks if configuration.zero.stage == 3 else 1
    part = counts.trainable / (num_ranks if configuration.zero.stage >= 1 else 1)
    whole = sizes.param * counts.trainable + _frozen_bytes(model, configuration, counts)
    params, grads, optimizer = round(whole / share), round(sizes.grad * part), round(sizes.states * part)
    if configuration.zero.is_offloaded:
        gone = params if configuration.zero.offloads_params else 0
        return States(params=params - gone, grads=0, optimizer=0, host=gone + grads + optimizer)
    return States(params=params, grads=grads, optimizer=optimizer)


def _sizes(configuration: Configuration) -> _Sizes:
    """Returns the bytes of one element of each kind."""
    param, optimizer = _param_item(configuration), configuration.step.optimizer
    step = param if optimizer is Optimizer.ADAMW and not published(configuration.code).fuses_step else 0
    moments = _moment_bytes_per_param(configuration)
    return _Sizes(compute=configuration.model.item, param=param, grad=param, states=moments, step=step)


def _param_item(configuration: Configuration) -> int:
    """Returns the bytes of one trainable element; PEFT's adapters are fp32 whatever the rest is."""
    is_autocast = configuration.code.is_autocast
    is_wide = is_autocast if configuration.model.is_full else published(configuration.code).has_peft
    return FP32 if is_wide else configuration.model.item


def _moment_bytes_per_param(configuration: Configuration) -> float:
    """Returns the bytes of optimizer states for each trained parameter."""
    param = _param_item(configuration)
    return {
        Optimizer.ADAMW: 2.0 * param,
        Optimizer.ADAMW_8BIT: 2 + 8 / 256,  # two bytes, and an fp32 scale of each for a block of 256
        Optimizer.ADAMW_BF16: 2.0 * param,  # no configuration: a rule
        Optimizer.LION: 1.0 * param,
        Optimizer.SGD: 0.0,
        Optimizer.MUON: 1.0 * param,  # no configuration: a rule
    }[configuration.step.optimizer]


def _during(
    model: ModelFacts, configuration: Configuration, counts: Trained, instant: Instant, share: int, num_ranks: int
) -> Peak:
    """Returns the live bytes at one instant of forward and backward beyond parameters and states."""
    sizes = _sizes(configuration)
    grads, buffers, gathered = instant.grads * sizes.grad // sizes.compute if share == 1 else instant.grads, 0, 0
    done = instant.layers_done / model.num_hidden_layers
    kept = 0.0 if configuration.zero.is_offloaded else sizes.grad * counts.trainable / share
    if share > 1:
        grads += round(kept * (1.0 if configuration.step.grad_accum > 1 else done))
        gathered = _gathered(model, configuration, instant)
    elif configuration.step.grad_accum > 1:
        grads += round(kept)
    if configuration.zero.stage < 3 and num_ranks > 1:
        buffers = round(sizes.grad * counts.trainable)  # DDP's buckets are copies of the gradients
    return Peak(
        name=instant.name,
        grads=grads,
        buffers=buffers,
        gathered=gathered,
        activations=instant.activations,
        logits=instant.logits,
    )


def _gathered(model: ModelFacts, configuration: Configuration, instant: Instant) -> int:
    """Returns the bytes of the units that FSDP holds whole: the root always, a layer while it works."""
    compute = configuration.model.item
    whole = compute * (model.num_params_of(Kind.EMBEDDING, Kind.HEAD, Kind.VISION) + model.hidden_size)
    if instant.name in ("forward", "layer backward"):
        inner = [group for group in model.tensors if is_inside(group)]
        per_linear: float = compute
        if configuration.model.method is Method.QLORA:
            per_linear = NF4_BYTES_PER_PARAM + published(configuration.code).scale_bytes
        are_linears = published(configuration.code).has_linear_experts
        layer = sum(
            g.numel * g.count * (per_linear if g.is_linear or (are_linears and g.kind is Kind.EXPERT) else compute)
            for g in inner
        )
        whole += round(layer / model.num_hidden_layers)
    return whole


WHOLE_ROOTS = 2.0
"""Root units that making FSDP's units leaves behind: its tensors, and all of them flat."""
HOLES = {"full": 0.05, "adapter": 0.02, "resting": 0.05, "sharded": 0.03}
"""Share of live bytes in holes by what is trained, as in `dstrain.plan.memory.reserved`."""


def quick_ratio(model: ModelFacts, configuration: Configuration, num_ranks: int, peak: Peak) -> float:
    """Returns reserved over live bytes at most, with `peak` the live peak of one rank of `num_ranks`.

    In draws of configurations the replay is more than 2 % above it in 2 of 150; it is on average 8 % above the replay.
    """
    item, kind = configuration.model.item, kind_of(configuration)
    base = float(peak.total)
    if kind == "sharded":
        base += _streams(model, configuration, num_ranks, peak)
    share, logits = HOLES[kind], FULL_LOGITS if configuration.model.is_full else ADAPTER_LOGITS
    if not configuration.expandable_segments:
        share, logits = share + FIXED_HOLES, FIXED_LOGITS
    reserved = base * (1 + share)
    if configuration.kernels.loss is LossKernel.FULL:
        reserved += logits * item * model.vocab_size * configuration.batch.tokens / configuration.parallel.sp
    if kind != "sharded":
        reserved += 0.5 * item * model.vocab_size * model.hidden_size
    return reserved / peak.total


def _streams(model: ModelFacts, configuration: Configuration, num_ranks: int, peak: Peak) -> float:
    """Returns the bytes of FSDP's streams beyond those live at the peak: root and two layers gathered, gradient shards,
    and what making the units left."""
    item = configuration.model.item
    root = item * model.num_params_of(Kind.EMBEDDING, Kind.HEAD)
    layer = item * model.num_params / model.num_hidden_layers
    beyond = WHOLE_ROOTS * root + max(0.0, root + 2 * layer - peak.gathered)
    if configuration.model.is_full:
        wide = 4 if configuration.code.is_autocast else item
        beyond += wide * model.num_params / num_ranks
    return beyond
