"""Rules about what a job saves."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.choices import Method
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule
from dstrain.config.lint.rules.jobs import in_job
from dstrain.config.lint.subject import Subject
from dstrain.config.resolve_auto import GATHERS

_GATHER = f"zero_optimization.{GATHERS}"


def _without_weights(subject: Subject) -> Iterator[Fault]:
    """Reports checkpoints of the weights alone where the weights are not gathered."""
    job = subject.asked
    if job is None or not job.save_only_model or job.method is not Method.FULL or subject.stage != 3:
        return
    if not subject.is_true(_GATHER, default=True):
        yield in_job(subject, "save_only_model", f"save_only_model is true, but {_GATHER} is false",
                     "the run stops before it loads the model: its checkpoints would have no weights",
                     f'write "{GATHERS}": true in ds_config.json')  # fmt: skip


RULES = (
    Rule(
        id="DS910",
        severity=Severity.ERROR,
        title="checkpoints without weights",
        find=_without_weights,
        source="dstrain/train/saving.py: require_weights",
    ),
)
"""Rules about saving."""
