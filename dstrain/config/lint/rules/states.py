"""Rules about the dtypes of master weights and optimizer states, the optimizer that a job asks for, and ZenFlow."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.choices import Optimizer, Precision
from dstrain.config.lint.advisories import accumulation
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import REFUSES, STOPS, Rule, when
from dstrain.config.lint.rules.conflicts import sums_in_fp32
from dstrain.config.lint.rules.jobs import in_job
from dstrain.config.lint.subject import Subject, has_zenflow
from dstrain.plan.estimate import BF16_STATES
from dstrain.plan.labels import bf16_losses


def _low_precision_states(subject: Subject) -> Iterator[Fault]:
    masters = {name: subject.is_true(f"{name}.{name}_master_weights_and_grads") for name in ("bf16", "fp16")}
    has_bf16_states, is_on_gpu = subject.is_true("bf16.bf16_optimizer_states"), not subject.offloads_optimizer
    for name, is_on in masters.items():
        key = f"{name}_master_weights_and_grads"
        if is_on and subject.stage == 0:
            fix = 'write "stage": 1 or higher, or remove the line'
            yield _refused(name, key, f"{key} with ZeRO-0", "DeepSpeed refuses it: only ZeRO has such copies", fix)
    if masters["bf16"] and subject.stage > 0 and is_on_gpu and not has_bf16_states:
        problem = "bf16_master_weights_and_grads with fp32 states on the GPU"
        effect = f"{STOPS}: this combination needs an optimizer on the CPU"
        fix = 'also write "bf16_optimizer_states": true, or offload the optimizer'
        yield _refused("bf16", "bf16_master_weights_and_grads", problem, effect, fix)
    key = "fp16_master_weights_and_grads"
    if all(masters.values()):
        yield _refused("fp16", key, f"{key} together with that of bf16", STOPS, "remove one of them")
    elif masters["fp16"] and subject.stage > 0 and is_on_gpu:
        fix = "offload the optimizer, or remove the line"
        yield _refused("fp16", key, f"{key} without an offloaded optimizer", STOPS, fix)
    if has_bf16_states and masters["bf16"] and not is_on_gpu and subject.is_trainers and not subject.has("optimizer"):
        problem = "bf16_optimizer_states with an offloaded optimizer of the Trainer"
        effect = f"{STOPS}: accelerate makes DeepSpeed's CPU Adam with fp32 moments"
        fix = 'add "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}}'
        yield _refused("bf16", "bf16_optimizer_states", problem, effect, fix)
    if has_bf16_states and not masters["bf16"]:
        problem = "bf16_optimizer_states without bf16_master_weights_and_grads"
        fix = 'also write "bf16_master_weights_and_grads": true, or remove the line'
        yield _refused("bf16", "bf16_optimizer_states", problem, REFUSES, fix)


def _refused(section: str, key: str, problem: str, effect: str, fix: str) -> Fault:
    return Fault(pointer=(section, key), problem=problem, effect=effect, fix=fix)


def _bf16_masters(subject: Subject) -> Iterator[Fault]:
    """Reports what is lost where weights are stepped in bf16, as keys or the job's optimizer say."""
    job = subject.asked
    of_job = job is not None and job.optimizer is Optimizer.ADAMW_BF16 and job.precision is Precision.BF16
    key, moments = BF16_STATES
    is_kept, has_moments = (subject.at(f"bf16.{name}", of_job) is True for name in (key, moments))
    if subject.stage == 0 or not is_kept or (of_job and sums_in_fp32(subject)):
        return  # DS225 reports what keeps the job's states from bf16
    if sums_in_fp32(subject):
        effect = "it has no effect: ZeRO-1 that sums in fp32 is another engine, with fp32 states"
        yield Fault(pointer=("bf16", key), problem=f"{key} with ZeRO-1 and fp32 sums", effect=effect, fix="remove it")
        return
    lost = bf16_losses(job.learning_rate if job else None, job.adam_beta2 if job and has_moments else None)
    if of_job:
        problem = "optimizer is adamw_bf16: master weights, gradients and moments are kept in bf16"
        fix = "write optimizer: adamw, unless losses are those of a run in fp32"
        yield in_job(subject, "optimizer", problem, lost, fix)
        return
    is_counted = has_moments and (job is None or job.optimizer is Optimizer.ADAMW)
    yield Fault(
        pointer=("bf16", key),
        problem="master weights and gradients are kept in bf16",
        effect=lost + ("" if is_counted else "; estimates count fp32 here, which takes more"),
        fix="remove the line, unless losses are those of a run in fp32",
    )


