"""The words with which a health rule ends a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrain.job.schema import HealthAction
from dstrain.monitor.health.nonfinite import Finding, error_of
from dstrain.rundir import COMPLETE, RunDir


@pytest.mark.parametrize(
    ("since", "hint"),
    [
        (None, "To continue from its checkpoint, add --set resume=auto"),
        (45, "checkpoint-40 with a lower learning_rate; later checkpoints hold the state that went wrong."),
        (39, "No checkpoint is from before that: start again with a lower learning_rate"),
    ],
)
def test_only_checkpoints_from_before_the_trouble_are_proposed(tmp_path: Path, since: int | None, hint: str) -> None:
    for step in (40, 60):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / COMPLETE).write_text(f'{{"step": {step}, "world_size": 2, "zero_stage": 2}}')
    message, stop = "step 60: it diverges.", HealthAction.STOP
    finding = Finding(rule="divergence", step=60, value="2", message=message, action=stop, since=since)
    error = error_of(finding, RunDir(tmp_path), 60)
    assert error.problem == "the health rule divergence ended the run: step 60: it diverges."
    assert hint in (error.hint or "")
