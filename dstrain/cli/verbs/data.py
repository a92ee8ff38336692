"""`dstrain data`: shows training data as the model sees them, and tokenizes them ahead of a run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click

from dstrain.choices import OnLongSample
from dstrain.cli.console import answer, answer_json, say
from dstrain.cli.group import Group
from dstrain.cli.options.typed import TRUST
from dstrain.cli.output.progress import Screen
from dstrain.config.lint.rule import JobContext
from dstrain.errors import Place
from dstrain.facts.data.messages import (
    Piece,
    Prepared,
    PrepareMessage,
    ShowAnswer,
    ShownData,
    ShownSample,
    ShowQuestion,
    marked,
    printable,
)
from dstrain.facts.model import hub_config
from dstrain.facts.this_machine import hub_variables
from dstrain.heartbeat import Phase
from dstrain.job.data_source import DataSource
from dstrain.job.file import is_local, job_of, read_job
from dstrain.job.schema import Job
from dstrain.launch.prepare.checks import DATA_FILES, DATA_IS_SET, EVALUATION, require
from dstrain.paths import python, shown
from dstrain.records import from_data, to_data
from dstrain.units import counted, format_bytes


def lines(data: ShownData, job: Job, *, in_color: bool) -> list[str]:
    """Returns the sample and the counts of a data set; without color, text with loss stands between ⟦ and ⟧."""
    in_color = in_color and "NO_COLOR" not in os.environ
    shown_lines = [line for sample in data.samples for line in _sample(sample, job, in_color=in_color)]
    return [*shown_lines, *_counts(data, job)]


def _sample(sample: ShownSample, job: Job, *, in_color: bool) -> list[str]:
    cut = f", {sample.num_cut:,} more were cut off by seq_len {job.seq_len:,}" if sample.num_cut else ""
    untaught = "; it is dropped, as it has nothing to learn" if not sample.num_learned else ""
    legend = "green text has loss" if in_color else "text between ⟦ and ⟧ has loss"
    return [
        f"sample {sample.number:,}, {shown(sample.place)} ({legend})",
        _colored(sample.pieces) if in_color else marked(sample.pieces),
        f"── end of sample: {counted(sample.num_tokens, 'token')}, {sample.num_learned:,} with loss{cut}{untaught}",
        "",
    ]


def _counts(data: ShownData, job: Job) -> list[str]:
    scope = "all" if data.is_complete else "the first"
    kept = data.num_samples - data.num_untaught
    lines = [f"{shown(data.name)}, {scope} {counted(data.num_samples, 'sample')}"]
    if kept:
        mean = data.num_tokens / kept
        lines += [
            f"  tokens     {data.num_tokens:,} ({mean:.0f} per sample, {data.max_tokens:,} at most)",
            f"  with loss  {data.num_learned:,} ({data.num_learned / data.num_tokens:.1%})",
        ]
    if data.num_untaught:
        lines.append(f"  dropped    {counted(data.num_untaught, 'sample')} without a token to learn")
    if data.num_long:
        done = "dropped" if job.on_long_sample is OnLongSample.DROP else "truncated"
        share = data.num_long / data.num_samples
        lines.append(
            f"  {done:<9}  {counted(data.num_long, 'sample')} ({share:.1%}) longer than seq_len {job.seq_len:,}"
        )
    return [*lines, *(f"  note       {note}" for note in data.notes), ""]


def _colored(pieces: tuple[Piece, ...]) -> str:
    return "".join(
        click.style(printable(piece.text), fg="green" if piece.is_learned else None, bold=piece.is_special or None)
        for piece in pieces
    )


COUNTED_SAMPLES = 1000
"""Samples of each data set that are counted, unless all are asked for."""


@click.group("data", cls=Group)
def command() -> None:
    """Show training data as the model sees them, or tokenize them ahead of a run.

    \b
    Example:
      dstrain data show
      dstrain data prepare
    """


@command.command("show")
@click.argument("file", required=False)
@click.option("--job", type=click.Path(path_type=Path), help="Job file.  [default: job.yaml, if it exists]")
@click.option("--model", help="Model whose tokenizer and chat template count.  [default: that of the job]")
@click.option("--sample", type=click.IntRange(1), default=1, show_default=True, help="Number of the sample to show.")
@click.option("--all", "counts_all", is_flag=True, help=f"Count all samples, not only the first {COUNTED_SAMPLES:,}.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the job.")
@TRUST
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(
    file: str | None,
    job: Path | None,
    model: str | None,
    sample: int,
    counts_all: bool,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print a sample as the model sees it, and counts: tokens, tokens with loss, answers that are empty or cut.

    FILE is a data file, a glob or a data set id; default: all data sets of the job. Text with loss is green on a
    terminal, and otherwise between ⟦ and ⟧. Loads the tokenizer only, and renders and tokenizes as training does.

    \b
    Example:
      dstrain data show
      dstrain data show train.jsonl --model Qwen/Qwen3-8B --sample 3
      dstrain data show --set thinking=off | less
    """
    asked = _job(file, job, model, overrides)
    question = ShowQuestion(job=asked, sample=sample, limit=None if counts_all else COUNTED_SAMPLES)
    # in a child: libraries read the job's variables, such as those of hubs, when they are imported
    done = subprocess.run(
        python("-m", "dstrain.train.data.show"),
        input=json.dumps(to_data(question)),
        env=_environment(asked),
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=False,
    )
    if done.returncode != 0:
        sys.exit(done.returncode if done.returncode > 0 else 1)
    data = json.loads(done.stdout)
    if as_json:
        answer_json(data)
        return
    for one in from_data(ShowAnswer, data, locate=str).data:
        answer("\n".join(lines(one, asked, in_color=sys.stdout.isatty())))
    if file is None and len(asked.train_sources) > 1:
        say("dstrain run mixes these data sets, and logs the samples of an epoch")


