"""Rules about features that dstrain's trainer does not support, and about a job's model, data, checkpoints and GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from dstrain.choices import Method, Precision, RopeType, Schedule
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Breaks, Rule, when
from dstrain.config.lint.rules.no_effect import above, has_pass, is_on
from dstrain.config.lint.subject import Subject, shown
from dstrain.config.resolve_auto import GATHERS
from dstrain.facts.cluster.cpu import CPU_LIMITS, OFFLOADED, limits_of
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.job.schema import Job
from dstrain.plan import rope_scaling

_GATHER = f"zero_optimization.{GATHERS}"
_HPZ = "zero_optimization.zero_hpz_partition_size"
_SCATTER = "zero_optimization.reduce_scatter"
_TP = "tensor_parallel.autotp_size"
_SPLIT_MODEL = "each rank holds a part of the model, and the final model has no weights that can be loaded"
_EP = "expert_parallel.autoep_size"
_IN_JOB = "the Trainer gathers weights by {key} in job.yaml"
_NOT_RUN: dict[str, tuple[Breaks, str]] = {
    "tensor_parallel.tp.tp_size": (above("tensor_parallel.tp.tp_size", 1), _SPLIT_MODEL),
    "sequence_parallel_size": (
        lambda subject: above("sequence_parallel_size", 1)(subject) and has_pass(subject, "autosp"),
        "sequences are not split: every rank trains on whole ones",
    ),
    "compile.passes": (
        lambda subject: has_pass(subject, "autosp") or has_pass(subject, "autotp"),
        "the passes run in engine.compile(), which is never called",
    ),
    "pipeline.stages": (above("pipeline.stages", 1), "the model is not a DeepSpeed pipeline, and is not split"),
    "hybrid_engine.enabled": (is_on("hybrid_engine.enabled"), "the engine for generation is untested here"),
    "data_efficiency.enabled": (is_on("data_efficiency.enabled"), "nothing reads it: the Trainer loads the data"),
    "autotuning.enabled": (is_on("autotuning.enabled"), "only DeepSpeed's own launcher tunes"),
}  # fmt: skip
"""Features that dstrain's trainer does not run or save → the condition that a configuration enables them, and the
effect."""


def _not_run(subject: Subject) -> Iterator[Fault]:
    for path, (is_enabled, effect) in _NOT_RUN.items():
        if subject.job is not None and is_enabled(subject):
            yield _unsupported(subject, path, effect, "remove it")


def _unsupported(subject: Subject, path: str, effect: str, fix: str) -> Fault:
    problem = f"{path} is {shown(subject.at(path, None))}, which dstrain run does not support yet"
    return Fault(pointer=tuple(path.split(".")), problem=problem, effect=effect, fix=fix)


def _unsaved(subject: Subject) -> Iterator[Fault]:
    """Reports tensor parallelism in another program's Trainer, which saves the model only if it may gather."""
    if subject.job is None and subject.is_trainers and above(_TP, 1)(subject) and not subject.is_true(_GATHER):
        effect = (
            "save_model writes no weights: accelerate gathers the parts of tensor parallelism only if "
            f"{GATHERS} is true, at any stage"
        )
        fix = f'remove it, or write "{GATHERS}": true for your own Trainer'
        yield _unsupported(subject, _TP, effect, fix)


