"""Generates a few tokens before the first step, so that texts of `samples` do not end a run in its midst."""

from __future__ import annotations

from typing import Any

import torch

from dstrain.errors import InvalidConfig, type_and_line
from dstrain.train.generate import SamplesCallback
from dstrain.train.loss import trial
from dstrain.train.preflight.found import Found
from dstrain.train.rank import of_all_ranks
from dstrain.train.training import Training
from dstrain.units import counted

NUM_TOKENS = 4
"""At most as many as `max_new_tokens`: the first reads the prompt, the others the cache of keys and values."""


def samples_of(trainer: Training) -> SamplesCallback | None:
    """Returns the generator of a run's texts; None if it has none."""
    callbacks: Any = trainer.callback_handler.callbacks
    return next((callback for callback in callbacks if isinstance(callback, SamplesCallback)), None)


def try_generation(trainer: Training, samples: SamplesCallback, group: Any) -> Found:
    """Generates from the longest prompt on all ranks; an error of any ends the run, running out of memory included.

    `group`: a gloo group of all ranks; None with one.
    """
    error: Exception | None = None
    text = None
    try:
        with trial(trainer.model_wrapped):
            text = samples.rehearse(NUM_TOKENS)
    except torch.OutOfMemoryError:  # has a report of its own
        raise
    except Exception as caught:  # generation is code of the model's family
        error = caught
    reasons = of_all_ranks(None if error is None else type_and_line(error), group)
    if (reason := next((reason for reason in reasons if reason), None)) is not None:
        problem = f"samples: the model cannot generate: {reason}"
        return Found(passed=False, text=problem, ends=InvalidConfig(problem, hint="Remove samples from the job."))
    assert text is not None
    prompt = counted(samples.longest_prompt, "token")
    return Found(passed=True, text=f"{counted(text.tokens, 'token')} after the longest prompt of {prompt}")
