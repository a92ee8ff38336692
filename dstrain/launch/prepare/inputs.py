"""Checks that this machine has the inputs, the packages and the run directory of a job."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from dstrain.choices import Hub, Method, OnBadRow, Optimizer, SinkName, SwanLabMode
from dstrain.config.lint.rule import JobContext, Subject
from dstrain.errors import Conflict, EnvironmentProblem, InvalidConfig, Place, located, not_installed, other_version
from dstrain.facts.data import datafile, media
from dstrain.facts.data.datafile import reading_for
from dstrain.facts.data.rows import require_there
from dstrain.facts.model import hub_config, model_files
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.model.traits import LIGER_RELEASES, kernel_packages, require_media, traits
from dstrain.facts.releases import is_in_range
from dstrain.findings import OTHER_FOLDER, UNWRITABLE
from dstrain.job.data_source import DataSource, weights_of
from dstrain.job.file import JobFile, is_local, looks_local
from dstrain.job.limits import require_for_media
from dstrain.job.model_changes import read_adapter
from dstrain.job.schema import Job
from dstrain.monitor.sinks.sink import decide_mode
from dstrain.paths import existing, shown
from dstrain.records import Keys
from dstrain.rundir import RunDir

SET_DATA = "Set data to a .jsonl, .json, .parquet or .arrow file, or a data set id on the hub."


def check_model(file: JobFile, context: JobContext) -> None:
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
    has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    # a folder with config.json alone is a model for the planner, so a missing part may be meant
    alone = "Training needs weights; a config.json alone is enough for gen-config only."
    for is_there, part, hint in (
        (
            (folder / "config.json").is_file(),
            "config.json",
            "Set the folder that save_pretrained or hf download wrote.",
        ),
        (has_weights, "weights (*.safetensors)", alone),
        (model_files.has_tokenizer(folder), "tokenizer", "Copy the files of the tokenizer into it."),
    ):
        if not is_there:
            raise InvalidConfig(f"{shown(job.model)} has no {part}", place=place, hint=hint)
    with located("model", place=place):
        model_files.read(folder)


def missing_in_cache(job: Job) -> str | None:
    """Returns a part of a job's model and data that the cache of the Hugging Face hub lacks, or None."""
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


def check_adapter(file: JobFile, context: JobContext) -> None:
    """Raises InvalidConfig if a job cannot continue from its adapter."""
    if file.job.adapter is not None:
        try:
            read_adapter(Path(file.job.adapter))
        except InvalidConfig as error:
            raise InvalidConfig(error.text, place=file.locate(("adapter",)), hint=error.hint) from None


def require_data(file: JobFile, context: JobContext) -> None:
    """Raises InvalidConfig if no data is set."""
    if not file.job.train_sources:
        raise InvalidConfig("data is not set", place=file.locate(("data",)), hint=SET_DATA)


def sources_of(job: Job, key: str) -> tuple[DataSource, ...]:
    """Returns the data sets of `data` or `eval_data`."""
    return job.train_sources if key == "data" else job.eval_sources


def check_files(key: str, file: JobFile, context: JobContext) -> None:
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


CHECKED_DATA_BYTES = 64 * 2**20
"""Bytes of a data file that are checked before the launch; the ranks check the rest."""


def check_contents(key: str, file: JobFile, context: JobContext) -> list[str]:
    """Returns notes about ignored columns of the data files that a key of the job names, of those that exist.

    Raises InvalidConfig if their first `CHECKED_DATA_BYTES` cannot be read or trained on, or if only some data sets
    have weights. If the context opens images, all rows are checked, and all images and videos are read.
    """
    sources, opens_images = sources_of(file.job, key), context.opens_images
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


_FOR_MEDIA: Mapping[str, Callable[[], None]] = MappingProxyType(
    {"images": media.require_pillow, "videos": media.require_packages}
)
"""Column → raises EnvironmentProblem without what it needs."""


