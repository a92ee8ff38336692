"""Explains a key of ds_config.json by its possible values, a whole configuration by section, and keys of job.yaml."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from dstrain.choices import Precision
from dstrain.config.files import config_values, template_of
from dstrain.config.jsonc import REMOVED, Change, Pointer, applied, dotted, lookup
from dstrain.config.key_bytes import Cost, Scale, cost
from dstrain.config.keys import KEYS, Key, Kind, default_text, is_read, key_of, listed, spoken_words, summary
from dstrain.config.lint.engine import remarks
from dstrain.config.lint.rule import ABSENT
from dstrain.config.resolve_auto import BATCH_KEYS, JOB_KEYS, REPEATED_KEYS
from dstrain.config.schema import job_schema
from dstrain.config.templates import reasons_in, render_json
from dstrain.errors import InvalidConfig
from dstrain.facts.ds_config import zero_stage
from dstrain.facts.workload import Workload
from dstrain.findings import Finding, Severity
from dstrain.plan.configuration import Configuration, choices, flat
from dstrain.plan.estimate import assess, effective
from dstrain.plan.estimate_records import Effect, Estimate, Reason, Topic, effect
from dstrain.plan.request import Request
from dstrain.plan.search.decide import plan_of, survey

_ZERO = "zero_optimization."
COUNTED = tuple(key for choice in choices().values() for key in choice.keys)
"""Keys that the planner reads from a configuration."""
_BATCH = ("train_batch_size", *BATCH_KEYS)
_INSTEAD = {
    key[:at]: key for key in reversed((*REPEATED_KEYS, *COUNTED)) for at, letter in enumerate(key) if letter == "."
}
"""Objects → the key that stands for them, the first that the planner reads."""
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
    if row.path in REPEATED_KEYS:
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
    if path not in COUNTED and path not in REPEATED_KEYS:
        return None
    place = tuple(path.split("."))
    return place, KEYS[place]


def _values(row: Key, here: Here, now: Any, theirs: Any) -> list[Any]:
    """Returns the values to compare: the current one, dstrain's, the default, and all others if they are few."""
    default = REMOVED if row.default is None else row.default
    values = [now, theirs, default]
    choice = next(choice for choice in choices().values() if row.path in choice.keys)
    if row.kind is Kind.BOOL:
        values += [True, False]
    elif choice.values and row.kind is Kind.INT:
        values = [*choice.values, now]
    elif choice.field == "hpz":
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
    name = REPEATED_KEYS[path]
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


BATCH, PRECISION, ZERO, OTHER = "batch", "precision", "ZeRO", "other keys"
_BATCH_KEYS = (
    *("train_batch_size", *BATCH_KEYS, "gradient_clipping"),
    *("managed_gradient_accumulation", "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op"),
)
_PRECISION_KEYS = ("bf16", "bfloat16", "fp16", "torch_autocast", "data_types", "communication_data_type")
_MATTERS = (*COUNTED, "gradient_clipping", "gradient_accumulation_steps", "zero_optimization.contiguous_gradients")
"""Keys whose defaults are listed if they apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One key of a file."""

    pointer: Pointer
    value: Any
    key: Key | None
    """Its row; None for an unknown name."""
    filled: Any
    """The Trainer's value for "auto", or ABSENT."""
    cost: Cost | None
    """The memory that its number takes."""
    is_idle: bool
    """Whether the stage does not read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Keys that belong together."""

    name: str
    """One of this module's names, or the key of the section."""
    meaning: str | None
    """The purpose of the section."""
    parts_bytes: Mapping[str, int]
    """Bytes of each GPU at its peak, by part; empty without an estimate."""
    entries: tuple[Entry, ...]
    """Its keys, in the order of the file."""
    silent: tuple[tuple[Key, str], ...]
    """Important keys that the file omits, with the default that applies."""


def sections(
    config: Mapping[str, Any], *, filled: Mapping[Pointer, Any], by: Scale, estimate: Estimate | None
) -> list[Section]:
    """Returns the sections of a configuration, those that cost memory first."""
    groups: dict[str, list[str]] = {ZERO: [], BATCH: [], PRECISION: []}
    for name in config:
        if not name.startswith(("$", "_", "x-")):
            groups.setdefault(_group(name, config[name]), []).append(name)
    return [
        Section(
            name=group,
            meaning=summary(KEYS[(group,)]) if (group,) in KEYS else None,
            parts_bytes=_parts(group, estimate),
            entries=tuple(entry for name in names for entry in _entries((name,), config[name], config, filled, by)),
            silent=tuple(_silent(group, config)),
        )
        for group, names in groups.items()
        if names or group == ZERO
    ]


def rest_bytes(estimate: Estimate) -> Mapping[str, int]:
    """Returns the bytes of each GPU that belong to no key, by part."""
    parts = estimate.memory.breakdown_bytes
    return {
        "CUDA and NCCL": parts.context,
        "cuBLAS workspaces": parts.workspace,
        "unused memory of the allocator": parts.fragmentation,
    }


def _group(name: str, value: Any) -> str:
    if name == "zero_optimization":
        return ZERO
    if name in _BATCH_KEYS:
        return BATCH
    if name in _PRECISION_KEYS:
        return PRECISION
    return name if isinstance(value, dict) else OTHER


def _parts(group: str, estimate: Estimate | None) -> Mapping[str, int]:
    if estimate is None:
        return {}
    parts = estimate.memory.breakdown_bytes
    if group == ZERO:
        return {
            "parameters": parts.params,
            "gradients": parts.grads,
            "optimizer states": parts.optimizer,
            "buckets and temporaries": parts.buffers,
            "layers gathered whole": parts.gathered,
        }
    return {"activations": parts.activations, "logits": parts.logits} if group == BATCH else {}


