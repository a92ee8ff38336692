"""`dstrain gen-config --adopt`: treats existing files as generated."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from dstrain import __version__
from dstrain.cli.console import answer_json, say
from dstrain.config.edits import edit
from dstrain.config.edits.lock import GENERATED, LOCK, Lock, read_lock, standing, write_files
from dstrain.errors import InvalidConfig
from dstrain.facts.releases import installed
from dstrain.findings import errors, lines
from dstrain.job.file import read_job
from dstrain.launch.prepare.lint_job import lint_job, refused
from dstrain.paths import alone


def adopt(folder: Path, *, dry_run: bool, as_json: bool) -> None:
    """Records the files of a folder in its lock as they are, and does not change them."""
    with nullcontext() if dry_run else alone(folder / LOCK, "writes into this folder"):
        files = _adopted(folder, dry_run=dry_run)
    if as_json:
        answer_json(
            {"schema": 1, "folder": str(folder), "dry_run": dry_run, "adopted": [str(folder / name) for name in files]}
        )
    _tell(folder, files, dry_run=dry_run)


def _adopted(folder: Path, *, dry_run: bool) -> list[str]:
    """Writes the lock; returns the names of the adopted files."""
    before = read_lock(folder)
    base = before.base if before else {}
    files = {name: text for name, text in standing(folder, GENERATED).items() if name not in base}
    if not files and not base:
        raise InvalidConfig(
            f"{folder}: has none of {', '.join(GENERATED)}",
            hint="dstrain gen-config --model NAME writes them; or name another folder.",
        )
    _lint(folder)
    if files and not dry_run:
        write_files(folder, _lock(before, files), {}, {}, before=before)
    return list(files)


def _lint(folder: Path) -> None:
    """Prints the findings of lint. Raises InvalidConfig for errors, and for a file that cannot be read."""
    problems = []
    for name, text in standing(folder, GENERATED).items():
        try:
            edit.read(text, str(folder / name))
        except InvalidConfig as error:
            problems.append(error.problem)
    if problems:
        raise InvalidConfig("\n".join(problems), hint="Correct the files, then adopt them.")
    path, job = folder / "ds_config.json", folder / "job.yaml"
    if not path.is_file():
        return
    result = lint_job(read_job(job, is_only_read=True) if job.is_file() else None, path)
    if errors(result.findings):
        raise refused(result.findings)
    for finding in result.findings:
        say("\n".join(lines(finding)))


def _lock(before: Lock | None, files: dict[str, str]) -> Lock:
    """Returns the lock with the files added to its base."""
    if before is not None:
        return replace(before, base={**before.base, **files}, adopted=(*before.adopted, *files))
    return Lock(dstrain=__version__, deepspeed=installed("deepspeed") or "none", base=files, adopted=tuple(files))


def _tell(folder: Path, names: list[str], *, dry_run: bool) -> None:
    """Prints the adopted files and the next command."""
    if not names:
        say("nothing to adopt: the files are recorded already")
        return
    verb = "would adopt" if dry_run else "adopted"
    say(f"{verb} {', '.join(str(folder / name) for name in names)}")
    if dry_run:
        return
    say(f"recorded in {folder / LOCK}: the next gen-config lists what it would change; yours stay until you decide")
    place = "" if folder == Path() else f" -o {shlex.quote(str(folder))}"
    say(f"next: dstrain gen-config{place} {_machines_and_model(folder)} --diff")


def _machines_and_model(folder: Path) -> str:
    """Returns the options that name the model and the hosts of adopted files; words in their place if these do not."""
    job, hosts = folder / "job.yaml", folder / "hostfile"
    given = edit.read(job.read_text(encoding="utf-8"), str(job)).get("model") if job.is_file() else None
    model = str(folder / given if given and (folder / given).exists() else given or "NAME")
    machines = f"--hostfile {shlex.quote(str(hosts))}" if hosts.is_file() else "--gpus N"
    return f"--model {shlex.quote(model)} {machines}"
