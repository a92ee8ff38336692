"""Rules about optimizers and learning-rate schedules: their types, parameters, length, and offloading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from dstrain.choices import Precision, Schedule
from dstrain.config.jsonc import Change, Pointer
from dstrain.config.keys import (
    OWN_OPTIMIZERS,
    OWN_SCHEDULES,
    PYTHON_SCHEDULES,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULES,
    optimizer_parameters,
)
from dstrain.config.lint.rule import (
    STOPS,
    Broken,
    Fault,
    Rule,
    Subject,
    fault,
    params_of,
    shown,
    together,
    type_of,
    when,
)
from dstrain.config.lint.rules.batch import agrees, auto_fix
from dstrain.config.lint.rules.key_names import NEAR_ENOUGH, likeness, slip_of
from dstrain.config.resolve_auto import JOB_KEYS, filled
from dstrain.errors import nearest
from dstrain.findings import Severity
from dstrain.job.schema import Job

TESTED = ("adam", "adamw", "adagrad", "lion", "muon")
"""Optimizers that ZeRO accepts. Source: deepspeed 0.19.8 runtime/zero/utils.py: ZERO_SUPPORTED_OPTIMIZERS."""
GONE_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb")
"""Optimizers that deepspeed 0.19.8 no longer has."""
_LEGAL = ("AdamW", "Adam", "Adagrad", "Lamb", "Lion", "Muon", *(name for name in TORCH_OPTIMIZERS if "Ada" not in name),
          "Adadelta", "Adafactor", "Adamax")  # fmt: skip
_CLIP = ', and write "gradient_clipping" at the top of the file'
_EXAMPLES = {"betas": [0.9, 0.999], "etas": [0.5, 1.2], "step_sizes": [1e-6, 50]}
SHARED = ("betas", "eps", "weight_decay")
"""Parameters that the job also sets, apart from the learning rate."""


def _legal_params(subject: Subject) -> Mapping[str, Any] | None:
    """Returns the optimizer's parameters with their defaults, or None if they are unknown."""
    name = type_of(subject, "optimizer")
    if name is None:
        return None
    is_offloaded = subject.device("offload_optimizer") != "none"
    return optimizer_parameters(name, params_of(subject, "optimizer"), is_offloaded=is_offloaded)


def _wrong_type(subject: Subject) -> Iterator[Fault]:
    name = type_of(subject, "optimizer")
    if name is None or name.lower() in OWN_OPTIMIZERS or name in TORCH_OPTIMIZERS:
        return
    meant = slip_of(name, _LEGAL)
    fix = f'did you mean "{meant}"?' if meant else 'write "AdamW", another one of DeepSpeed, or a class of torch.optim'
    if name.lower() in GONE_OPTIMIZERS:
        meant, fix = None, 'write "AdamW": DeepSpeed 0.19.8 has no 1-bit optimizers'
    yield type_fault("optimizer", name, meant, fix)


def type_fault(section: str, name: str, meant: str | None, fix: str) -> Fault:
    """Returns the fault of an unknown type; `meant` is the type of which it is a typo."""
    changes = (Change(pointer=(section, "type"), value=meant),) if meant else ()
    return fault((section, "type"), f"DeepSpeed has no {section} {shown(name)}", STOPS, fix, changes=changes)


def _is_nameless(section: str, s: Subject) -> bool:
    value = s.at(section)
    return isinstance(value, dict) and "type" not in value


def _wrong_params(subject: Subject) -> Iterator[Fault]:
    name, legal, params = type_of(subject, "optimizer"), _legal_params(subject), params_of(subject, "optimizer")
    if legal is None or name is None:
        return
    for key in params:
        if key == "max_grad_norm":
            fix = f"remove it{'' if subject.has('gradient_clipping') else _CLIP}"
            problem = "max_grad_norm is not a parameter of an optimizer"
            yield fault(("optimizer", "params", key), problem, "DeepSpeed stops with a ValueError", fix)
        elif key not in legal:
            yield param_fault("optimizer", name, key, legal, params)
    is_own = name.lower() in ("adam", "adamw", "lamb") and params.get("torch_adam") is not True
    if params.get("amsgrad") is True and is_own and subject.device("offload_optimizer") == "none":
        yield fault(
            "optimizer.params.amsgrad",
            f"amsgrad is true, but DeepSpeed's {name} does not support it",
            "the run stops with a RuntimeError when the engine starts",
            "remove the line" + ("" if name.lower() == "lamb" else ', or write "torch_adam": true'),
        )


