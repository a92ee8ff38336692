"""What the loss of a model is, tried on a few tokens: whether it takes shifted targets and their number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from dstrain.train.data.collate import without_adapter
from dstrain.train.data.slices import shift
from dstrain.train.data.tokenize import IGNORED
from dstrain.train.evaluation import loss_of
from dstrain.train.loss import targets_of

_CHECKED = 1e-2
"""Largest relative difference between a model's own loss of some tokens and that of their logits."""


def takes_targets(engine: Any, inputs: Mapping[str, Any]) -> bool:
    """Returns whether the loss is a sum over `shift_labels` divided by `num_items_in_batch`; all ranks run it together.

    `inputs`: a micro-batch with `labels`, (batch, seq). Classes of vision-language models say that they do not
    (`accepts_loss_kwargs`), and most do; the Trainer would then average over micro-batches of different lengths. The
    sum is 0 where there are no targets; a mean is NaN, and a loss that shifts `labels` itself is above 0.
    """
    labels = inputs["labels"]
    targets = {"shift_labels": torch.full_like(labels, IGNORED), "num_items_in_batch": labels.new_tensor(1)}
    with trial(engine):
        try:
            return bool(engine(**{**inputs, **targets}).loss == 0)
        except TypeError:  # an unknown argument
            return False


def is_that_of_logits(engine: Any, inputs: Mapping[str, Any]) -> bool:
    """Returns whether a model's loss is the cross entropy of its logits; all ranks run it together.

    A fused loss is not, in a model that scales or bounds its logits. `inputs`: a micro-batch with `labels`.
    """
    targets = {name: value for name, value in inputs.items() if name in ("labels", "shift_labels")}
    others = {name: value for name, value in inputs.items() if name not in targets}
    with trial(engine):
        sums = sums_of(engine, inputs)
        logits = engine(**others).logits
    losses = loss_of(logits, targets_of(targets.get("labels"), targets.get("shift_labels")))
    return bool(torch.isclose(sums[0], losses[0], rtol=_CHECKED, atol=_CHECKED))


def is_mean_of_logits(engine: Any, inputs: Mapping[str, Any]) -> bool:
    """Returns whether a loss that takes no token count is the mean of its micro-batch; all ranks run it together.

    Losses that shift no labels, smooth them or add something are not. `inputs`: a micro-batch with `labels`.
    """
    with trial(engine):
        loss = engine(**inputs).loss
        total, count = loss_of(engine(**{**inputs, "labels": None}).logits, shift(inputs["labels"]))
    return bool(torch.isclose(loss.double(), total / count, rtol=_CHECKED, atol=_CHECKED))


def sums_of(engine: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Returns the sum of the losses, which the model computes, and the number of targets: (2,), float64.

    The loss of a router, which some models add to that of each micro-batch, is left out.
    """
    targets = targets_of(inputs.get("labels"), inputs.get("shift_labels"))
    config = without_adapter(getattr(engine, "module", engine)).config.get_text_config()
    others = {"output_router_logits": False} if getattr(config, "output_router_logits", False) else {}
    loss = engine(**inputs, **others, num_items_in_batch=targets.new_ones(())).loss
    return torch.stack([loss.double(), (targets != IGNORED).sum().double()])


@contextmanager
def trial(engine: Any) -> Iterator[None]:
    """Forwards within it have no gradients and no dropout, leave random numbers as they are, and compile nothing."""
    was_training = engine.training
    engine.eval()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        engine.train(was_training)
