"""The checks of a job, one row each: `run` refuses at the first that fails, and `lint` reports all that do.

`import`, `data` and `script` ask for some of them. A row says one fault in the same words everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from dstrain.choices import Attention, Interval
from dstrain.config.lint.rule import JobContext, Subject
from dstrain.config.lint.rules.jobs import limits_on_cpu
from dstrain.errors import DstrainError, EnvironmentProblem, InvalidConfig, Place
from dstrain.facts import probe, this_machine
from dstrain.facts.attention_kernels import runs_on
from dstrain.facts.cluster import machines
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.this_machine import trains_on_cpu
from dstrain.facts.workload import Workload
from dstrain.findings import Finding, Severity
from dstrain.job.data_source import held_out_counts
from dstrain.job.file import JobFile
from dstrain.job.limits import shown as written
from dstrain.job.schema import Job
from dstrain.launch.prepare.inputs import (
    check_adapter,
    check_contents,
    check_engine_packages,
    check_files,
    check_model,
    check_packages,
    require_data,
)
from dstrain.launch.prepare.job_context import request_of, sizes_of
from dstrain.launch.prepare.resume import check_resume
from dstrain.plan.configuration import DEFAULTS, DEGREES, choices
from dstrain.plan.estimate import effective
from dstrain.plan.search.rules import Rule, broken, broken_by_any
from dstrain.units import counted

DATA = "DS808"
"""The lint rule about the data of a job, and about keys that do not go together."""
ABSENT = "DS812"
"""The lint rule about inputs and packages of a job that are not on this machine."""
HOSTFILE = "DS805"
"""The lint rule about hostfiles."""
SLOTS = "DS806"
"""The lint rule about the slots of a hostfile."""
_REFUSED = "dstrain run refuses it"
_ELSEWHERE = f"{_REFUSED}, unless the machine that starts the run has it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of a job."""

    rule: str = DATA
    """The lint rule that reports it."""
    key: str = ""
    """The key of the job that it judges; empty if its errors have places of their own."""
    find: Callable[[JobFile, JobContext], Iterable[str] | None]
    """Returns notes, if it has any. Raises DstrainError for a job that cannot run."""
    effect: str = _REFUSED
    """The consequence, as lint tells it."""
    severity: Severity = Severity.ERROR
    """How much it matters to lint: a warning if another machine may run the job."""

    def findings(self, file: JobFile, context: JobContext) -> Iterator[Finding]:
        """Yields its errors as lint reports them."""
        try:
            self.find(file, context)
        except DstrainError as error:
            for part in error.parts or (error,):
                yield Finding(
                    rule=self.rule,
                    severity=self.severity,
                    place=part.place or file.locate((self.key,) if self.key else ()),
                    problem=part.text.replace("\n", "; "),
                    effect=self.effect,
                    fix=part.hint or "correct the file",
                )


def require(checks: Iterable[Check], context: JobContext) -> list[str]:
    """Returns the notes of checks. Raises InvalidConfig or EnvironmentProblem for the first one that fails."""
    file = context.job
    assert file is not None
    return [note for check in checks for note in check.find(file, context) or ()]


def findings(checks: Iterable[Check], context: JobContext) -> list[Finding]:
    """Returns the findings of checks, errors before warnings."""
    file = context.job
    assert file is not None
    found = [finding for check in checks for finding in check.findings(file, context)]
    return sorted(found, key=lambda finding: list(Severity).index(finding.severity))


def _of_key(key: str, judge: Callable[[Job], tuple[str, str] | None]) -> Check:
    """Returns the check of a key by its job alone; `judge` returns the problem and what to write."""

    def find(file: JobFile, context: JobContext) -> None:
        if (fault := judge(file.job)) is not None:
            raise InvalidConfig(fault[0], place=file.locate((key,)), hint=fault[1])

    return Check(key=key, find=find)


def _runs_on_cpu(file: JobFile, context: JobContext) -> None:
    """Raises InvalidConfig for a setting of the job that no CPU runs, if its ranks train on the CPU."""
    on_cpu = trains_on_cpu(os.environ, file.job.env)
    for limit in limits_on_cpu(file.job) if on_cpu else ():
        if not limit.unless:
            place, hint = file.locate((limit.key,)), f"{limit.key}: {limit.instead}"
            raise InvalidConfig(f"{limit.problem}: {limit.why}", place=place, hint=hint)


