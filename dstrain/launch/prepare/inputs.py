"""Checks that the inputs of a job are on this machine: model, adapter, data files and checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from dstrain.errors import InvalidConfig, located
from dstrain.facts.data import datafile
from dstrain.facts.data.rows import require_there
from dstrain.facts.model import hub_config, model_files
from dstrain.job.data_source import DataSource
from dstrain.job.file import JobFile, looks_local
from dstrain.job.model_changes import read_adapter
from dstrain.job.schema import Job
from dstrain.paths import shown
from dstrain.rundir import damage


def check_model(file: JobFile) -> None:
    """Raises InvalidConfig if a local model has no configuration, weights or tokenizer."""
    job, place = file.job, file.locate(("model",))
    folder = Path(job.model)
    if looks_local(job.model) and not folder.exists():
        raise InvalidConfig(
            f'model is "{job.model}", which does not exist',
            place=place,
            hint="Set a folder with config.json and weights, or an id such as Qwen/Qwen3-8B.",
        )
    if not folder.is_dir():
        return
    if not (folder / "config.json").is_file():
        raise InvalidConfig(
            f"{shown(job.model)} has no config.json",
            place=place,
            hint="Set the folder that save_pretrained or hf download wrote.",
        )
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise InvalidConfig(
            f"{shown(job.model)} has no weights (*.safetensors)",
            place=place,
            hint="Training needs weights; a config.json alone is enough for gen-config only.",
        )
    with located("model", place=place):
        model_files.read(folder)
    if not model_files.has_tokenizer(folder):
        raise InvalidConfig(
            f"{shown(job.model)} has no tokenizer", place=place, hint="Copy the files of the tokenizer into it."
        )


def missing_in_cache(job: Job) -> str | None:
    """Returns what of a job's model and data is not in the cache of the Hugging Face hub, or None."""
    config = hub_config.cached_file(job.model, job.hub)
    folder = config.parent if config is not None else Path(job.model)
    try:
        model_files.read(folder)
    except InvalidConfig as error:
        return error.problem
    names = (model_files.MODEL, f"{model_files.MODEL}{model_files.INDEX}")
    if not any((folder / name).is_file() for name in names) and not any(folder.glob("*.bin")):
        return "the weights"
    if not model_files.has_tokenizer(folder):
        return "the tokenizer"
    data = [path for path in job.data_paths if hub_config.is_hub_id(path) and not Path(path).exists()]
    return next((path for path in data if not hub_config.has_data_set(path)), None)


def check_adapter(file: JobFile) -> None:
    """Raises InvalidConfig if a job cannot continue from its adapter."""
    if file.job.adapter is not None:
        try:
            read_adapter(Path(file.job.adapter))
        except InvalidConfig as error:
            raise InvalidConfig(error.text, place=file.locate(("adapter",)), hint=error.hint) from None


def check_resume(file: JobFile) -> None:
    """Raises InvalidConfig if the checkpoint to resume from does not exist or is not whole."""
    resume = file.job.resume
    problem = None if resume in ("never", "auto") else damage(Path(resume))
    if problem is not None:
        state = problem if Path(resume).is_dir() else "does not exist"
        raise InvalidConfig(
            f"checkpoint {shown(resume)} {state}",
            place=file.locate(("resume",)),
            hint="Write resume: auto to continue from the newest complete checkpoint of output_dir.",
        )


def require_data(file: JobFile) -> None:
    """Raises InvalidConfig if no data is set."""
    if not file.job.train_sources:
        raise InvalidConfig(
            "data is not set",
            place=file.locate(("data",)),
            hint="Set data to a .jsonl, .json, .parquet or .arrow file, or a data set id on the hub.",
        )


def sources_of(job: Job, key: str) -> tuple[DataSource, ...]:
    """Returns the data sets of `data` or `eval_data`."""
    return job.train_sources if key == "data" else job.eval_sources


def check_files(file: JobFile, key: str) -> None:
    """Raises InvalidConfig if data files that a key of the job names do not exist, with each of them."""
    missing = []
    for source in sources_of(file.job, key):
        if datafile.is_file_name(source.path):
            try:
                for path in datafile.files_of(source.path):
                    require_there(path)
            except InvalidConfig as error:
                missing.append(error)
    if missing:
        text, hints = "\n".join(f"{key}: {error.problem}" for error in missing), [error.hint for error in missing]
        hint = "\n".join(hint for hint in hints if hint) or None
        raise InvalidConfig(text, place=file.locate((key,)), hint=hint)


CHECKS: Mapping[str, Callable[[JobFile], None]] = MappingProxyType(
    {
        "model": check_model,
        "adapter": check_adapter,
        "data": partial(check_files, key="data"),
        "eval_data": partial(check_files, key="eval_data"),
        "resume": check_resume,
    }
)
"""Key of a job → raises InvalidConfig if this machine lacks what it names."""
