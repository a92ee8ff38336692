"""Checks a job before the launch: its files, its packages, its data, and the machines it runs on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from dstrain.choices import Attention, LossKernel, OnBadRow, Optimizer, Precision
from dstrain.config.lint.finding import Finding
from dstrain.config.lint.subject import JobContext
from dstrain.errors import DstrainError, EnvironmentProblem, InvalidConfig, located
from dstrain.facts import probe
from dstrain.facts.attention_kernels import runs_on
from dstrain.facts.cluster import machines
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.cluster.cpu import limits_of
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.data import datafile, videos
from dstrain.facts.data.images import require_pillow
from dstrain.facts.data.job_reading import reading_for
from dstrain.facts.model import model_files
from dstrain.facts.model.hub_config import model_type
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.model.vision_towers import PACKS_IMAGES, require_media
from dstrain.facts.workload import Workload
from dstrain.job.data_source import DataSource, weights_of
from dstrain.job.file import JobFile
from dstrain.job.schema import Job
from dstrain.job.task_limits import require_for_media
from dstrain.launch.prepare import inputs
from dstrain.launch.prepare.evaluation_checks import check_evaluation, unplanned, without_evaluation
from dstrain.launch.prepare.hostfile_findings import of_absent, of_job, of_unset
from dstrain.launch.prepare.inputs import (
    check_adapter,
    check_files,
    check_model,
    check_resume,
    require_data,
    sources_of,
)
from dstrain.launch.prepare.job_context import request_of
from dstrain.launch.prepare.packages import check_packages, lacks
from dstrain.paths import shown
from dstrain.plan.search.rules import Rule, broken
from dstrain.units import counted

CHECKED_DATA_BYTES = 64 * 2**20
"""Bytes of a data file that are checked before the launch; the ranks check the rest."""
_PLAIN = {
    **dict.fromkeys(("sp", "tp", "ep"), 1),
    "loss": LossKernel.FULL,
    "liger": False,
    "tiled_mlp": False,
    "activation_offload": False,
    "torch_compile": False,
    "attn": Attention.AUTO,
    "optimizer": Optimizer.ADAMW,
}
"""Keys of a job that rules limit, with the value that always works; of two that exclude each other, the latter one
is to be changed."""
_LINTED = frozenset({"zero_stage", "task"})
"""Keys whose combinations lint reports."""
DATA_KEYS = ("data", "eval_data")
"""Keys of a job that name data files."""


def check(file: JobFile, *, on_cpu: bool, opens_images: bool = False) -> list[str]:
    """Returns notes about a job's data and its end. Raises InvalidConfig or EnvironmentProblem if the job cannot run.

    With `opens_images`, all images and videos are read.
    """
    check_model(file)
    check_adapter(file)
    _check_kernels(file, on_cpu=on_cpu)
    check_packages(file)
    check_evaluation(file)
    notes = check_data(file, opens_images=opens_images)
    check_resume(file)
    return [*notes, *unplanned(file.job)]


def _check_kernels(file: JobFile, *, on_cpu: bool) -> None:
    job = file.job
    is_compiled = job.liger and {**os.environ, **job.env}.get("TRITON_INTERPRET") != "1"
    for limit in limits_of({"attn": job.attn, "liger": is_compiled}) if on_cpu else ():
        problem = f"{limit.key} is {limit.value}, but this job trains on the CPU: {limit.why}"
        raise InvalidConfig(problem, place=file.locate((limit.key,)), hint=f"{limit.key}: {limit.instead}")
    if job.attn.is_flash and job.precision is Precision.FP32:
        hint = "attn: auto, or precision: bf16"
        problem = f"{job.attn} needs bf16 or fp16; precision is fp32"
        raise InvalidConfig(problem, place=file.locate(("attn",)), hint=hint)


def check_machines(file: JobFile, hosts: Hosts, cluster: Cluster, *, needs_gpus: bool) -> None:
    """Raises EnvironmentProblem or InvalidConfig if this machine or its GPUs cannot run a job."""
    if needs_gpus:
        _check_gpus(hosts)
    check_gpu(file, cluster)


def _check_gpus(hosts: Hosts) -> None:
    """Raises EnvironmentProblem if this machine has fewer GPUs than slots."""
    if not probe.local_gpus():
        raise EnvironmentProblem(
            f"{hosts.name} asks for {counted(hosts.num_slots, 'GPU')}, but NVML finds none on this machine",
            hint="Check nvidia-smi. To train on the CPU instead: dstrain run --set env.DS_ACCELERATOR=cpu",
        )
    if (lack := machines.shortage(hosts)) is not None:
        raise lack


def check_gpu(file: JobFile, cluster: Cluster) -> None:
    """Raises InvalidConfig for flash attention on local GPUs that are too old for it."""
    is_known = cluster.gpu_origin is Origin.MEASURED and cluster.gpu.fp16_flops_per_s > 0
    if is_known and not runs_on(cluster.gpu, file.job.attn):
        raise InvalidConfig(
            f"{file.job.attn} does not run on {cluster.gpu.name}", place=file.locate(("attn",)), hint="attn: auto"
        )


def check_combinations(file: JobFile, model: ModelFacts | None, cluster: Cluster) -> None:
    """Raises InvalidConfig if parallelism, the loss or tiled MLPs do not work for a model, its cluster or its job.

    Of a model whose facts are unknown, only the number of GPUs is checked. Lint does the rest: ZeRO and tasks.
    """
    for key in _PLAIN:
        _check_combination(file, key, model, cluster)


def _check_combination(file: JobFile, key: str, model: ModelFacts | None, cluster: Cluster) -> None:
    """Raises InvalidConfig if a key breaks rules with the job's other keys, of which none after it in `_PLAIN` does."""
    job, plain = file.job, _PLAIN[key]
    if getattr(job, key) == plain:
        return
    if model is None:
        value = getattr(job, key)
        if isinstance(value, int) and cluster.num_gpus % value != 0:
            says = f"it does not divide the number of GPUs, {cluster.num_gpus}"
            raise _contradiction(file, [key], says, f"{key}: {_text(plain)}")
        return
    rules = broken(Workload(model=model, cluster=cluster), request_of(job).of_model(model))
    wrong = [rule for rule in rules if _LINTED.isdisjoint(rule.options) and _at_odds(job, rule)[-1:] == [key]]
    if wrong:
        keys = [key, *dict.fromkeys(name for rule in wrong for name in _at_odds(job, rule)[:-1])]
        cure = wrong[0].cure if len(wrong) == 1 else None
        says = "; ".join(rule.says for rule in wrong)
        raise _contradiction(file, keys, says, cure or f"{key}: {_text(plain)}")