def _entries(
    pointer: Pointer, value: Any, config: Mapping[str, Any], filled: Mapping[Pointer, Any], by: Scale
) -> Iterator[Entry]:
    """Yields the keys at and below a place, except objects with keys."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _entries((*pointer, name), inner, config, filled, by)
        return
    key = key_of(pointer)
    by_trainer = filled.get(pointer, ABSENT) if value == "auto" else ABSENT
    number = value if by_trainer is ABSENT else by_trainer
    yield Entry(
        pointer=pointer,
        value=value,
        key=key,
        filled=by_trainer,
        cost=cost(key.alias_of or key.path, number, config, by) if key else None,
        is_idle=not is_read(pointer, zero_stage(config)),
    )


def _silent(group: str, config: Mapping[str, Any]) -> Iterator[tuple[Key, str]]:
    """Yields the important keys of a section that the file omits and whose default has an effect here."""
    for path in _MATTERS:
        key = KEYS[tuple(path.split("."))]
        pointer = tuple(path.split("."))
        if _group(pointer[0], {}) != group or _has(config, path):
            continue
        if not isinstance(lookup(config, pointer[:-1], {} if len(pointer) == 2 else None), dict):
            continue  # its section is missing, or not an object
        if group == ZERO and path != "zero_optimization.stage" and zero_stage(config) == 0:
            continue
        if is_read(pointer, zero_stage(config)) and (default := default_text(key)) is not None:
            yield key, default


def _has(config: Mapping[str, Any], path: str) -> bool:
    """Returns whether a configuration has a key, under any of its names."""
    names = [path, *(key.path for key in KEYS.values() if key.alias_of == path)]
    return any(lookup(config, tuple(name.split("."))) is not ABSENT for name in names)


_KINDS = {"boolean": "true or false", "integer": "whole number", "number": "number", "string": "text"}
_BOUNDS = {"minimum": "at least", "maximum": "at most", "exclusiveMinimum": "above", "exclusiveMaximum": "below"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKey:
    """A key of job.yaml."""

    path: str
    """Dotted; `data[].weight` is a key of each data set, `health.RULE.warn` one of each rule."""
    schema: Mapping[str, Any]
    """Its JSON schema; the description is the docstring of its field."""
    is_required: bool = False

    @property
    def meaning(self) -> str:
        """Its sentence."""
        return " ".join(str(self.schema.get("description", "")).split())

    @property
    def type_text(self) -> str:
        """Its type in words, with its bounds and legal values."""
        return _type_text(self.schema)

    @property
    def default_text(self) -> str | None:
        """Its default as it is written; None for a section."""
        if self.is_required:
            return "none: it is required"
        return json.dumps(self.schema["default"], ensure_ascii=False) if "default" in self.schema else None

    @property
    def inside(self) -> tuple[str, ...]:
        """The names in a section."""
        return tuple(name for _, part in _sections(self.schema) for name in part)

    @property
    def fills(self) -> tuple[str, ...]:
        """The keys of ds_config.json whose "auto" it fills in."""
        return tuple(dotted(pointer) for pointer, key in JOB_KEYS.items() if key == self.path)


@cache
def job_keys() -> Mapping[str, JobKey]:
    """Returns every key by its path.

    >>> job_keys()["lora.rank"].type_text, job_keys()["data[].weight"].default_text
    ('whole number above 0', 'null')
    """
    schema = job_schema()
    return {key.path: key for key in _keys(schema, "", frozenset(schema["required"]))}


def find_job_keys(text: str) -> list[JobKey]:
    """Returns the key with a path, or all keys whose path ends with it.

    >>> [key.path for key in find_job_keys("rank")], find_job_keys("overlap_comm")
    (['lora.rank'], [])
    """
    path, keys = text.strip("/. ").replace("/", "."), job_keys()
    if path in keys:
        return [keys[path]]
    return [key for name, key in keys.items() if name.endswith(f".{path}")]


def _keys(schema: Mapping[str, Any], prefix: str, required: frozenset[str] = frozenset()) -> Iterator[JobKey]:
    for between, properties in _sections(schema):
        for name, inner in properties.items():
            path = f"{prefix}{between}{'.' if prefix else ''}{name}"
            yield JobKey(path=path, schema=inner, is_required=name in required)
            yield from _keys(inner, path)


def _sections(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the named keys in a value, with what is between its path and theirs; one in a list once."""
    forms = list(schema.get("anyOf", [schema]))
    lists = [form["items"] for form in forms if isinstance(form.get("items"), dict)]
    forms = [inner for form in forms for inner in form.get("anyOf", [form])]
    rows = [inner for item in lists for inner in item.get("anyOf", [item]) if "properties" in inner]
    if rows:
        yield "[]", rows[0]["properties"]
        return
    for form in forms:
        if "properties" in form:
            yield "", form["properties"]
        elif isinstance(rule := form.get("additionalProperties"), dict) and "properties" in rule:
            yield ".RULE", rule["properties"]


def _type_text(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        forms = [form for form in schema["anyOf"] if form.get("type") != "null"]
        or_null = ", or null" if len(forms) < len(schema["anyOf"]) else ""
        return listed(list(dict.fromkeys(map(_type_text, forms)))) + or_null
    if "enum" in schema:
        return listed([str(word) for word in schema["enum"]])
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_type_text(schema.get('items', {}))}"
    if kind == "object":
        return "section" if list(_sections(schema)) else "names with values"
    bounds = [f"{words} {schema[key]}" for key, words in _BOUNDS.items() if key in schema]
    return " ".join([_KINDS.get(str(kind), "any value"), " and ".join(bounds)]).strip()