def _not_the_jobs(subject: Subject) -> Iterator[Fault]:
    """Reports keys that put another optimizer in the place of the job's AdamW with states of 8 or 16 bits."""
    optimizer = subject.job.job.optimizer if subject.job is not None else Optimizer.ADAMW
    if subject.job is None or optimizer not in (Optimizer.ADAMW_8BIT, Optimizer.ADAMW_BF16):
        return
    said = f"{subject.job.locate(('optimizer',))}: optimizer is {optimizer}"
    if subject.has("optimizer"):
        yield Fault(pointer=("optimizer",), problem=f"an optimizer of the engine, but {said}",
                    effect="the engine's optimizer trains", fix="remove the section")  # fmt: skip
    if subject.device("offload_optimizer") != "none":
        effect = "accelerate replaces it with DeepSpeed's CPU Adam without decoupled weight decay, with fp32 moments"
        yield Fault(pointer=("zero_optimization", "offload_optimizer"), problem=f"an offloaded optimizer, but {said}",
                    effect=effect, fix="remove the section, or write optimizer: adamw in job.yaml")  # fmt: skip
    if optimizer is Optimizer.ADAMW_BF16:
        yield from _not_in_bf16(subject, said)


def _not_in_bf16(subject: Subject, said: str) -> Iterator[Fault]:
    """Reports what keeps the job's states from being in bf16."""
    instead = ", or optimizer: adamw in job.yaml"
    if subject.stage == 0:
        fix = f'write "stage": 1 or higher in ds_config.json{instead}'
        yield in_job(subject, "optimizer", "optimizer is adamw_bf16 with ZeRO-0", REFUSES, fix)
    for key in BF16_STATES:
        if subject.at(f"bf16.{key}", True) is False:
            yield Fault(pointer=("bf16", key), problem=f"{key} is false, but {said}",
                        effect="states are kept in fp32", fix=f"remove the line{instead}")  # fmt: skip
    if sums_in_fp32(subject):
        effect = "ZeRO-1 that sums in fp32 is another engine, with fp32 states"
        yield Fault(pointer=("data_types", "grad_accum_dtype"), problem=f"fp32 sums with ZeRO-1, but {said}",
                    effect=effect, fix=f'remove the line, write "stage": 2{instead}')  # fmt: skip


_ZERO = "zero_optimization."
_ZENFLOW = _ZERO + "zenflow"
_ENGINE = "deepspeed 0.19.8 runtime/zenflow/engine.py: configure_zenflow"
_OPTIMIZER = "deepspeed 0.19.8 runtime/zenflow/zenflow_stage_1_and_2.py: "
_E = Severity.ERROR


def _is_interval_inconsistent(s: Subject) -> bool:
    is_auto = bool(s.at(_ZENFLOW + ".select_strategy", "auto") == "auto")
    interval = s.at(_ZENFLOW + ".select_interval", "auto")
    return has_zenflow(s) and is_auto == (isinstance(interval, int) and not isinstance(interval, bool))


def _selects_more_often(s: Subject) -> bool:
    select, update = s.at(_ZENFLOW + ".select_interval", 0), s.at(_ZENFLOW + ".update_interval", 0)
    is_step = s.at(_ZENFLOW + ".select_strategy", "auto") == "step"
    return is_step and type(select) is int and type(update) is int and select < update


