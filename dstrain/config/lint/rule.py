"""A lint rule, and checks of keys as data.

Texts of such a check are templates: `{value}` is the value at the key, `{stage}` the stage of ZeRO, `{job.max_steps}`
and `{model.name}` are facts of the context, and others are words that the condition gives; its word `severity` replaces
the severity of the rule.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

from dstrain.config.jsonc import REMOVED, Change, Document, Pointer, lookup
from dstrain.config.keys import ROWS
from dstrain.errors import Place
from dstrain.facts.ds_config import ZERO, offload_device, section, written_device, zero_stage
from dstrain.findings import Severity
from dstrain.job import limits
from dstrain.job.schema import Job

if TYPE_CHECKING:
    from dstrain.facts.cluster.cluster import Cluster
    from dstrain.facts.cluster.hostfile import Hosts
    from dstrain.facts.model.model_facts import ModelFacts
    from dstrain.job.file import JobFile
    from dstrain.plan.estimate_records import Estimate

_OTHER_NAMES = {row.path: row.alias_of for row in ROWS if row.alias_of is not None}
"""Sections of ZeRO's offload → the switches that predate them."""
ABSENT: Any = REMOVED
"""The result of a look-up for a missing key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """A job with its hosts, model and cluster; unknown parts are None."""

    job: JobFile | None = None
    hosts: Hosts | None = None
    model: ModelFacts | None = None
    cluster: Cluster | None = None
    planned: Cluster | None = None
    """The cluster of its plan."""
    opens_images: bool = False
    """Whether checks of the data read all images and videos, and not only look for them."""

    @property
    def asked(self) -> Job | None:
        """The job; None without a file."""
        return self.job.job if self.job is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject(JobContext):
    """A configuration in the context of its job. Rules about unknown parts of the context report nothing."""

    document: Document
    """The configuration; its value is an object."""
    is_trainers: bool
    """Whether the Hugging Face Trainer reads it; else `deepspeed.initialize` does."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package → the version that will run it; without those that are not known."""
    estimate: Estimate | None = None
    """Its estimated needs; None also if it cannot be estimated."""
    counted_steps: int | None = None
    """Steps of a job without max_steps, by the rows of its data; None if they cannot be counted."""
    free_disk_bytes: int | None = None
    """Free bytes in the folder of the job's checkpoints."""
    free_nvme_bytes: int | None = None
    """Free bytes in the folder of offloaded states."""

    @property
    def config(self) -> dict[str, Any]:
        """The configuration."""
        value: dict[str, Any] = self.document.value
        return value

    def at(self, path: str, default: Any = ABSENT) -> Any:
        """Returns the value at a dotted path or one of its aliases, or `default`."""
        value = lookup(self.config, tuple(path.split(".")))
        if value is ABSENT and (other := _other_name(path)) is not None:
            value = lookup(self.config, tuple(other.split(".")))
        return default if value is ABSENT else value

    def has(self, path: str) -> bool:
        """Returns whether the configuration has a dotted path."""
        return self.at(path) is not ABSENT

    def is_true(self, path: str, default: bool = False) -> bool:
        """Returns whether a switch is on."""
        return self.at(path, default) is True

    @property
    def zero(self) -> Mapping[str, Any]:
        """The section on ZeRO; empty if there is none."""
        return section(self.config, ZERO)

    @property
    def stage(self) -> int:
        """The ZeRO stage that the engine runs."""
        return zero_stage(self.config)

    def device(self, section: str) -> str:
        """Returns the device of `offload_optimizer` or `offload_param`: `cpu`, `nvme` or `none`."""
        return written_device(self.config, section)

    @property
    def offloads_optimizer(self) -> bool:
        """Whether ZeRO keeps optimizer states off the GPU."""
        return offload_device(self.config, "offload_optimizer") != "none"

    def number(self, path: str, default: float) -> float:
        """Returns the number at a path, or the default for anything else, including numbers beyond 64 bits."""
        value = self.at(path, default)
        return value if is_number(value) and abs(value) < 2**63 else default

    @property
    def num_ranks(self) -> int | None:
        """Ranks of the run, or None if the machines are unknown."""
        return self.hosts.num_slots if self.hosts is not None else None

    def walk(self) -> Iterator[tuple[Pointer, Any]]:
        """Yields every pointer with its value, outer ones first."""
        yield from _walk((), self.config)


def _other_name(path: str) -> str | None:
    """Returns a path under the other name of one of its keys: `bfloat16.enabled` for `bf16.enabled`."""
    for name, canonical in _OTHER_NAMES.items():
        if path == canonical or path.startswith(f"{canonical}."):
            return name + path.removeprefix(canonical)
    return None


def _walk(pointer: Pointer, value: Any) -> Iterator[tuple[Pointer, Any]]:
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*pointer, key), item
        yield from _walk((*pointer, key), item)


