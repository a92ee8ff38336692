"""The command line by which a run continues: as it was typed, with its job file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from dstrain.paths import shown
from dstrain.rundir import RUN


def words_of(typed: Sequence[str], job: Path) -> tuple[str, ...]:
    """Returns the words that start a run again: those typed after `dstrain`, with the job file's absolute path, and
    without what they say about resuming.

    >>> words_of(["run", "--set", "resume=auto", "--set", "seed=1"], Path("/jobs/job.yaml"))
    ('dstrain', 'run', '/jobs/job.yaml', '--set', 'seed=1')
    """
    rest = [word for word in typed[1:] if word != str(job)]
    kept: list[str] = []
    for word in rest:
        if word.startswith("resume=") and kept[-1:] == ["--set"]:
            kept.pop()
        elif not word.startswith("--set=resume="):
            kept.append(word)
    return (*RUN, str(job.absolute()), *kept)


def line_of(words: Sequence[str], *more: str) -> str:
    """Returns the line to type in the current folder."""
    command, rest = words[:2], words[2:]
    return shlex.join([*command, *(shown(word) for word in rest[:1]), *rest[1:], *more])


def run_line(job: Path) -> str:
    """Returns the line that runs a job file.

    >>> run_line(Path("job.yaml")), run_line(Path("runs/a b/job.yaml"))
    ('dstrain run', "dstrain run 'runs/a b/job.yaml'")
    """
    return line_of(RUN) if job == Path("job.yaml") else line_of((*RUN, str(job)))


def resumed(words: Sequence[str]) -> str:
    """Returns the line that continues from the newest checkpoint."""
    return line_of(words, "--set", "resume=auto")
