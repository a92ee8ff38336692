"""The packages that only some jobs need: found before the launch, without importing them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from dstrain.choices import Hub, Method, Optimizer, SinkName, SwanLabMode
from dstrain.errors import EnvironmentProblem
from dstrain.facts.model.kernel_packages import LIGER_RELEASES, kernel_packages
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.releases import is_in_range
from dstrain.job.file import JobFile, is_local
from dstrain.job.schema import Job
from dstrain.monitor.mode import decide_mode
from dstrain.records import Keys


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

    @property
    def lack(self) -> str | None:
        """What is wrong with what is installed; None if the job can use it."""
        if not is_installed(*self.modules):
            return f"{self.name}, which is not installed"
        version = metadata.version(self.name) if self.range else ""
        return None if is_in_range(version, self.range) else f"{self.name} {self.range}, and {version} is installed"


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
    """Returns the packages that must be alike on every node: those of this job, and with kernels of its model.

    Sinks are rank 0's alone.
    """
    rows = (row for row in _PACKAGES if row.is_wanted(job) and row.key[0] != "monitor")
    kernels = kernel_packages(model.model_type) if model else ()
    return tuple(dict.fromkeys((*(module for row in rows for module in row.modules), *kernels)))


def lacks(file: JobFile) -> list[EnvironmentProblem]:
    """Returns an error for every package that the job needs and is not installed, at the key that needs it."""
    rows = [(row, row.lack) for row in _PACKAGES if row.is_wanted(file.job)]
    return [
        EnvironmentProblem(f"{row.value} needs {lack}", hint=row.install, place=file.locate(row.key))
        for row, lack in rows
        if lack is not None
    ]


def check_packages(file: JobFile) -> None:
    """Raises EnvironmentProblem with every package that the job needs and is not installed."""
    if missing := lacks(file):
        problem = "\n".join(error.problem for error in missing)
        raise EnvironmentProblem(problem, hint="\n".join(dict.fromkeys(error.hint or "" for error in missing)))


def check_engine_packages(ds_config: Mapping[str, Any], name: str) -> None:
    """Raises EnvironmentProblem if a monitor of DeepSpeed lacks its package; `name` is the configuration file."""
    for key, package in _OF_ENGINE.items():
        section = ds_config.get(key)
        if isinstance(section, Mapping) and section.get("enabled") is True and not is_installed(package):
            raise EnvironmentProblem(
                f"{name}: {key} needs {package}, which is not installed",
                hint=f"pip install {package}, or remove {key}: metrics.jsonl and the sinks of the job hold more",
            )