def _does_not_overlap(s: Subject) -> bool:
    is_overlapped = s.at(_ZERO + "overlap_comm", s.stage == 3) is True
    return s.is_true(_ZENFLOW + ".offload") and s.stage > 0 and not is_overlapped


def _accumulation(subject: Subject) -> Iterator[Fault]:
    """ZenFlow replaces the accumulation steps that the Trainer counts by its update_interval."""
    steps = accumulation(subject)
    if has_zenflow(subject) and steps is not None and steps > 1:
        yield Fault(
            pointer=("gradient_accumulation_steps",),
            problem=f"zenflow with {steps} accumulation steps",
            effect="the engine replaces them by zenflow's update_interval, but the Trainer keeps counting them",
            fix="accumulate 1 step, and set update_interval",
        )


# fmt: off
RULES = (
    Rule(id="DS225", severity=Severity.ERROR, title="another optimizer than the job's", find=_not_the_jobs,
         source="Transformers 5.23 integrations/deepspeed.py: deepspeed_optim_sched; "
                "accelerate 1.15 utils/deepspeed.py: map_pytorch_optim_to_deepspeed; "
                "deepspeed 0.19.8 runtime/engine.py: _do_optimizer_sanity_check"),
    Rule(id="DS306", severity=Severity.ERROR, title="low-precision states without their requirements",
         find=_low_precision_states,
         source="deepspeed 0.19.8 runtime/config.py: _do_error_check; runtime/base_optimizer.py: "
                "_configure_master_weights"),
    Rule(id="DS332", severity=Severity.WARNING, title="master weights in bf16", find=_bf16_masters,
         source="deepspeed 0.19.8 runtime/base_optimizer.py: _configure_master_weights; Zamirai et al. "
                "(arXiv 2010.06192); Kingma and Ba (arXiv 1412.6980), 2.1"),
    Rule(id="DS307", severity=_E, title="ZenFlow without an offloaded optimizer",
         find=when(_ZENFLOW, lambda s: has_zenflow(s) and s.stage > 0 and s.device("offload_optimizer") != "cpu",
                   problem="zenflow without an optimizer on the CPU",
                   fix='write "offload_optimizer": {{"device": "cpu"}}, or remove zenflow'),
         source=_OPTIMIZER + "Zenflow must be used with cpu offload"),
    Rule(id="DS308", severity=_E, title="ZenFlow's strategy and interval",
         find=when(_ZENFLOW + ".select_interval", _is_interval_inconsistent,
                   problem="zenflow's select_strategy and select_interval contradict each other",
                   fix='write "select_strategy": "step" with a number, or omit both'), source=_ENGINE),
    Rule(id="DS309", severity=_E, title="ZenFlow's two intervals",
         find=when(_ZENFLOW + ".update_interval", _selects_more_often,
                   problem="zenflow updates every {value} steps and selects more often",
                   fix="write a select_interval of at least update_interval"), source=_ENGINE),
    Rule(id="DS310", severity=_E, title="ZenFlow with the Trainer's optimizer",
         find=when(_ZENFLOW, lambda s: has_zenflow(s) and s.is_trainers and not s.has("optimizer"),
                   problem="zenflow without an optimizer section",
                   effect="the run stops when the engine starts: ZenFlow reads the optimizer's parameters here",
                   fix='write "optimizer": {{"type": "AdamW", "params": {{"lr": "auto"}}}}'),
         source=_OPTIMIZER + "optimizer_params"),
    Rule(id="DS326", severity=_E, title="ZenFlow's offload without overlap",
         find=when(_ZENFLOW + ".offload", _does_not_overlap, problem="zenflow.offload without overlap_comm",
                   fix='write "overlap_comm": true'),
         source=_OPTIMIZER + "offload selective optimizer"),
    Rule(id="DS327", severity=Severity.WARNING, title="ZenFlow with accumulation", find=_accumulation,
         source=_ENGINE + " sets gradient_accumulation_steps"),
)
"""Rules about states."""
# fmt: on
