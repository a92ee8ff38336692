"""Rules about optimizers and schedules: their types, the parameters of each, and what offloading asks of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from dstrain.errors import nearest
from dstrain.render.jsonc import Pointer
from dstrain.render.lint.finding import Fault, Severity
from dstrain.render.lint.naming import is_a_slip
from dstrain.render.lint.rule import Rule
from dstrain.render.lint.subject import Subject, shown
from dstrain.render.merge import Change

_ADAM = ("lr", "bias_correction", "betas", "eps", "weight_decay", "amsgrad", "adam_w_mode", "torch_adam",
         "fp32_optimizer_states", "set_grad_none")  # fmt: skip
_TORCH_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad", "adam_w_mode", "torch_adam", "fp32_optimizer_states",
               "foreach", "maximize", "capturable", "differentiable", "fused")  # fmt: skip
"""What torch's own Adam takes, where `torch_adam` asks for it."""
TESTED = ("adam", "adamw", "adagrad", "lion", "muon")
"""Optimizers that ZeRO takes without being told to. Source: deepspeed 0.19.8 runtime/zero/utils.py:
ZERO_SUPPORTED_OPTIMIZERS."""
_LION = ("lr", "betas", "weight_decay", "set_grad_none", "fp32_optimizer_states")

# fmt: off
OPTIMIZERS: Mapping[str, tuple[str, ...] | None] = MappingProxyType({
    "adam": _ADAM,
    "adamw": _ADAM,
    "adagrad": ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "foreach", "maximize",
                "differentiable", "fused", "amsgrad", "fp32_optimizer_states"),
    "lamb": ("lr", "bias_correction", "betas", "eps", "eps_inside_sqrt", "weight_decay", "max_coeff", "min_coeff",
             "amsgrad"),
    "lion": _LION,
    "muon": ("lr", "muon_lr", "adam_lr", "momentum", "weight_decay", "ns_method", "betas", "eps", "per_head_muon",
             "adam_w_mode", "torch_adam", "foreach", "fp32_optimizer_states"),
    "muadam": None,
    "muadamw": None,
    "musgd": None,
})
"""DeepSpeed's optimizers, in any case → the parameters that they take; None: those of the package mup.

Source: deepspeed 0.19.8 runtime/config.py: DEEPSPEED_OPTIMIZERS, runtime/engine.py: _configure_basic_optimizer.
"""
TORCH_OPTIMIZERS = ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam",
                    "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam")
"""Classes of torch.optim, written exactly so. Source: torch 2.13."""
GONE_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb")
"""Source: deepspeed 0.19.8, where they were removed."""
SCHEDULERS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "LRRangeTest": ("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate",
                    "lr_range_test_staircase", "last_batch_iteration"),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size",
                 "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum",
                 "cycle_min_mom", "cycle_max_mom", "decay_mom_rate", "last_batch_iteration"),
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration"),
    "WarmupDecayLR": ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type",
                      "last_batch_iteration"),
    "WarmupCosineLR": ("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type",
                       "last_batch_iteration"),
})
"""DeepSpeed's schedules → the parameters that they take. Source: deepspeed 0.19.8 runtime/lr_schedules.py."""
TORCH_SCHEDULERS = ("ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR",
                    "ExponentialLR", "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR",
                    "PolynomialLR", "ReduceLROnPlateau", "SequentialLR", "StepLR")
"""Classes of torch.optim.lr_scheduler. Source: torch 2.13."""
_NEEDED: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
})
# fmt: on


def _type(subject: Subject, section: str) -> str | None:
    name = subject.at(f"{section}.type", None)
    return name if isinstance(name, str) else None


def _wrong_type(subject: Subject) -> Iterator[Fault]:
    name = _type(subject, "optimizer")
    if name is None or name.lower() in OPTIMIZERS or name in TORCH_OPTIMIZERS:
        return
    legal = ["AdamW", "Adam", "Adagrad", "Lamb", "Lion", "Muon", *TORCH_OPTIMIZERS]
    if name.lower() in GONE_OPTIMIZERS:
        meant, fix = None, 'write "AdamW": DeepSpeed 0.19.8 has no 1-bit optimizers'
    else:
        meant = nearest(name, legal)
        fix = f'did you mean "{meant}"?' if meant else 'write "AdamW", or the name of a class of torch.optim'
    yield _type_fault("optimizer", name, meant, fix)