def is_number(value: Any) -> bool:
    """Returns whether a value is a number; true is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """Returns whether a value is a whole number above 0."""
    return isinstance(value, int) and is_number(value) and value > 0


def type_of(subject: Subject, section: str) -> str | None:
    """Returns the type that `optimizer` or `scheduler` names."""
    name = subject.at(f"{section}.type", None)
    return name if isinstance(name, str) else None


def params_of(subject: Subject, section: str) -> dict[str, Any]:
    """Returns the parameters of `optimizer` or `scheduler`; empty unless they are an object."""
    params = subject.at(f"{section}.params", None)
    return params if isinstance(params, dict) else {}


def has_zenflow(subject: Subject) -> bool:
    """Returns whether the ZenFlow section is present, which alone enables it."""
    return isinstance(subject.at("zero_optimization.zenflow"), dict)


def shown(value: Any) -> str:
    """Returns a value as JSON, truncated to 60 characters.

    >>> shown("x"), shown(True)
    ('"x"', 'true')
    """
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The result of a rule, before it has a place."""

    pointer: Pointer = ()
    """The key at fault; a missing key is placed at its object."""
    problem: str
    """The problem in the file."""
    effect: str
    """The consequence at run time."""
    fix: str
    """The advice."""
    changes: tuple[Change, ...] = ()
    """The fix as changes of the file, if there is one safe fix."""
    at: int | None = None
    """Offset in the text, if the pointer does not determine it."""
    severity: Severity | None = None
    """The severity, if it differs from the rule's."""
    place: Place | None = None
    """The place, if it is in another file."""


Words = Mapping[str, Any]
Broken = bool | Words | list[dict[str, Any]] | None
"""Answer of a condition: whether it holds; or the words for the texts of a fault, or of several."""
Find = Callable[[Subject], Iterable[Fault]]
Breaks = Callable[[Subject], Any]
STOPS = "the run stops when the engine starts"
REFUSES = "DeepSpeed refuses the configuration"
REMOVE_ONE = "remove one of them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A check and its description."""

    id: str
    """`DS` and three digits, which never change their meaning."""
    severity: Severity
    """Default severity; a fault may have its own."""
    title: str
    """The subject in a few words."""
    find: Find
    """Yields the faults of a configuration."""
    source: str
    """Evidence: a file and symbol of the engine, or a measurement."""


def fault(where: str | Pointer, problem: str, effect: str, fix: str, **more: Any) -> Fault:
    """Returns a fault at a dotted path or a pointer; the empty path is the whole file."""
    pointer = where if isinstance(where, tuple) else tuple(where.split(".")) if where else ()
    return Fault(pointer=pointer, problem=problem, effect=effect, fix=fix, **more)


def job_fault(subject: Subject, key: str, problem: str, effect: str, fix: str, **more: Any) -> Fault:
    """Returns a fault at a key of the job; `lora.dropout` is one inside a section."""
    assert subject.job is not None
    return fault("", problem, effect, fix, place=subject.job.locate(tuple(key.split("."))), **more)


def _cases(broken: Any) -> Iterator[Words]:
    """Yields the words of each fault."""
    if isinstance(broken, list):
        yield from broken
    elif broken:
        yield {} if broken is True else broken


def when(
    path: str, breaks: Breaks, *, problem: str, effect: str = STOPS, fix: str, changes: tuple[Change, ...] = ()
) -> Find:
    """Returns a check that reports a path if `breaks` is true. A missing key is reported at its object."""

    def find(subject: Subject) -> Iterator[Fault]:
        for given in _cases(breaks(subject)):
            place = path.format_map(given)
            value = shown(subject.at(place, None))
            words = {"path": place, "name": place.rsplit(".", 1)[-1], "value": value, "stage": subject.stage,
                     "job": subject.asked, "model": subject.model, **given}  # fmt: skip
            texts = (text.format_map(words) for text in (problem, effect, fix))
            yield fault(place, *texts, severity=given.get("severity"), changes=changes)

    return find


def each_of(
    paths: Mapping[str, Breaks],
    given: Breaks = lambda subject: True,
    *,
    problem: str,
    effect: str = STOPS,
    fix: str = REMOVE_ONE,
) -> Find:
    """Returns a check that reports every path whose condition is true, if the `given` one is.

    The texts may also contain `{path}` and `{name}`, its last part.
    """
    checks = [when(path, breaks, problem=problem, effect=effect, fix=fix) for path, breaks in paths.items()]
    return lambda subject: together(*checks)(subject) if given(subject) else ()


def in_job(key: str, breaks: Callable[[Subject, Job], Broken], *, problem: str, effect: str, fix: str) -> Find:
    """Returns a check that reports a key of the job, dotted in a section, if there is a job and `breaks` is true."""

    def find(subject: Subject) -> Iterator[Fault]:
        job = subject.asked
        for given in _cases(breaks(subject, job)) if job is not None else ():
            place = key.format_map(given)
            value = limits.shown(reduce(getattr, place.split("."), job))
            words = {"key": place, "value": value, "stage": subject.stage, "job": job, "model": subject.model, **given}
            texts = (text.format_map(words) for text in (problem, effect, fix))
            yield job_fault(subject, place, *texts, severity=given.get("severity"))

    return find


def together(*checks: Find) -> Find:
    """Returns a check that reports what any of several does."""
    return lambda subject: [found for check in checks for found in check(subject)]