_EVALUATION_DATA = "Set eval_data to the evaluation data or val_split to a share of data"


def _eval_steps(job: Job) -> tuple[str, str] | None:
    """Returns why no evaluation runs every `eval_steps`, and what to write."""
    if job.eval_steps is None or job.has_eval:
        return None
    return f"eval_steps is {job.eval_steps}, but eval_data is not set", f"{_EVALUATION_DATA}, or remove eval_steps."


def _val_split(job: Job) -> tuple[str, str] | None:
    """Returns why no sample is held out or none is left, even if all rows are usable, and what to write."""
    if job.val_split is None:
        return None
    if job.eval_data is not None:
        return f"val_split is {job.val_split:g}, but eval_data is set too", "Remove one of the two."
    if job.streaming and job.val_split < 1:
        return None  # a limit of streaming says it
    sizes = sizes_of(job)
    try:
        held_out_counts(sizes or [], job.val_split)
    except InvalidConfig as error:
        return (error.problem, error.hint or "") if sizes and sum(sizes) else None
    return None


def _has_best(key: str, job: Job) -> tuple[str, str] | None:
    """Returns why a job that compares evaluations has no best checkpoint, and what to write.

    It has one if there is a checkpoint of each evaluation at least.
    """
    if not job.keeps_best or key != ("load_best" if job.early_stopping is None else "early_stopping"):
        return None
    if not job.has_eval:
        return f"{key} compares evaluations, but eval_data is not set", f"{_EVALUATION_DATA}, or remove {key}."
    needs = f"{key} needs a checkpoint of each evaluation"
    if job.eval_strategy is not job.save_strategy:
        problem = f"{needs}, but eval_strategy is {job.eval_strategy} and save_strategy is {job.save_strategy}"
        return problem, f"save_strategy: {job.eval_strategy}"
    if job.eval_strategy is Interval.EPOCH:
        return None
    if job.eval_steps is None:
        problem = f"{key} compares evaluations, but eval_steps is not set, and the only one is that at the end"
        return problem, f"eval_steps: {job.save_steps}"
    if job.eval_steps == job.save_steps or (job.save_steps >= 1 and job.eval_steps % job.save_steps == 0):
        return None
    problem = f"{needs}, but eval_steps is {job.eval_steps} and save_steps is {job.save_steps}"
    return problem, f"save_steps: {job.eval_steps}"


def _generates(job: Job) -> tuple[str, str] | None:
    """Returns why no samples would be generated, and what to write."""
    if job.samples is None:
        return None
    if not job.samples.prompts and not job.samples.eval_prompts:
        return "samples has neither prompts nor eval_prompts", "add prompts: [Who are you?] to samples"
    if job.samples.eval_prompts and not job.has_eval:
        problem = f"samples: eval_prompts is {job.samples.eval_prompts}, but eval_data is not set"
        return problem, f"{_EVALUATION_DATA}, or write prompts."
    if job.samples.generate_every is None and not job.has_eval:
        return (
            "samples are generated at each evaluation, but eval_data is not set",
            "add generate_every: 100 to samples, or set eval_data",
        )
    return None


def _has_gpus(file: JobFile, context: JobContext) -> None:
    """Raises EnvironmentProblem if this machine is to train on GPUs and has fewer than slots."""
    hosts, cluster = context.hosts, context.cluster
    if hosts is None or cluster is None or cluster.gpu.is_cpu or not machines.is_local(hosts):
        return
    if not probe.local_gpus():
        raise EnvironmentProblem(
            f"{hosts.name} asks for {counted(hosts.num_slots, 'GPU')}, but NVML finds none on this machine",
            hint="Check nvidia-smi. To train on the CPU instead: dstrain run --set env.DS_ACCELERATOR=cpu",
        )
    if (lack := machines.shortage(hosts)) is not None:
        raise lack


