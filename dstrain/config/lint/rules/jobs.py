"""Rules about a job: keys that its task, its GPU or dstrain's trainer does not support, that nothing reads, or whose
values make no sense."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from dstrain.choices import Interval, Method, Optimizer, Precision, RopeType, Schedule, Task
from dstrain.config.lint.rule import (
    Breaks,
    Broken,
    Fault,
    Find,
    Rule,
    Subject,
    fault,
    in_job,
    job_fault,
    shown,
    together,
    when,
)
from dstrain.config.lint.rules.no_effect import above, has_pass, is_on
from dstrain.config.resolve_auto import GATHERS
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.model.model_files import names_of
from dstrain.facts.model.traits import traits
from dstrain.findings import Severity
from dstrain.job import limits
from dstrain.job.limits import CPU_LIMITS, OFFLOADED, CpuLimit, cpu_limits_of
from dstrain.job.model_changes import Lora
from dstrain.job.schema import Job
from dstrain.plan import rope_scaling
from dstrain.plan.named_parts import unknown
from dstrain.plan.search.rules import RULES as PLANNERS

_SAYS = {rule.name: rule.says for rule in PLANNERS}
"""Rules of the planner, in words."""
_GATHER = f"zero_optimization.{GATHERS}"
_HPZ = "zero_optimization.zero_hpz_partition_size"
_SCATTER = "zero_optimization.reduce_scatter"
_TP = "tensor_parallel.autotp_size"
_EP = "expert_parallel.autoep_size"
_PLAIN = Job(model="", output_dir="")
LARGEST_RATE = 0.1
"""Learning rate from which lint warns, which is a judgement: Muon's own default is 0.02, AdamW's 0.001."""
_SPLIT_MODEL = "each rank holds a part of the model, and the final model has no weights that can be loaded"
_NOT_RUN: dict[str, tuple[Breaks, str]] = {
    "tensor_parallel.tp.tp_size": (above("tensor_parallel.tp.tp_size", 1), _SPLIT_MODEL),
    "sequence_parallel_size": (
        lambda s: above("sequence_parallel_size", 1)(s) and has_pass(s, "autosp"),
        "sequences are not split: every rank trains on whole ones",
    ),
    "compile.passes": (
        lambda s: has_pass(s, "autosp") or has_pass(s, "autotp"),
        "the passes run in engine.compile(), which is never called",
    ),
    "pipeline.stages": (above("pipeline.stages", 1), "the model is not a DeepSpeed pipeline, and is not split"),
    "hybrid_engine.enabled": (is_on("hybrid_engine.enabled"), "the engine for generation is untested here"),
    "data_efficiency.enabled": (is_on("data_efficiency.enabled"), "nothing reads it: the Trainer loads the data"),
    "autotuning.enabled": (is_on("autotuning.enabled"), "only DeepSpeed's own launcher tunes"),
}  # fmt: skip
"""Features that dstrain's trainer does not run or save → the condition that a configuration enables them, and the
effect."""
_UNSUPPORTED = "{path} is {value}, which dstrain run does not support yet"


def _not_run(subject: Subject) -> Iterator[Fault]:
    for path, (is_enabled, effect) in _NOT_RUN.items():
        if subject.job is not None and is_enabled(subject):
            problem = _UNSUPPORTED.format(path=path, value=shown(subject.at(path, None)))
            yield fault(path, problem, effect, "remove it")


def _is_unsaved(s: Subject) -> bool:
    """Returns whether another program's Trainer has tensor parallelism, and may not gather the model to save it."""
    return s.job is None and s.is_trainers and s.number(_TP, 1) > 1 and not s.is_true(_GATHER)


def _other_size(path: str, key: str, subject: Subject) -> Broken:
    """Returns the words for a group of ranks that has another size in the configuration than in the job."""
    size, job = subject.number(path, 1), subject.job
    if job is None or size == getattr(job.job, key):
        return None
    return {"value": shown(subject.at(path, size)), "at": job.locate((key,)), "key": key, "size": size,
            "wanted": getattr(job.job, key)}  # fmt: skip


