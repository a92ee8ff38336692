"""`dstrain script`: writes job scripts for SLURM, Kubernetes, and nodes started by hand."""

from __future__ import annotations

import math
import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from dstrain.choices import LossKernel
from dstrain.cli.console import answer, answer_json, say, say_lines
from dstrain.cli.group import Group, options
from dstrain.cli.options.typed import TRUST
from dstrain.cli.types import SIZE, Choice
from dstrain.config import jsonc
from dstrain.config.edits.lock import backups, differing, planned_cluster, standing
from dstrain.errors import Conflict, InvalidConfig
from dstrain.facts.cluster.machines import hosts_of
from dstrain.facts.ds_config import ZERO, zero_stage
from dstrain.findings import errors
from dstrain.job.file import JobFile, read_job
from dstrain.launch.prepare.job_context import job_context, request_of, workload_of
from dstrain.launch.prepare.lint_job import lint_job, planned, read_text, refused
from dstrain.launch.prepare.prepare import prepare as check_job
from dstrain.launch.scripts import job_script
from dstrain.launch.scripts.exports import COMMAND, Export, ExportEngine, export
from dstrain.launch.scripts.job_script import Batch, ScriptContext, describe, parse_time
from dstrain.launch.scripts.k8s import Pods, label, manifest, outside, parse_claim
from dstrain.paths import write_atomic, write_together
from dstrain.plan.estimate import estimate, moved
from dstrain.plan.run_time import checkpoint_seconds
from dstrain.units import GIB, counted, format_bytes

JOB = click.argument("job", type=click.Path(path_type=Path), default="job.yaml")
SET = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a line of the job, in the script too."
)
MACHINES = (
    TRUST,
    click.option("--nodes", type=click.IntRange(1), help="Number of nodes.  [default: as the job's hostfile or plan]"),
    click.option("--gpus", type=click.IntRange(1), help="GPUs altogether.  [default: as the job's hostfile or plan]"),
)
COMMON = (
    JOB,
    *MACHINES,
    click.option("--name", metavar="NAME", help="Name of the job.  [default: from the job's folders]"),
    SET,
    click.option("--python", metavar="PATH", help="Python on the nodes.  [default: this one; in Kubernetes python3]"),
    click.option("-o", "--out", type=click.Path(path_type=Path), help="File to write.  [default: beside the job]"),
    click.option("--force", is_flag=True, help="Replace a script that was edited; yours is kept as .bak."),
    click.option("-n", "--dry-run", is_flag=True, help="Print the script, write nothing."),
    click.option("--json", "as_json", is_flag=True, help="Print the script and what it asks for as JSON to stdout."),
)
BATCH = (
    click.option("--time", default="24h", show_default=True, metavar="TIME", help="Time limit: 90m, 12h, 1d12h."),
    click.option("--cpus", type=click.IntRange(1), help="CPU cores of each node.  [default: 8 for each GPU]"),
    click.option("--memory", type=SIZE, metavar="SIZE", help="RAM of each node, such as 512GiB."),
    click.option("--partition", "--queue", metavar="NAME", help="Partition."),
    click.option("--account", metavar="NAME", help="Account or project."),
    click.option("--qos", metavar="NAME", help="Quality of service."),
    click.option("--reservation", metavar="NAME", help="Reservation."),
)


PORT = click.option("--port", type=click.IntRange(1, 65535), help="Port of the first node.  [default: 29500]")
PODS = (
    click.option("--image", required=True, metavar="IMAGE", help="Image with dstrain installed."),
    click.option("--namespace", metavar="NAME", help="Namespace.  [default: kubectl's]"),
    click.option("--pvc", "claims", multiple=True, metavar="CLAIM:/PATH", help="Volume that all pods share; repeat."),
    click.option("--secret", default="dstrain", show_default=True, metavar="NAME", help="Secret of the job."),
    click.option("--shm", default="16Gi", show_default=True, metavar="SIZE", help="Shared memory of a pod at most."),
    click.option("--cpus", metavar="NUMBER", help="CPU cores of each node."),
    click.option("--memory", metavar="SIZE", help="RAM of each node, such as 512Gi."),
    click.option("--gpu-resource", default="nvidia.com/gpu", show_default=True, metavar="NAME", help="Name of a GPU."),
    click.option("--runtime", default="torch-distributed", show_default=True, metavar="NAME", help="Training runtime."),
)


