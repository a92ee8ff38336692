"""`dstrain lint`: reports errors in a DeepSpeed configuration, their effect at run time, and the fix."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dstrain.cli.console import answer, answer_json, say
from dstrain.config.lint import engine
from dstrain.config.lint.finding import Severity, count_text, lines
from dstrain.errors import InvalidConfig
from dstrain.launch.prepare.lint_job import LintResult, check_rules, lint_job
from dstrain.paths import shown, write_atomic

if TYPE_CHECKING:
    from dstrain.job.file import JobFile

JOB = "job.yaml"


@click.command("lint", short_help="Check a DeepSpeed configuration.")
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option("--job", type=click.Path(path_type=Path), help="Job file.  [default: job.yaml beside the configuration]")
@click.option("--hostfile", type=click.Path(path_type=Path), help="Hostfile to use in place of the job's.")
@click.option(
    "--trainer/--no-trainer",
    default=None,
    help="Whether the Hugging Face Trainer reads it, or deepspeed.initialize.  [default: the Trainer, where there is"
    ' a job or an "auto" in it]',
)
@click.option("--ignore", "ignored", multiple=True, metavar="RULE", help="A rule to leave out, such as DS701.")
@click.option("--fix", is_flag=True, help="Mend what has one safe answer; every other byte stays.")
@click.option("-n", "--dry-run", is_flag=True, help="With --fix: print the mended text, write nothing.")
@click.option("--strict", is_flag=True, help="Exit with 3 for warnings too.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON to stdout.")
def command(
    config: Path | None,
    job: Path | None,
    hostfile: Path | None,
    trainer: bool | None,
    ignored: tuple[str, ...],
    fix: bool,
    dry_run: bool,
    strict: bool,
    as_json: bool,
) -> None:
    """Check a DeepSpeed configuration, ours or any other.

    Reads what people write: comments and trailing commas are fine. With a job it also says what contradicts the job,
    and what does not fit. Exits with 3 when there are errors.

    \b
    Example:
      dstrain lint
      dstrain lint ds_config.json --fix
    """
    check_rules(ignored)
    if dry_run and not fix:
        raise click.UsageError("-n is about --fix; lint alone writes nothing.")
    path, file = _files(config, job, hostfile)
    try:
        linted = lint_job(file, path, is_trainers=trainer, ignored=ignored, fix=fix)
    except InvalidConfig as error:
        if as_json:
            answer_json({"schema": 1, "findings": [], "error": error.problem})
        raise
    text = linted.subject.document.text if linted.subject is not None else None
    if not dry_run and text is not None and linted.mended:
        write_atomic(path, text)
    _say_mended(linted, dry_run=dry_run)
    if as_json:
        found = {"schema": 1, "findings": [finding.document() for finding in linted.findings]}
        answer_json(found | ({"text": text} if fix else {}))
    elif fix and dry_run and text is not None:
        answer(text)
        _print(path, linted, say)
    else:
        _print(path, linted, answer)
    if any(finding.severity in _failing(strict=strict) for finding in linted.findings):
        sys.exit(InvalidConfig.exit_code)


def _failing(*, strict: bool) -> tuple[Severity, ...]:
    return (Severity.ERROR, Severity.WARNING) if strict else (Severity.ERROR,)


def _files(config: Path | None, job: Path | None, hostfile: Path | None) -> tuple[Path, JobFile | None]:
    """Returns the configuration to lint, and the job that it belongs to where there is one."""
    named = job or _beside(config)
    if named is None:
        if hostfile is not None:
            raise click.UsageError("--hostfile is about a job, and there is none; name it with --job.")
        return config or Path("ds_config.json"), None
    from dstrain.job.file import read_job

    file = read_job(named, [f"hostfile={hostfile.resolve()}"] if hostfile else [])
    theirs = Path(file.job.ds_config)
    if job is None and config is not None and config.resolve() != theirs:
        return config, None  # the job beside it is about another file
    return config or theirs, file


def _beside(config: Path | None) -> Path | None:
    """Returns the job file beside a configuration, where there is one."""
    found = (config or Path("ds_config.json")).parent / JOB
    return found if found.is_file() else None


def _say_mended(linted: LintResult, *, dry_run: bool) -> None:
    for finding in linted.mended:
        verb = "would mend" if dry_run else "mended"
        say(f"{verb} {finding.place}: {finding.rule}: {finding.problem}; {finding.fix}")


def _print(path: Path, linted: LintResult, write: Callable[[str], None]) -> None:
    for finding in linted.findings:
        write("\n".join(lines(finding)))
    if not linted.findings:
        say(f"{shown(str(path))}: no problems")
        return
    can_mend = len(engine.fixed(linted.subject)[1]) if linted.subject is not None else 0
    say(f"{shown(str(path))}: {count_text(linted.findings)}" + (f"; --fix mends {can_mend}" if can_mend else ""))
