"""Known faults of DeepSpeed's releases, and defaults that they changed: one table, which lint, doctor and run read.

Releases are those whose published package has the fault: each fix was looked for in the packages around it, because a
release can be cut from a branch that lacks what `version.txt` at the time promises. `script` names the cases that
benchmarks/advisories ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from dstrain.choices import Precision
from dstrain.config.jsonc import Pointer
from dstrain.config.lint.rule import Fault, Find, Rule, Subject, fault, has_zenflow
from dstrain.facts.releases import is_in_range, release
from dstrain.findings import Severity

PULLS = "https://github.com/deepspeedai/DeepSpeed/pull/"
ZERO = "zero_optimization."


class Effect(StrEnum):
    """Effect of a release on the settings."""

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
    """Effect on the run."""
    otherwise: str
    """Setting to write if the release must stay."""
    script: str | None = None
    """The case of benchmarks/advisories that shows it; None if a CPU cannot."""

    @property
    def source(self) -> str:
        """The address of the pull request."""
        return f"{PULLS}{self.pull}"

    @property
    def history(self) -> str:
        """The releases with it, and where that is said.

        >>> from dstrain.config.lint.rules.releases import ADVISORIES
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


_OFFLOAD = ("zero_optimization", "offload_optimizer")
_OVERLAP = ("zero_optimization", "overlap_comm")
_NO_OVERLAP = 'write "overlap_comm": false'
_E, _W, _I = Severity.ERROR, Severity.WARNING, Severity.INFO


def _accumulates_offloaded(s: Subject) -> bool | None:
    steps = accumulation(s)
    offloads = s.stage == 2 and s.offloads_optimizer and not has_zenflow(s)
    return every(offloads, None if steps is None else steps > 2)


def _calls_backward_often(s: Subject) -> bool | None:
    """Only the training loop tells how often it calls backward(); the Trainer's says it by accumulation steps."""
    offloads = s.stage == 2 and s.offloads_optimizer and not has_zenflow(s)
    return every(offloads and not s.is_trainers and accumulation(s) in (1, None), None)


def _compiles(s: Subject) -> bool | None:
    """Whether the model is compiled stands in the training loop, unless a job describes that."""
    contiguous = s.is_true(ZERO + "contiguous_gradients", default=True)
    compiled = s.is_true("compile.deepcompile") or (None if s.job is None else s.job.job.torch_compile)
    return every(s.stage in (1, 2) and overlaps(s) and contiguous, compiled)


def _accumulates_in_fp32(s: Subject) -> bool | None:
    in_fp32 = s.at("data_types.grad_accum_dtype", None) in ("fp32", "float32", "float")
    return every(s.stage == 1 and in_fp32 and not s.offloads_optimizer, trains_in(s, Precision.BF16))


def _may_freeze(s: Subject) -> bool | None:
    """The Trainer gives the optimizer trained weights only."""
    halves = [trains_in(s, precision) for precision in (Precision.BF16, Precision.FP16)]
    return every(s.stage == 0 and not s.is_trainers and halves != [False, False], None)


def _offloads_unpinned(s: Subject) -> bool:
    sections = [name for name in ("offload_optimizer", "offload_param") if s.device(name) != "none"]
    return s.stage > 0 and any(not s.has(f"{ZERO}{name}.pin_memory") for name in sections)