def _at_odds(job: Job, rule: Rule) -> list[str]:
    """Returns the keys of a rule that are not plain, in the order of `_PLAIN`: the last one gives way."""
    return [name for name, plain in _PLAIN.items() if name in rule.options and getattr(job, name) != plain]


def _contradiction(file: JobFile, keys: Sequence[str], says: str, cure: str) -> InvalidConfig:
    """Returns the error of keys that a rule contradicts, at the first one."""
    values = " and ".join(f"{key} is {_text(getattr(file.job, key))}" for key in keys)
    return InvalidConfig(f"{values}, but {says}", place=file.locate((keys[0],)), hint=f"Write {cure}.")


def _text(value: object) -> str:
    return str(value).lower()


def check_data(file: JobFile, *, opens_images: bool = False) -> list[str]:
    """Returns notes about columns of the data that are ignored. Raises InvalidConfig if no data is set."""
    require_data(file)
    for key in DATA_KEYS:
        check_files(file, key)
    return [note for key in DATA_KEYS for note in check_data_files(file, key, opens_images=opens_images)]


def check_data_files(file: JobFile, key: str, *, opens_images: bool = False) -> list[str]:
    """Returns notes about ignored columns of the data files that a key of the job names, of those that exist.

    Raises InvalidConfig if their first `CHECKED_DATA_BYTES` cannot be read or trained on, or if only some data sets
    have weights. With `opens_images` all rows are checked, and all images and videos are read.
    """
    sources = sources_of(file.job, key)
    notes: list[str] = []
    remaining_bytes = CHECKED_DATA_BYTES
    with located(key, place=file.locate((key,))):
        weights_of(sources)
        for source in sources:
            for path in map(Path, datafile.found(source.path)):
                if path.exists() and (remaining_bytes > 0 or opens_images):
                    limit = None if opens_images else remaining_bytes
                    notes += _check_data_file(file.job, source, path, limit_bytes=limit, opens_images=opens_images)
                    remaining_bytes -= path.stat().st_size
    return notes