def _of_size(path: str, key: str, is_on: Breaks) -> Find:
    """Returns the check that a group of ranks has the size that the job gives it."""
    return when(path, lambda s: is_on(s) and _other_size(path, key, s),
                problem="{path} is {value}, but {at}: {key} is {wanted}",
                effect="the Trainer gathers weights by {key} in job.yaml",
                fix="remove it; in job.yaml: {key}: {size:g}")  # fmt: skip


def _shared(s: Subject) -> list[str]:
    """Returns the ways in which the job's ranks share weights."""
    return [key for key in ("tp", "ep") if s.asked is not None and getattr(s.asked, key) > 1]


def _ungathered(s: Subject) -> list[dict[str, Any]]:
    return [{"key": key, "size": getattr(s.asked, key)} for key in _shared(s) if not s.is_true(_GATHER, default=True)]


def _mixes_averages(s: Subject) -> bool:
    """Returns whether ZeRO-3 divides gradients of some parameters by all ranks, and others by the groups of `sp`."""
    return s.asked is not None and s.asked.sp > 1 and s.stage == 3 and not s.is_true(_SCATTER, default=True)


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


def _not_taken(_: Subject, job: Job) -> list[dict[str, Any]]:
    legal = _SCHEDULE_KEYS.get(job.lr_scheduler_type, ())
    takes = f"it takes {', '.join(legal)}" if legal else "it takes none"
    return [{"name": name, "takes": takes} for name in job.lr_scheduler_kwargs if name not in legal]


def _needed(_: Subject, job: Job) -> Broken:
    needed = _NEEDED_KEYS.get(job.lr_scheduler_type, ())
    if not needed or sum(key in job.lr_scheduler_kwargs for key in needed) == 1:
        return None
    return {"needed": " or ".join(needed), "last": needed[-1]}


def _trains_on_its_evaluation(_: Subject, job: Job) -> bool:
    paths = {source.path for source in job.train_sources}
    return any(source.path in paths and source.split is None for source in job.eval_sources)


def _too_long(s: Subject, job: Job) -> Broken:
    model = s.model
    if model is None or job.rope_scaling or not 0 < model.max_position_embeddings < job.seq_len:
        return None
    return {"instead": _shorter_or_scaled(model, RopeType.YARN, job.seq_len)}


def _shorter_or_scaled(model: ModelFacts, rope_type: RopeType, seq_len: int) -> str:
    """Returns the settings for a length beyond the model's own."""
    fix = f"write seq_len: {model.max_position_embeddings}"
    scaling = rope_scaling.reaching(model, rope_type, seq_len)
    if scaling is None or rope_scaling.fault(model, scaling, seq_len) is not None:
        return fix
    values = ", ".join(f"{key}: {value}" for key, value in asdict(scaling).items())
    return f"{fix}, or rope_scaling: {{{values}}}"


def _cannot_scale(s: Subject, job: Job) -> Broken:
    if s.model is None or job.rope_scaling is None:
        return None
    if (why := rope_scaling.fault(s.model, job.rope_scaling, job.seq_len)) is None:
        return None
    is_longer = job.seq_len > s.model.max_position_embeddings
    more = f" and {_shorter_or_scaled(s.model, job.rope_scaling.rope_type, job.seq_len)}" if is_longer else ""
    return {"why": why, "more": more}


def _lacks_bf16(s: Subject, job: Job) -> Broken:
    if s.cluster is None or s.cluster.gpu_origin == "assumed" or job.precision is not Precision.BF16:
        return None
    return {"gpu": s.cluster.gpu.name} if s.cluster.gpu.lacks_bf16 else None


