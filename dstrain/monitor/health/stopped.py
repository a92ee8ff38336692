"""Says why a health rule ended a run, and from which checkpoint it can continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.errors import RunFailed
from dstrain.job.monitor import HealthAction
from dstrain.monitor.health.nonfinite import Finding
from dstrain.monitor.sinks.jsonl import read_jsonl
from dstrain.rundir import RunDir, lacks_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A health rule that ended a run."""

    rule: str
    step: int
    since: int | None
    """The last step before the trouble, which is in later checkpoints; None if checkpoints are unharmed."""


def stop_of(run_dir: RunDir, cause: str) -> Stop | None:
    """Returns the rule that ended a run, given the first line of its failure; None if none did."""
    with suppress(OSError):
        return stop_in(read_jsonl(run_dir.health), cause)
    return None


def stop_in(findings: Sequence[Mapping[str, Any]], cause: str) -> Stop | None:
    """Returns the same from the lines of `health.jsonl`."""
    for line in reversed(findings):
        rule, step, since = (line.get(name) for name in ("rule", "step", "since"))
        if line.get("action") == HealthAction.STOP and isinstance(rule, str) and isinstance(step, int):
            since = since if isinstance(since, int) else None
            return Stop(rule=rule, step=step, since=since) if rule in cause else None
    return None


def usable_checkpoint(run_dir: RunDir, since: int) -> Path | None:
    """Returns the newest complete checkpoint from before the trouble; None if there is none."""
    whole = (folder for step, folder in reversed(run_dir.whole_checkpoints()) if step <= since)
    return next((folder for folder in whole if lacks_states(folder) is None), None)


def error_of(finding: Finding | None, run_dir: RunDir | None, step: int) -> RunFailed:
    """Returns the error with which ranks end a run; only rank 0 knows the finding and the run directory."""
    if finding is None or run_dir is None:
        return RunFailed(f"a health rule ended the run after step {step}")
    hint = "To continue from its checkpoint, add --set resume=auto to the command."
    if finding.since is not None:
        folder = usable_checkpoint(run_dir, finding.since)
        hint = "No checkpoint is from before that: start again" if folder is None else f"Resume from {folder}"
        hint += " with a lower learning_rate; later checkpoints hold the state that went wrong."
    return RunFailed(f"the health rule {finding.rule} ended the run: {finding.message}", hint=hint)
