"""`dstrain script accelerate`: writes a job as a script that trains without dstrain."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from dstrain.choices import LossKernel, StateDtypes
from dstrain.cli.console import answer, answer_json, say, say_lines
from dstrain.cli.options.trust import TRUST
from dstrain.cli.types import Choice
from dstrain.config import jsonc
from dstrain.config.edits.lock import backups, differing, planned_cluster, standing
from dstrain.config.lint.engine import errors
from dstrain.errors import InvalidConfig
from dstrain.facts.ds_config import ZERO, zero_stage
from dstrain.job.file import JobFile, read_job
from dstrain.launch.prepare.job_context import hosts_of, job_context, request_of, workload_of
from dstrain.launch.prepare.lint_job import lint_job, read_text, refused
from dstrain.launch.scripts.exports import COMMAND, Export, ExportEngine, export
from dstrain.paths import write_together
from dstrain.plan.configuration import changed
from dstrain.plan.estimate import assess, estimate
from dstrain.units import format_bytes


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
def command(job: Path, engine: ExportEngine, out: Path | None, force: bool, dry_run: bool, as_json: bool) -> None:
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
        _write(folder, exported, force=force)
        say(f"next: cd {shlex.quote(str(folder))} && {COMMAND}")


def _needs(file: JobFile, config: dict[str, Any], engine: ExportEngine) -> list[str]:
    """Returns the memory of the export by the plan; nothing if the model or the machines are unknown."""
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
    if engine is not ExportEngine.DEEPSPEED:
        found = assess(workload, changed(found.configuration, state_dtypes=StateDtypes.AUTOCAST))
    size = format_bytes(found.memory.device_bytes_per_gpu)
    verdict = "" if found.fits else f", which does not fit: {found.shortage}"
    return [f"{engine} needs {size} on each GPU by the plan{verdict}"]


def _write(folder: Path, exported: Export, *, force: bool) -> None:
    """Writes the files. Raises Conflict if a different one exists, unless it is to be replaced."""
    there = standing(folder, exported.files)
    different = {folder / name: text for name, text in there.items() if text != exported.files[name]}
    if different and not force:
        raise differing(different, otherwise="-o DIR writes elsewhere")
    write_together({folder / name: text for name, text in exported.files.items()}, backups=backups(different))
    say(f"wrote {', '.join(str(folder / name) for name in exported.files)}")