def _not_on_cpu(subject: Subject) -> Iterator[Fault]:
    """Reports settings of the job and of the engine that a CPU does not run."""
    job, cluster = subject.asked, subject.cluster
    if job is None or cluster is None or cluster.gpu_origin == "assumed" or not cluster.gpu.is_cpu:
        return
    of_engine = cpu_limits_of({limit.key: subject.at(limit.key, None) for limit in CPU_LIMITS if limit.is_of_engine})
    for limit in (*limits_on_cpu(job), *of_engine):
        if limit.unless == OFFLOADED and subject.offloads_optimizer:
            continue  # DeepSpeed's CPU optimizer trains
        effect = f"the run stops{f', unless {limit.unless}' if limit.unless else ''}: {limit.why}"
        severity = None if limit.unless not in ("", OFFLOADED) else Severity.ERROR
        if limit.is_of_engine:
            fix = f"write {limit.instead if limit.value == 'true' else shown(limit.instead)}"
            yield fault(limit.key, limit.problem, effect, fix, severity=severity)
        else:
            fix = f"write {limit.key}: {limit.instead}"
            yield job_fault(subject, limit.key, limit.problem, effect, fix, severity=severity)


def limits_on_cpu(job: Job) -> list[CpuLimit]:
    """Returns the limits of a CPU that keys of a job meet; Triton's interpreter runs Liger's kernels."""
    is_interpreted = {**os.environ, **job.env}.get("TRITON_INTERPRET") == "1"
    values = {limit.key: getattr(job, limit.key, None) for limit in CPU_LIMITS if not limit.is_of_engine}
    return [limit for limit in cpu_limits_of(values) if not (limit.key == "liger" and is_interpreted)]


def _saves_no_weights(s: Subject, job: Job) -> bool:
    is_ungathered = s.stage == 3 and not s.is_true(_GATHER, default=True)
    return job.save_only_model and job.method is Method.FULL and is_ungathered


_STOPS = "the run stops before it loads the model"
_STOPS_FIRST = "the run stops before the first step"
_STOPS_LOADED = "the run stops once the model is loaded"
_OF_VIDEOS = ("video_max_pixels", "video_fps", "video_maxlen")
_OF_TOWERS = ("max_pixels", "min_pixels", "image_patches", *_OF_VIDEOS, *(row.key for row in limits.WITH_ADAPTERS))


def _not_of_task(subject: Subject) -> Iterator[Fault]:
    """Reports keys of the job that its task or method does not support."""
    for limit, problem in limits.broken(subject.job.job) if subject.job is not None else ():
        yield job_fault(subject, limit.key, problem, _STOPS, limit.fix)


def _without_tower(s: Subject, job: Job) -> list[dict[str, Any]]:
    """Returns keys of images, videos and towers in the job of a language model."""
    given = [key for key in _OF_TOWERS if getattr(job, key) != getattr(_PLAIN, key)]
    return [{"name": key} for key in given if s.model is not None and not s.model.has_tower]


def _of_videos(s: Subject, job: Job) -> list[dict[str, Any]]:
    """Returns keys of videos in the job of a model with a tower that does not train on them."""
    if s.model is None or not s.model.has_tower or traits(s.model.model_type).trains_videos:
        return []
    return [{"name": key} for key in _OF_VIDEOS if getattr(job, key)]


def _named_in_vain(subject: Subject) -> Iterator[Fault]:
    """Reports patterns of parameters and modules of an adapter that are in no name of the model."""
    job = subject.asked
    given = _named_keys(job) if job is not None else []
    if subject.job is None or job is None or not given:
        return
    names = names_of(subject.model, job.model)
    if names is not None:  # names in files may list each expert separately
        given = [key for key in given if key.endswith("target_parameters") and subject.model is None]
    if given and (names is None or subject.model is None):
        problem = f"{', '.join(given)} cannot be checked: the names of {job.model}'s parameters are not known here"
        fix = "name a folder with its config.json or its weights to check them before the launch"
        effect = f"{_STOPS_LOADED} if it has no such names"
        yield replace(job_fault(subject, "model", problem, effect, fix), severity=Severity.WARNING)
    if names is None:
        return
    for found in unknown(job, names, subject.model):
        yield fault("", found.problem, _STOPS_LOADED, found.fix, place=subject.job.locate(found.keys))


