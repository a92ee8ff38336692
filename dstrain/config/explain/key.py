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
from dstrain.config.resolve_auto import BATCH_KEYS
from dstrain.config.templates.files import config_values, template_of
from dstrain.config.templates.templates import reasons_in, render_json
from dstrain.errors import InvalidConfig
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration, flat
from dstrain.plan.effect import Effect, effect
from dstrain.plan.estimate import BF16_STATES, assess, effective
from dstrain.plan.estimate_records import Estimate, Reason, Topic
from dstrain.plan.request import Request
from dstrain.plan.search.decide import plan_of, survey

_ZERO = "zero_optimization."
COUNTED = (
    *(_ZERO + name for name in (
        "stage", "overlap_comm", "reduce_bucket_size", "sub_group_size", "zero_hpz_partition_size",
        "zero_quantized_weights", "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
        "offload_optimizer.device", "offload_optimizer.ratio", "offload_optimizer.pin_memory", "offload_param.device",
    )),
    "data_types.grad_accum_dtype",
    "optimizer.type",
    *(f"bf16.{name}" for name in BF16_STATES),
)  # fmt: skip
"""Keys that the planner reads from a configuration."""
OF_JOB = {
    **BATCH_KEYS,
    "bf16.enabled": "precision",
    "fp16.enabled": "precision",
    "tensor_parallel.autotp_size": "tp",
    "expert_parallel.autoep_size": "ep",
}
"""Keys that the planner takes from the job → the job's key."""
_BATCH = ("train_batch_size", *BATCH_KEYS)
_INSTEAD = {
    _ZERO + "offload_optimizer": _ZERO + "offload_optimizer.device",
    _ZERO + "offload_param": _ZERO + "offload_param.device",
    "zero_optimization": _ZERO + "stage",
    "optimizer": "optimizer.type",
}
"""Objects → the key that stands for them."""
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
"""Key → topics of the reasons for its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """A job with its configuration."""

    config: Mapping[str, Any]
    """The current configuration."""
    request: Request
    """The job."""
    workload: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """dstrain's choice for the job."""

    config: Mapping[str, Any]
    """The generated ds_config.json."""
    configuration: Configuration
    reasons: tuple[Reason, ...]
    """The plan's reasons."""
    written_because: Mapping[str, str]
    """The template's reasons, by the last name of the key."""
    fits: bool
    """Whether it fits; otherwise it comes nearest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One possible value of the key."""

    value: Any
    """The value; REMOVED: the key is omitted."""
    is_here: bool
    """Whether it is the current value."""
    is_chosen: bool
    """Whether dstrain would write it."""
    estimate: Estimate | None
    """Its needs; None if they cannot be estimated."""
    effect: Effect | None
    """The difference from the current configuration; None if either cannot be estimated."""
    problem: str | None = None
    """Why it cannot be estimated."""
    remark: str | None = None
    """Lint's finding about the value."""


def choose(key: Key, here: Here) -> Chosen:
    """Returns dstrain's choice for a job; for the keys of the batch, the split of the samples of a step is open."""
    request = here.request
    if key.path in _BATCH:
        ranks = here.workload.cluster.num_gpus // ((request.sp or 1) * (request.tp or 1))
        samples = (request.micro_batch or 1) * (request.grad_accum or 1) * ranks
        request = replace(request, micro_batch=None, grad_accum=None, global_batch=samples)
    ranking = survey(here.workload, request)
    plan = plan_of(ranking, here.workload.cluster, request)
    template = template_of(plan.chosen.configuration)
    return Chosen(
        config=render_json(template, config_values(plan, here.workload)),
        configuration=plan.chosen.configuration,
        reasons=plan.reasons,
        written_because=reasons_in(template),
        fits=ranking.fits,
    )


def why(key: Key, chosen: Chosen) -> list[str]:
    """Returns the reasons for dstrain's value of a key: the template's, then the plan's."""
    path, name = _INSTEAD.get(key.path, key.path), key.path.rsplit(".", 1)[-1]
    reasons = [chosen.written_because[name]] if name in chosen.written_because else []
    reasons += [reason.text for reason in chosen.reasons if reason.topic in _TOPICS.get(path, ())]
    if not reasons and lookup(chosen.config, tuple(key.path.split("."))) == "auto":
        reasons = ["the Trainer fills it in from the job, so that the value is written only once"]
    return reasons


