"""Starts a launch on its nodes, on a port that is free on rank 0's node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from dstrain.facts.attention_kernels import AttentionKernels
from dstrain.facts.deepspeed_ops import needed_ops
from dstrain.launch.command import master
from dstrain.launch.failure.outcome import Outcome
from dstrain.launch.launch import Launch, for_ranks, plan_launch, write_request, write_start
from dstrain.launch.nodes import handshake
from dstrain.launch.nodes.connection import connect
from dstrain.launch.nodes.coordinator import Coordinator
from dstrain.launch.nodes.layout import Node
from dstrain.launch.nodes.protocol import Hello
from dstrain.launch.nodes.spec import LaunchSpec
from dstrain.launch.prepare.attention import choose
from dstrain.launch.prepare.packages import of_ranks
from dstrain.launch.prepare.prepare import with_attention
from dstrain.launch.timeouts import TIMEOUTS, Timeouts
from dstrain.records import to_json


def launch_spec(launch: Launch, *, timeouts: Timeouts = TIMEOUTS) -> LaunchSpec:
    """Returns the specification of a launch, with these time limits."""
    prepared = launch.prepared
    python_path = launch.exported.get("PYTHONPATH", "")
    return LaunchSpec(
        nodes=launch.nodes,
        run_dir=launch.prepared.run_dir,
        mark=launch.mark,
        open=lambda nodes: connect(nodes, launch.environment, python_path, by_srun=launch.by_srun),
        environment={"PYTHONPATH": python_path} if python_path else {},
        unset=tuple(launch.secrets),
        exports=launch.for_nodes,
        master_port=launch.master_port,
        takes_another_port=launch.takes_another_port,
        master=None if prepared.is_local else master(prepared.hosts),
        ops=tuple(needed_ops(prepared.ds_config, on_gpu=not prepared.on_cpu)),
        files={} if prepared.is_local else handshake.files_of(prepared.job),
        packages=() if prepared.is_local else of_ranks(prepared.job, prepared.model),
        saved_bytes=prepared.checkpoint_bytes,
        timeouts=timeouts,
    )


def start(launch: Launch, coordinator: Coordinator, spec: LaunchSpec, say: Callable[[str], None]) -> Outcome:
    """Runs the launch to its end; no process of it is left behind on any node that can be reached.

    `say` gets the attention that all nodes have.
    """

    def check(hellos: Mapping[Node, Hello]) -> tuple[LaunchSpec, dict[int, dict[str, str]]]:
        port = next((hello.port for node, hello in hellos.items() if node.number == 0), None)
        last = launch if port in {None, launch.master_port} else _on_port(launch, port or 0)
        variables = _meet(last, hellos)
        request = decide_attention(last, hellos, say)
        final = replace(spec, nodes=last.nodes, exports=last.for_nodes, master_port=last.master_port, request=request)
        return final, {node.number: own for node, own in variables.items()}

    return coordinator.run(check)


def decide_attention(launch: Launch, hellos: Mapping[Node, Hello], say: Callable[[str], None]) -> str | None:
    """Decides the attention of several nodes, says it, and writes it into the run directory; returns the request that
    ranks read. None if it was decided before. Raises EnvironmentProblem if nodes lack the kernel that the job names."""
    prepared = launch.prepared
    if prepared.is_local or prepared.on_cpu:
        return None
    by_host = {node.host: _kernels(hello) for node, hello in hellos.items()}
    choice = choose(prepared.attention.wish, by_host)
    if choice.says is not None:
        say(f"attn     {choice.says}")
    decided = replace(launch, prepared=with_attention(prepared, choice))
    request = for_ranks(decided)
    write_request(decided.prepared, request)
    return to_json(request)


def _kernels(hello: Hello) -> AttentionKernels:
    return AttentionKernels(
        packages=hello.attention_packages,
        cached=hello.attention_cached,
        downloadable=tuple(hello.attention_downloadable),
    )


def _on_port(launch: Launch, port: int) -> Launch:
    """Returns the same launch with another port for rank 0, and writes it down for those who start it by hand."""
    changed = plan_launch(
        launch.prepared,
        master_port=port,
        by_srun=launch.by_srun,
        saves_on_term=launch.saves_on_term,
        syncs=launch.syncs,
        mark=launch.mark,
        user_lines=launch.user_lines,
    )
    write_start(changed)
    return changed


def _meet(launch: Launch, hellos: Mapping[Node, Hello]) -> dict[Node, dict[str, str]]:
    """Returns the variables by which each node's ranks use the network interface that leads to the others, unless the
    user has named one. Raises EnvironmentProblem if the nodes cannot run together."""
    prepared = launch.prepared
    handshake.require_compatible(
        hellos,
        prepared.run_dir,
        launch.master_port,
        on_cpu=prepared.on_cpu,
        files=handshake.files_of(prepared.job),
        may_be_apart=launch.syncs,
        keeps_best=prepared.job.keeps_best,
    )
    return handshake.own_interfaces(hellos, launch.for_nodes.keys())