def _shared_weights(subject: Subject) -> Iterator[Fault]:
    """Reports keys that are at odds with the job's tensor or expert parallelism."""
    if subject.job is None:
        return
    job = subject.job.job
    has_experts = subject.is_true("expert_parallel.enabled")
    yield from _other_size(subject, _TP, "tp", job.tp, is_on=subject.number(_TP, 1) != 1)
    yield from _other_size(subject, _EP, "ep", job.ep, is_on=has_experts)
    if job.tp > 1 and subject.stage == 3 and subject.number(_HPZ, 1) > 1:
        effect = "hpZ takes consecutive ranks, which are tensor-parallel here, for data-parallel ones"
        yield Fault(pointer=tuple(_HPZ.split(".")), problem=f"{_HPZ} with tp {job.tp}", effect=effect, fix="remove it")
    for key, wanted, effect in (
        ("tp", job.tp, "in bf16 and fp16, gradients are clipped by a norm that lacks the parts of other ranks"),
        ("ep", job.ep, "shared experts are untested without ZeRO"),
    ):
        if wanted > 1 and subject.stage == 0:
            yield in_job(subject, key, f"{key} is {wanted} without ZeRO", effect, 'write "stage": 1 in ds_config.json')
        if wanted > 1 and not subject.is_true(_GATHER, default=True):
            effect = "no checkpoint holds whole weights, and no program makes them of the parts"
            problem = f"{_GATHER} is false with {key} {wanted}"
            yield Fault(pointer=tuple(_GATHER.split(".")), problem=problem, effect=effect, fix="remove it")


def _other_size(subject: Subject, path: str, key: str, wanted: int, *, is_on: bool) -> Iterator[Fault]:
    """Yields a fault if a group of ranks has another size in the configuration than in the job."""
    assert subject.job is not None
    size = subject.number(path, 1)
    if is_on and size != wanted:
        problem = f"{path} is {shown(subject.at(path, size))}, but {subject.job.locate((key,))}: {key} is {wanted}"
        fix = f"remove it; in job.yaml: {key}: {size:g}"
        yield Fault(pointer=tuple(path.split(".")), problem=problem, effect=_IN_JOB.format(key=key), fix=fix)


def in_job(subject: Subject, key: str, problem: str, effect: str, fix: str) -> Fault:
    """Returns a fault at a key of the job; `lora.dropout` is one inside a section."""
    assert subject.job is not None
    return Fault(place=subject.job.locate(tuple(key.split("."))), problem=problem, effect=effect, fix=fix)


def _mixes_averages(subject: Subject) -> bool:
    """Returns whether ZeRO-3 divides gradients of some parameters by all ranks, and others by the groups of `sp`."""
    scatters = subject.is_true(_SCATTER, default=True)
    return subject.job is not None and subject.job.job.sp > 1 and subject.stage == 3 and not scatters


def _steps_of(job: Job) -> Iterator[tuple[str, float, str]]:
    """Yields keys with intervals in steps, and the effect of an interval longer than the run."""
    if job.eval_steps is not None and job.has_eval:
        yield "eval_steps", job.eval_steps, "the model is evaluated only at the end"
    yield "logging_steps", job.logging_steps, "the metrics have a single line, at the end"


def _never_reached(subject: Subject) -> Iterator[Fault]:
    job = subject.asked
    if job is None or job.max_steps is None:
        return
    for key, steps, effect in _steps_of(job):
        if steps > job.max_steps > 1:
            problem = f"{key} is {steps}, but max_steps is {job.max_steps}"
            yield in_job(subject, key, problem, effect, f"write a {key} of at most {job.max_steps}")


