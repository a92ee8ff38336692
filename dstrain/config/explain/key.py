"""Explains one key: its possible values, each estimated beside the current configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dstrain.choices import Precision
from dstrain.config.document import REMOVED, Change, applied, lookup
from dstrain.config.jsonc import Pointer
from dstrain.config.key_text import spoken_words
from dstrain.config.keys.key import Key, Kind
from dstrain.config.keys.table import KEYS
from dstrain.config.lint.engine import remarks
from dstrain.config.lint.finding import Finding, Severity
from dstrain.config.lint.subject import ABSENT
from dstrain.config.templates.templates import reasons_in, render_json
from dstrain.config.templates.values import config_values, template_of
from dstrain.errors import InvalidConfig
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration
from dstrain.plan.effect import Effect, effect
from dstrain.plan.estimate import assess, effective
from dstrain.plan.estimate_records import Estimate, Reason, Topic
from dstrain.plan.request import Request
from dstrain.plan.search.decide import plan_of, survey

_ZERO = "zero_optimization."
COUNTED = (
    *(_ZERO + name for name in (
        "stage", "overlap_comm", "reduce_bucket_size", "sub_group_size", "zero_hpz_partition_size",
        "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters",
        "stage3_max_reuse_distance", "offload_optimizer.device", "offload_optimizer.ratio",
        "offload_optimizer.pin_memory", "offload_param.device",
    )),
    "tensor_parallel.autotp_size",
    "data_types.grad_accum_dtype",
)  # fmt: skip
"""Keys that the planner reads in a configuration."""
OF_JOB = {
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "grad_accum",
    "bf16.enabled": "precision",
    "fp16.enabled": "precision",
}
"""Keys that the planner takes from the job, and what they are called there."""
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_INSTEAD = {
    _ZERO + "offload_optimizer": _ZERO + "offload_optimizer.device",
    _ZERO + "offload_param": _ZERO + "offload_param.device",
    "zero_optimization": _ZERO + "stage",
}
"""Objects that matter by one of their keys."""
_TOPICS: Mapping[str, tuple[Topic, ...]] = {
    _ZERO + "stage": (Topic.ZERO_STAGE, Topic.MODEL_STATES),
    _ZERO + "offload_optimizer.device": (Topic.OFFLOAD, Topic.HOST_RAM),
    _ZERO + "offload_param.device": (Topic.OFFLOAD, Topic.HOST_RAM),
    "train_micro_batch_size_per_gpu": (Topic.MICRO_BATCH, Topic.BATCH),
    "gradient_accumulation_steps": (Topic.BATCH,),
    "train_batch_size": (Topic.BATCH,),
    _ZERO + "reduce_bucket_size": (Topic.BUFFERS, Topic.ZERO3_BUFFERS),
    _ZERO + "stage3_max_reuse_distance": (Topic.ZERO3_BUFFERS,),
    _ZERO + "sub_group_size": (Topic.ZERO3_BUFFERS,),
}
"""What the reasons for the value of a key are about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """A job with its configuration."""

    config: Mapping[str, Any]
    """The configuration as it stands."""
    request: Request
    """The job."""
    workload: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What dstrain would write for the job."""

    config: Mapping[str, Any]
    """The configuration."""
    configuration: Configuration
    """The plan."""
    reasons: tuple[Reason, ...]
    """Why, in sentences."""
    written_because: Mapping[str, str]
    """Why the template writes a key, by its last name."""
    fits: bool
    """Whether it fits; else it is what comes nearest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One value that the key could have."""

    value: Any
    """The value; REMOVED: the key is not written."""
    is_here: bool
    """Whether it stands so now."""
    is_chosen: bool
    """Whether dstrain would write it."""
    estimate: Estimate | None
    """What it needs; None where that cannot be estimated."""
    effect: Effect | None
    """What it does beside the configuration as it stands; None where one of them cannot be estimated."""
    problem: str | None = None
    """Why it cannot."""
    remark: str | None = None
    """What lint says of the value, where it is an error or makes no difference."""


def choose(key: Key, here: Here) -> Chosen:
    """Returns what dstrain would write for a job; how the samples of a step are cut up is open where that is asked."""
    request = here.request
    if key.path in _BATCH:
        ranks = here.workload.cluster.num_gpus
        samples = (request.micro_batch or 1) * (request.grad_accum or 1) * ranks
        request = replace(request, micro_batch=None, grad_accum=None, global_batch=samples)
    found = survey(here.workload, request)
    plan = plan_of(found, here.workload.cluster, request)
    template = template_of(plan.chosen.configuration)
    return Chosen(
        config=render_json(template, config_values(plan, here.workload)),
        configuration=plan.chosen.configuration,
        reasons=plan.reasons,
        written_because=reasons_in(template),
        fits=found.fits,
    )


def why(key: Key, chosen: Chosen) -> list[str]:
    """Returns why dstrain writes what it writes for a key: what the template says, then what the plan does."""
    path = _INSTEAD.get(key.path, key.path)
    said = [chosen.written_because[name]] if (name := key.path.rsplit(".", 1)[-1]) in chosen.written_because else []
    said += [reason.text for reason in chosen.reasons if reason.topic in _TOPICS.get(path, ())]
    if not said and lookup(chosen.config, tuple(key.path.split("."))) == "auto":
        said = ["the Trainer fills it in from the job, so that the number stands in one place"]
    return said


def ways(key: Key, here: Here, chosen: Chosen | None) -> list[Way]:
    """Returns the values that a key could have with what each does; nothing where the planner does not count it."""
    found_row = counted(key)
    if found_row is None:
        return []
    place, row = found_row
    if row.path in OF_JOB:
        return _ways_of_job(row.path, here, chosen)
    now = lookup(here.config, place)
    now = REMOVED if now is ABSENT else now
    theirs = lookup(chosen.config, place) if chosen else ABSENT
    theirs = REMOVED if theirs is ABSENT else theirs
    before = _estimate(here, here.config)
    found: list[Way] = []
    for value in _values(row, here, now, theirs if chosen else now):
        changed = applied(here.config, [Change(pointer=place, value=value)])
        is_here = value == now and type(value) is type(now)
        way = _way(here, before, changed, value, is_here=is_here, is_chosen=bool(chosen) and value == theirs)
        said = remarks(changed, place, here.workload)
        found.append(replace(way, remark=remark_text(said[0]) if said else None))
    return found


def remark_text(finding: Finding) -> str:
    """Returns a finding in one line."""
    kind = "an error, " if finding.severity is Severity.ERROR else ""
    return f"{kind}{finding.rule}: {finding.effect}"


def counted(key: Key) -> tuple[Pointer, Key] | None:
    """Returns the place and the row whose value the planner counts for a key, where it counts any."""
    path = key.alias_of or key.path
    path = _INSTEAD.get(path, path)
    if path not in COUNTED and path not in OF_JOB:
        return None
    place = tuple(path.split("."))
    return place, KEYS[place]


def _values(row: Key, here: Here, now: Any, theirs: Any) -> list[Any]:
    """Returns the values to compare: as it stands, dstrain's, the default, and every other where they are few."""
    default = REMOVED if row.default is None else row.default
    values = [now, theirs, default]
    if row.kind is Kind.BOOL:
        values += [True, False]
    elif row.path == _ZERO + "stage":
        values = [0, 1, 2, 3, now]
    elif row.path == _ZERO + "zero_hpz_partition_size":
        values.append(here.workload.cluster.gpus_per_node)
    elif row.path == "tensor_parallel.autotp_size":
        values.append(2)
    elif row.path.endswith(".ratio"):
        values.append(0.5)
    elif row.kind is Kind.TEXT:
        values += [word for word in _words(row) if word != "nvme" or here.workload.cluster.nvme_path]
    elif row.filled is not None:
        values.append("auto")
    found: list[Any] = []
    for value in values:
        if not any(value == each and type(value) is type(each) for each in found):
            found.append(value)
    return found


