"""`dstrain script`: writes job scripts for schedulers, Kubernetes, and nodes started by hand."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from dstrain.cli.console import say, say_lines
from dstrain.cli.options.script import BATCH, COMMON, JOB, MACHINES, PODS, PORT, SET, options
from dstrain.cli.script_file import Script, finish
from dstrain.errors import did_you_mean
from dstrain.job.file import JobFile, read_job
from dstrain.launch import environment
from dstrain.launch.prepare.prepare import prepare as check_job
from dstrain.launch.scripts import batch as batches
from dstrain.launch.scripts import k8s as manifests
from dstrain.launch.scripts import ready, shell
from dstrain.launch.scripts.batch import Batch, parse_time
from dstrain.launch.scripts.k8s import Kind, Pods, label, parse_claim
from dstrain.launch.scripts.script_context import ScriptContext, describe
from dstrain.rundir import RunDir


class Kinds(click.Group):
    """A group that suggests the closest match for an unknown kind."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the kind and its arguments."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            raise click.UsageError(f"No such script '{args[0]}'. {did_you_mean(args[0], list(self.commands))}", ctx)
        return super().resolve_command(ctx, args)


@click.group("script", cls=Kinds, short_help="Write a script for SLURM, Kubernetes and others.")
def command() -> None:
    """Write a script that starts a job elsewhere: to read, to edit and to submit.

    It goes on from the newest checkpoint whenever it is started, and names the secrets that the job needs without
    holding any.

    \b
    Example:
      dstrain script slurm job.yaml --partition gpu --time 12h
      dstrain script k8s job.yaml --kind pytorchjob --image registry/train:1 --pvc training:/shared
    """


def _batch(kind: str, submit: str, typed: dict[str, Any]) -> None:
    """Writes a script for a batch scheduler."""
    file, asked = _asked(typed)
    wish = Batch(
        time_s=parse_time(typed["time"]),
        cpus=typed["cpus"],
        memory_bytes=typed["memory"],
        partition=typed["partition"],
        account=typed["account"],
        qos=typed["qos"],
        reservation=typed["reservation"],
    )
    text = batches.BATCH[kind](asked, wish)
    ending = {"slurm": "sbatch"}.get(kind, kind)
    script = Script(kind=kind, ending=ending, submit=submit, text=text)
    if not finish(script, asked, typed):
        return
    batches.logs(asked).mkdir(parents=True, exist_ok=True)
    secrets = environment.secrets(os.environ, file.job.env)
    if kind == "pbs" and secrets:
        place = RunDir(asked.run_dir)
        environment.write_secrets(place, secrets)
        say(f"wrote {place.secrets}, for you alone: {', '.join(sorted(secrets))}")


@command.command("slurm", short_help="For sbatch.")
@options(*COMMON, *BATCH)
def slurm(**typed: Any) -> None:
    """Write a script for SLURM's sbatch: safe in arrays, queued again with a checkpoint when its nodes are taken.

    \b
    Example:
      dstrain script slurm job.yaml --partition gpu --time 12h
      sbatch job.sbatch
    """
    _batch("slurm", "sbatch {}", typed)


@command.command("pbs", short_help="For qsub.")
@options(*COMMON, *BATCH)
def pbs(**typed: Any) -> None:
    """Write a script for qsub of PBS Professional or OpenPBS; the nodes are reached over ssh.

    \b
    Example:
      dstrain script pbs job.yaml --queue gpu --time 12h
      qsub job.pbs
    """
    _batch("pbs", "qsub {}", typed)


@command.command("lsf", short_help="For bsub.")
@options(*COMMON, *BATCH)
def lsf(**typed: Any) -> None:
    """Write a script for LSF's bsub; the nodes are reached over ssh.

    \b
    Example:
      dstrain script lsf job.yaml --queue gpu --time 12h
      bsub < job.lsf
    """
    _batch("lsf", "bsub < {}", typed)


