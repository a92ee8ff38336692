"""`dstrain import`: turns the training file of another tool into a job, with its cost, its faults, and what is lost."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from dstrain.cli.console import answer, answer_json, say
from dstrain.cli.generate import lock_of
from dstrain.cli.options.imported import ImportInputs, import_inputs, of_file
from dstrain.cli.options.planning import machine_options
from dstrain.cli.options.typed import typed
from dstrain.cli.output.generated import next_lines
from dstrain.cli.output.imported import ImportReport, read_document, read_lines, report_document, report_lines
from dstrain.config import jsonc
from dstrain.config.edits.lock import LOCK, Lock, differing, read_lock, standing, write_files
from dstrain.config.edits.regenerate import Standing, replaced
from dstrain.config.imports import walk
from dstrain.config.imports.converters import runs_deepspeed
from dstrain.config.imports.read import TOOLS, import_file
from dstrain.config.imports.tables import launch_variables
from dstrain.config.imports.walk import Imported, Note
from dstrain.config.lint import engine
from dstrain.config.lint.rule import JobContext
from dstrain.config.lint.rules.releases import past_faults
from dstrain.errors import InvalidConfig
from dstrain.findings import Finding
from dstrain.job.file import JobFile, job_of
from dstrain.job.yaml_source import parse_yaml
from dstrain.launch.prepare import checks
from dstrain.launch.prepare.job_context import request_of
from dstrain.launch.prepare.lint_job import LintResult, lint_text
from dstrain.paths import alone
from dstrain.plan.estimate import estimate
from dstrain.plan.estimate_records import Estimate, Plan
from dstrain.plan.search.alternatives import unasked
from dstrain.plan.search.decide import plan_of, survey
from dstrain.units import counted


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--from", "tool", type=click.Choice(list(TOOLS)), help="Tool of the file.  [default: by its content]")
@click.option("--model", metavar="NAME", help="Model in place of the file's: alias, hub id or local folder.")
@click.option("--data", metavar="FILE", help="Training data in place of the file's.")
@click.option("--ignore", metavar="KEY", multiple=True, help="Leave out a key of the file; repeatable.")
@machine_options
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=".",
    help="Folder to write into.  [default: here]",
)
@click.option("--force", is_flag=True, help="Replace existing files; yours are kept as .bak.")
@click.option("-n", "--dry-run", is_flag=True, help="Print the page and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the page and the files as JSON.")
def command(file: Path, out: Path, force: bool, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Turn a training file of another tool into job.yaml and ds_config.json.

    FILE is a YAML of LLaMA-Factory, ms-swift, axolotl or accelerate, a shell script with a command of one of them or
    of a script with Transformers' Trainer, or a DeepSpeed configuration. Prints what the settings cost beside dstrain's
    own plan, what lint says of them, and every key without counterpart, with its line. If its keys contradict each
    other, or something else would be trained, prints what it read, writes nothing and exits with 3; --ignore leaves a
    key out. Afterwards gen-config keeps what the file says as edits.

    \b
    Example:
      dstrain import train_qwen.yaml --gpus 8 --gpu h100
      dstrain import sft.sh -o runs/swift --dry-run
    """
    imported = _imported(file, options)
    if imported.stops:
        raise _refused(_stopped(imported), imported, as_json=as_json)
    # keys that contradict each other make no job that could be planned, so they stop it before this
    inputs = import_inputs(imported, typed(options), out)
    with nullcontext() if dry_run else alone(out / LOCK, "writes into this folder"):
        try:
            made = _made(inputs, out)
        except InvalidConfig as error:
            raise _refused(error, inputs.imported, as_json=as_json) from None
        if as_json:
            answer_json(report_document(made.report, made.files))
        else:
            answer("\n".join(report_lines(made.report)))
        if made.errors:
            raise _faulty(made, file)
        if not dry_run:
            _write(out, made, force=force)
    if not dry_run:
        for line in _next(out, made, inputs):
            say(line)


def _faulty(made: _Made, file: Path) -> InvalidConfig:
    """Returns the error for settings at which lint finds errors, so that no run would start with them."""
    rules = ", ".join(dict.fromkeys(finding.rule for finding in made.errors))
    problem = (
        f"{counted(len(made.errors), 'error')} above ({rules}), at which dstrain run stops, so nothing was written"
    )
    return InvalidConfig(f"{file}: {problem}", hint="Mend the lines that they name, and import it again.")


def _next(out: Path, made: _Made, inputs: ImportInputs) -> list[str]:
    """Returns the next command; not the run if it would stop at errors of the job or its data."""
    theirs = made.report.theirs
    fits = {"fits": theirs is None or theirs.fits}
    lines = next_lines(out, made.files, inputs.facts, made.plan, with_edits=fits)
    if not engine.errors_of_settings(made.report.findings):
        return lines
    return [*lines[:-1], f"next: mend the errors above, at which dstrain run stops, in {out / 'job.yaml'}"]