def _words(row: Key) -> list[str]:
    return [word for word in spoken_words(row) if row.path != "data_types.grad_accum_dtype" or word in tuple(Precision)]


def _ways_of_job(path: str, here: Here, chosen: Chosen | None) -> list[Way]:
    """Returns the ways of what the job says: precision, or half and twice as many."""
    name = OF_JOB[path]
    now = getattr(here.request, name)
    theirs = getattr(chosen.configuration, name) if chosen else now
    others = list(Precision) if name == "precision" else [max(1, (now or 1) // 2), 2 * (now or 1)]
    before = _estimate(here, here.config)
    found = []
    for value in dict.fromkeys([now, theirs, *others]):
        changed = replace(here, request=replace(here.request, **{name: value}))
        is_chosen = chosen is not None and value == theirs
        found.append(_way(changed, before, here.config, value, is_here=value == now, is_chosen=is_chosen))
    return found


def _way(
    here: Here, before: Estimate | str, config: Mapping[str, Any], value: Any, *, is_here: bool, is_chosen: bool
) -> Way:
    after = before if is_here else _estimate(here, config)
    problem = next((each for each in (before, after) if isinstance(each, str)), None)
    known = after if isinstance(after, Estimate) else None
    does = effect(before, known) if isinstance(before, Estimate) and known else None
    return Way(value=value, is_here=is_here, is_chosen=is_chosen, estimate=known, effect=does, problem=problem)


def _estimate(here: Here, config: Mapping[str, Any]) -> Estimate | str:
    """Returns what a configuration needs, or why nobody knows."""
    try:
        made = effective(here.workload.model, here.request, config)
    except InvalidConfig as error:
        return f"{error.problem}; dstrain lint says where"
    return assess(here.workload, made)


def estimate_of(here: Here) -> Estimate | str:
    """Returns what the configuration as it stands needs, or why nobody knows."""
    return _estimate(here, here.config)