@click.command("accelerate")
@click.argument("job", type=click.Path(path_type=Path, dir_okay=False), default="job.yaml")
@click.option(
    "--engine", type=Choice(ExportEngine), default="deepspeed", show_default=True, help="What shards the training."
)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder to write into.  [default: ENGINE]"
)
@TRUST
@click.option("--force", is_flag=True, help="Replace existing files; yours are kept as .bak.")
@click.option("-n", "--dry-run", is_flag=True, help="Print the files and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the files as JSON to stdout.")
def accelerate(job: Path, engine: ExportEngine, out: Path | None, force: bool, dry_run: bool, as_json: bool) -> None:
    """Write a job as a script with Transformers' Trainer and a configuration of accelerate, which need no dstrain.

    It trains the same samples in the same order with the same losses, with DeepSpeed, PyTorch's FSDP2 or PyTorch's DDP.
    Exits with 3 if the job has something without counterpart, such as QLoRA.

    \b
    Example:
      dstrain script accelerate
      dstrain script accelerate runs/qwen3/job.yaml --engine fsdp2 -o fsdp
    """
    file = read_job(job)
    config = Path(file.job.ds_config)
    result = lint_job(file, config)
    if errors(result.findings):
        raise refused(result.findings)
    document = jsonc.read(read_text(config), str(config)).value
    exported = export(file.job, document, hosts_of(file), engine)
    folder = out or job.parent / engine.value
    if as_json:
        answer_json({"schema": 1, "engine": engine, "command": COMMAND, "files": dict(exported.files)})
    elif dry_run:
        for name, content in exported.files.items():
            answer(f"# {name}\n{content}")
    say_lines(f"note     {note}" for note in (*exported.notes, *_needs(file, document, engine)))
    if not dry_run:
        _write_files(folder, exported, force=force)
        say(f"next: cd {shlex.quote(str(folder))} && {COMMAND}")


def _needs(file: JobFile, config: dict[str, Any], engine: ExportEngine) -> list[str]:
    """Returns the memory of the export by the plan; nothing if the model or the machines are unknown.

    DDP and FSDP2 are planned as the ZeRO stage that shards as much: fp32 weights, gradients and two moments have as
    many bytes as bf16 ones with an fp32 master copy. DDP's buckets are a copy of the gradients.
    """
    workload = workload_of(job_context(file, planned_cluster(Path(file.job.ds_config).parent)))
    if workload is None or workload.cluster.gpu.is_cpu:
        return []
    request = replace(request_of(file.job), loss=LossKernel.FULL)
    if engine is not ExportEngine.DEEPSPEED:
        stage = 0 if engine is ExportEngine.DDP else 3 if zero_stage(config) == 3 else 2
        config = {ZERO: {"stage": stage}}
    try:
        found = estimate(workload, request, config)
    except InvalidConfig:
        return []
    if engine is ExportEngine.DDP and workload.cluster.num_gpus > 1:
        found = moved(found, 4 * found.num_trainable_params)
    size = format_bytes(found.memory.device_bytes_per_gpu)
    verdict = "" if found.fits else f", which does not fit: {found.shortage}"
    about = "" if engine is ExportEngine.DEEPSPEED else "about "
    return [f"{engine} needs {about}{size} on each GPU by the plan{verdict}"]