def _pairs(subject: Subject) -> Iterator[Fault]:
    """Reports pairs of numbers with another length, order or range."""
    params = params_of(subject, "optimizer")
    for key, example in _EXAMPLES.items():
        value = params.get(key)
        if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
            continue
        is_pair = len(value) == 2 and (key == "betas" or value[0] <= value[1])
        if not is_pair or (key == "etas" and not 0 < value[0] < 1 < value[1]):
            fix = f"write two numbers, such as {shown(example)}"
            yield fault(("optimizer", "params", key), f"{key} is {shown(value)}", STOPS, fix)


def param_fault(section: str, name: str, key: str, legal: Iterable[str], params: Mapping[str, object]) -> Fault:
    """Returns the fault of a parameter that an optimizer or a schedule does not have."""
    names = [*legal]
    slip = slip_of(key, names)
    meant = "lr" if key == "learning_rate" and "lr" in names else slip or nearest(key, names)
    pointer = (section, "params", key)
    effect = "the run stops with a TypeError when the engine starts"
    return fault(
        pointer,
        f'{name} has no parameter "{key}"',
        "it is ignored without a warning" if name.lower() == "muon" else effect,
        _param_fix(section, key, meant, names),
        changes=(Change(pointer=pointer, renamed=slip),) if slip is not None and slip not in params else (),
    )


def _param_fix(section: str, key: str, meant: str | None, legal: Sequence[str]) -> str:
    """Returns the fix of an unknown parameter: the type that has it, or the nearest name."""
    schedules = {**OWN_SCHEDULES, **TORCH_SCHEDULES}
    owners = [name for name, params in schedules.items() if key in params] if section == "scheduler" else []
    if owners and len(owners) < 4:
        return f"remove it, or write the type that has it: {' or '.join(owners)}"
    is_near = meant is not None and likeness(key, meant) >= NEAR_ENOUGH
    if is_near or meant == "lr":
        return f'did you mean "{meant}"?'
    return "remove it; the parameters are " + ", ".join(legal[:8]) + (" …" if len(legal) > 8 else "")


def _is_set_by_schedule(subject: Subject) -> bool:
    """Returns whether a schedule overwrites the optimizer's learning rate."""
    name, params = type_of(subject, "scheduler"), params_of(subject, "scheduler")
    if name == "WarmupLR":
        return params.get("warmup_max_lr") is not None
    return name in ("WarmupDecayLR", "OneCycle", "LRRangeTest", "CyclicLR", "OneCycleLR")


def _no_rate(subject: Subject) -> Iterator[Fault]:
    """Reports a missing lr: the engine uses the optimizer's default and ignores the Trainer's learning rate."""
    legal, params, section = _legal_params(subject), params_of(subject, "optimizer"), subject.at("optimizer")
    is_chosen = params.get("lr") is not None or {"muon_lr", "adam_lr"} <= params.keys() or _is_set_by_schedule(subject)
    if legal is None or is_chosen or "lr" in section or not params.keys() <= legal.keys():
        return  # other rules report a misplaced or unknown parameter
    default = "0.02 and 0.0003" if "muon_lr" in legal else f"{legal['lr']:g}"
    yield fault(
        ("optimizer", "params") if "params" in section else ("optimizer",),
        "optimizer.params has no lr",
        f"the engine trains with its own default, {default}"
        + (", and ignores learning_rate" if subject.is_trainers else ""),
        auto_fix(subject, "lr", "learning_rate") if subject.is_trainers else "write the one that you want",
        severity=None if subject.is_trainers else Severity.WARNING,
    )


def _not_the_jobs(subject: Subject) -> Iterator[Fault]:
    """Reports hyper-parameters of the job that the optimizer section omits, so that the engine's default applies."""
    legal, params = _legal_params(subject), params_of(subject, "optimizer")
    if legal is None or subject.job is None:
        return
    values = filled(subject.job.job, None, num_ranks=None)
    for name in SHARED:
        pointer: Pointer = ("optimizer", "params", name)
        key, wanted = JOB_KEYS[pointer], values[pointer]
        if name in params or name not in legal or agrees(legal[name], wanted) or not _is_chosen(subject.job.job, key):
            continue
        yield fault(
            ("optimizer", "params") if subject.has("optimizer.params") else ("optimizer",),
            f"optimizer.params has no {name}, but {subject.job.locate((key,))}: {key} makes it {shown(wanted)}",
            f"the engine uses its own default, {shown(legal[name])}",
            f'write "{name}": "auto"',
        )