def _check_data_file(
    job: Job, source: DataSource, path: Path, *, limit_bytes: int | None, opens_images: bool
) -> list[str]:
    skip = job.on_bad_row is OnBadRow.SKIP
    report = datafile.check(
        path, reading_for(source, job), limit_bytes=limit_bytes, skip=skip, opens_images=opens_images
    )
    named = report.media
    if named:
        _check_media(job, path, named)
    notes = [report.note] if report.note else []
    if named and not job.image_patches:
        notes.append(f"the estimate counts no {' or '.join(named)}: set image_patches to the patches of a sample")
    return [f"{shown(str(path))}: {note}" for note in notes]


_PACKAGES: Mapping[str, Callable[[], None]] = MappingProxyType(
    {"images": require_pillow, "videos": videos.require_packages}
)
"""Column → raises EnvironmentProblem without what it needs."""


def _check_media(job: Job, path: Path, named: Sequence[str]) -> None:
    """Raises InvalidConfig or EnvironmentProblem if a job cannot train on the media in these columns."""
    family = model_type(job.model, job.hub)
    require_media(family, named)
    require_for_media(job, named, packs=family is None or family in PACKS_IMAGES)  # the ranks know
    for name in named:
        _PACKAGES[name]()
    folder = Path(job.model)
    if folder.is_dir() and not model_files.has_processor(folder):
        raise InvalidConfig(
            model_files.lacks_processor(shown(str(path)), named, shown(job.model)),
            hint=f"Train a vision-language model, with its {' or '.join(model_files.PROCESSOR_FILES[:2])}.",
        )


def findings(file: JobFile, context: JobContext, *, opens_images: bool = False) -> list[Finding]:
    """Returns lint's findings about keys of a job, about its data files that exist on this machine, and about inputs
    and packages that do not.

    With `opens_images`, all their images and videos are read.
    """
    checks: dict[str, Callable[[], object]] = {}
    if (cluster := context.cluster) is not None:
        checks |= {key: partial(_check_combination, file, key, context.model, cluster) for key in _PLAIN}
    checks |= {key: partial(check_data_files, file, key, opens_images=opens_images) for key in DATA_KEYS}
    unset = {"data": partial(require_data, file)}
    absent = {key: partial(check_one, file) for key, check_one in inputs.CHECKS.items()}
    return [
        *(of_job(error, file.locate(("eval_steps",))) for error in without_evaluation(file)),
        *(of_job(error, file.locate((key,))) for key, error in _errors(checks)),
        *(of_unset(error, file.locate((key,))) for key, error in _errors(unset)),
        *(of_absent(error, file.locate((key,))) for key, error in _errors(absent)),
        *(of_absent(error, file.locate(())) for error in lacks(file)),
    ]


def _errors(checks: Mapping[str, Callable[[], object]]) -> Iterator[tuple[str, DstrainError]]:
    """Yields the errors of checks, with their keys."""
    for key, check_one in checks.items():
        try:
            check_one()
        except DstrainError as error:
            yield key, error
