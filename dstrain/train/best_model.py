"""Stops training early, and makes the checkpoint of the lowest evaluation loss the final model."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from dstrain.job.schema import Job
from dstrain.monitor.best_model import BestModel

_STATES = (
    *("global_step*", "latest*", "zero_to_*.py", "*.pt", "*.pth", "stream-*.json"),
    *("trainer_state.json", "training_args.bin", "complete.json", "part.json", ".*"),
)
"""Files and folders of a checkpoint that are not of its model."""


class BestModelCallback(EarlyStoppingCallback):
    """Transformers' early stopping, whose count of evaluations without a lower loss continues after a resume."""

    def __init__(self, job: Job) -> None:
        """Without `early_stopping`, any number of such evaluations is allowed."""
        self.patience = job.early_stopping
        super().__init__(job.early_stopping or sys.maxsize, job.early_stopping_threshold)
        self._began_at = 0

    def state(self) -> dict[str, Any]:
        """Returns the count for a checkpoint; limits are those of the job, which may have changed at a resume."""
        return {"args": {}, "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes the count of the checkpoint that training resumes from; a checkpoint without one begins at 0."""
        states: Any = state.stateful_callbacks
        known = states.setdefault(type(self).__name__, self.state())
        self.early_stopping_patience_counter = known["attributes"]["early_stopping_patience_counter"]
        self._began_at = state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Evaluates the last step, too: Transformers writes a checkpoint of it."""
        if args.eval_strategy == IntervalStrategy.STEPS and state.global_step >= state.max_steps:
            control.should_evaluate = True

    def on_evaluate(  # type: ignore[override]  # its two bases have different signatures
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Counts an evaluation; that of `eval_on_start` repeats an earlier one, or has nothing before it."""
        if state.global_step > self._began_at:
            super().on_evaluate(args, state, control, **kwargs)  # type: ignore[no-untyped-call]

    def outcome(self, state: TrainerState) -> BestModel | None:
        """Returns the best model, and whether training stopped early; None if no evaluation had a loss."""
        if state.best_global_step is None or state.best_metric is None:
            return None
        is_early = self.early_stopping_patience_counter >= self.early_stopping_patience
        stopped_at = state.global_step if is_early and state.global_step < state.max_steps else None
        evaluations = self.patience if stopped_at is not None else None
        best: dict[str, Any] = {"step": int(state.best_global_step), "loss": float(state.best_metric)}
        return BestModel(**best, stopped_at=stopped_at, evaluations=evaluations)


def copy_model(checkpoint: Path, to: Path) -> None:
    """Copies the model of a checkpoint, as it was saved, without the states of training."""
    shutil.copytree(checkpoint, to, ignore=shutil.ignore_patterns(*_STATES))
