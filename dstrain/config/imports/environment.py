"""Variables and launchers' options that say where training runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dstrain.config.imports import converters as convert
from dstrain.config.imports.rows import ABSENT, Converted, needless, table, to
from dstrain.config.imports.source import Source


def _visible(value: Any, source: Source) -> Any:
    devices = convert.names(value, source)
    return len(devices) if devices else ABSENT


def _per_node(value: Any, source: Source) -> Any:
    if str(value) in ("auto", "gpu", "cpu"):
        return ABSENT
    return convert.count(value, source)


def _hub(name: str, *, otherwise: str) -> Any:
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


RANKS = table(
    to("CUDA_VISIBLE_DEVICES", "machines.visible", _visible),
    to("ASCEND_RT_VISIBLE_DEVICES", "machines.visible", _visible),
    to("NPROC_PER_NODE", "machines.gpus_per_node", _per_node),
    to("NNODES", "machines.nodes", convert.count),
    to("USE_MODELSCOPE_HUB", "hub", _hub("modelscope", otherwise="hf")),
    to("USE_HF", "hub", _hub("hf", otherwise="modelscope")),
    to("DS_ACCELERATOR", "", _cpu),
)
"""Variables that launchers and tools read."""

LAUNCHERS = table(
    to("nproc_per_node", "machines.gpus_per_node", _per_node),
    to("nnodes", "machines.nodes", convert.count),
    to("num_gpus", "machines.gpus_per_node", convert.count),
    to("num_nodes", "machines.nodes", convert.count),
    to("hostfile", "machines.hostfile", convert.file),
    needless(
        """
        master_addr master_port node_rank rdzv_id rdzv_backend rdzv_endpoint rdzv_conf standalone
        max_restarts local_ranks_filter log_dir tee redirects launcher launcher_args ssh_port no_local_rank
        include exclude enable_each_rank_log bind_cores_to_rank
        """,
        "`dstrain run` starts the ranks",
    ),
)
"""Options of torchrun and deepspeed."""