_SCHEDULE_KEYS = {
    Schedule.COSINE: ("num_cycles",),
    Schedule.COSINE_WITH_RESTARTS: ("num_cycles",),
    Schedule.POLYNOMIAL: ("lr_end", "power"),
    Schedule.INVERSE_SQRT: ("timescale",),
    Schedule.COSINE_WITH_MIN_LR: ("min_lr", "min_lr_rate", "num_cycles"),
    Schedule.COSINE_WARMUP_WITH_MIN_LR: ("min_lr", "min_lr_rate", "num_cycles", "warmup_lr_rate"),
    Schedule.WARMUP_STABLE_DECAY: (
        *("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
    ),
}  # fmt: skip
"""Schedule → its parameters in `lr_scheduler_kwargs`. Source: transformers 5.23 optimization.py."""
_NEEDED_KEYS = {
    Schedule.COSINE_WITH_MIN_LR: ("min_lr", "min_lr_rate"),
    Schedule.COSINE_WARMUP_WITH_MIN_LR: ("min_lr", "min_lr_rate"),
    Schedule.WARMUP_STABLE_DECAY: ("num_decay_steps",),
}
"""Schedule → the parameters of which it needs exactly one."""


def _wrong_schedule(subject: Subject) -> Iterator[Fault]:
    """Reports parameters that a schedule does not take, and one that it needs."""
    job = subject.asked
    if job is None:
        return
    schedule, given = job.lr_scheduler_type, job.lr_scheduler_kwargs
    legal, needed = _SCHEDULE_KEYS.get(schedule, ()), _NEEDED_KEYS.get(schedule, ())
    for key in given:
        if key not in legal:
            takes = f"it takes {', '.join(legal)}" if legal else "it takes none"
            yield in_job(subject, "lr_scheduler_kwargs", f'{schedule} has no parameter "{key}"; {takes}',
                          "the run stops before the first step", "remove it")  # fmt: skip
    if needed and sum(key in given for key in needed) != 1:
        problem = f"{schedule} needs {' or '.join(needed)} in lr_scheduler_kwargs"
        yield in_job(subject, "lr_scheduler_type", problem, "the run stops before the first step",
                      f"write lr_scheduler_kwargs: {{{needed[-1]}: …}}")  # fmt: skip


def _its_own_data(subject: Subject) -> Iterator[Fault]:
    if (job := subject.asked) is None:
        return
    paths = {source.path for source in job.train_sources}
    if any(source.path in paths and source.split is None for source in job.eval_sources):
        yield in_job(subject, "eval_data", "eval_data is the training data",
                      "eval_loss measures memorization", "use other data")  # fmt: skip


def _too_long(subject: Subject) -> Iterator[Fault]:
    model, job = subject.model, subject.asked
    if model is None or job is None or job.rope_scaling or not 0 < model.max_position_embeddings < job.seq_len:
        return
    problem = f"seq_len is {job.seq_len}, but {model.name} has {model.max_position_embeddings} positions"
    effect = "positions beyond were never trained: the loss is wrong there, or an index is out of range"
    yield in_job(subject, "seq_len", problem, effect, _shorter_or_scaled(model, RopeType.YARN, job.seq_len))


def _shorter_or_scaled(model: ModelFacts, rope_type: RopeType, seq_len: int) -> str:
    """Returns the settings for a length beyond the model's own."""
    fix = f"write seq_len: {model.max_position_embeddings}"
    scaling = rope_scaling.reaching(model, rope_type, seq_len)
    if scaling is None or rope_scaling.fault(model, scaling, seq_len) is not None:
        return fix
    values = ", ".join(f"{key}: {value}" for key, value in asdict(scaling).items())
    return f"{fix}, or rope_scaling: {{{values}}}"


def _cannot_scale(subject: Subject) -> Iterator[Fault]:
    model, job = subject.model, subject.asked
    if model is None or job is None or job.rope_scaling is None:
        return
    if (problem := rope_scaling.fault(model, job.rope_scaling, job.seq_len)) is not None:
        fix = "remove rope_scaling"
        if job.seq_len > model.max_position_embeddings:
            fix += f" and {_shorter_or_scaled(model, job.rope_scaling.rope_type, job.seq_len)}"
        yield in_job(subject, "rope_scaling", problem, "the model is refused, or trains on untrained positions", fix)


def _not_on_gpu(subject: Subject) -> Iterator[Fault]:
    """Reports settings that a known GPU does not support."""
    job = subject.asked
    cluster = subject.cluster
    if job is None or cluster is None or cluster.gpu_origin == "assumed":
        return
    gpu = cluster.gpu
    if job.precision is Precision.BF16 and not gpu.has_bf16 and not gpu.is_cpu:
        yield in_job(subject, "precision", f"precision is bf16, but {gpu.name} does not support it",
                      "matrix products run in fp32, at a fraction of the speed", "write precision: fp16")  # fmt: skip
    if gpu.is_cpu:
        yield from _not_on_cpu(subject, job)


def _not_on_cpu(subject: Subject, job: Job) -> Iterator[Fault]:
    values = {
        limit.key: subject.at(limit.key, None) if limit.is_of_engine else getattr(job, limit.key, None)
        for limit in CPU_LIMITS
    }
    for limit in limits_of(values):
        if limit.unless == OFFLOADED and subject.offloads_optimizer:
            continue
        problem = f"{limit.key} is {limit.value}, but the ranks train on the CPU"
        effect = f"the run stops{f', unless {limit.unless}' if limit.unless else ''}: {limit.why}"
        if not limit.is_of_engine:
            yield in_job(subject, limit.key, problem, effect, f"write {limit.key}: {limit.instead}")
            continue
        fix = f"write {limit.instead if limit.value == 'true' else shown(limit.instead)}"
        pointer = tuple(limit.key.split("."))
        severity = None if limit.unless not in ("", OFFLOADED) else Severity.ERROR
        yield Fault(pointer=pointer, problem=problem, effect=effect, fix=fix, severity=severity)


def _without_weights(subject: Subject) -> Iterator[Fault]:
    """Reports checkpoints of the weights alone where the weights are not gathered."""
    job = subject.asked
    if job is None or not job.save_only_model or job.method is not Method.FULL or subject.stage != 3:
        return
    if not subject.is_true(_GATHER, default=True):
        yield in_job(subject, "save_only_model", f"save_only_model is true, but {_GATHER} is false",
                     "the run stops before it loads the model: its checkpoints would have no weights",
                     f'write "{GATHERS}": true in ds_config.json')  # fmt: skip


# fmt: off
RULES = (
    Rule(id="DS221", severity=Severity.ERROR, title="feature that dstrain run does not support", find=_not_run,
         source="dstrain/train"),
    Rule(id="DS222", severity=Severity.ERROR, title="tensor parallelism that cannot be saved", find=_unsaved,
         source="accelerate 1.15 accelerator.py: get_state_dict"),
    Rule(id="DS223", severity=Severity.ERROR, title="sequence parallelism without reduce_scatter",
         find=when(_SCATTER, _mixes_averages,
                   problem="reduce_scatter is {value} under ZeRO-3, and sp in job.yaml is above 1",
                   effect="gradients are multiplied by sp, except for those larger than reduce_bucket_size",
                   fix="remove the line"),
         source="deepspeed 0.19.8 runtime/zero/stage3.py: __avg_scatter_contiguous_grads, __avg_scatter_grads"),
    Rule(id="DS224", severity=Severity.ERROR, title="parallelism at odds with the job", find=_shared_weights,
         source="dstrain/train/parallel.py; a norm of 3.71 in place of 4.78 on CPU ranks, deepspeed 0.19.8"),
    Rule(id="DS901", severity=Severity.WARNING, title="interval longer than the run", find=_never_reached,
         source="dstrain/job/schema.py"),
    Rule(id="DS902", severity=Severity.WARNING, title="evaluation on the training data", find=_its_own_data,
         source="dstrain/train/arguments.py"),
    Rule(id="DS903", severity=Severity.WARNING, title="samples longer than the model's positions", find=_too_long,
         source="config.json: max_position_embeddings"),
    Rule(id="DS904", severity=Severity.WARNING, title="setting that the GPU does not support", find=_not_on_gpu,
         source="dstrain/facts/cluster/gpus.py"),
    Rule(id="DS905", severity=Severity.ERROR, title="rope scaling that the model cannot have", find=_cannot_scale,
         source="Transformers 5.23 modeling_rope_utils.py; dstrain/plan/rope_scaling.py"),
    Rule(id="DS906", severity=Severity.ERROR, title="parameter that the schedule does not take", find=_wrong_schedule,
         source="transformers 5.23 optimization.py: TYPE_TO_SCHEDULER_FUNCTION"),
    Rule(
        id="DS910",
        severity=Severity.ERROR,
        title="checkpoints without weights",
        find=_without_weights,
        source="dstrain/train/saving.py: require_weights",
    ),
)
"""Rules about the job."""
# fmt: on
