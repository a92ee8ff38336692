"""Tensor parallelism (DeepSpeed's AutoTP): the ranks of a group share each weight and train on the same micro-batch.

Transformers splits the model before the engine starts, by the `tp_plan` of its family; accelerate deals out the rows to
groups, and gathers the weights of a saved model. Source: Transformers 5.23 integrations/deepspeed.py: deepspeed_init;
accelerate 1.15 accelerator.py: _prepare_deepspeed, get_state_dict; deepspeed 0.19.8 runtime/engine.py:
_apply_autotp_partitioning, _replace_module_consolidated_state_dict.
"""

from __future__ import annotations

from typing import Any

import torch

from dstrain.train.loss_trials import sums_of
from dstrain.train.trainer import Trainer


class TensorParallelTrainer(Trainer):
    """The Trainer of a rank that holds a part of each weight."""

    def _totals(self, engine: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Returns the totals of a micro-batch on the first rank of its group, and zeros on the others: (2,), float64.

        The loss is the model's own, since a rank may have the logits of a part of the vocabulary.
        """
        totals = sums_of(engine, inputs)
        return totals if self._counts_rows else torch.zeros_like(totals)