def ways(key: Key, here: Here, chosen: Chosen | None) -> list[Way]:
    """Returns the possible values of a key with their effects; none if the planner does not count the key."""
    counted_row = counted(key)
    if counted_row is None:
        return []
    place, row = counted_row
    if row.path in OF_JOB:
        return _ways_of_job(row.path, here, chosen)
    now = lookup(here.config, place)
    theirs = lookup(chosen.config, place) if chosen else REMOVED
    before = estimate_of(here)
    ways: list[Way] = []
    for value in _values(row, here, now, theirs if chosen else now):
        config = applied(here.config, [Change(pointer=place, value=value)])
        is_here = value == now and type(value) is type(now)
        way = _way(here, before, config, value, is_here=is_here, is_chosen=bool(chosen) and value == theirs)
        findings = remarks(config, place, here.workload)
        ways.append(replace(way, remark=remark_text(findings[0]) if findings else None))
    return ways


def remark_text(finding: Finding) -> str:
    """Returns a finding in one line."""
    kind = "an error, " if finding.severity is Severity.ERROR else ""
    return f"{kind}{finding.rule}: {finding.effect}"


def counted(key: Key) -> tuple[Pointer, Key] | None:
    """Returns the place and row that the planner reads for a key, or None."""
    path = key.alias_of or key.path
    path = _INSTEAD.get(path, path)
    if path not in COUNTED and path not in OF_JOB:
        return None
    place = tuple(path.split("."))
    return place, KEYS[place]


def _values(row: Key, here: Here, now: Any, theirs: Any) -> list[Any]:
    """Returns the values to compare: the current one, dstrain's, the default, and all others if they are few."""
    default = REMOVED if row.default is None else row.default
    values = [now, theirs, default]
    if row.kind is Kind.BOOL:
        values += [True, False]
    elif row.path == _ZERO + "stage":
        values = [0, 1, 2, 3, now]
    elif row.path == _ZERO + "zero_hpz_partition_size":
        values.append(here.workload.cluster.gpus_per_node)
    elif row.path.endswith(".ratio"):
        values.append(0.5)
    elif row.path == "optimizer.type":
        values += ["AdamW", "Lion", "Muon", "SGD"]
    elif row.kind is Kind.TEXT:
        values += [word for word in _words(row) if word != "nvme" or here.workload.cluster.nvme_path]
    elif row.filled is not None:
        values.append("auto")
    distinct: list[Any] = []
    for value in values:
        if not any(value == other and type(value) is type(other) for other in distinct):
            distinct.append(value)
    return distinct


def _words(row: Key) -> list[str]:
    return [word for word in spoken_words(row) if row.path != "data_types.grad_accum_dtype" or word in tuple(Precision)]


def _ways_of_job(path: str, here: Here, chosen: Chosen | None) -> list[Way]:
    """Returns the values of a key of the job: every precision, or half and twice the number."""
    name = OF_JOB[path]
    now = getattr(here.request, name)
    theirs = flat(chosen.configuration)[name] if chosen else now
    others = list(Precision) if name == "precision" else [max(1, (now or 1) // 2), 2 * (now or 1)]
    before = estimate_of(here)
    ways = []
    for value in dict.fromkeys([now, theirs, *others]):
        changed = replace(here, request=replace(here.request, **{name: value}))
        is_chosen = chosen is not None and value == theirs
        ways.append(_way(changed, before, here.config, value, is_here=value == now, is_chosen=is_chosen))
    return ways


def _way(
    here: Here, before: Estimate | str, config: Mapping[str, Any], value: Any, *, is_here: bool, is_chosen: bool
) -> Way:
    after = before if is_here else estimate_of(replace(here, config=config))
    problem = next((side for side in (before, after) if isinstance(side, str)), None)
    estimate = after if isinstance(after, Estimate) else None
    difference = effect(before, estimate) if isinstance(before, Estimate) and estimate else None
    return Way(value=value, is_here=is_here, is_chosen=is_chosen, estimate=estimate, effect=difference, problem=problem)


def estimate_of(here: Here) -> Estimate | str:
    """Returns the estimate of a configuration, or the reason why there is none."""
    try:
        configuration = effective(here.workload.model, here.request, here.config)
    except InvalidConfig as error:
        return f"{error.problem}; dstrain lint shows the place"
    return assess(here.workload, configuration)