def _imported(file: Path, options: dict[str, Any]) -> Imported:
    """Returns the counterpart of a file, of which a script knows the GPUs that were typed."""
    given = partial(launch_variables, os.environ, gpus=options["gpus"], gpus_per_node=options["gpus_per_node"])
    tool, ignore = options.pop("tool"), options.pop("ignore")
    return import_file(file, tool=tool, given=given, ignore=ignore, typed=typed(options))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """The files of an import, and the page about them."""

    lock: Lock
    """The files that gen-config generates for the same question."""
    files: dict[str, str]
    """The same with the imported values."""
    plan: Plan
    report: ImportReport
    errors: list[Finding]
    """Findings of lint in the settings themselves."""


def _stopped(imported: Imported) -> InvalidConfig:
    """Returns the error for a file whose counterpart would train something else."""
    by_text: dict[str, list[Note]] = {}
    for note in imported.stops:
        by_text.setdefault(note.text, []).append(note)
    lines = [f"{notes[0].place}: {', '.join(note.key for note in notes)}: {text}" for text, notes in by_text.items()]
    keys = dict.fromkeys(note.key for note in imported.stops)
    return InvalidConfig(
        "\n".join(["this would be another training, so nothing was written:", *lines]),
        hint=f"Without them the rest is imported: {' '.join(f'--ignore {key}' for key in keys)}",
    )


def _refused(error: InvalidConfig, imported: Imported, *, as_json: bool) -> InvalidConfig:
    """Prints the rows read from a file, and returns the error for which nothing is written."""
    if as_json:
        answer_json({"error": error.problem, **read_document(imported)})
    else:
        answer("\n".join(read_lines(imported)))
    return error


def _made(inputs: ImportInputs, out: Path) -> _Made:
    """Plans the file's settings and dstrain's own, and returns the files and the page."""
    workload, request = inputs.facts.workload, inputs.facts.request
    try:
        fixed = survey(workload, request, top=1)
    except InvalidConfig as error:
        raise of_file(error, inputs) from None
    plan = plan_of(fixed, workload.cluster, request)
    lock = lock_of(inputs.asked, inputs.facts, plan, out)
    files = {**lock.base, "job.yaml": walk.edited(lock.base["job.yaml"], inputs.imported)}
    files["ds_config.json"] = inputs.config or files["ds_config.json"]
    locate = walk.locator(inputs.imported, out / "job.yaml")
    job = job_of(parse_yaml(files["job.yaml"], "job.yaml")[0], locate, out.resolve())
    linted = _linted(inputs, job, files["ds_config.json"])
    report = ImportReport(
        imported=inputs.imported,
        workload=workload,
        theirs=_estimate(inputs, job, files["ds_config.json"]),
        ours=survey(workload, unasked(request, request.global_batch) or request, top=1),
        findings=[*linted.findings, *checks.findings(checks.OF_LINT, _context(inputs, job))],
        past_faults=past_faults(linted.subject) if linted.subject and runs_deepspeed(inputs.imported.source) else [],
    )
    return _Made(lock=lock, files=files, plan=plan, report=report, errors=engine.errors_of_settings(linted.findings))


def _estimate(inputs: ImportInputs, job: JobFile, config: str) -> Estimate | None:
    """Returns the estimate of the file's settings; None if its DeepSpeed configuration is not understood."""
    document = jsonc.read(config, inputs.config_name).value
    try:
        return estimate(inputs.facts.workload, request_of(job.job), document)
    except InvalidConfig:
        return None  # lint says why


def _linted(inputs: ImportInputs, job: JobFile, config: str) -> LintResult:
    """Returns the findings of lint on the configuration and the job."""
    return lint_text(_context(inputs, job), config, inputs.config_name, is_trainers=True)


def _context(inputs: ImportInputs, job: JobFile) -> JobContext:
    facts = inputs.facts
    return JobContext(job=job, hosts=facts.hosts, model=facts.workload.model, cluster=facts.workload.cluster)


def _write(out: Path, made: _Made, *, force: bool) -> None:
    """Writes the files. Raises Conflict if others exist, which may have been edited, unless they are to be replaced."""
    before = read_lock(out)
    there = standing(out, made.files)
    files = [
        Standing(name=name, shown=str(out / name), base=None, yours=there.get(name), new=new)
        for name, new in made.files.items()
    ]
    merged = replaced(files)
    if merged.beside and not force:
        paths = [out / name.removesuffix(".bak") for name in merged.beside]
        raise differing(paths, otherwise="-o DIR writes elsewhere")
    changed = write_files(out, made.lock, merged.files, merged.beside, before=before)
    say()
    say(
        f"wrote {', '.join(str(out / name) for name in changed)}"
        if changed
        else "nothing changed: the files are the same"
    )
