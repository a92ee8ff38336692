"""Reads why a run did not finish, and says how it can be started again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress

from dstrain.launch.again import line_of, resumed
from dstrain.monitor.health.stopped import Stop, usable_checkpoint
from dstrain.paths import shown
from dstrain.rundir import RunDir


def cause_of(failure: str | None) -> str:
    """Returns the cause, which is the first line of the report of a failed run (`RunDir.failure`)."""
    return (failure or "").strip().partition("\n")[0]


def resumed_text(run_dir: RunDir, command: Sequence[str]) -> str:
    """Returns how to start again from the newest checkpoint, with the words of the first start."""
    newest = run_dir.newest_checkpoint(for_resume=True)
    if newest.folder:
        return f"`{resumed(command)}` continues from step {newest.step}."
    if run_dir.whole_checkpoints():
        return "Its checkpoints hold the weights alone (save_only_model): set another output_dir to start over."
    return f"No complete checkpoint exists yet: `{line_of(command)}` starts over."


def after_stop(run_dir: RunDir, stop: Stop, command: Sequence[str]) -> str:
    """Returns how to start again after a health rule ended a run: never from a state that went wrong, and with a tenth
    of the learning rate."""
    if stop.since is None:
        return resumed_text(run_dir, command)
    folder = usable_checkpoint(run_dir, stop.since)
    changed = [] if (rate := _learning_rate(run_dir)) is None else ["--set", f"learning_rate={rate / 10:.2g}"]
    slower = " with a tenth of its learning rate" if changed else "; lower its learning rate"
    if folder is not None:
        line = line_of(command, "--set", f"resume={shown(str(folder))}", *changed)
        return f"`{line}` continues from {folder.name}, from before that{slower}."
    other = shown(str(run_dir.path.with_name(f"{run_dir.path.name}-2")))
    line = line_of(command, *changed, "--set", f"output_dir={other}")
    return f"No checkpoint is from before that: `{line}` starts again{slower}."


def _learning_rate(run_dir: RunDir) -> float | None:
    with suppress(OSError, ValueError, TypeError, KeyError):
        return float(json.loads(run_dir.request.read_text(encoding="utf-8"))["learning_rate"])
    return None
