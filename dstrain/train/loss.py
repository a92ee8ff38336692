"""Tests, before the first step, whether a model's loss takes the targets and the token count of the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dstrain.train.data.tokenize import IGNORED


def takes_targets(engine: Any, inputs: Mapping[str, Any]) -> bool:
    """Returns whether the loss is a sum over `shift_labels` divided by `num_items_in_batch`; all ranks run it together.

    `inputs`: a micro-batch with `labels`, (batch, seq). Classes of vision-language models say that they do not
    (`accepts_loss_kwargs`), and most do; the Trainer would then average over micro-batches of different lengths. The
    sum is 0 where there are no targets; a mean is NaN, and a loss that shifts `labels` itself is above 0.
    """
    labels = inputs["labels"]
    targets = {"shift_labels": torch.full_like(labels, IGNORED), "num_items_in_batch": labels.new_tensor(1)}
    was_training = engine.training
    engine.eval()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            return bool(engine(**{**inputs, **targets}).loss == 0)
    except TypeError:  # an unknown argument
        return False
    finally:
        engine.train(was_training)