def _type_fault(section: str, name: str, meant: str | None, fix: str) -> Fault:
    pointer = (section, "type")
    return Fault(
        pointer=pointer,
        problem=f"DeepSpeed has no {section} {shown(name)}",
        effect="the run stops when the engine starts",
        fix=fix,
        changes=(Change(pointer=pointer, value=meant),) if meant else (),
    )


def _nameless(subject: Subject) -> Iterator[Fault]:
    stops = "nobody builds one, and the run stops when the engine starts"
    silent = "DeepSpeed builds no schedule from it, and says nothing"
    for section, example, effect in (("optimizer", "AdamW", stops), ("scheduler", "WarmupLR", silent)):
        value = subject.at(section)
        if isinstance(value, dict) and "type" not in value:
            yield Fault(
                pointer=(section,),
                problem=f"{section} has no type",
                effect=effect,
                fix=f'write "type": "{example}", or remove the section',
            )


def _wrong_params(subject: Subject) -> Iterator[Fault]:
    name = _type(subject, "optimizer")
    legal = OPTIMIZERS.get(name.lower()) if name else None
    params = subject.at("optimizer.params", {})
    if not isinstance(params, dict) or legal is None:
        return
    if legal is _ADAM and params.get("torch_adam") is True:
        legal = _TORCH_ADAM
    for key in params:
        if key == "max_grad_norm":
            yield Fault(
                pointer=("optimizer", "params", key),
                problem="max_grad_norm is no parameter of an optimizer",
                effect="DeepSpeed stops with a ValueError",
                fix='remove it, and write "gradient_clipping"',
            )
        elif key not in legal:
            yield _param_fault("optimizer", str(name), key, legal, params)
        elif (
            key == "amsgrad"
            and params[key] is True
            and legal is _ADAM
            and subject.device("offload_optimizer") == "none"
        ):
            yield Fault(
                pointer=("optimizer", "params", key),
                problem="amsgrad is true, and DeepSpeed's Adam has none",
                effect="the run stops with a RuntimeError when the engine starts",
                fix='remove the line, or write "torch_adam": true',
            )


def _param_fault(section: str, name: str, key: str, legal: Sequence[str], params: Mapping[str, object]) -> Fault:
    meant = "lr" if key == "learning_rate" and "lr" in legal else nearest(key, legal)
    pointer = (section, "params", key)
    is_free = meant is not None and meant not in params and is_a_slip(key, meant)
    return Fault(
        pointer=pointer,
        problem=f'{name} takes no "{key}"',
        effect="the run stops with a TypeError when the engine starts",
        fix=_param_fix(section, key, meant, legal),
        changes=(Change(pointer=pointer, renamed=meant),) if is_free else (),
    )


def _param_fix(section: str, key: str, meant: str | None, legal: Sequence[str]) -> str:
    """Returns what to write for a parameter that is not taken: the type that takes it, or the nearest name."""
    takers = [name for name, takes in SCHEDULERS.items() if key in takes] if section == "scheduler" else []
    if takers:
        return f"remove it, or write the type that takes it: {' or '.join(takers)}"
    return f'did you mean "{meant}"?' if meant else "remove it; it takes " + ", ".join(legal[:8])


def _wrong_schedule(subject: Subject) -> Iterator[Fault]:
    name = _type(subject, "scheduler")
    if name is None or name in SCHEDULERS or name in TORCH_SCHEDULERS:
        return
    meant = nearest(name, [*SCHEDULERS, *TORCH_SCHEDULERS])
    fix = f'did you mean "{meant}"?' if meant else "write one of " + ", ".join(SCHEDULERS)
    yield _type_fault("scheduler", name, meant, fix)


def _schedule_params(subject: Subject) -> Iterator[Fault]:
    name = _type(subject, "scheduler")
    legal = SCHEDULERS.get(name) if name else None
    params = subject.at("scheduler.params", {})
    if not isinstance(params, dict) or legal is None:
        return
    for key in params:
        if key not in legal:
            yield _param_fault("scheduler", str(name), key, legal, params)
    if list(subject.at("scheduler")) == ["type"]:
        yield _missing_params(("scheduler",), f"scheduler has no params, and {name} is built from them")
    for needed in _NEEDED.get(str(name), ()):
        if needed not in params and subject.has("scheduler.params"):
            yield _missing_params(("scheduler", "params"), f"{name} needs {needed}", needed)


