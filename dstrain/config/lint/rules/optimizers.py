"""Rules about optimizers: their types, parameters, learning rate, and offloading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from dstrain.config.document import Change
from dstrain.config.jsonc import Pointer
from dstrain.config.keys.optimizers import OWN_OPTIMIZERS, TORCH_OPTIMIZERS, parameters
from dstrain.config.keys.schedulers import OWN_SCHEDULES, TORCH_SCHEDULES
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule
from dstrain.config.lint.rules.batch import JOB_KEYS, agrees, auto_fix
from dstrain.config.lint.rules.key_names import NEAR_ENOUGH, likeness, slip_of
from dstrain.config.lint.subject import Subject, shown
from dstrain.config.resolve_auto import filled
from dstrain.errors import nearest
from dstrain.job.schema import Job

TESTED = ("adam", "adamw", "adagrad", "lion", "muon")
"""Optimizers that ZeRO takes without being told to. Source: deepspeed 0.19.8 runtime/zero/utils.py:
ZERO_SUPPORTED_OPTIMIZERS."""
GONE_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb")
"""Source: deepspeed 0.19.8, where they were removed."""
_LEGAL = ("AdamW", "Adam", "Adagrad", "Lamb", "Lion", "Muon", *(name for name in TORCH_OPTIMIZERS if "Ada" not in name),
          "Adadelta", "Adafactor", "Adamax")  # fmt: skip
_EXAMPLES = {"betas": [0.9, 0.999], "etas": [0.5, 1.2], "step_sizes": [1e-6, 50]}
SHARED = ("betas", "eps", "weight_decay")
"""Parameters that the job says too, beside the learning rate."""


def type_of(subject: Subject, section: str) -> str | None:
    """Returns the type that `optimizer` or `scheduler` names."""
    name = subject.at(f"{section}.type", None)
    return name if isinstance(name, str) else None


def params_of(subject: Subject, section: str) -> dict[str, Any]:
    """Returns the parameters of `optimizer` or `scheduler`; nothing where they are no object."""
    params = subject.at(f"{section}.params", None)
    return params if isinstance(params, dict) else {}


def _taken(subject: Subject) -> Mapping[str, Any] | None:
    """Returns what the optimizer takes, with its defaults; None where nobody knows."""
    name = type_of(subject, "optimizer")
    is_offloaded = subject.device("offload_optimizer") != "none"
    return None if name is None else parameters(name, params_of(subject, "optimizer"), is_offloaded=is_offloaded)


def _wrong_type(subject: Subject) -> Iterator[Fault]:
    name = type_of(subject, "optimizer")
    if name is None or name.lower() in OWN_OPTIMIZERS or name in TORCH_OPTIMIZERS:
        return
    meant = slip_of(name, _LEGAL)
    fix = f'did you mean "{meant}"?' if meant else 'write "AdamW", another of DeepSpeed, or a class of torch.optim'
    if name.lower() in GONE_OPTIMIZERS:
        meant, fix = None, 'write "AdamW": DeepSpeed 0.19.8 has no 1-bit optimizers'
    yield type_fault("optimizer", name, meant, fix)


def type_fault(section: str, name: str, meant: str | None, fix: str) -> Fault:
    """Returns what to say of a type that there is not; `meant` is the type that it is with a slip in it."""
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
    name, legal, params = type_of(subject, "optimizer"), _taken(subject), params_of(subject, "optimizer")
    if legal is None or name is None:
        return
    for key in params:
        if key == "max_grad_norm":
            yield Fault(
                pointer=("optimizer", "params", key),
                problem="max_grad_norm is no parameter of an optimizer",
                effect="DeepSpeed stops with a ValueError",
                fix='remove it, and write "gradient_clipping"',
            )
        elif key not in legal:
            yield param_fault("optimizer", name, key, legal, params)
    is_own = name.lower() in ("adam", "adamw", "lamb") and params.get("torch_adam") is not True
    if params.get("amsgrad") is True and is_own and subject.device("offload_optimizer") == "none":
        yield Fault(
            pointer=("optimizer", "params", "amsgrad"),
            problem=f"amsgrad is true, and DeepSpeed's {name} has none",
            effect="the run stops with a RuntimeError when the engine starts",
            fix="remove the line" + ("" if name.lower() == "lamb" else ', or write "torch_adam": true'),
        )


def _pairs(subject: Subject) -> Iterator[Fault]:
    """Two numbers each, the smaller one first where there is one."""
    params = params_of(subject, "optimizer")
    for key in _EXAMPLES:
        value = params.get(key)
        if not isinstance(value, list) or not all(isinstance(each, int | float) for each in value):
            continue
        is_pair = len(value) == 2 and (key == "betas" or value[0] <= value[1])
        if not is_pair or (key == "etas" and not 0 < value[0] < 1 < value[1]):
            yield Fault(
                pointer=("optimizer", "params", key),
                problem=f"{key} is {shown(value)}",
                effect="the run stops when the engine starts",
                fix=f"write two numbers, such as {shown(_EXAMPLES[key])}",
            )


def param_fault(section: str, name: str, key: str, legal: Iterable[str], params: Mapping[str, object]) -> Fault:
    """Returns what to say of a parameter that an optimizer or a schedule does not take."""
    names = [*legal]
    slip = slip_of(key, names)
    meant = "lr" if key == "learning_rate" and "lr" in names else slip or nearest(key, names)
    pointer = (section, "params", key)
    is_muon = name.lower() == "muon"
    return Fault(
        pointer=pointer,
        problem=f'{name} takes no "{key}"',
        effect="it is passed over in silence" if is_muon else "the run stops with a TypeError when the engine starts",
        fix=_param_fix(section, key, meant, names),
        changes=(Change(pointer=pointer, renamed=slip),) if slip is not None and slip not in params else (),
    )


def _param_fix(section: str, key: str, meant: str | None, legal: Sequence[str]) -> str:
    """Returns what to write for a parameter that is not taken: the type that takes it, or the nearest name."""
    schedules = {**OWN_SCHEDULES, **TORCH_SCHEDULES}
    takers = [name for name, takes in schedules.items() if key in takes] if section == "scheduler" else []
    if takers and len(takers) < 4:
        return f"remove it, or write the type that takes it: {' or '.join(takers)}"
    near = meant is not None and likeness(key, meant) >= NEAR_ENOUGH
    return f'did you mean "{meant}"?' if near or meant == "lr" else "remove it; it takes " + ", ".join(legal[:8])


def _is_set_by_schedule(subject: Subject) -> bool:
    """Returns whether a schedule overwrites the optimizer's learning rate."""
    name, params = type_of(subject, "scheduler"), params_of(subject, "scheduler")
    if name == "WarmupLR":
        return params.get("warmup_max_lr") is not None
    return name in ("WarmupDecayLR", "OneCycle", "LRRangeTest", "CyclicLR", "OneCycleLR")