def _named_keys(job: Job) -> list[str]:
    """Returns the keys of a job that name parameters or modules."""
    if job.method is Method.FULL:
        return [key for key in ("freeze", "train_only") if getattr(job, key)]
    plain = Lora()
    keys = ("targets", "target_parameters", "modules_to_save")
    return [f"lora: {key}" for key in keys if getattr(job.lora, key) != getattr(plain, key)]


def _is_weighted(job: Job) -> bool:
    return any(source.weight is not None for source in job.train_sources)


_NO_TURNS = ("task is pretrain, whose texts have no turns", lambda job: job.task is not Task.PRETRAIN)
_NO_EVALUATION = ("there are no evaluation data", lambda job: job.has_eval)
READ_WITH: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "dpo": ("task is not dpo", lambda job: job.task is Task.DPO),
        **dict.fromkeys(("loss_on", "system", "thinking"), _NO_TURNS),
        **dict.fromkeys(("eval_strategy", "eval_on_start", "eval_micro_batch"), _NO_EVALUATION),
        "eval_steps": ("eval_strategy is epoch", lambda job: job.eval_strategy == Interval.STEPS),
        "lora": ("method is full", lambda job: job.method is not Method.FULL),
        "shuffle_buffer": ("streaming is false", lambda job: job.streaming),
        "stopping_strategy": ("no data set has a weight", _is_weighted),
        "muon_learning_rate": ("optimizer is not muon", lambda job: job.optimizer is Optimizer.MUON),
        "torch_compile_backend": ("torch_compile is false", lambda job: job.torch_compile),
        "warmup_ratio": ("warmup_steps is set, in its place", lambda job: job.warmup_steps is None),
        "early_stopping_threshold": ("early_stopping is not set", lambda job: job.early_stopping is not None),
    }
)
"""Keys that are read only beside others → why a job does not read them otherwise, and whether it does."""


def _unread(_: Subject, job: Job) -> list[dict[str, Any]]:
    """Returns keys that differ from their default, but that nothing reads."""
    given = {key: row for key, row in READ_WITH.items() if getattr(job, key) != getattr(_PLAIN, key)}
    return [{"name": key, "why": why} for key, (why, is_read) in given.items() if not is_read(job)]


_E, _W = Severity.ERROR, Severity.WARNING
# fmt: off
ODD = {
    "warmup_steps": in_job(
        "warmup_steps", lambda s, job: job.max_steps is not None and (job.warmup_steps or 0) >= job.max_steps,
        problem="warmup_steps is {value}, but max_steps is {job.max_steps}",
        effect="the learning rate never gets to its peak", fix="write fewer than max_steps"),
    "new_tokens": in_job(
        "new_tokens", lambda s, job: len(set(job.new_tokens)) < len(job.new_tokens),
        problem="new_tokens is {value}, but one of them is there twice",
        effect="it is added once", fix="remove the second one"),
    "samples.max_new_tokens": in_job(
        "samples.max_new_tokens",
        lambda s, job: job.samples is not None and job.samples.max_new_tokens > job.seq_len,
        problem="samples.max_new_tokens is {value}, but seq_len is {job.seq_len}",
        effect="texts may be longer than any of the training, and each of their tokens takes a forward pass",
        fix="write seq_len at most"),
    "min_pixels": in_job(
        "min_pixels", lambda s, job: (job.min_pixels or 0) > (job.max_pixels or job.min_pixels or 0),
        problem="min_pixels is {value}, but max_pixels is {job.max_pixels}",
        effect="images are made smaller, then larger again", fix="write max_pixels at most"),
    "learning_rate": in_job(
        "learning_rate", lambda s, job: job.learning_rate > LARGEST_RATE,
        problem=f"learning_rate is {{value}}, but rates above {LARGEST_RATE} are too large for {{job.optimizer}}",
        effect="the loss diverges in the first steps",
        fix="write 1e-5 (full) or 1e-4 (lora), or leave it out"),
}
"""Keys of a job whose value makes no sense → their check."""


