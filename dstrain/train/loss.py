"""The loss of a model: in chunks, and whether it takes the targets and the token count of the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dstrain.errors import InvalidConfig
from dstrain.train.data.slices import shift
from dstrain.train.data.tokenize import IGNORED


def compute_in_chunks(model: Any) -> None:
    """Makes a model compute its loss without whole logits in fp32: a kernel on CUDA, chunks of tokens elsewhere.

    Raises InvalidConfig for a model with its own code, which need not ask for the loss that it is given.
    """
    if not type(model).__module__.startswith("transformers."):
        problem = f"loss: chunked needs a model of Transformers, not {type(model).__module__}"
        raise InvalidConfig(problem, hint="loss: full")
    model.loss_function = chunked_loss


def chunked_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Returns the sum over the targets divided by `num_items_in_batch`, by default their number: (), float32.

    `logits`: (batch, seq, vocab); `labels`, or `shift_labels` where they are shifted already: (batch, seq).
    Source: Transformers 5.23 loss/loss_utils.py: ForCausalLMLoss.
    """
    # a trace of the model's code, which prints JSON, needs no DeepSpeed, which prints too
    from deepspeed.runtime.chunked_cross_entropy import chunked_cross_entropy  # type: ignore[import-untyped]

    if shift_labels is None:
        assert labels is not None
        shift_labels = shift(labels)
    targets = shift_labels.reshape(-1).to(logits.device)
    total: torch.Tensor = chunked_cross_entropy(logits.reshape(-1, vocab_size), targets, ignore_index, reduction="sum")
    count = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)


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
