"""`dstrain explain`: explains a key of ds_config.json or job.yaml, or a whole file, in words and numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dstrain.cli.console import answer, answer_json, say_unread_links
from dstrain.config.keys import NoKey, named
from dstrain.errors import DstrainError, InvalidConfig, nearest

if TYPE_CHECKING:
    from dstrain.config.explain import Here
    from dstrain.config.lint.rule import JobContext

CONFIG, JOB = "ds_config.json", "job.yaml"


@click.command("explain")
@click.argument("subject", metavar="[KEY | FILE]", default="")
@click.option(
    "--edits",
    is_flag=True,
    help="List your edits since gen-config wrote the files, with their effect on memory and speed.",
)
@click.option("--job", type=click.Path(path_type=Path), help="Job file.  [default: job.yaml here, or beside FILE]")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def command(subject: str, edits: bool, job: Path | None, as_json: bool) -> None:
    """Explain a key of a DeepSpeed configuration or of job.yaml, or a whole file; by default, ds_config.json.

    A key is a path (zero_optimization.overlap_comm, lora.rank), a JSON pointer, or the unambiguous end of a path. If
    both files have it, both are explained. With a job, also shows the value that dstrain would choose, and what each
    value costs compared with the current file.

    With --edits, FILE is a folder, by default this one: compares each edit alone, then all edits together, with the
    generated files, on the model and the cluster they were generated for, and says what lint finds at an edit.

    \b
    Example:
      dstrain explain overlap_comm
      dstrain explain seq_len
      dstrain explain ds_config.json --json
      dstrain explain --edits
    """
    if edits:
        from dstrain.cli.edits import explain_edits  # it brings the lock and the planner

        if job is not None:
            raise click.UsageError("--edits reads the job of the folder: leave out --job.")
        explain_edits(Path(subject or "."), as_json=as_json)
        return
    subject = subject or CONFIG
    if _is_file(subject):
        _explain_file(Path(subject), job, as_json=as_json)
    else:
        _explain_key(subject, job, as_json=as_json)


def _is_file(subject: str) -> bool:
    from dstrain.config.explain import job_keys

    return subject.endswith((".json", ".jsonc", ".hjson")) or (Path(subject).is_file() and subject not in job_keys())


def _explain_key(subject: str, job: Path | None, *, as_json: bool) -> None:
    from dstrain.cli.output import explain_key as text
    from dstrain.config.explain import find_job_keys

    of_job = find_job_keys(subject)
    is_exact = [key.path for key in of_job] == [subject]
    try:
        pointer, key = named(subject)
    except InvalidConfig as error:
        if not (of_job if isinstance(error, NoKey) else is_exact):
            raise _no_key(error, subject) from None
        explanation, others = None, "" if isinstance(error, NoKey) else f"\n{error.problem} (in ds_config.json)"
    else:
        explanation, of_job, others = text.explain(pointer, key, *_here(job)), of_job if is_exact else [], ""
    if as_json:
        document = {"schema": 1} if explanation is None else text.document(explanation)
        answer_json({**document, **({"job": [text.job_key_document(one) for one in of_job]} if of_job else {})})
        return
    written = _written(job) if of_job else None
    blocks = ["\n".join(text.job_key_lines(one, written)) for one in of_job]
    blocks += [] if explanation is None else ["\n".join(text.lines(explanation))]
    answer("\n\n".join(blocks) + others)


def _no_key(error: InvalidConfig, subject: str) -> InvalidConfig:
    """Returns the error with the key of job.yaml that is meant, if one is near."""
    from dstrain.config.explain import job_keys
    from dstrain.config.lint.rules.key_names import NEAR_ENOUGH, likeness

    near = nearest(subject, job_keys()) if isinstance(error, NoKey) else None
    if near is None or likeness(subject, near) < NEAR_ENOUGH:
        return error
    return InvalidConfig(error.problem, hint=f'Did you mean "{near}" of job.yaml?')


def _written(job: Path | None) -> dict[str, Any] | None:
    """Returns the job file here as it is written; None if there is none, or one without keys.

    Raises InvalidConfig if it cannot be read.
    """
    from dstrain.job.yaml_source import parse_yaml

    path = job or Path(JOB)
    if job is None and not path.is_file():
        return None
    try:
        value = parse_yaml(path.read_text(encoding="utf-8"), str(path))[0]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path}: cannot be read: {error}") from None
    return value if isinstance(value, dict) else None


def _explain_file(path: Path, job: Path | None, *, as_json: bool) -> None:
    from dstrain.cli.output import explain_file as text
    from dstrain.config import jsonc
    from dstrain.launch.prepare.lint_job import read_text

    document = jsonc.parse(read_text(path), str(path))
    if not isinstance(document.value, dict):
        raise InvalidConfig("a configuration is a JSON object", place=document.place(()))
    context, missing = _context(job, path)
    explanation = text.explain(path, document.value, context, missing)
    if as_json:
        answer_json(text.document(explanation))
    else:
        answer("\n".join(text.lines(explanation)))


def _context(job: Path | None, config: Path | None) -> tuple[JobContext | None, str | None]:
    """Returns the context of the job of a configuration, or None and what is missing."""
    from dstrain.config.edits.lock import planned_cluster
    from dstrain.job.file import read_job
    from dstrain.launch.prepare.job_context import job_context

    path = job or (config.parent if config else Path()) / JOB
    if job is None and not path.is_file():
        return None, f"{path} does not exist; dstrain gen-config writes one, or name yours with --job"
    file = read_job(path, is_only_read=True)
    theirs = Path(file.job.ds_config)
    if job is None and config is not None and config.resolve() != theirs:
        return None, f"{path} uses another configuration ({theirs.name})"
    say_unread_links()
    return job_context(file, planned_cluster(theirs.parent)), None


def _here(job: Path | None) -> tuple[Here | None, str | None]:
    """Returns the job here with its configuration, or None and what is missing for an estimate."""
    from dstrain.cli.output.explain_file import unknown_model
    from dstrain.config import jsonc
    from dstrain.config.explain import Here
    from dstrain.launch.prepare.job_context import request_of, workload_of
    from dstrain.launch.prepare.lint_job import read_text

    context, missing = _context(job, None)
    if context is None or context.job is None:
        return None, missing
    workload = workload_of(context)
    if workload is None:
        return None, unknown_model(context.job.job.model)
    try:
        path = Path(context.job.job.ds_config)
        config = jsonc.parse(read_text(path), path.name).value
    except DstrainError as error:
        return None, error.problem
    if not isinstance(config, dict):
        return None, f"{path.name} is not a JSON object"
    return Here(config=config, request=request_of(context.job.job), workload=workload), None