# fmt: off
ADVISORIES: tuple[Advisory, ...] = (
    Advisory(id="DS951", pull=7967, kind=Effect.WRONG, severity=_E, since="0.15.2", fixed="0.19.0", pointer=_OFFLOAD,
             settings="ZeRO-2 with an offloaded optimizer and more than 2 accumulation steps",
             has_settings=_accumulates_offloaded,
             effect="of each step only the first and the last micro-batch reach the gradient, whose norm is too small",
             otherwise='write "stage": 3, or accumulate at most 2 steps', script="offloaded_accumulation"),
    Advisory(id="DS952", pull=7981, kind=Effect.WRONG, severity=_E, since=None, fixed="0.19.0", pointer=_OFFLOAD,
             settings="ZeRO-2 with an offloaded optimizer, and a loop that calls backward() several times a step",
             has_settings=_calls_backward_often,
             effect="only the last backward() of a step reaches the gradient",
             otherwise="set gradient_accumulation_steps to the number of calls", script="several_backwards"),
    Advisory(id="DS953", pull=7965, kind=Effect.WRONG, severity=_W, since=None, fixed="0.19.0", pointer=_OVERLAP,
             settings="ZeRO-1 or 2 with overlap_comm", has_settings=lambda s: s.stage in (1, 2) and overlaps(s),
             effect="the memory of reduced gradients may be used again too early: the loss becomes NaN within steps",
             otherwise=_NO_OVERLAP),
    Advisory(id="DS954", pull=8080, kind=Effect.WRONG, severity=_W, since=None, fixed="0.19.3", pointer=_OVERLAP,
             settings="ZeRO-1 or 2 with overlap_comm and contiguous_gradients, and a compiled model",
             has_settings=_compiles,
             effect="gradients may be reduced before they are complete: NaN from the first step on",
             otherwise=_NO_OVERLAP),
    Advisory(id="DS955", pull=7898, kind=Effect.WRONG, severity=_E, since=None, fixed="0.18.8", torch=">=2.10",
             settings="ZeRO-3 in bf16 with overlap_comm, and torch 2.10 or newer", pointer=_OVERLAP,
             has_settings=lambda s: every(s.stage == 3 and overlaps(s), trains_in(s, Precision.BF16)),
             effect="gradients may be reduced before they are complete: weights become NaN", otherwise=_NO_OVERLAP),
    Advisory(id="DS956", pull=7839, kind=Effect.WRONG, severity=_E, since="0.17.6", fixed="0.18.6",
             settings="bf16 without ZeRO", pointer=("bf16", "enabled"),
             has_settings=lambda s: every(s.stage == 0, trains_in(s, Precision.BF16)),
             effect="gradients are never zeroed and, unless the optimizer is DeepSpeed's FusedAdam, divided by 65,536",
             otherwise='write "zero_optimization": {"stage": 1}', script="bf16_without_zero"),
    Advisory(id="DS957", pull=7985, kind=Effect.WRONG, severity=_E, since="0.18.5", fixed="0.19.0",
             settings="ZeRO-1 in bf16 with grad_accum_dtype fp32", pointer=("data_types", "grad_accum_dtype"),
             has_settings=lambda s: every(s.num_ranks != 1 and not s.is_true("bf16.immediate_grad_update"),
                                          _accumulates_in_fp32(s)),
             effect="the last micro-batch of each step is not averaged over the ranks",
             otherwise='write "immediate_grad_update": true into bf16, or "stage": 2', script="last_micro_batch"),
    Advisory(id="DS958", pull=8029, kind=Effect.MEMORY, severity=_W, since="0.17.6", fixed="0.19.1",
             settings="bf16 or fp16 without ZeRO, and an optimizer that gets frozen weights (LoRA)", pointer=(),
             has_settings=_may_freeze,
             effect="frozen weights get a copy in fp32 and another flat one: out of memory for large models",
             otherwise="give the optimizer only weights with requires_grad", script="frozen_weights"),
    Advisory(id="DS959", pull=7886, kind=Effect.SLOW, severity=_W, since="0.18.5", fixed="0.18.7",
             settings="ZeRO", has_settings=lambda s: s.stage > 0, pointer=("zero_optimization", "stage"),
             effect="each gradient counts all parameters again: backward time grows with the square of their number",
             otherwise="train with 0.18.4", script="hook_count"),
    Advisory(id="DS960", pull=7906, kind=Effect.WRONG, severity=_E, since="0.18.0", fixed="0.18.9",
             settings="SuperOffload with several parameter groups", pointer=(*_OFFLOAD, "super_offload"),
             has_settings=lambda s: every(s.stage == 3 and s.is_true(ZERO + "offload_optimizer.super_offload"),
                                          True if s.is_trainers else None),
             effect="every group is updated with the settings of the first: biases and norms get weight decay",
             otherwise='remove "super_offload"'),
    Advisory(id="DS961", pull=8210, kind=Effect.STOPS, severity=_W, since=None, fixed="0.19.5",
             settings="zero_hpz_partition_size, and parameters with fewer elements than the group has parts",
             pointer=("zero_optimization", "zero_hpz_partition_size"),
             has_settings=lambda s: every(s.stage == 3 and s.number(ZERO + "zero_hpz_partition_size", 1) > 1, None),
             effect="ranks beyond a small parameter's end stop with an IndexError at the first step",
             otherwise="remove zero_hpz_partition_size", script="hpz_small_parameter"),
    Advisory(id="DS962", pull=8226, kind=Effect.STOPS, severity=_W, since=None, fixed="0.19.6", pointer=(),
             settings="Ulysses sequence parallelism, and a checkpoint to load", has_settings=uses_sequence_parallelism,
             effect="all ranks but the first of each group look for weights of a rank that saved none, and stop",
             otherwise="load the checkpoint without sequence parallelism", script="sequence_parallel_checkpoint"),
    Advisory(id="DS963", pull=8261, kind=Effect.STOPS, severity=_W, since="0.19.4", fixed="0.19.6",
             settings="AutoEP on GPUs before Hopper with 2^31 or more elements in the experts of a rank",
             pointer=("expert_parallel", "enabled"),
             has_settings=lambda s: every(s.is_true("expert_parallel.enabled"), None),
             effect="the grouped matrix product reads outside the experts: illegal memory access",
             otherwise='write "disable_triton_grouped_mm": true into expert_parallel'),
    Advisory(id="DS964", pull=8068, kind=Effect.DEFAULT, severity=_I, since=None, fixed="0.19.3",
             settings="no gradient_clipping", has_settings=lambda s: not s.has("gradient_clipping"), pointer=(),
             effect="gradients are not clipped; from 0.19.3 on they are, at 1.0",
             otherwise='write "gradient_clipping": 1.0, or 0.0', script="defaults"),
    Advisory(id="DS965", pull=8035, kind=Effect.DEFAULT, severity=_I, since=None, fixed="0.19.3",
             settings="bf16 without check_grad_overflow", pointer=("bf16",),
             has_settings=lambda s: every(not s.has("bf16.check_grad_overflow"), trains_in(s, Precision.BF16)),
             effect="an infinite gradient is stepped into the weights; from 0.19.3 on the step is skipped",
             otherwise='write "check_grad_overflow": true into bf16', script="defaults"),
    Advisory(id="DS966", pull=8253, kind=Effect.DEFAULT, severity=_I, since=None, fixed="0.19.6", pointer=(),
             settings="no time limit of its own (deepspeed.initialize)", has_settings=lambda s: not s.is_trainers,
             effect="a collective operation times out after 30 minutes; from 0.19.6 on after 10",
             otherwise="export DEEPSPEED_TIMEOUT=10  (minutes)", script="defaults"),
    Advisory(id="DS967", pull=8207, kind=Effect.DEFAULT, severity=_I, since=None, fixed="0.19.5",
             settings="offload without pin_memory", has_settings=_offloads_unpinned, pointer=("zero_optimization",),
             effect="offloaded states are copied from pageable memory, which is slower; from 0.19.5 on it is pinned",
             otherwise='write "pin_memory": true', script="defaults"),
    Advisory(id="DS968", pull=7788, kind=Effect.WRONG, severity=_E, since="0.17.6", fixed="0.18.5",
             settings="ZeRO-1 in bf16 with grad_accum_dtype fp32", pointer=("data_types", "grad_accum_dtype"),
             has_settings=_accumulates_in_fp32,
             effect="the optimizer without ZeRO runs: nothing is partitioned, and gradients are divided by 65,536",
             otherwise='write "stage": 2', script="fp32_accumulation"),
)
"""Every advisory. Ids never change their meaning."""
# fmt: on


