"""Keys of a job that some tasks do not support, each with the values that they do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dstrain.choices import DataFormat, DpoLoss, LossKernel, LossOn, Task
from dstrain.errors import InvalidConfig
from dstrain.job.schema import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLimit:
    """A key of a job whose values are limited in some tasks."""

    key: str
    values: tuple[Any, ...]
    """The supported values; the first one works always."""
    why: str
    """The reason, as the end of a sentence."""
    tasks: frozenset[Task] = frozenset(task for task in Task if task.has_own_loss)
    """The tasks, by default those with a loss of whole answers."""

    def problem(self, task: Task, value: Any) -> str:
        """Returns what is wrong with a value."""
        shown = str(value).lower() if isinstance(value, bool) else value
        return f"{self.key} is {shown}, which task {task} does not support: {self.why}"

    @property
    def says(self) -> str:
        """The limit in words."""
        return f"task {', '.join(sorted(self.tasks))} needs {self.instead}: {self.why}"

    @property
    def instead(self) -> str:
        """What to write."""
        value = self.values[0]
        return f"{self.key}: {str(value).lower() if isinstance(value, bool) else value}"


LIMITS = (
    TaskLimit(
        key="loss",
        values=(LossKernel.CHUNKED, LossKernel.FULL),
        why="it needs a sum for each answer, and the fused loss has one for all tokens",
    ),
    TaskLimit(key="packing", values=(False,), why="each answer has a row of its own"),
    TaskLimit(key="sp", values=(1,), why="an answer is not shared by ranks"),
    TaskLimit(key="tp", values=(1,), why="ranks that share the head have parts of the log-probabilities"),
    TaskLimit(key="ep", values=(1,), why="it was not tried with shared experts"),
    TaskLimit(key="loss_on", values=(LossOn.ANSWER, LossOn.LAST), why="only the last answer counts"),
    TaskLimit(key="data_format", values=(DataFormat.AUTO, DataFormat.PREFERENCE), why="it trains on pairs of answers"),
    TaskLimit(
        key="data_format",
        values=(DataFormat.AUTO, DataFormat.TEXT),
        why="it trains on texts",
        tasks=frozenset({Task.PRETRAIN}),
    ),
    TaskLimit(
        key="data_format",
        values=(DataFormat.AUTO, DataFormat.MESSAGES, DataFormat.ALPACA, DataFormat.TEXT),
        why="it has one answer for each question",
        tasks=frozenset({Task.SFT}),
    ),
)
"""What tasks do not support; the first five keys are choices of the planner as well."""


def broken(job: Job) -> Iterator[tuple[TaskLimit, str]]:
    """Yields the limits that a job exceeds, and the problem in words."""
    for limit in LIMITS:
        value = getattr(job, limit.key)
        if job.task in limit.tasks and value not in limit.values:
            yield limit, limit.problem(job.task, value)


def require_format(task: Task, data_format: DataFormat) -> None:
    """Raises InvalidConfig for data in a format that a task does not support."""
    for limit in LIMITS:
        if limit.key == "data_format" and task in limit.tasks and data_format not in limit.values:
            raise InvalidConfig(limit.problem(task, data_format), hint=limit.instead)


def is_smoothing_unused(job: Job) -> bool:
    """Returns whether label smoothing is asked of a loss that has none."""
    return job.dpo.label_smoothing > 0 and job.dpo.loss_type is not DpoLoss.ROBUST


def require(job: Job) -> None:
    """Raises InvalidConfig for a job that exceeds a limit of its task."""
    for limit, problem in broken(job):
        raise InvalidConfig(problem, hint=limit.instead)
