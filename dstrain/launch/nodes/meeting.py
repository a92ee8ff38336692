"""Whether the nodes of a run can run together, by what their agents say before anything is started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from dstrain.errors import EnvironmentProblem
from dstrain.launch.nodes.plan import Node
from dstrain.launch.nodes.wire import Hello
from dstrain.rundir import RunDir


def check(hellos: Mapping[Node, Hello], run_dir: RunDir, port: int, *, on_cpu: bool) -> None:
    """Raises EnvironmentProblem, with every reason at once, where the nodes cannot run together."""
    problems = [
        f"{node.host}: {name} is {version or 'missing'}, and {usual or 'missing'} on most nodes"
        for name, usual in _usual(list(hellos.values())).items()
        for node, hello in hellos.items()
        if (version := hello.versions.get(name)) != usual
    ]
    problems += [
        f"{node.host}: port {port}, for rank 0, is in use there"
        for node, hello in hellos.items()
        if node.number == 0 and not hello.port_is_free
    ]
    problems += [
        f"{node.host}: {node.num_ranks} slots in the hostfile, and {hello.num_gpus} GPUs there"
        for node, hello in hellos.items()
        if not on_cpu and node.num_ranks > hello.num_gpus
    ]
    if problems:
        hint = "Versions must be the same everywhere, slots as many as GPUs; --master-port names another port."
        raise EnvironmentProblem("\n".join(problems), hint=hint)
    apart = [node.host for node, hello in hellos.items() if not hello.shares_run_dir]
    if apart:
        raise EnvironmentProblem(
            f"{run_dir.path} on {', '.join(apart)} is not the run directory of this machine",
            hint="Put output_dir on a file system that all nodes share, or let --sync copy code and run directory.",
        )


def _usual(hellos: list[Hello]) -> dict[str, str | None]:
    """Returns the version that most nodes have of each thing; of equals, the first node's."""
    names = dict.fromkeys(name for hello in hellos for name in hello.versions)
    return {name: Counter(hello.versions.get(name) for hello in hellos).most_common(1)[0][0] for name in names}
