"""Rules about learning-rate schedules: their types, parameters, length, and who owns them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from dstrain.choices import Precision, Schedule
from dstrain.config.jsonc import Pointer
from dstrain.config.keys.schedulers import OWN_SCHEDULES, PYTHON_SCHEDULES, TORCH_SCHEDULES
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import STOPS, Rule
from dstrain.config.lint.rules.batch import auto_fix
from dstrain.config.lint.rules.key_names import NEAR_ENOUGH, likeness, slip_of
from dstrain.config.lint.rules.optimizers import param_fault, type_fault
from dstrain.config.lint.subject import Subject, params_of, type_of
from dstrain.errors import nearest

_ALL: Mapping[str, Mapping[str, Any]] = MappingProxyType({**OWN_SCHEDULES, **TORCH_SCHEDULES})
_NO_END: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "WarmupLR": {"warmup_num_steps": "warmup_ratio"},
        "WarmupDecayLR": {"warmup_max_lr": "learning_rate", "warmup_num_steps": "warmup_ratio"},
        "WarmupCosineLR": {"warmup_num_steps": "warmup_ratio"},
        "PolynomialLR": {"total_iters": ""},
        "LinearLR": {"total_iters": ""},
        "ConstantLR": {"total_iters": ""},
    }
)
"""Schedule → the parameters of its shape whose defaults suit no run, with the job's key for each."""


def _wrong_schedule(subject: Subject) -> Iterator[Fault]:
    name = type_of(subject, "scheduler")
    if name is None or name in _ALL or name in PYTHON_SCHEDULES:
        return
    yield type_fault("scheduler", name, slip_of(name, _ALL), _schedule_fix(name, params_of(subject, "scheduler")))


def _schedule_fix(name: str, params: Mapping[str, Any]) -> str:
    """Returns the fix of an unknown schedule; parameters of a warm-up tell more than the name."""
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
    return Fault(pointer=pointer, problem=problem, effect=f"{STOPS}, after loading the model", fix=fix)


def _no_end(subject: Subject) -> Iterator[Fault]:
    name, params = type_of(subject, "scheduler") or "", params_of(subject, "scheduler")
    if not subject.has("scheduler.params") or not params.keys() <= _ALL.get(name, {}).keys():
        return
    for key, of_job in _NO_END.get(name, {}).items():
        default, is_rate = _ALL[name][key], key == "warmup_max_lr"
        if key in params or not (subject.is_trainers or is_rate or not of_job):
            continue
        unit = "learning rate" if is_rate else "steps"
        is_safe = name in ("LinearLR", "ConstantLR") or not subject.is_trainers
        yield Fault(
            pointer=("scheduler", "params"),
            severity=Severity.WARNING if is_safe else None,
            problem=f"{name} has no {key}",
            effect=f"the engine uses its own default, {default:g}"
            + (f", instead of the job's {unit}" if of_job else " steps")
            + (": the learning rate is then 0" if name == "PolynomialLR" else ""),
            fix=auto_fix(subject, key, of_job) if of_job and subject.is_trainers else f'write "{key}": …',
        )


def _plateau(subject: Subject) -> Iterator[Fault]:
    if type_of(subject, "scheduler") == "ReduceLROnPlateau":
        yield Fault(
            pointer=("scheduler", "type"),
            problem="ReduceLROnPlateau needs a metric",
            effect="the engine has none and passes train_batch_size, which never changes: the learning rate is reduced "
            "repeatedly",
            fix="write another schedule, or remove the section",
        )


def _under_a_wrapper(subject: Subject) -> Iterator[Fault]:
    """Reports torch's schedules, which need one of torch's optimizers, under the wrappers of ZeRO and low precision."""
    name = type_of(subject, "scheduler")
    is_low = any(subject.is_true(f"{section}.enabled") for section in ("bf16", "fp16"))
    if subject.job is not None:
        is_low = subject.job.job.precision is not Precision.FP32
    if name in TORCH_SCHEDULES and (subject.stage > 0 or is_low):
        yield Fault(
            pointer=("scheduler", "type"),
            problem=f"{name} is a schedule of torch"
            + (f", under ZeRO-{subject.stage}" if subject.stage else ", in low precision"),
            effect=f"{STOPS} (TypeError: … is not an Optimizer): the schedule receives DeepSpeed's wrapper",
            fix="remove the section and set lr_scheduler_type, or write one of " + ", ".join(OWN_SCHEDULES),
        )


def _overruled(subject: Subject) -> Iterator[Fault]:
    if subject.job is not None and subject.has("scheduler"):
        schedule = subject.job.job.lr_scheduler_type
        yield Fault(
            pointer=("scheduler",),
            problem=f"a schedule here and lr_scheduler_type ({schedule}) at "
            f"{subject.job.locate(('lr_scheduler_type',))}",
            effect=f"the run uses the schedule of {subject.document.name}, not the job's",
            fix="remove one of them",
        )


_ENGINE = "deepspeed 0.19.8 runtime/engine.py: "
_E = Severity.ERROR

# fmt: off
RULES = (
    Rule(id="DS503", severity=_E, title="unknown schedule", find=_wrong_schedule,
         source=_ENGINE + "_scheduler_from_config"),
    Rule(id="DS504", severity=_E, title="parameters of a schedule", find=_schedule_params,
         source="the signatures in deepspeed 0.19.8 runtime/lr_schedules.py and torch 2.13 optim/lr_scheduler.py"),
    Rule(id="DS506", severity=Severity.INFO, title="two schedules", find=_overruled,
         source="Transformers 5.23 integrations/deepspeed.py: deepspeed_optim_sched"),
    Rule(id="DS512", severity=_E, title="schedule without a length or learning rate", find=_no_end,
         source="deepspeed 0.19.8 runtime/lr_schedules.py: WarmupDecayLR; torch 2.13 optim/lr_scheduler.py"),
    Rule(id="DS515", severity=_E, title="schedule of torch with DeepSpeed's optimizer wrapper", find=_under_a_wrapper,
         source=_ENGINE + "_configure_lr_scheduler; torch 2.13 optim/lr_scheduler.py: LRScheduler.__init__"),
    Rule(id="DS513", severity=_E, title="schedule that needs a metric", find=_plateau,
         source=_ENGINE + "_take_model_step: lr_scheduler.step(self.train_batch_size())"),
)
"""Rules about schedules."""
# fmt: on
