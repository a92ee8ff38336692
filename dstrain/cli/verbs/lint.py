"""`dstrain lint`: reports errors in a DeepSpeed configuration, their effect at run time, and the fix."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dstrain.cli.console import answer, answer_json, say, say_unread_links
from dstrain.cli.options.typed import TRUST
from dstrain.cli.types import Release
from dstrain.config.lint import engine
from dstrain.errors import InvalidConfig
from dstrain.findings import Severity, count_text, lines
from dstrain.launch.prepare.lint_job import LintResult, check_rules, lint_job
from dstrain.paths import shown, write_atomic

if TYPE_CHECKING:
    from dstrain.job.file import JobFile

JOB = "job.yaml"


@click.command("lint")
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option("--job", type=click.Path(path_type=Path), help="Job file.  [default: job.yaml beside the configuration]")
@click.option("--hostfile", type=click.Path(path_type=Path), help="Hostfile that replaces the job's.")
@click.option(
    "--trainer/--no-trainer",
    default=None,
    help="Whether the Hugging Face Trainer reads it, or deepspeed.initialize.  [default: the Trainer, if it has"
    ' a job or an "auto"]',
)
@click.option(
    "--deepspeed",
    type=Release(),
    metavar="VERSION",
    help="Release whose known faults to report, such as 0.18.9.  [default: the installed one]",
)
@click.option("--ignore", "ignored", multiple=True, metavar="RULE", help="Rule to skip, such as DS701.")
@click.option("--check-images", is_flag=True, help="Read every image and video of the data, not only find it.")
@click.option("--fix", is_flag=True, help="Apply safe fixes; every other byte stays.")
@click.option("-n", "--dry-run", is_flag=True, help="With --fix: print the fixed text and write nothing.")
@TRUST
@click.option("--strict", is_flag=True, help="Exit with 3 on warnings too.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON to stdout.")
def command(
    config: Path | None,
    job: Path | None,
    hostfile: Path | None,
    trainer: bool | None,
    deepspeed: str | None,
    ignored: tuple[str, ...],
    check_images: bool,
    fix: bool,
    dry_run: bool,
    strict: bool,
    as_json: bool,
) -> None:
    """Check a DeepSpeed configuration, generated or not.

    Accepts comments and trailing commas. With a job, also reports what contradicts the job and what does not fit into
    memory. Exits with 3 on errors.

    \b
    Example:
      dstrain lint
      dstrain lint ds_config.json --fix
    """
    check_rules(ignored)
    if dry_run and not fix:
        raise click.UsageError("-n goes with --fix; without it, lint writes nothing.")
    path, file = _files(config, job, hostfile)
    options: dict[str, Any] = {"is_trainers": trainer, "ignored": ignored, "fix": fix, "deepspeed": deepspeed}
    result = _linted(file, path, as_json=as_json, opens_images=check_images, **options)
    text = _fixed(path, result, dry_run=dry_run)
    if file is not None:
        say_unread_links()
    if as_json:
        document = {"schema": 1, "findings": [finding.document() for finding in result.findings]}
        answer_json(document | ({"text": text} if fix else {}))
    else:
        _print(path, result, text if dry_run else None)
    failing = (Severity.ERROR, Severity.WARNING) if strict else (Severity.ERROR,)
    if any(finding.severity in failing for finding in result.findings):
        # the findings are printed: an error raised here would be printed after them
        sys.exit(InvalidConfig.exit_code)


def _linted(file: JobFile | None, path: Path, *, as_json: bool, **options: Any) -> LintResult:
    """Returns the findings; an error is an answer too."""
    try:
        return lint_job(file, path, **options)
    except InvalidConfig as error:
        if as_json:
            answer_json({"schema": 1, "findings": [], "error": error.problem})
        raise


def _fixed(path: Path, result: LintResult, *, dry_run: bool) -> str | None:
    """Writes the fixed text and prints the fixes, if there are any; returns the text, or None if it is unreadable."""
    text = result.subject.document.text if result.subject is not None else None
    if not dry_run and text is not None and result.mended:
        write_atomic(path, text)
    for finding in result.mended:
        say(f"{'would fix' if dry_run else 'fixed'} {finding.line}")
    return text


def _files(config: Path | None, job: Path | None, hostfile: Path | None) -> tuple[Path, JobFile | None]:
    """Returns the configuration to lint, and its job if it has one."""
    beside = (config or Path("ds_config.json")).parent / JOB
    named = job or (beside if beside.is_file() else None)
    if named is None:
        if hostfile is not None:
            raise click.UsageError("--hostfile needs a job; name one with --job.")
        return config or Path("ds_config.json"), None
    from dstrain.job.file import read_job

    file = read_job(named, [f"hostfile={hostfile.resolve()}"] if hostfile else [])
    theirs = Path(file.job.ds_config)
    if job is None and config is not None and config.resolve() != theirs:
        return config, None  # the job beside it uses another configuration
    return config or theirs, file


def _print(path: Path, result: LintResult, text: str | None) -> None:
    """Prints the findings: to stdout, or to stderr after the fixed text if that is the answer."""
    if text is not None:
        answer(text)
    write = answer if text is None else say
    for finding in result.findings:
        write("\n".join(lines(finding)))
    if not result.findings:
        say(f"{shown(str(path))}: no problems")
        return
    num_fixable = len(engine.fixed(result.subject)[1]) if result.subject is not None else 0
    say(
        f"{shown(str(path))}: {count_text(result.findings)}"
        + (f"; {num_fixable} fixable with --fix" if num_fixable else "")
    )