def _runs_on_gpu(file: JobFile, context: JobContext) -> None:
    """Raises InvalidConfig for attention that the GPUs which were found are too old for."""
    cluster, attn = context.cluster, file.job.attn
    if cluster is None or cluster.gpu_origin is not Origin.MEASURED or cluster.gpu.fp16_flops_per_s <= 0:
        return
    if not runs_on(cluster.gpu, attn):
        raise InvalidConfig(
            f"{attn} does not run on {cluster.gpu.name}", place=file.locate(("attn",)), hint="attn: auto"
        )


def _hosts_are_read(file: JobFile, context: JobContext) -> None:
    """Raises InvalidConfig with every line of the hostfile that is wrong."""
    if file.job.hostfile is not None:
        machines.hosts_of(file)


def _of_hosts(
    judge: Callable[[Hosts, Cluster | None], DstrainError | None],
    rule: str,
    effect: str,
) -> Check:
    """Returns a check of the hosts in a hostfile; `judge` returns a fault of them, or of them under a plan."""

    def find(file: JobFile, context: JobContext) -> None:
        hosts = context.hosts if file.job.hostfile is not None else None
        if hosts is not None and (fault := judge(hosts, context.planned)) is not None:
            raise fault

    return Check(rule=rule, find=find, effect=effect, severity=Severity.WARNING)


def _unplanned_slots(hosts: Hosts, planned: Cluster | None) -> InvalidConfig | None:
    """Returns the error of hosts with more or fewer slots in total than the plan has GPUs."""
    if planned is None or hosts.num_slots == planned.num_gpus or machines.placeholders(hosts):
        return None
    return InvalidConfig(
        f"{counted(hosts.num_slots, 'slot')} in total, but the plan is for {counted(planned.num_gpus, 'GPU')}",
        place=Place(file=hosts.name, line=1, column=1),
        hint=f"dstrain gen-config --gpus {hosts.num_slots} plans for these",
    )


def _one_machine(file: JobFile, context: JobContext) -> None:
    """Raises InvalidConfig with the hosts that, by their names, are the machine of an earlier host."""
    hosts = context.hosts
    if hosts is None:
        return
    here, names, faults = this_machine.names(), dict[str, str](), list[InvalidConfig]()
    for order, host in enumerate(hosts.hosts, start=1):
        name = host.name.rpartition("@")[2].lower()
        is_address = ":" in name or name.replace(".", "").isdigit()
        is_here = this_machine.is_this_machine(name, here) and not (name.startswith("127.") and name != "127.0.0.1")
        machine = "" if is_here else name if is_address else name.partition(".")[0]
        first = names.setdefault(machine, name)
        if first != name and (is_here or first.startswith(f"{name}.") or name.startswith(f"{first}.")):
            place = Place(file=hosts.name, line=host.line or order, column=1)
            text = f"{host.name} and {first} are two names of one machine"
            faults.append(InvalidConfig(text, place=place, hint="remove one of the two lines"))
    if faults:
        raise InvalidConfig("\n".join(fault.problem for fault in faults), hint=faults[0].hint, parts=faults)


_GIVE_WAY = (*DEGREES, "loss", "liger", "tiled_mlp", "activation_offload", "torch_compile", "attn", "optimizer")
_PLAIN = {key: choices()[key].of(DEFAULTS) for key in _GIVE_WAY} | {"attn": Attention.AUTO}
"""Keys of a job that rules limit, with the value that always works; of two that exclude each other, the latter one
is to be changed."""


def _combines(key: str, file: JobFile, context: JobContext) -> None:
    """Raises InvalidConfig if a key breaks rules with the job's other keys, of which none after it in `_PLAIN` does.

    Leaves out rules that lint reports at another key. For a model whose facts are unknown, only the rules that need no
    model are checked.
    """
    job, model, cluster = file.job, context.model, context.cluster
    if cluster is None or getattr(job, key) == _PLAIN[key]:
        return
    wrong = [
        rule for rule in _broken(job, model, cluster, context) if not rule.lint and _at_odds(job, rule)[-1:] == [key]
    ]
    if wrong:
        keys = [key, *dict.fromkeys(name for rule in wrong for name in _at_odds(job, rule)[:-1])]
        values = " and ".join(f"{name} is {written(getattr(job, name))}" for name in keys)
        cure = wrong[0].cure if len(wrong) == 1 else None
        raise InvalidConfig(
            f"{values}, but {'; '.join(rule.says for rule in wrong)}",
            place=file.locate((key,)),
            hint=f"Write {cure or f'{key}: {written(_PLAIN[key])}'}.",
        )