def _no_rate(subject: Subject) -> Iterator[Fault]:
    """Without lr the engine takes the optimizer's own default, and the Trainer's learning rate is read by nobody."""
    legal, params, section = _taken(subject), params_of(subject, "optimizer"), subject.at("optimizer")
    is_chosen = params.get("lr") is not None or {"muon_lr", "adam_lr"} <= params.keys() or _is_set_by_schedule(subject)
    if legal is None or is_chosen or "lr" in section or not params.keys() <= legal.keys():
        return  # beside the type, or with a name that is not taken: rules of their own
    default = "0.02 and 0.0003" if "muon_lr" in legal else f"{legal['lr']:g}"
    yield Fault(
        pointer=("optimizer", "params") if "params" in section else ("optimizer",),
        severity=None if subject.is_trainers else Severity.WARNING,
        problem="optimizer.params has no lr",
        effect=f"the engine trains with its own default, {default}"
        + (", whatever learning_rate says" if subject.is_trainers else ""),
        fix=auto_fix(subject, "lr", "learning_rate") if subject.is_trainers else "write the one that you mean",
    )


def _not_the_jobs(subject: Subject) -> Iterator[Fault]:
    """A hyper-parameter that the job writes, and that the optimizer section leaves to the engine's default."""
    legal, params = _taken(subject), params_of(subject, "optimizer")
    if legal is None or subject.job is None:
        return
    values = filled(subject.job.job, None, num_ranks=None)
    for name in SHARED:
        pointer: Pointer = ("optimizer", "params", name)
        key, wanted = JOB_KEYS[pointer], values[pointer]
        if name in params or name not in legal or agrees(legal[name], wanted) or not _is_chosen(subject.job.job, key):
            continue
        yield Fault(
            pointer=("optimizer", "params") if subject.has("optimizer.params") else ("optimizer",),
            problem=f"optimizer.params has no {name}, and {subject.job.locate((key,))}: {key} makes it {shown(wanted)}",
            effect=f"the engine takes its own default, {shown(legal[name])}",
            fix=f'write "{name}": "auto"',
        )


def _is_chosen(job: Job, key: str) -> bool:
    """Returns whether a job has another value than the default of its key, or of the beta beside it."""
    keys = ("adam_beta1", "adam_beta2") if key == "adam_beta1" else (key,)
    return any(getattr(job, field.name) != field.default for field in fields(Job) if field.name in keys)


def _not_on_cpu(subject: Subject) -> Iterator[Fault]:
    """DeepSpeed's CPU has Adam, Adagrad and Lion; others step there as torch has them."""
    name = type_of(subject, "optimizer")
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
    name = type_of(subject, "optimizer")
    is_known = name is not None and (name in TORCH_OPTIMIZERS or name.lower() in OWN_OPTIMIZERS)
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
    Rule(id="DS514", severity=_E, title="a pair of numbers that is none", find=_pairs,
         source="torch 2.13 optim: the checks of Adam and Rprop; deepspeed 0.19.8 ops/adam"),
    Rule(id="DS505", severity=_E, title="an optimizer or a schedule without a type", find=_nameless,
         source="deepspeed 0.19.8 runtime/config.py: get_optimizer_name, get_scheduler_name"),
    Rule(id="DS510", severity=_E, title="no learning rate", find=_no_rate,
         source=_ENGINE + "_configure_basic_optimizer takes the signature's default; Transformers 5.23 "
         "integrations/deepspeed.py: fill_match fills keys that are there"),
    Rule(id="DS511", severity=_E, title="a default in the place of the job's value", find=_not_the_jobs,
         source=_ENGINE + "_configure_basic_optimizer"),
    Rule(id="DS509", severity=_E, title="an optimizer that ZeRO was not tested with", find=_untested,
         source=_ENGINE + "_do_optimizer_sanity_check"),
    Rule(id="DS508", severity=Severity.INFO, title="nobody's optimizer", find=_nobodys,
         source=_ENGINE + "_configure_zero_optimizer: zero stage … requires an optimizer"),
    Rule(id="DS507", severity=_W, title="an offloaded optimizer that the CPU does not have", find=_not_on_cpu,
         source=_ENGINE + "_configure_optimizer, zero_force_ds_cpu_optimizer"),
)
"""Rules about optimizers and schedules."""
# fmt: on