def _write_files(folder: Path, exported: Export, *, force: bool) -> None:
    """Writes the files. Raises Conflict if a different one exists, unless it is to be replaced."""
    there = standing(folder, exported.files)
    different = {folder / name: text for name, text in there.items() if text != exported.files[name]}
    if different and not force:
        raise differing(different, otherwise="-o DIR writes elsewhere")
    write_together({folder / name: text for name, text in exported.files.items()}, backups=backups(different))
    say(f"wrote {', '.join(str(folder / name) for name in exported.files)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script to write."""

    kind: str
    """The scheduler or tool that runs it."""
    ending: str
    """The suffix of its file name."""
    submit: str
    """The command that starts it; `{}` is the file."""
    text: str
    is_program: bool = True
    """Whether the file is executable."""
    notes: tuple[str, ...] = ()
    """Lines to print about it."""


def finish(script: Script, context: ScriptContext, typed: dict[str, Any]) -> bool:
    """Writes or prints a script, and prints the next command; returns whether it was written."""
    job: Path = typed["job"]
    out: Path = typed["out"] or job.with_name(f"{job.stem}.{script.ending}")
    submit = script.submit.format(shlex.quote(str(out)))
    if not typed["dry_run"]:
        _write_script(out, script, force=typed["force"])
    if typed["as_json"]:
        document = {"schema": 1, "kind": script.kind, "path": str(out), "submit": submit, "text": script.text}
        answer_json(
            {**document, "nodes": context.nodes, "gpus_per_node": context.gpus, "secrets": list(context.secrets)}
        )
    elif typed["dry_run"]:
        answer(script.text)
    say_lines(script.notes)
    if typed["dry_run"]:
        return False
    say(f"wrote {out}: {counted(context.nodes, 'node')} of {counted(context.gpus, 'GPU')}")
    say(f"next: read it, then {submit}")
    return True


def _write_script(out: Path, script: Script, *, force: bool) -> None:
    """Writes the file. Raises Conflict if a different one exists, which may have been edited."""
    mode = 0o755 if script.is_program else 0o644
    try:
        present = out.read_text(encoding="utf-8", errors="surrogateescape") if out.exists() else script.text
    except OSError as error:
        raise Conflict(f"{out}: {error.strerror}; nothing was written", hint="Name another file with --out.") from None
    if present != script.text:
        if not force:
            raise differing([out], otherwise="--dry-run prints the new one")
        write_together({}, backups=backups({out: present}))
    write_atomic(out, script.text, mode=mode)


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
    estimate, warning_s, notes = planned(file), job_script.WARNING_S, []
    if estimate is not None and estimate.speed is not None:
        checkpoint_s = checkpoint_seconds(estimate, context.nodes, only_model=file.job.save_only_model)
        warning_s = job_script.warning_s(estimate.speed.step_s, checkpoint_s)
    if estimate is not None and typed["memory"] is None:
        needed = estimate.memory.host_bytes_per_node
        # a tenth more than planned: SLURM kills a step that exceeds what it asked for
        option = f"--memory {math.ceil(1.1 * needed / GIB)}GiB"
        notes.append(f"note: the script asks for no RAM; the plan needs {format_bytes(needed)} a node: {option}")
    names = ("cpus", "partition", "account", "qos", "reservation")
    batch = Batch(
        time_s=parse_time(typed["time"], warning_s),
        warning_s=warning_s,
        memory_bytes=typed["memory"],
        **{name: typed[name] for name in names},
    )
    text = job_script.slurm(context, batch)
    if finish(Script(kind="slurm", ending="sbatch", submit="sbatch {}", text=text, notes=tuple(notes)), context, typed):
        job_script.slurm_logs(context).mkdir(parents=True, exist_ok=True)


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
    text = job_script.bash(context, typed["port"])
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
        hosts = job_script.stand_ins(context.nodes, context.gpus)
    prepared = job_script.decided(check_job(file, os.environ, hosts=hosts), os.environ)
    job_script.write_run_dir(prepared, os.environ)
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