RULES = (
    Rule(id="DS221", severity=_E, title="feature that dstrain run does not support", find=_not_run,
         source="dstrain/train"),
    Rule(id="DS222", severity=_E, title="tensor parallelism that cannot be saved",
         find=when(_TP, _is_unsaved, problem=_UNSUPPORTED,
                   effect="save_model writes no weights: accelerate gathers the parts of tensor parallelism only if "
                          f"{GATHERS} is true, at any stage",
                   fix=f'remove it, or write "{GATHERS}": true for your own Trainer'),
         source="accelerate 1.15 accelerator.py: get_state_dict"),
    Rule(id="DS223", severity=_E, title="sequence parallelism without reduce_scatter",
         find=when(_SCATTER, _mixes_averages,
                   problem="reduce_scatter is {value} under ZeRO-3, and sp in job.yaml is above 1",
                   effect="gradients are multiplied by sp, except for those larger than reduce_bucket_size",
                   fix="remove the line"),
         source="deepspeed 0.19.8 runtime/zero/stage3.py: __avg_scatter_contiguous_grads, __avg_scatter_grads"),
    Rule(id="DS224", severity=_E, title="parallelism at odds with the job",
         find=together(
             _of_size(_TP, "tp", lambda s: s.number(_TP, 1) != 1),
             _of_size(_EP, "ep", is_on("expert_parallel.enabled")),
             when(_HPZ, lambda s: "tp" in _shared(s) and s.stage == 3 and s.number(_HPZ, 1) > 1,
                  problem="{path} with tp {job.tp}",
                  effect=_SAYS["hpZ and AutoTP"],
                  fix="remove it"),
             in_job("tp", lambda s, job: "tp" in _shared(s) and s.stage == 0, problem="tp is {value} without ZeRO",
                    effect=_SAYS["TP needs ZeRO"],
                    fix='write "stage": 1 in ds_config.json'),
             in_job("ep", lambda s, job: "ep" in _shared(s) and s.stage == 0, problem="ep is {value} without ZeRO",
                    effect=_SAYS["EP needs ZeRO"], fix='write "stage": 1 in ds_config.json'),
             when(_GATHER, _ungathered, problem="{path} is false with {key} {size}",
                  effect="no checkpoint holds whole weights, and no program makes them of the parts",
                  fix="remove it")),
         source="dstrain/train/parts/parallel.py; a norm of 3.71 in place of 4.78 on CPU ranks, deepspeed 0.19.8"),
    Rule(id="DS226", severity=_E, title="key that the task or the method does not support", find=_not_of_task,
         source="dstrain/job/limits.py"),
    Rule(id="DS227", severity=_E, title="name not found in the model", find=_named_in_vain,
         source="dstrain/train/adapters.py; peft 0.21 tuners/tuners_utils.py: check_target_module_exists"),
    Rule(id="DS901", severity=_W, title="interval longer than the run",
         find=together(
             in_job("eval_steps", lambda s, job: job.has_eval and (job.eval_steps or 0) > (job.max_steps or 0) > 1,
                    problem="eval_steps is {job.eval_steps}, but max_steps is {job.max_steps}",
                    effect="the model is evaluated only at the end",
                    fix="write a eval_steps of at most {job.max_steps}"),
             in_job("logging_steps", lambda s, job: job.logging_steps > (job.max_steps or 0) > 1,
                    problem="logging_steps is {job.logging_steps}, but max_steps is {job.max_steps}",
                    effect="the metrics have a single line, at the end",
                    fix="write a logging_steps of at most {job.max_steps}")),
         source="dstrain/job/schema.py"),
    Rule(id="DS902", severity=_W, title="evaluation on the training data",
         find=in_job("eval_data", _trains_on_its_evaluation, problem="eval_data is the training data",
                     effect="eval_loss measures memorization", fix="use other data"),
         source="dstrain/train/arguments.py"),
    Rule(id="DS903", severity=_W, title="samples longer than the model's positions",
         find=in_job("seq_len", _too_long,
                     problem="seq_len is {value}, but {model.name} has {model.max_position_embeddings} positions",
                     effect="positions beyond were never trained: the loss is wrong there, or an index is out of range",
                     fix="{instead}"),
         source="config.json: max_position_embeddings"),
    Rule(id="DS904", severity=_W, title="setting that the GPU does not support",
         find=together(
             in_job("precision", _lacks_bf16, problem="precision is bf16, but {gpu} does not support it",
                    effect="matrix products run in fp32, at a fraction of the speed", fix="write precision: fp16"),
             _not_on_cpu),
         source="dstrain/facts/cluster/gpus.py"),
    Rule(id="DS905", severity=_E, title="rope scaling that the model cannot have",
         find=in_job("rope_scaling", _cannot_scale, problem="{why}",
                     effect="the model is refused, or trains on untrained positions", fix="remove rope_scaling{more}"),
         source="Transformers 5.23 modeling_rope_utils.py; dstrain/plan/rope_scaling.py"),
    Rule(id="DS906", severity=_E, title="parameter that the schedule does not take",
         find=together(
             in_job("lr_scheduler_kwargs", _not_taken, effect=_STOPS_FIRST, fix="remove it",
                    problem='{job.lr_scheduler_type} has no parameter "{name}"; {takes}'),
             in_job("lr_scheduler_type", _needed, effect=_STOPS_FIRST, fix="write lr_scheduler_kwargs: {{{last}: …}}",
                    problem="{job.lr_scheduler_type} needs {needed} in lr_scheduler_kwargs")),
         source="transformers 5.23 optimization.py: TYPE_TO_SCHEDULER_FUNCTION"),
    Rule(id="DS907", severity=_W, title="key of the job that is not read",
         find=in_job("{name}", _unread, problem="{key} is {value}, but {why}", effect="it is not read",
                     fix="remove it"),
         source="dstrain/config/lint/rules/jobs.py: READ_WITH"),
    Rule(id="DS908", severity=_W, title="label smoothing without effect on this loss",
         find=in_job("dpo", lambda s, job: limits.is_smoothing_unused(job),
                     problem="label_smoothing is {job.dpo.label_smoothing:g}, but loss_type is {job.dpo.loss_type}",
                     effect="it changes nothing", fix="write loss_type: robust, or remove it"),
         source="trl 1.16 trainer/dpo_trainer.py: DPOTrainer._compute_loss"),
    Rule(id="DS909", severity=_W, title="key of images or towers for a language model",
         find=in_job("{name}", _without_tower, problem="{key} is {value}, but {model.name} has no tower",
                     effect="it changes nothing, or stops the run", fix="remove the key"),
         source="dstrain/train/adapters.py: freeze"),
    Rule(id="DS910", severity=_E, title="checkpoints without weights",
         find=in_job("save_only_model", _saves_no_weights,
                     problem=f"save_only_model is true, but {_GATHER} is false",
                     effect="the run stops before it loads the model: its checkpoints would have no weights",
                     fix=f'write "{GATHERS}": true in ds_config.json'),
         source="dstrain/train/parts/saving.py: require_weights"),
    Rule(id="DS911", severity=_W, title="key of videos for a family that does not train on them",
         find=in_job("{name}", _of_videos,
                     problem="{key} is {value}, but {model.model_type} does not train on videos",
                     effect="it changes nothing", fix="remove the key"),
         source="dstrain/facts/model/traits.py: trains_videos"),
    Rule(id="DS912", severity=_W, title="value of the job that makes no sense", find=together(*ODD.values()),
         source="dstrain/config/lint/rules/jobs.py: ODD"),
)
"""Rules about the job."""
# fmt: on