@command.command("prepare")
@click.argument("job", type=click.Path(path_type=Path), default="job.yaml")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the job.")
@TRUST
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def prepare(job: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Tokenize the data of a job over all cores, without GPUs, into the cache where dstrain run finds the tokens.

    JOB is a job file; default: job.yaml. Finished parts are kept if it is interrupted or killed: type it again. Of
    several at a time one tokenizes and the others wait. taskset limits the cores.

    \b
    Example:
      dstrain data prepare
      dstrain data prepare job.yaml --set seq_len=8192
    """
    read = read_job(job, overrides)
    # the checks ask the hub and read the cache that the ranks would, and the job may name others
    os.environ.update(hub_variables(read.job.env))
    require((*EVALUATION, *DATA_FILES), JobContext(job=read))
    prepared = _prepared(read.job)
    if as_json:
        answer_json(to_data(prepared))
        return
    for note in prepared.notes:
        answer(note)
    folders = "\n  ".join(prepared.folders)
    if prepared.num_made:
        say(f"dstrain run of the same job reads these tokens, from\n  {folders}")
    else:
        say(f"nothing is left to do: all tokens are in\n  {folders}")
    say(f"tokens of all jobs take {format_bytes(prepared.cache_bytes)}; to remove those that are older than 30 days:")
    say(f"  find {shlex.quote(prepared.cache)} -mindepth 1 -maxdepth 1 -mtime +30 -exec rm -r {{}} +")


def _prepared(job: Job) -> Prepared:
    """Returns the child process's answer about the data, after showing its progress; exits with its code."""
    line = python("-m", "dstrain.train.job_data")
    with (
        subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=_environment(job)
        ) as child,
        Screen() as screen,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        with child.stdin:
            json.dump(to_data(job), child.stdin)
        name = None
        for text in child.stdout:
            message = from_data(PrepareMessage, json.loads(text), locate=str)
            if message.prepared is not None:
                return message.prepared
            assert message.progress is not None
            if message.progress.name != name:
                name = message.progress.name
                screen.say(f"tokenizing {shown(name)}")
            screen.progress(Phase.TOKENIZING, message.progress.done, message.progress.total)
    sys.exit(child.returncode if child.returncode > 0 else 1)


def _environment(job: Job) -> dict[str, str]:
    """Returns the environment of a child process, which reads the cache alone if the hub cannot be reached.

    Raises EnvironmentProblem or InvalidConfig for a model that is neither there nor here.
    """
    environment, note = hub_config.for_child(job.model, job.hub)
    if note is not None:
        say(note)
    return environment


def _job(file: str | None, path: Path | None, model: str | None, overrides: tuple[str, ...]) -> Job:
    """Returns the job whose data are shown. Raises UsageError without a model or data."""
    here = Path("job.yaml")
    if file is not None and file.endswith((".yaml", ".yml")):
        more = f" --model {model}" if model is not None else ""
        raise click.UsageError(f"{file} is a job, not data; type dstrain data show --job {file}{more}")
    if path is None and not here.exists():
        if file is None or model is None:
            raise click.UsageError("There is no job.yaml here; give --job, or FILE and --model.")
        data = {"model": model, "data": file, "output_dir": "output"}
        return job_of(data, lambda keys: Place(file="--set"), Path.cwd(), overrides).job
    read = read_job(path or here, overrides)
    os.environ.update(hub_variables(read.job.env))
    job = read.job if model is None else replace(read.job, model=_absolute(model))
    if file is not None:
        name = _absolute(file)
        of_job = (source for source in job.train_sources if source.path == name)
        return replace(job, data=next(of_job, DataSource(path=name)))
    require((DATA_IS_SET,), JobContext(job=read))
    return job


def _absolute(name: str) -> str:
    """Returns a local path as an absolute one; an id on a hub stays as it is."""
    return str(Path(name).expanduser().resolve()) if is_local(name) else name
