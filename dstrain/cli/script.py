"""`dstrain script`: writes job scripts for SLURM, Kubernetes, and nodes started by hand."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from dstrain.cli.console import say, say_lines
from dstrain.cli.group import Group
from dstrain.cli.options.script import BATCH, COMMON, JOB, MACHINES, PODS, PORT, SET, options
from dstrain.cli.script_accelerate import command as accelerate
from dstrain.cli.script_file import Script, finish
from dstrain.job.file import JobFile, read_job
from dstrain.launch.prepare.lint_job import planned
from dstrain.launch.prepare.prepare import prepare as check_job
from dstrain.launch.scripts import ready, shell
from dstrain.launch.scripts import slurm as batches
from dstrain.launch.scripts.k8s import Pods, label, manifest, outside, parse_claim
from dstrain.launch.scripts.script_context import ScriptContext, describe
from dstrain.launch.scripts.slurm import Batch, parse_time
from dstrain.plan.run_time import checkpoint_seconds
from dstrain.units import GIB, counted, format_bytes


@click.group("script", cls=Group)
def command() -> None:
    """Write a script that starts a job elsewhere, to read, edit and submit.

    The script resumes from the newest checkpoint at every start. It names the secrets that the job needs, without their
    values.

    \b
    Example:
      dstrain script slurm job.yaml --partition gpu --time 12h
      dstrain script k8s job.yaml --image registry/train:1 --pvc training:/shared
    """


command.add_command(accelerate)


@command.command("slurm", short_help="For sbatch.")
@options(*COMMON, *BATCH)
def slurm(**typed: Any) -> None:
    """Write a script for SLURM's sbatch: safe in arrays; saves and requeues when preempted.

    \b
    Example:
      dstrain script slurm job.yaml --partition gpu --time 12h
      sbatch job.sbatch
    """
    file, context = _context(typed)
    estimate, warning_s, notes = planned(file), batches.WARNING_S, []
    if estimate is not None and estimate.speed is not None:
        checkpoint_s = checkpoint_seconds(estimate, context.nodes, only_model=file.job.save_only_model)
        warning_s = batches.warning_s(estimate.speed.step_s, checkpoint_s)
    if estimate is not None and typed["memory"] is None:
        needed = estimate.memory.host_bytes_per_node
        option = f"--memory {math.ceil(1.1 * needed / GIB)}GiB"
        notes.append(f"note: the script asks for no RAM; the plan needs {format_bytes(needed)} a node: {option}")
    names = ("cpus", "partition", "account", "qos", "reservation")
    batch = Batch(
        time_s=parse_time(typed["time"], warning_s),
        warning_s=warning_s,
        memory_bytes=typed["memory"],
        **{name: typed[name] for name in names},
    )
    text = batches.script(context, batch)
    if finish(Script(kind="slurm", ending="sbatch", submit="sbatch {}", text=text, notes=tuple(notes)), context, typed):
        batches.logs(context).mkdir(parents=True, exist_ok=True)


@command.command("bash", short_help="For nodes started by hand.")
@options(*COMMON, PORT)
def bash(**typed: Any) -> None:
    """Write a script that starts every node of the hostfile: by hand on each, or over ssh from one.

    \b
    Example:
      dstrain script bash job.yaml
      bash job.sh
    """
    _, context = _context(typed)
    text = shell.bash(context, typed["port"])
    finish(Script(kind="bash", ending="sh", submit="bash {}", text=text), context, typed)


@command.command("k8s", short_help="For Kubernetes: a TrainJob of Kubeflow Trainer.")
@options(*COMMON, *PODS)
def k8s(**typed: Any) -> None:
    """Write the manifest of a TrainJob, for Kubeflow Trainer 2.2 and later.

    \b
    Example:
      dstrain script k8s job.yaml --image registry/train:1 --pvc training:/shared
      kubectl apply -f job.trainjob.yaml
    """
    file, context = _context({**typed, "python": typed["python"] or "python3"})
    if typed["name"] is None:
        context = replace(context, name=label(context.name))
    names = ("image", "namespace", "secret", "shm", "cpus", "memory", "gpu_resource", "runtime")
    pods = Pods(claims=tuple(map(parse_claim, typed["claims"])), **{name: typed[name] for name in names})
    missing = outside(context, file.job, pods.claims)
    notes = (f"note: not on a --pvc, so it must be in the image, or is lost with the pod: {', '.join(missing)}",)
    script = Script(
        kind="k8s",
        ending="trainjob.yaml",
        submit="kubectl apply -f {}",
        text=manifest(context, pods),
        is_program=False,
        notes=notes if missing else (),
    )
    finish(script, context, typed)


@command.command("prepare", short_help="Write the run directory and start nothing.")
@options(JOB, *MACHINES, SET)
def prepare(job: Path, nodes: int | None, gpus: int | None, overrides: tuple[str, ...]) -> None:
    """Check a job and write its run directory, for ranks that other programs start, such as pods.

    With --nodes or --gpus, the job's hostfile is ignored.

    \b
    Example:
      dstrain script prepare job.yaml --nodes 2 --gpus 16 --set resume=auto
    """
    file = read_job(job, list(overrides))
    hosts = None
    if nodes is not None or gpus is not None:
        context = describe(file, job, environment={}, python=sys.executable, nodes=nodes, gpus=gpus)
        hosts = ready.stand_ins(context.nodes, context.gpus)
    prepared = ready.decided(check_job(file, os.environ, hosts=hosts), os.environ)
    ready.write(prepared, os.environ)
    says = prepared.attention.says
    say_lines([*([f"attn     {says}"] if says is not None else []), *prepared.notes])
    say(f"prepared {prepared.run_dir.path} for {counted(prepared.hosts.num_slots, 'rank')}")


def _context(typed: dict[str, Any]) -> tuple[JobFile, ScriptContext]:
    """Returns the job and the context of its scripts."""
    path: Path = typed["job"]
    file = read_job(path, list(typed["overrides"]))
    context = describe(
        file,
        path,
        environment=os.environ,
        python=typed["python"] or sys.executable,
        nodes=typed["nodes"],
        gpus=typed["gpus"],
        name=typed["name"],
        overrides=typed["overrides"],
    )
    return file, context
