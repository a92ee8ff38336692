"""`dstrain lint`: what is wrong with a DeepSpeed configuration, what happens at run time, and what to write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dstrain.cli.console import answer, answer_json, say
from dstrain.errors import InvalidConfig
from dstrain.launch.linting import Known, Linted, check_rules, lint
from dstrain.paths import write_atomic
from dstrain.render.lint.finding import Severity, count_text, lines

if TYPE_CHECKING:
    from dstrain.jobfile import JobFile

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
    path, file = _files(config, job, hostfile)
    known = Known() if file is None else _known(file, path)
    linted = lint(known, path, is_trainers=trainer, ignored=ignored, fix=fix)
    if fix and linted.subject is not None and linted.mended:
        _write(path, linted, dry_run=dry_run)
    if as_json:
        answer_json({"schema": 1, "findings": [finding.document() for finding in linted.findings]})
    elif not (fix and dry_run):
        _print(path, linted)
    if any(finding.severity in _failing(strict=strict) for finding in linted.findings):
        sys.exit(InvalidConfig.exit_code)


def _failing(*, strict: bool) -> tuple[Severity, ...]:
    return (Severity.ERROR, Severity.WARNING) if strict else (Severity.ERROR,)


def _files(config: Path | None, job: Path | None, hostfile: Path | None) -> tuple[Path, JobFile | None]:
    """Returns the configuration to lint, and the job that it belongs to where there is one."""
    named = job or _beside(config)
    if named is None:
        return config or Path("ds_config.json"), None
    from dstrain.jobfile import read_job

    file = read_job(named, [f"hostfile={hostfile.resolve()}"] if hostfile else [])
    theirs = Path(file.job.ds_config)
    if job is None and config is not None and config.resolve() != theirs:
        return config, None  # the job beside it is about another file
    return config or theirs, file


def _beside(config: Path | None) -> Path | None:
    """Returns the job file beside a configuration, where there is one."""
    found = (config or Path("ds_config.json")).parent / JOB
    return found if found.is_file() else None


def _known(file: JobFile, path: Path) -> Known:
    from dstrain.launch.known import known

    return known(file, path.parent)


def _write(path: Path, linted: Linted, *, dry_run: bool) -> None:
    assert linted.subject is not None
    if dry_run:
        answer(linted.subject.document.text)
    else:
        write_atomic(path, linted.subject.document.text)
    for finding in linted.mended:
        say(
            f"{'would mend' if dry_run else 'mended'} {finding.where}: {finding.rule}: {finding.problem}; {finding.fix}"
        )


def _print(path: Path, linted: Linted) -> None:
    for finding in linted.findings:
        answer("\n".join(lines(finding)))
    if not linted.findings:
        say(f"{path}: nothing to say")
        return
    can_mend = sum(bool(finding.changes) for finding in linted.findings)
    say(f"{path}: {count_text(linted.findings)}" + (f"; --fix mends {can_mend}" if can_mend else ""))