def _find(advisory: Advisory) -> Find:
    """Returns the check of one advisory; a finding that rests on an unknown is at most a warning."""

    def find(subject: Subject) -> Iterator[Fault]:
        affected = advisory.affects(subject.versions)
        applies = False if affected is False else every(affected, advisory.has_settings(subject))
        if applies is False:
            return
        is_maybe_error = applies is None and advisory.severity is Severity.ERROR
        unless = "; part of that is not in this file" if applies is None else ""
        upgrade = "" if advisory.kind is Effect.DEFAULT else f"pip install 'deepspeed>={advisory.fixed}', or "
        yield fault(
            advisory.pointer,
            f"deepspeed {subject.versions['deepspeed']}: {advisory.settings}{unless}",
            f"{advisory.effect} ({advisory.history})",
            f"{upgrade}{advisory.otherwise}",
            severity=Severity.WARNING if is_maybe_error else None,
        )

    return find


def past_faults(subject: Subject) -> list[Advisory]:
    """Returns the faults by which other releases than the installed one train something wrong with these settings."""
    return [
        advisory
        for advisory in ADVISORIES
        if advisory.kind is Effect.WRONG
        and advisory.affects(subject.versions) is False
        and advisory.has_settings(subject)
    ]


RULES = tuple(
    Rule(
        id=advisory.id,
        severity=advisory.severity,
        title=f"release: {advisory.settings}",
        find=_find(advisory),
        source=advisory.source,
    )
    for advisory in ADVISORIES
)
"""One rule for each advisory."""