def _is_chosen(job: Job, key: str) -> bool:
    """Returns whether a job changes a key, or one of the two betas, from the default."""
    keys = ("adam_beta1", "adam_beta2") if key == "adam_beta1" else (key,)
    return any(getattr(job, field.name) != field.default for field in fields(Job) if field.name in keys)


def _not_on_cpu(s: Subject) -> Broken:
    """Returns an offloaded optimizer other than Adam, Adagrad and Lion, which DeepSpeed has for the CPU."""
    name, allowed = type_of(s, "optimizer"), s.is_true("zero_allow_untested_optimizer")
    if s.device("offload_optimizer") == "none" or s.stage == 0 or name is None or not allowed:
        return None
    is_slow = name.lower() not in TESTED and (name in TORCH_OPTIMIZERS or name.lower() == "lamb")
    return {"type": name} if is_slow else None


def _untested(s: Subject) -> Broken:
    name = type_of(s, "optimizer")
    is_known = name is not None and (name in TORCH_OPTIMIZERS or name.lower() in OWN_OPTIMIZERS)
    if not is_known or name is None or name.lower() in TESTED or s.stage == 0:
        return None
    return None if s.is_true("zero_allow_untested_optimizer") else {"type": name}


_ENGINE = "deepspeed 0.19.8 runtime/engine.py: "
_E, _W = Severity.ERROR, Severity.WARNING


_ALL: Mapping[str, Mapping[str, Any]] = MappingProxyType({**OWN_SCHEDULES, **TORCH_SCHEDULES})
_NO_END: Mapping[str, Mapping[str, str]] = {
    "WarmupLR": {"warmup_num_steps": "warmup_ratio"},
    "WarmupDecayLR": {"warmup_max_lr": "learning_rate", "warmup_num_steps": "warmup_ratio"},
    "WarmupCosineLR": {"warmup_num_steps": "warmup_ratio"},
    "PolynomialLR": {"total_iters": ""},
    "LinearLR": {"total_iters": ""},
    "ConstantLR": {"total_iters": ""},
}
"""Schedule → the parameters of its shape whose defaults suit no run, with the job's key for each."""


def _wrong_schedule(subject: Subject) -> Iterator[Fault]:
    name = type_of(subject, "scheduler")
    if name is None or name in _ALL or name in PYTHON_SCHEDULES:
        return
    yield type_fault("scheduler", name, slip_of(name, _ALL), _schedule_fix(name, params_of(subject, "scheduler")))


def _schedule_fix(name: str, params: Mapping[str, Any]) -> str:
    """Returns the fix of an unknown schedule; parameters of a warm-up tell more than the name."""
    # a schedule whose parameters these are was meant, whatever its name
    fitting = [own for own, taken in OWN_SCHEDULES.items() if params and params.keys() <= taken.keys()]
    if any(str(key).startswith("warmup") for key in params):
        fitting = ["WarmupCosineLR"] if "cos" in name.lower() else fitting or ["WarmupLR"]
    if name.lower() in [schedule.value for schedule in Schedule]:
        other = f', or write "type": "{fitting[0]}" with its own parameters' if fitting else ""
        return f"remove the section, and write lr_scheduler_type: {name.lower()} in job.yaml{other}"
    if fitting == ["WarmupCosineLR"] and not params.keys() <= OWN_SCHEDULES["WarmupCosineLR"].keys():
        return 'write "WarmupCosineLR" with "total_num_steps" and "warmup_num_steps", or remove the section'
    meant = nearest(name, _ALL)
    is_near = meant is not None and likeness(name, meant) >= NEAR_ENOUGH and params.keys() <= _ALL[meant].keys()
    return f'did you mean "{meant}"?' if is_near else "write one of " + ", ".join(OWN_SCHEDULES)


