"""The record of a known fault of DeepSpeed's releases, and how its settings are recognized in a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from dstrain.choices import Precision
from dstrain.config.jsonc import Pointer
from dstrain.config.lint.finding import Severity
from dstrain.config.lint.subject import Subject
from dstrain.facts.releases import is_in_range, release

PULLS = "https://github.com/deepspeedai/DeepSpeed/pull/"
ZERO = "zero_optimization."


class Effect(StrEnum):
    """What a release does with the settings."""

    WRONG = "wrong result"
    STOPS = "stops"
    SLOW = "slow"
    MEMORY = "memory"
    DEFAULT = "changed default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advisory:
    """One known fault of a range of releases, or a default that a release changed."""

    id: str
    """Id of its lint rule."""
    pull: int
    """The pull request of DeepSpeed that ended it."""
    kind: Effect
    severity: Severity
    """Of the finding, if the settings certainly apply."""
    settings: str
    """The settings, in words."""
    has_settings: Callable[[Subject], bool | None]
    """Whether a configuration has the settings; None if that rests on what is not known."""
    pointer: Pointer
    """The key that a finding names."""
    since: str | None
    """The first release with it; None if older than 0.15."""
    fixed: str
    """The first release without it."""
    torch: str = ""
    """The range of torch with it, such as `>=2.10`; empty for every torch."""
    effect: str
    """What the run does."""
    otherwise: str
    """What to write if the release must stay."""
    script: str | None = None
    """The case of benchmarks/advisories that shows it; None if a CPU cannot."""

    @property
    def source(self) -> str:
        """The address of the pull request."""
        return f"{PULLS}{self.pull}"

    @property
    def history(self) -> str:
        """The releases with it, and where that is said.

        >>> from dstrain.config.lint.advisories import ADVISORIES
        >>> ADVISORIES[0].history
        'since 0.15.2, fixed in 0.19.0: DeepSpeed#7967'
        """
        since = f"since {self.since}, " if self.since else ""
        verb = "changed" if self.kind is Effect.DEFAULT else "fixed"
        return f"{since}{verb} in {self.fixed}: DeepSpeed#{self.pull}"

    def affects(self, versions: Mapping[str, str]) -> bool | None:
        """Returns whether installed versions, by package, have it; None if the version of torch is not known."""
        deepspeed, torch = versions.get("deepspeed"), versions.get("torch")
        if deepspeed is None or release(deepspeed) >= release(self.fixed):
            return False
        if self.since is not None and release(deepspeed) < release(self.since):
            return False
        if not self.torch:
            return True
        return None if torch is None else is_in_range(torch, self.torch)


def every(*parts: bool | None) -> bool | None:
    """Returns whether every part holds; None if that rests on an unknown one.

    >>> every(True, None), every(False, None), every(True, True)
    (None, False, True)
    """
    if any(part is False for part in parts):
        return False
    return None if None in parts else True


def accumulation(subject: Subject) -> int | None:
    """Returns the micro-batches of a step; None if they are not known."""
    steps = subject.at("gradient_accumulation_steps", None)
    if isinstance(steps, int) and not isinstance(steps, bool):
        return steps
    if subject.job is not None:
        return subject.job.job.grad_accum
    return None if steps == "auto" or subject.has("train_batch_size") else 1


def trains_in(subject: Subject, precision: Precision) -> bool | None:
    """Returns whether the ranks train in bf16, or in fp16; None if that is not known."""
    enabled = subject.at(f"{precision.value}.enabled", False)
    if enabled == "auto":
        return subject.job.job.precision is precision if subject.job is not None else None
    return enabled is True


def overlaps(subject: Subject) -> bool:
    """Returns whether gradients are reduced on a stream of their own during backward; a CPU has no streams."""
    on_cpu = subject.cluster is not None and subject.cluster.gpu.is_cpu
    return not on_cpu and subject.is_true(ZERO + "overlap_comm", default=subject.stage == 3)


def uses_sequence_parallelism(subject: Subject) -> bool:
    """Returns whether samples are split over ranks."""
    by_job = subject.job is not None and subject.job.job.sp > 1
    return by_job or subject.number("sequence_parallel_size", 1) > 1
