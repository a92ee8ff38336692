"""Writes a run directory from which other programs, such as pods, start the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dstrain.choices import Attention
from dstrain.facts.attention_kernels import of_this_machine
from dstrain.facts.cluster.hostfile import Host, Hosts, render
from dstrain.launch import environment
from dstrain.launch.launch import write_inputs
from dstrain.launch.prepare import preflight
from dstrain.launch.prepare.attention import choose
from dstrain.launch.prepare.prepare import PreparedRun


def stand_ins(nodes: int, gpus: int) -> Hosts:
    """Returns hosts with any names, for a number of nodes with that many GPUs each."""
    if nodes == 1:
        return Hosts(hosts=(Host(name="localhost", slots=gpus),), name="--nodes and --gpus")
    hosts = tuple(Host(name=f"node-{number}", slots=gpus) for number in range(nodes))
    return Hosts(hosts=hosts, name="--nodes and --gpus")


def decided(prepared: PreparedRun, variables: Mapping[str, str]) -> PreparedRun:
    """Returns a run with its attention decided: of several nodes, of which none can ask the others, what all have.

    Raises EnvironmentProblem if this machine lacks the kernel that the job names.
    """
    choice = prepared.attention
    if prepared.is_local or prepared.on_cpu:
        return prepared
    if choice.wish.asked.is_flash:
        choice = choose(choice.wish, {"this machine": of_this_machine({**variables, **prepared.job.env})})
    elif choice.wish.asked is Attention.AUTO:
        choice = replace(choice, says=f"{choice.attn}; no node can be asked for a better one, which attn may name")
    return replace(prepared, attention=choice)


def write(prepared: PreparedRun, variables: Mapping[str, str]) -> None:
    """Writes what the ranks read. All nodes may do this at once, since a file that already holds its text is not
    touched.

    Raises Conflict if the folder holds checkpoints of another run.
    """
    job = prepared.job
    preflight.check(prepared.run_dir, resume=job.resume, needed_bytes=0)
    secrets = environment.secrets(variables, job.env)
    open_env = {name: value for name, value in job.env.items() if name not in secrets}
    write_inputs(prepared, job=replace(job, env=open_env), hostfile=render(prepared.hosts), secrets=secrets)