def _schedule_params(subject: Subject) -> Iterator[Fault]:
    name, params = type_of(subject, "scheduler"), params_of(subject, "scheduler")
    if name in PYTHON_SCHEDULES:
        problem = f"{name} needs Python functions or schedules, which JSON cannot express"
        yield _unbuildable(("scheduler", "type"), problem, "remove the section")
    legal = _ALL.get(name or "")
    if legal is None or name is None:
        return
    for key in params:
        if key not in legal:
            yield param_fault("scheduler", name, key, legal, params)
    if list(subject.at("scheduler")) == ["type"]:
        yield _unbuildable(("scheduler",), f"scheduler has no params, which {name} needs", 'write "params": {}')
    if not subject.has("scheduler.params"):
        return
    missing = [key for key, default in legal.items() if default is ... and key not in params]
    has_length = params.get("total_steps") is not None or {"epochs", "steps_per_epoch"} <= params.keys()
    if name == "OneCycleLR" and not has_length:
        missing.append("total_steps")
    for key in missing:
        example = '"auto"' if key == "total_num_steps" and subject.is_trainers else "…"
        yield _unbuildable(("scheduler", "params"), f"{name} needs {key}", f'write "{key}": {example}')


def _unbuildable(pointer: Pointer, problem: str, fix: str) -> Fault:
    """Returns the fault of a schedule that cannot be built."""
    return fault(pointer, problem, f"{STOPS}, after loading the model", fix)


def _no_end(subject: Subject) -> Iterator[Fault]:
    name, params = type_of(subject, "scheduler") or "", params_of(subject, "scheduler")
    if not subject.has("scheduler.params") or not params.keys() <= _ALL.get(name, {}).keys():
        return
    for key, of_job in _NO_END.get(name, {}).items():
        default, is_rate = _ALL[name][key], key == "warmup_max_lr"
        # without the Trainer, a script may count its steps itself: only the rate and torch's lengths are surely wrong
        if key in params or not (subject.is_trainers or is_rate or not of_job):
            continue
        unit = "learning rate" if is_rate else "steps"
        is_safe = name in ("LinearLR", "ConstantLR") or not subject.is_trainers
        effect = f"the engine uses its own default, {default:g}"
        effect += f", instead of the job's {unit}" if of_job else " steps"
        yield fault(
            "scheduler.params",
            f"{name} has no {key}",
            effect + (": the learning rate is then 0" if name == "PolynomialLR" else ""),
            auto_fix(subject, key, of_job) if of_job and subject.is_trainers else f'write "{key}": …',
            severity=Severity.WARNING if is_safe else None,
        )


def _under_a_wrapper(s: Subject) -> Broken:
    """Returns torch's schedule, which needs one of torch's optimizers, under the wrappers of ZeRO and low precision."""
    name = type_of(s, "scheduler")
    is_low = any(s.is_true(f"{section}.enabled") for section in ("bf16", "fp16"))
    if s.asked is not None:
        is_low = s.asked.precision is not Precision.FP32
    if name not in TORCH_SCHEDULES or not (s.stage or is_low):
        return None
    return {"type": name, "under": f"under ZeRO-{s.stage}" if s.stage else "in low precision"}


def _overruled(s: Subject) -> Broken:
    if s.job is None or not s.has("scheduler"):
        return None
    return {"at": s.job.locate(("lr_scheduler_type",)), "file": s.document.name}


