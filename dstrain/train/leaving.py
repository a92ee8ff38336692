"""Leaving early with a checkpoint, and telling the node's agent how far this rank is (a Transformers callback)."""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dstrain.pulse import SAVE_ON_TERM, Phase, Sender


class Leaving:
    """Whether somebody wants this rank to save a checkpoint and leave."""

    def __init__(self) -> None:
        """Listens to SIGUSR1, and to SIGTERM where the run says so; SIGUSR2 writes every thread's stack to stderr."""
        self.is_wanted = False
        signal.signal(signal.SIGUSR1, self._note)
        if SAVE_ON_TERM in os.environ:
            signal.signal(signal.SIGTERM, self._note)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # which is blocked in the launchers
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR2, all_threads=True)

    def _note(self, number: int, frame: Any) -> None:
        self.is_wanted = True


class LeavingCallback(TrainerCallback):
    """After each step asks all ranks whether one of them is to leave: they save and leave together, or not at all."""

    def __init__(self, leaving: Leaving, pulse: Sender, group: Any) -> None:
        """`group` is a gloo group of all ranks, None with one rank."""
        self._leaving = leaving
        self._pulse = pulse
        self._group = group
        self.has_left = False
        """Whether the training ends because somebody wanted that."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tells the agent, and leaves where that is wanted."""
        self._pulse.send(state.global_step, Phase.STEP, state.max_steps)
        if state.global_step < state.max_steps and self._is_wanted_anywhere():
            self.has_left = True
            control.should_save = True
            control.should_training_stop = True

    def _is_wanted_anywhere(self) -> bool:
        if self._group is None:
            return self._leaving.is_wanted
        wanted = torch.tensor([int(self._leaving.is_wanted)])
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX, group=self._group)
        return bool(wanted.item())
