"""Checks from the agents' first messages whether the nodes can run together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from dstrain.errors import EnvironmentProblem
from dstrain.facts.data.datafile import found
from dstrain.facts.network_interface import interface_environment
from dstrain.facts.this_machine import usual_versions, version_problems
from dstrain.job.schema import Job
from dstrain.launch.nodes.layout import Node
from dstrain.launch.nodes.protocol import Hello
from dstrain.rundir import RunDir
from dstrain.units import counted

_OF_A_MODEL = frozenset({".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py"})
"""Endings of the names of files that are read with a model."""


def files_of(job: Job) -> dict[str, int]:
    """Returns the files here that ranks read, with their bytes; nothing for what comes from a hub."""
    data = [Path(path) for name in job.data_paths for path in found(name)]
    model = Path(job.model)
    paths = [*data, *(path for path in sorted(model.glob("*")) if path.suffix in _OF_A_MODEL)]
    return {str(path): path.stat().st_size for path in paths if path.is_file()}


def require_compatible(
    hellos: Mapping[Node, Hello],
    run_dir: RunDir,
    port: int,
    *,
    on_cpu: bool,
    files: Mapping[str, int] = MappingProxyType({}),
    may_be_apart: bool = False,
    keeps_best: bool = False,
) -> None:
    """Raises EnvironmentProblem, with every reason at once, if the nodes cannot run together.

    `files` is what ranks read, with the bytes here; `may_be_apart` where the run directory was copied to other nodes,
    but not if the run `keeps_best`, the checkpoint of its best evaluation, which stays on one disk.
    """
    problems = _unfit(hellos, port, on_cpu=on_cpu)
    if problems:
        hint = (
            "Install the same versions everywhere, give no more slots than GPUs, or name another port: --master-port."
        )
        raise EnvironmentProblem("\n".join(problems), hint=hint)
    differ = [f"{node.host}: {said}" for node, hello in hellos.items() for said in _differing(hello, files)]
    if differ:
        raise EnvironmentProblem(
            "\n".join(differ),
            hint="Copy model and data to every node, to the same paths.",
        )
    apart = [node.host for node, hello in hellos.items() if not hello.shares_run_dir]
    if apart and not may_be_apart:
        raise EnvironmentProblem(
            f"{run_dir.path} on {', '.join(apart)} is not the run directory of this machine",
            hint="Put output_dir on a file system that all nodes share, or let --sync copy code and run directory.",
        )
    if apart and keeps_best:
        raise EnvironmentProblem(
            f"the best checkpoint stays on a disk that all nodes share, but {', '.join(apart)} has one of its own",
            hint="Put output_dir on a file system that all nodes share, or load_best: false, without early_stopping.",
        )


def _unfit(hellos: Mapping[Node, Hello], port: int, *, on_cpu: bool) -> list[str]:
    """Returns the problems of the nodes themselves."""
    usual = usual_versions([hello.versions for hello in hellos.values()])
    problems = [
        f"{node.host}: {problem}"
        for node, hello in hellos.items()
        for problem in version_problems(hello.versions, usual)
    ]
    problems += [
        f"{node.host}: port {port} for rank 0 is in use"
        for node, hello in hellos.items()
        if node.number == 0 and hello.port is None
    ]
    problems += [
        f"{node.host}: {counted(node.num_ranks, 'slot')} in the hostfile, but {counted(hello.num_gpus, 'GPU')} there"
        for node, hello in hellos.items()
        if not on_cpu and node.num_ranks > hello.num_gpus
    ]
    return problems


def _differing(hello: Hello, files: Mapping[str, int]) -> Iterator[str]:
    """Yields how a node's files differ from those here; of many files of a folder the first one."""
    seen = set()
    for name, size in hello.unlike.items():
        folder = str(Path(name).parent)
        if name in files and folder not in seen:
            seen.add(folder)
            yield f"{name} cannot be read" if size is None else f"{name} has {size:,} bytes, and {files[name]:,} here"


def own_interfaces(hellos: Mapping[Node, Hello], named: Collection[str]) -> dict[Node, dict[str, str]]:
    """Returns the variables by which each node's ranks use the interface that leads to the others, but those `named`
    by the user."""
    variables = {
        node: {} if hello.interface is None else interface_environment(hello.interface)
        for node, hello in hellos.items()
    }
    return {node: {name: own[name] for name in own if name not in named} for node, own in variables.items()}