# fmt: off
RULES = (
    Rule(id="DS501", severity=_E, title="unknown optimizer", find=_wrong_type,
         source=_ENGINE + "_is_supported_optimizer"),
    Rule(id="DS502", severity=_E, title="unknown parameter of the optimizer", find=_wrong_params,
         source=_ENGINE + "_configure_basic_optimizer"),
    Rule(id="DS514", severity=_E, title="illegal pair of numbers", find=_pairs,
         source="torch 2.13 optim: the checks of Adam and Rprop; deepspeed 0.19.8 ops/adam"),
    Rule(id="DS505", severity=_E, title="optimizer or schedule without a type",
         find=together(
             when("optimizer", lambda s: _is_nameless("optimizer", s), problem="optimizer has no type",
                  effect="DeepSpeed builds no optimizer from it, and the run stops when the engine starts",
                  fix='write "type": "AdamW", or remove the section'),
             when("scheduler", lambda s: _is_nameless("scheduler", s), problem="scheduler has no type",
                  effect="DeepSpeed builds no schedule from it, without a warning",
                  fix='write "type": "WarmupLR", or remove the section')),
         source="deepspeed 0.19.8 runtime/config.py: get_optimizer_name, get_scheduler_name"),
    Rule(id="DS510", severity=_E, title="missing learning rate", find=_no_rate,
         source=_ENGINE + "_configure_basic_optimizer takes the signature's default; Transformers 5.23 "
         "integrations/deepspeed.py: fill_match fills keys that are there"),
    Rule(id="DS511", severity=_E, title="default instead of the job's value", find=_not_the_jobs,
         source=_ENGINE + "_configure_basic_optimizer"),
    Rule(id="DS509", severity=_E, title="optimizer that ZeRO was not tested with",
         find=when("optimizer.type", _untested, problem="{type} under ZeRO-{stage}",
                   effect="DeepSpeed refuses optimizers that ZeRO has not been tested with",
                   fix='write "zero_allow_untested_optimizer": true at the top, or "AdamW"'),
         source=_ENGINE + "_do_optimizer_sanity_check"),
    Rule(id="DS508", severity=Severity.INFO, title="missing optimizer",
         find=when("", lambda s: not s.is_trainers and s.stage > 0 and not s.has("optimizer"),
                   problem="no optimizer section",
                   effect="ZeRO stops unless the script passes an optimizer to deepspeed.initialize",
                   fix='pass one, or write "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-5}}}}'),
         source=_ENGINE + "_configure_zero_optimizer: zero stage … requires an optimizer"),
    Rule(id="DS507", severity=_W, title="offloaded optimizer without a CPU implementation",
         find=when("optimizer.type", _not_on_cpu, problem="an offloaded {type}",
                   effect="DeepSpeed has no such optimizer for the CPU: torch's is used, which is several times slower",
                   fix='write "AdamW", or keep the optimizer on the GPU'),
         source=_ENGINE + "_configure_optimizer, zero_force_ds_cpu_optimizer"),
    Rule(id="DS503", severity=_E, title="unknown schedule", find=_wrong_schedule,
         source=_ENGINE + "_scheduler_from_config"),
    Rule(id="DS504", severity=_E, title="parameters of a schedule", find=_schedule_params,
         source="the signatures in deepspeed 0.19.8 runtime/lr_schedules.py and torch 2.13 optim/lr_scheduler.py"),
    Rule(id="DS506", severity=Severity.INFO, title="two schedules",
         find=when("scheduler", _overruled,
                   problem="a schedule here and lr_scheduler_type ({job.lr_scheduler_type}) at {at}",
                   effect="the run uses the schedule of {file}, not the job's", fix="remove one of them"),
         source="Transformers 5.23 integrations/deepspeed.py: deepspeed_optim_sched"),
    Rule(id="DS512", severity=_E, title="schedule without a length or learning rate", find=_no_end,
         source="deepspeed 0.19.8 runtime/lr_schedules.py: WarmupDecayLR; torch 2.13 optim/lr_scheduler.py"),
    Rule(id="DS515", severity=_E, title="schedule of torch with DeepSpeed's optimizer wrapper",
         find=when("scheduler.type", _under_a_wrapper, problem="{type} is a schedule of torch, {under}",
                   effect=f"{STOPS} (TypeError: … is not an Optimizer): the schedule receives DeepSpeed's wrapper",
                   fix="remove the section and set lr_scheduler_type, or write one of " + ", ".join(OWN_SCHEDULES)),
         source=_ENGINE + "_configure_lr_scheduler; torch 2.13 optim/lr_scheduler.py: LRScheduler.__init__"),
    Rule(id="DS513", severity=_E, title="schedule that needs a metric",
         find=when("scheduler.type", lambda s: type_of(s, "scheduler") == "ReduceLROnPlateau",
                   problem="ReduceLROnPlateau needs a metric",
                   effect="the engine has none and passes train_batch_size, which never changes: the learning rate is "
                          "reduced repeatedly",
                   fix="write another schedule, or remove the section"),
         source=_ENGINE + "_take_model_step: lr_scheduler.step(self.train_batch_size())"),
)
"""Rules about optimizers and schedules."""
# fmt: on
