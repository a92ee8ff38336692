"""Errors a person can fix, grouped by who can fix them, each with its exit code.

    DstrainError                 what happened, and the next thing to type
    ├── RunFailed             1  a training run failed (the message has the exit codes of ranks)
    ├── InvalidConfig         3  ds_config.json, job.yaml, a hostfile or data is invalid
    ├── DoesNotFit            4  no configuration fits into memory
    ├── EnvironmentProblem    5  something on this machine is missing, busy or unreachable
    ├── Conflict              6  hand edits or existing checkpoints would be overwritten
    ├── SavedAndLeft         75  a run saved a checkpoint and left, as asked (EX_TEMPFAIL: resume later)
    └── Interrupted         130  Ctrl-C

Click's own usage errors exit with 2. Anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A position in a file, or an option."""

    file: str
    """The file or option, in the form for messages."""
    line: int | None = None
    """Line, from 1; None for a whole file or an option."""
    column: int | None = None
    """Column, from 1."""

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)


class DstrainError(Exception):
    """A problem that a person can fix; `cli.main` turns it into text, once."""

    exit_code = 1

    def __init__(
        self, text: str, *, hint: str | None = None, place: Place | None = None, parts: Sequence[DstrainError] = ()
    ) -> None:
        """`text` quotes the input, `hint` is the next thing to type; `parts` are the problems that it joins."""
        self.text = text
        self.place = place
        self.problem = text if place is None else f"{place}: {text}"
        self.hint = hint
        self.parts = tuple(parts)
        super().__init__(self.problem)

    def __str__(self) -> str:
        return self.problem if self.hint is None else f"{self.problem}\n{self.hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Lets other processes raise it."""
        return partial(type(self), hint=self.hint), (self.problem,)


class RunFailed(DstrainError):
    """A training run failed."""

    exit_code = 1

    def __init__(
        self, problem: str, *, hint: str | None = None, rank_exit_code: int | None = None, stopped_by: str | None = None
    ) -> None:
        """`rank_exit_code` belongs to the first rank or launcher that failed, if any; `stopped_by` the health rule that
        ended the run."""
        super().__init__(problem, hint=hint)
        self.rank_exit_code = rank_exit_code
        self.stopped_by = stopped_by


class InvalidConfig(DstrainError):
    """A config, job, hostfile or data file is invalid; several problems are joined, one per line."""

    exit_code = 3


@contextmanager
def located(where: object, *, place: Place | None = None) -> Iterator[None]:
    """Puts the file, line or key that a problem is in before the text of an InvalidConfig."""
    try:
        yield
    except InvalidConfig as error:
        raise InvalidConfig(f"{where}: {error.problem}", place=place, hint=error.hint) from None


class DoesNotFit(DstrainError):
    """No configuration fits into memory; the hint has the closest one that would."""

    exit_code = 4


class EnvironmentProblem(DstrainError):
    """Something on this machine is missing, busy or unreachable."""

    exit_code = 5


def not_installed(who_needs: str, *packages: str, install: str, place: Place | None = None) -> EnvironmentProblem:
    """Returns the error of packages that are needed and not there; `install` is the command that installs them.

    >>> not_installed("images need", "Pillow", install="pip install pillow").problem
    'images need Pillow, which is not installed'
    """
    are = "is" if len(packages) == 1 else "are"
    text = f"{who_needs} {' and '.join(packages)}, which {are} not installed"
    return EnvironmentProblem(text, place=place, hint=install)


def other_version(who_needs: str, package: str, releases: str, version: str) -> str:
    """Returns that another release of a package is installed than those that are needed, such as `>=5.0`."""
    return f"{who_needs} {package} {releases}, and {version} is installed"


class Conflict(DstrainError):
    """Hand edits, or checkpoints of an earlier run, would be overwritten."""

    exit_code = 6


class SavedAndLeft(DstrainError):
    """A run saved a checkpoint and left, as a scheduler or a person asked."""

    exit_code = 75


class Interrupted(DstrainError):
    """Interrupted by Ctrl-C."""

    exit_code = 130


def first_line(error: BaseException) -> str:
    """Returns the first line of an error that is not blank, or its type if it has no message."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return lines[0] if lines else type(error).__name__


def type_and_line(error: BaseException) -> str:
    """Returns an error of a library in one line, for messages that go on: its type, and the first line of its text.

    >>> type_and_line(ValueError("no\\nmore"))
    'ValueError: no'
    """
    return f"{type(error).__name__}: {error}".split("\n")[0]


def nearest(word: str, legal: Iterable[str]) -> str | None:
    """Returns the closest legal word, or None if none is close."""
    folded = {candidate.lower().replace("-", "_"): candidate for candidate in legal}
    matches = difflib.get_close_matches(word.lower().replace("-", "_"), list(folded), n=1, cutoff=0.6)
    return folded[matches[0]] if matches else None


def merge_hint(text: str) -> str | None:
    """Returns a hint for text with git's conflict markers, or None."""
    if not re.search(r"^(<{7}|>{7})( |$)", text, re.MULTILINE):
        return None
    return "Finish the merge: keep one side, and remove the lines of <<<<<<<, ======= and >>>>>>>."


def did_you_mean(word: str, legal: Sequence[str]) -> str:
    """Returns a hint: the closest legal word, or all of them if none is close.

    >>> did_you_mean("quen3", ["qwen3", "llama"])
    'Did you mean "qwen3"?'
    """
    near = nearest(word, legal)
    return f'Did you mean "{near}"?' if near else "Known: " + ", ".join(legal)
