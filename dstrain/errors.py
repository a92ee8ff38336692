"""Errors a person can fix, grouped by who can fix them, each with its exit code.

    DstrainError                 what happened, and the next thing to type
    ├── RunFailed             1  a training run ended badly (the ranks' own codes are in the message)
    ├── InvalidConfig         3  ds_config.json, job.yaml, a hostfile or data is wrong
    ├── DoesNotFit            4  no configuration fits the memory that there is
    ├── EnvironmentProblem    5  something on this machine is missing, busy or unreachable
    ├── Conflict              6  hand edits or existing checkpoints stand in the way
    ├── SavedAndLeft         75  a run was asked to save a checkpoint and leave, and did (EX_TEMPFAIL: go on later)
    └── Interrupted         130  Ctrl-C

Click's own usage errors exit with 2. Anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where something is written."""

    file: str
    """The file, or the option that sets the value, as people should see it."""
    line: int | None = None
    """Line, from 1; None: of the file as a whole, or of an option."""
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


class RunFailed(DstrainError):
    """A training run that ended badly."""

    exit_code = 1

    def __init__(self, problem: str, *, hint: str | None = None, rank_exit_code: int | None = None) -> None:
        """`rank_exit_code` is that of the rank or launcher that failed first, where one did."""
        super().__init__(problem, hint=hint)
        self.rank_exit_code = rank_exit_code


class InvalidConfig(DstrainError):
    """A config, job, hostfile or data file that is wrong; several problems are joined, one a line."""

    exit_code = 3


class DoesNotFit(DstrainError):
    """No configuration fits; the hint names the nearest thing that would."""

    exit_code = 4


class EnvironmentProblem(DstrainError):
    """Something on this machine is missing, busy or unreachable."""

    exit_code = 5


class Conflict(DstrainError):
    """Hand edits, or checkpoints of an earlier run, stand in the way."""

    exit_code = 6


class SavedAndLeft(DstrainError):
    """A run that saved a checkpoint and left, because a scheduler or a person asked for that."""

    exit_code = 75


class Interrupted(DstrainError):
    """Somebody pressed Ctrl-C."""

    exit_code = 130


def nearest(word: str, legal: Iterable[str]) -> str | None:
    """Returns the legal word that `word` most likely meant, or None where nothing is near."""
    folded = {candidate.lower().replace("-", "_"): candidate for candidate in legal}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), list(folded), n=1, cutoff=0.6)
    return folded[found[0]] if found else None


def merge_hint(text: str) -> str | None:
    """Returns what to do about a text with the marks of a merge that git left to a person; None where it has none."""
    if not re.search(r"^(<{7}|>{7})( |$)", text, re.MULTILINE):
        return None
    return "A merge is not finished: keep one side, and remove the lines of <<<<<<<, ======= and >>>>>>>."


def did_you_mean(word: str, legal: Sequence[str]) -> str:
    """Returns a hint: the nearest legal word, or all of them where nothing is near.

    >>> did_you_mean("quen3", ["qwen3", "llama"])
    'Did you mean "qwen3"?'
    """
    near = nearest(word, legal)
    return f'Did you mean "{near}"?' if near else "Known: " + ", ".join(legal)