def _check_media(job: Job, path: Path, named: Sequence[str]) -> None:
    """Raises InvalidConfig or EnvironmentProblem if a job cannot train on the media in these columns."""
    family = hub_config.model_type(job.model, job.hub)
    require_media(family, named)
    require_for_media(job, named, packs=family is None or traits(family).packs_images)  # the ranks know
    for name in named:
        _FOR_MEDIA[name]()
    folder = Path(job.model)
    if folder.is_dir() and not model_files.has_processor(folder):
        raise InvalidConfig(
            model_files.lacks_processor(shown(str(path)), named, shown(job.model)),
            hint=f"Train a vision-language model, with its {' or '.join(model_files.PROCESSOR_FILES[:2])}.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Package:
    """A package that only some jobs need."""

    key: Keys
    """The key of the job that needs it."""
    value: str
    """The value of the key that needs it."""
    modules: tuple[str, ...]
    """Modules that provide it; one is enough."""
    name: str
    install: str
    """The command that installs it."""
    is_wanted: Callable[[Job], bool]
    """Whether a job needs it."""
    range: str = ""
    """Releases that do, such as `>=0.8.5,<0.9`; empty: all."""

    def lack(self, place: Place) -> EnvironmentProblem | None:
        """Returns why the installed package does not do; None if the job can use it."""
        if not is_installed(*self.modules):
            return not_installed(f"{self.value} needs", self.name, install=self.install, place=place)
        version = metadata.version(self.name) if self.range else ""
        if is_in_range(version, self.range):
            return None
        text = other_version(f"{self.value} needs", self.name, self.range, version)
        return EnvironmentProblem(text, place=place, hint=self.install)


_SINKS: Keys = ("monitor", "sinks")


def _sink(name: SinkName, install: str) -> _Package:
    return _Package(
        key=_SINKS,
        value=name,
        modules=(name,),
        name=name,
        install=install,
        is_wanted=lambda job: name in job.monitor.sinks and not _is_silent(job, name),
    )


def _is_silent(job: Job, name: SinkName) -> bool:
    return name is SinkName.SWANLAB and job.monitor.mode is SwanLabMode.DISABLED


def _is_shown_here(job: Job) -> bool:
    """Returns whether SwanLab writes for its dashboard on this machine."""
    if SinkName.SWANLAB not in job.monitor.sinks:
        return False
    return decide_mode(job.monitor.mode, {**os.environ, **job.env}, logged_in=False) is SwanLabMode.LOCAL


_PACKAGES = (
    _Package(key=("method",), value="qlora", modules=("bitsandbytes",), name="bitsandbytes",
        install="pip install 'dstrain[qlora]'", is_wanted=lambda job: job.method is Method.QLORA),
    _Package(key=("lora", "target_parameters"), value="target_parameters", modules=("peft",), name="peft",
        range=">=0.21,<0.22", install="pip install 'peft>=0.21,<0.22'",  # older ones fail under ZeRO-3
        is_wanted=lambda job: job.method is not Method.FULL and bool(job.lora.target_parameters)),
    _Package(key=("optimizer",), value="adamw_8bit", modules=("bitsandbytes",), name="bitsandbytes",
        install="pip install 'dstrain[qlora]'", is_wanted=lambda job: job.optimizer is Optimizer.ADAMW_8BIT),
    *(_Package(key=("liger",), value="liger", modules=(name.replace("-", "_"),), name=name, range=releases,
               install="pip install 'dstrain[kernels]'", is_wanted=lambda job: job.liger)
      for name, releases in (("liger-kernel", LIGER_RELEASES), ("triton", ""))),
    _Package(key=("hub",), value="modelscope", modules=("modelscope",), name="modelscope",
        install="pip install 'dstrain[modelscope]'",
        is_wanted=lambda job: job.hub is Hub.MODELSCOPE
        and not all(map(is_local, (job.model, *job.data_paths)))),
    _sink(SinkName.SWANLAB, "pip install 'swanlab>=0.10,<0.11'"),
    _Package(key=("monitor", "mode"), value="local", modules=("swanboard",), name="swanboard",
        install="pip install 'swanlab[dashboard]>=0.10,<0.11'", is_wanted=_is_shown_here),
    _sink(SinkName.TENSORBOARD, "pip install 'dstrain[tensorboard]'"),
    _sink(SinkName.WANDB, "pip install 'dstrain[wandb]'"),
)  # fmt: skip
_OF_ENGINE = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""DeepSpeed's own monitors → their packages. Source: deepspeed 0.19.8 monitor/utils.py."""


def is_installed(*modules: str) -> bool:
    """Returns whether one of the modules can be found, without importing it."""
    return any(find_spec(module) is not None for module in modules)


def of_ranks(job: Job, model: ModelFacts | None) -> tuple[str, ...]:
    """Returns the packages that must be alike on every node: for this job, and with kernels of its model.

    Sinks are rank 0's alone.
    """
    rows = (row for row in _PACKAGES if row.is_wanted(job) and row.key[0] != "monitor")
    kernels = kernel_packages(model.model_type) if model else ()
    return tuple(dict.fromkeys((*(module for row in rows for module in row.modules), *kernels)))


def check_packages(file: JobFile, context: JobContext) -> None:
    """Raises EnvironmentProblem with every package that the job needs and that is not installed."""
    wanted = [row for row in _PACKAGES if row.is_wanted(file.job)]
    if missing := [lack for row in wanted if (lack := row.lack(file.locate(row.key))) is not None]:
        problem = "\n".join(error.problem for error in missing)
        hint = "\n".join(dict.fromkeys(error.hint or "" for error in missing))
        raise EnvironmentProblem(problem, hint=hint, parts=missing)


def check_engine_packages(file: JobFile, context: JobContext) -> None:
    """Raises EnvironmentProblem if a monitor of DeepSpeed, in a configuration that is known, lacks its package."""
    if not isinstance(context, Subject):
        return
    for key, package in _OF_ENGINE.items():
        if context.is_true(f"{key}.enabled") and not is_installed(package):
            way = f"pip install {package}, or remove {key}: metrics.jsonl and the sinks of the job hold more"
            raise not_installed(f"{key} needs", package, install=way, place=context.document.place((key,)))


def check_run_dir(run_dir: RunDir, *, resume: str, creates: bool = True) -> None:
    """Creates the run directory, or only looks at its nearest parent that exists.

    Raises Conflict or EnvironmentProblem if this run cannot use it.
    """
    check_checkpoints(run_dir, resume=resume)
    check_writable(run_dir.path if creates else existing(run_dir.path), name=run_dir.path)


def check_checkpoints(run_dir: RunDir, *, resume: str) -> None:
    """Raises Conflict if there are checkpoints of an earlier run that this one does not resume from."""
    checkpoints = run_dir.checkpoints()
    if checkpoints and resume == "never":
        raise Conflict(
            f"{run_dir.path} holds checkpoints up to step {checkpoints[-1][0]} of an earlier run",
            hint="To resume from there, add --set resume=auto to the command; to start over, --set output_dir=OTHER.",
        )


def check_writable(folder: Path, *, name: Path) -> None:
    """Creates the folder. Raises EnvironmentProblem if it cannot be created or written to.

    `name` is the folder that the error names.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        says = UNWRITABLE.format(key="output_dir", folder=name)
        raise EnvironmentProblem(f"{says}: {reason}", hint=OTHER_FOLDER) from error