def _broken(job: Job, model: ModelFacts | None, cluster: Cluster, context: JobContext) -> list[Rule]:
    """Returns the rules that a job breaks, with the ZeRO of its ds_config.json if that is known and legal."""
    request = request_of(job)
    if model is None:
        return broken_by_any(cluster, request.configuration)
    configuration = request.of_model(model)
    if isinstance(context, Subject):
        with suppress(InvalidConfig):  # lint reports a value that means nothing to the engine
            configuration = replace(configuration, zero=effective(model, request, context.config).zero)
    return broken(Workload(model=model, cluster=cluster), configuration)


def _at_odds(job: Job, rule: Rule) -> list[str]:
    """Returns the keys of a rule that are not plain, in the order of `_PLAIN`: the last one gives way."""
    return [name for name, plain in _PLAIN.items() if name in rule.options and getattr(job, name) != plain]


EVALUATION = (
    _of_key("eval_steps", _eval_steps),
    _of_key("val_split", _val_split),
    *(_of_key(key, partial(_has_best, key)) for key in ("load_best", "early_stopping")),
    _of_key("samples", _generates),
)
"""Keys of a job that need evaluations: their data, their intervals, and checkpoints of them."""
_absent = partial(Check, rule=ABSENT, severity=Severity.WARNING, effect=_ELSEWHERE)
DATA_IS_SET = _absent(key="data", find=require_data, effect=_REFUSED)
DATA_FILES = (
    DATA_IS_SET,
    *(_absent(key=key, find=partial(check_files, key)) for key in ("data", "eval_data")),
    *(Check(key=key, find=partial(check_contents, key)) for key in ("data", "eval_data")),
)
"""The data files of a job, and the contents of those that this machine has."""
INPUTS = (
    _absent(key="model", find=check_model),
    _absent(key="adapter", find=check_adapter),
    _absent(find=check_packages),
    *EVALUATION,
    *DATA_FILES,
    _absent(key="resume", find=check_resume),
)
"""The files and packages that a job names or needs, as far as its own keys tell."""
COMBINATIONS = tuple(Check(key=key, find=partial(_combines, key)) for key in _PLAIN)
"""Parallelism, losses and kernels that do not work for a model, its cluster or beside another key of the job."""
OF_CONFIGURATION = (*COMBINATIONS, _absent(find=check_engine_packages))
"""The checks of a job whose model, machines and configuration are known."""
BEFORE_HUBS = (Check(find=_runs_on_cpu), *INPUTS)
"""The checks of a run that need no fact from a hub, which may take minutes to answer."""
ONE_NAME_EACH = Check(
    rule=HOSTFILE,
    find=_one_machine,
    effect="two sets of ranks share its GPUs: the run stops, or each set has half of the memory",
)
"""No two hosts of a run are one machine."""
ATTENTION_RUNS = Check(key="attn", find=_runs_on_gpu)
OF_MACHINES = (ONE_NAME_EACH, Check(find=_has_gpus), ATTENTION_RUNS)
"""The checks of a run whose machines are known."""
# fmt: off
OF_HOSTFILE = (
    Check(rule=HOSTFILE, key="hostfile", find=_hosts_are_read,
          effect="DeepSpeed stops, or trains on other machines than intended"),
    _of_hosts(lambda hosts, _: next(iter(machines.placeholders(hosts)), None), HOSTFILE, _REFUSED),
    _of_hosts(_unplanned_slots, SLOTS, "the global batch changes with the number of ranks"),
    _of_hosts(lambda hosts, _: machines.shortage(hosts), SLOTS,
              f"{_REFUSED}; DeepSpeed would start ranks without a GPU"),
    ONE_NAME_EACH,
)
"""The lines of a hostfile, and its hosts."""
# fmt: on
OF_LINT = (*INPUTS, ATTENTION_RUNS, *OF_CONFIGURATION)
"""The checks of a job that may run on another machine; a rule of its own reports the limits of a CPU."""
