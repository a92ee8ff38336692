"""Exits early with a checkpoint, and reports progress to the node's agent (a Transformers callback)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dstrain.heartbeat import Phase, Sender
from dstrain.train.rank import Leaving


class LeavingCallback(TrainerCallback):
    """Checks after each step whether any rank was asked to leave; all ranks save and leave together."""

    def __init__(self, leaving: Leaving, heartbeat: Sender, group: Any) -> None:
        """`group` is a gloo group of all ranks, None with one rank."""
        self._leaving = leaving
        self._heartbeat = heartbeat
        self._group = group
        self.has_left = False
        """Whether training ended because of a request."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Sends a heartbeat, and ends training if requested."""
        self._heartbeat.send(state.global_step, Phase.STEP, state.max_steps)
        if state.global_step < state.max_steps and self._is_wanted_anywhere():
            self.has_left = True
            args.save_only_model = False  # to resume from
            control.should_save = True
            control.should_training_stop = True

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Sends a heartbeat during an evaluation, however long it is."""
        self._heartbeat.count(Phase.EVALUATING, state.global_step, state.max_steps)

    def _is_wanted_anywhere(self) -> bool:
        if self._group is None:
            return self._leaving.is_wanted
        wanted = torch.tensor([int(self._leaving.is_wanted)])
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX, group=self._group)
        return bool(wanted.item())