@command.command("bash", short_help="For nodes that are started by hand.")
@options(*COMMON, PORT)
def bash(**typed: Any) -> None:
    """Write a script that starts every node of the hostfile: by hand on each, or from one over ssh.

    \b
    Example:
      dstrain script bash job.yaml
      bash job.sh
    """
    _, asked = _asked(typed)
    text = shell.bash(asked, typed["port"])
    finish(Script(kind="bash", ending="sh", submit="bash {}", text=text), asked, typed)


@command.command("torchrun", short_help="For torchrun in place of DeepSpeed's launcher.")
@options(*COMMON, PORT)
def torchrun(**typed: Any) -> None:
    """Write a script that starts one node with torchrun; the nodes find each other by c10d.

    \b
    Example:
      dstrain script torchrun job.yaml
      bash job.torchrun.sh prepare && bash job.torchrun.sh
    """
    _, asked = _asked(typed)
    text = shell.torchrun(asked, typed["port"])
    submit = "bash {0} prepare, then on every node bash {0}"
    finish(Script(kind="torchrun", ending="torchrun.sh", submit=submit, text=text), asked, typed)


@command.command("k8s", short_help="For Kubernetes: Kubeflow or Volcano.")
@options(*COMMON, *PODS)
def k8s(**typed: Any) -> None:
    """Write a manifest: a Kubeflow PyTorchJob, TrainJob or MPIJob, or a Volcano Job.

    \b
    Example:
      dstrain script k8s job.yaml --image registry/train:1 --pvc training:/shared
      kubectl apply -f job.pytorchjob.yaml
    """
    file, asked = _asked({**typed, "python": typed["python"] or "python3"})
    if typed["name"] is None:
        asked = replace(asked, name=label(asked.name))
    names = ("image", "namespace", "secret", "shm", "cpus", "memory", "gpu_resource", "runtime", "queue")
    pods = Pods(claims=tuple(map(parse_claim, typed["claims"])), **{name: typed[name] for name in names})
    kind: Kind = typed["kind"]
    missing = manifests.outside(asked, file.job, pods.claims)
    notes = (f"note: on no --pvc, so the image must hold it or it goes with the pod: {', '.join(missing)}",)
    script = Script(
        kind=kind.value,
        ending=f"{kind.value}.yaml",
        submit="kubectl apply -f {}",
        text=manifests.manifest(asked, pods, kind),
        is_program=False,
        notes=notes if missing else (),
    )
    finish(script, asked, typed)


@command.command("prepare", short_help="Write what ranks read, and start nothing.")
@options(JOB, *MACHINES, SET)
def prepare(job: Path, nodes: int | None, gpus: int | None, overrides: tuple[str, ...]) -> None:
    """Check a job and write its run directory, for ranks that something else starts: torchrun, or an operator's pods.

    With --nodes or --gpus the job's hostfile is not read.

    \b
    Example:
      dstrain script prepare job.yaml --nodes 2 --gpus 16 --set resume=auto
    """
    file = read_job(job, list(overrides))
    hosts = None
    if nodes is not None or gpus is not None:
        asked = describe(file, job, environment={}, python=sys.executable, nodes=nodes, gpus=gpus)
        hosts = ready.stand_ins(asked.nodes, asked.gpus)
    prepared = check_job(file, os.environ, hosts=hosts)
    ready.write(prepared, os.environ)
    say_lines(prepared.notes)
    say(f"prepared {prepared.run_dir.path} for {prepared.hosts.num_slots} ranks")


def _asked(typed: dict[str, Any]) -> tuple[JobFile, ScriptContext]:
    """Returns the job and what its scripts are filled with."""
    path: Path = typed["job"]
    file = read_job(path, list(typed["overrides"]))
    asked = describe(
        file,
        path,
        environment=os.environ,
        python=typed["python"] or sys.executable,
        nodes=typed["nodes"],
        gpus=typed["gpus"],
        name=typed["name"],
        overrides=typed["overrides"],
    )
    return file, asked
