"""Tables that several tools share: launchers' variables and options, and keys of Transformers' TrainingArguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dstrain.config.imports import converters as convert
from dstrain.config.imports.source import ABSENT, Converted, Source
from dstrain.config.imports.tables import rows_of


def _visible(value: Any, source: Source) -> Any:
    devices = convert.names(value, source)
    return len(devices) if devices else ABSENT


def _per_node(value: Any, source: Source) -> Any:
    if str(value) in ("auto", "gpu", "cpu"):
        return ABSENT
    return convert.count(value, source)


def _hub(name: str, otherwise: str) -> Any:
    def converted(value: Any, _: Source) -> str:
        return name if str(value).lower() in ("1", "true") else otherwise

    return converted


def _cpu(value: Any, _: Source) -> Any:
    return Converted(values={"machines.gpu": "cpu"}) if str(value) == "cpu" else ABSENT


_PER_NODE = ("NPROC_PER_NODE", "GPUS_PER_NODE", "NGPUS_PER_NODE", "NUM_GPUS_PER_NODE", "GPU_PER_NODE")
_ALL_GPUS = ("GPUS", "NUM_GPUS", "NGPUS", "N_GPUS", "NUM_DEVICES", "GPU_NUM", "NUM_PROCESSES", "WORLD_SIZE")
_NODES = ("NNODES", "NUM_NODES", "NODES", "NODE_NUM", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")


def launch_variables(
    environment: Mapping[str, str], *, gpus: int | None, gpus_per_node: int | None, script: str
) -> dict[str, str]:
    """Returns the variables of a launch that are set before a script: by the GPUs that are asked for, or else as the
    shell has them. WORLD_SIZE counts nodes where the script gives it to torchrun as such, and ranks elsewhere."""
    found = {name: environment[name] for name in (*_PER_NODE, *_ALL_GPUS, *_NODES) if environment.get(name)}
    if gpus is None:
        return found
    per_node = min(gpus, gpus_per_node or 8)
    nodes = max(1, gpus // per_node)
    found |= dict.fromkeys(_PER_NODE, str(per_node)) | dict.fromkeys(_ALL_GPUS, str(gpus))
    counts_nodes = re.search(r"nnodes[= ]+[\"']?\$\{?WORLD_SIZE", script) is not None
    return found | dict.fromkeys((*_NODES, *(["WORLD_SIZE"] if counts_nodes else [])), str(nodes))


RANKS = rows_of("variables", {"cpu": _cpu, "hub": _hub, "per_node": _per_node, "visible": _visible})
"""Variables that launchers and tools read."""

LAUNCHERS = rows_of("launchers", {"per_node": _per_node})
"""Options of torchrun and deepspeed."""


def _max_steps(value: Any, source: Source) -> Any:
    return ABSENT if convert.number(value, source) < 1 else convert.count(value, source)


def _run_name(value: Any, _: Source) -> Any:
    return str(value) if value else ABSENT


def _kwargs(value: Any, _: Source) -> Any:
    return value or ABSENT


def _checkpointing_kwargs(value: Any, _: Source) -> Any:
    return Converted(values={}, note="chosen by the method: non-reentrant, except for adapters under ZeRO-3")


_MONITORING = "`metrics.jsonl` and the sinks have it"
_LOADER = "the ranks' own loader; dataloader_num_workers is its one setting"
_DDP = "DeepSpeed in place of DDP has no such setting"

TRAINING_ARGUMENTS = rows_of(
    "huggingface",
    {
        "checkpointing_kwargs": _checkpointing_kwargs,
        "kwargs": _kwargs,
        "max_steps": _max_steps,
        "run_name": _run_name,
    },
)
"""Keys of Transformers' TrainingArguments, which several tools pass on, with their defaults."""