def _missing_params(pointer: Pointer, problem: str, needed: str = "params") -> Fault:
    """Returns what to say of a schedule that cannot be built."""
    example = {"total_num_steps": '"auto"', "params": "{}"}.get(needed, "1e-6")
    return Fault(
        pointer=pointer,
        problem=problem,
        effect="the run stops with a TypeError when the engine starts",
        fix=f'write "{needed}": {example}',
    )


def _overruled(subject: Subject) -> Iterator[Fault]:
    if subject.job is not None and subject.has("scheduler"):
        schedule = subject.job.job.lr_scheduler_type
        yield Fault(
            pointer=("scheduler",),
            problem=f"a schedule here, and lr_scheduler_type ({schedule}) at "
            f"{subject.job.locate(('lr_scheduler_type',))}",
            effect="this one is used",
            fix="remove one of them",
        )


def _not_on_cpu(subject: Subject) -> Iterator[Fault]:
    """DeepSpeed's CPU has Adam, Adagrad and Lion; others step there as torch has them."""
    name = _type(subject, "optimizer")
    allowed = subject.is_true("zero_allow_untested_optimizer")
    if subject.device("offload_optimizer") == "none" or subject.stage == 0 or name is None or not allowed:
        return
    if name.lower() not in TESTED and (name in TORCH_OPTIMIZERS or name.lower() == "lamb"):
        yield Fault(
            pointer=("optimizer", "type"),
            problem=f"an offloaded {name}",
            effect="DeepSpeed has no such optimizer for the CPU: torch's steps there, several times slower",
            fix='write "AdamW", or keep the optimizer on the GPU',
        )


def _untested(subject: Subject) -> Iterator[Fault]:
    name = _type(subject, "optimizer")
    is_known = name is not None and (name in TORCH_OPTIMIZERS or name.lower() in OPTIMIZERS)
    if not is_known or name is None or name.lower() in TESTED or subject.stage == 0:
        return
    if not subject.is_true("zero_allow_untested_optimizer"):
        yield Fault(
            pointer=("optimizer", "type"),
            problem=f"{name} under ZeRO-{subject.stage}",
            effect="DeepSpeed refuses an optimizer that it has not been tested with",
            fix='write "zero_allow_untested_optimizer": true at the top, or "AdamW"',
        )


def _nobodys(subject: Subject) -> Iterator[Fault]:
    if not subject.is_trainers and subject.stage > 0 and not subject.has("optimizer"):
        yield Fault(
            problem="no optimizer section",
            effect="ZeRO stops unless the script hands an optimizer to deepspeed.initialize",
            fix='hand one over, or write "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}',
        )


_ENGINE = "deepspeed 0.19.8 runtime/engine.py: "
_E, _W = Severity.ERROR, Severity.WARNING

# fmt: off
RULES = (
    Rule(id="DS501", severity=_E, title="an optimizer that DeepSpeed does not have", find=_wrong_type,
         source=_ENGINE + "_is_supported_optimizer"),
    Rule(id="DS502", severity=_E, title="a parameter that the optimizer does not take", find=_wrong_params,
         source=_ENGINE + "_configure_basic_optimizer"),
    Rule(id="DS503", severity=_E, title="a schedule that DeepSpeed does not have", find=_wrong_schedule,
         source=_ENGINE + "_scheduler_from_config"),
    Rule(id="DS504", severity=_E, title="the parameters of a schedule", find=_schedule_params,
         source="deepspeed 0.19.8 runtime/lr_schedules.py"),
    Rule(id="DS505", severity=_E, title="an optimizer or a schedule without a type", find=_nameless,
         source="deepspeed 0.19.8 runtime/config.py: get_optimizer_name, get_scheduler_name"),
    Rule(id="DS506", severity=Severity.INFO, title="two schedules", find=_overruled,
         source="Transformers 5.23 integrations/deepspeed.py: deepspeed_optim_sched"),
    Rule(id="DS509", severity=_E, title="an optimizer that ZeRO was not tested with", find=_untested,
         source=_ENGINE + "_do_optimizer_sanity_check"),
    Rule(id="DS508", severity=Severity.INFO, title="nobody's optimizer", find=_nobodys,
         source=_ENGINE + "_configure_zero_optimizer: zero stage … requires an optimizer"),
    Rule(id="DS507", severity=_W, title="an offloaded optimizer that the CPU does not have", find=_not_on_cpu,
         source=_ENGINE + "_configure_optimizer, zero_force_ds_cpu_optimizer"),
)
"""Rules about optimizers and schedules."""
# fmt: on
