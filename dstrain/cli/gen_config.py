"""`dstrain gen-config`: decide how to train, say why, and write files to edit."""

from __future__ import annotations

import difflib
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from dstrain import __version__
from dstrain.choices import Method
from dstrain.cli.console import answer, answer_json, say, say_lines
from dstrain.cli.facts_options import Question, facts_options, question
from dstrain.cli.plan_text import plan_document, plan_lines
from dstrain.jobfile import looks_local
from dstrain.plan.decide import plan_of, survey
from dstrain.plan.plan import Plan
from dstrain.plan.shortage import does_not_fit
from dstrain.render.files import generated
from dstrain.render.lock import Lock, write_generated
from dstrain.render.templates import template_hash
from dstrain.render.values import template_of


@click.command("gen-config", short_help="Decide how to train, say why, write the files.")
@facts_options
@click.option("--data", metavar="FILE", help="Training data: .jsonl, .json, .parquet or a data set id.")
@click.option("--eval-data", metavar="FILE", help="Evaluation data.")
@click.option(
    "--output-dir", default="output", show_default=True, help="Run directory of the job, relative to job.yaml."
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=".",
    help="Folder to write into.  [default: here]",
)
@click.option("--template-dir", type=click.Path(path_type=Path), help="Folder with your own templates.")
@click.option("-n", "--dry-run", is_flag=True, help="Write nothing; print ds_config.json to stdout.")
@click.option("--diff", "as_diff", is_flag=True, help="Write nothing; print what would change as a unified diff.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON to stdout, beside writing the files.")
def command(out: Path, template_dir: Path | None, dry_run: bool, as_diff: bool, as_json: bool, **options: Any) -> None:
    """Decide how to train a model on these GPUs, and write the files.

    Writes ds_config.json, job.yaml and hostfile, which are yours to edit, and .dstrain/lock.json. What you give is
    fixed, the rest is chosen: the fastest way that fits.

    \b
    Example:
      dstrain gen-config --gpus 16 --model qwen3-32b
      dstrain gen-config --gpus 1 --gpu 4090 --model qwen3-8b --method lora --data train.jsonl
    """
    asked = question(options)
    found = survey(asked.model, asked.cluster, asked.request, calibration=asked.calibration)
    if not found.fits:
        raise does_not_fit(asked.model, asked.cluster, asked.request, found.first, calibration=asked.calibration)
    plan = plan_of(found, asked.cluster, asked.request)
    lock = _lock(asked, plan, template_dir, out, options)
    say_lines(plan_lines(found, asked.model, asked.cluster))
    diff = _diff(out, lock) if as_diff else None
    if as_json:
        answered = plan_document(found, asked.model, asked.cluster)
        document = {**answered, "notes": list(found.notes), "files": dict(lock.base)}
        answer_json(document if diff is None else {**document, "diff": diff})
    elif diff is not None:
        answer(diff)
    elif dry_run:
        answer(lock.base["ds_config.json"])
    if not dry_run and not as_diff:
        _write(out, lock, asked, plan)


def _lock(asked: Question, plan: Plan, template_dir: Path | None, out: Path, options: dict[str, Any]) -> Lock:
    """Returns the generated files with what they were made from."""
    template = template_of(plan.chosen.configuration)
    job = {
        "model": _model(asked.model.source, out),
        "data": _relative(options["data"], out),
        "eval_data": _relative(options["eval_data"], out),
        "hub": options["hub"],
        "output_dir": options["output_dir"],
    }
    files = generated(plan, asked.model, asked.cluster, asked.hosts, template_dir=template_dir, job=job)
    if options["hostfile"] and options["hostfile"].resolve() == (out / "hostfile").resolve():
        del files["hostfile"]  # it is the user's own, comments and all
    return Lock(
        dstrain=__version__,
        deepspeed=_installed("deepspeed"),
        template=template,
        template_sha256=template_hash(template, override=template_dir),
        inputs=_given(options, template_dir, out),
        cluster=asked.cluster,
        base=files,
    )


def _installed(package: str) -> str:
    """Returns the version of an installed package, or `none`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _given(options: dict[str, Any], template_dir: Path | None, out: Path) -> dict[str, Any]:
    """Returns the options that were typed, local paths relative to the generated files; defaults may change later."""
    context = click.get_current_context()
    typed = {
        name: value
        for name, value in {**options, "template_dir": template_dir}.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    paths = ("model", "data", "eval_data", "hostfile", "template_dir")
    return {name: _relative(str(value), out) if name in paths else value for name, value in typed.items()}


def _model(source: str, out: Path) -> str | None:
    """Returns the model as job.yaml must name it; a relative folder begins with `./`, so that it is no hub id."""
    named = _relative(source, out)
    return f"./{named}" if Path(source).exists() and named and not Path(named).is_absolute() else named


def _relative(name: str | None, out: Path) -> str | None:
    """Returns a local path as job.yaml in `out` must name it; a hub id stays as it is."""
    if name is None or not (Path(name).exists() or looks_local(name)):
        return name
    path = Path(name).resolve()
    folder = out.resolve()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _diff(out: Path, lock: Lock) -> str:
    """Returns the unified diff from the files that are there to the ones that would be."""
    pieces: list[str] = []
    for name, text in lock.base.items():
        path = out / name
        present = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        pieces += difflib.unified_diff(
            present.splitlines(keepends=True), text.splitlines(keepends=True), str(path), f"{path} (new)"
        )
    return "".join(pieces)


def _write(out: Path, lock: Lock, asked: Question, plan: Plan) -> None:
    """Writes the files and says what to type next."""
    changed = write_generated(out, lock)
    where = "" if out == Path() else f"{out}/"
    say()
    say(
        f"wrote {', '.join(where + name for name in changed)}" if changed else "nothing changed: the files are the same"
    )
    steps = []
    if asked.hosts.placeholder_lines:
        steps.append(f"put the names of your nodes into {where}hostfile")
    if plan.chosen.configuration.method is Method.QLORA:
        steps.append("pip install 'dstrain[qlora]'")
    if "\ndata: null" in lock.base["job.yaml"]:
        steps.append(f"name your training data in {where}job.yaml")
    steps.append(f"dstrain run {where}job.yaml" if where else "dstrain run")
    for number, step in enumerate(steps, 1):
        say(f"next: {step}" if len(steps) == 1 else f"next {number}: {step}")
