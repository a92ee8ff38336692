"""The auxiliary loss of a mixture of experts, which keeps its load balanced."""

from __future__ import annotations

from typing import Any

import torch

from dstrain.errors import InvalidConfig
from dstrain.job.schema import Job
from dstrain.train.data.collate import without_adapter


class RouterLoss:
    """Asks the model for its auxiliary loss, and weighs it as a mean over the micro-batches of a step.

    Models of Transformers add coefficient × auxiliary loss to the loss of each micro-batch, which the Trainer then sums
    over micro-batches and ranks, because the loss of tokens is divided by their number in the whole step: 64
    micro-batches in a step would make the coefficient 64 times what it says.
    Source: Transformers 5.23 models/qwen3_moe/modeling_qwen3_moe.py: forward; trainer.py: compute_loss, training_step.
    """

    def __init__(self, model: Any, job: Job, num_ranks: int) -> None:
        """Without a coefficient in the job the model's configuration says whether there is one.

        Raises InvalidConfig for a model without such a loss, and for ranks that share sequences or weights. Those that
        share experts have routers and sequences of their own.
        """
        base, coefficient = without_adapter(model), job.router_aux_loss_coef
        self._num_ranks = num_ranks
        config = base.config.get_text_config()
        own = getattr(config, "router_aux_loss_coef", None)
        if coefficient and own is None:
            problem = f"router_aux_loss_coef is {coefficient:g}, but {type(base).__name__} has no auxiliary loss"
            raise InvalidConfig(problem, hint="router_aux_loss_coef: null")
        if coefficient and job.ranks_per_batch > 1:
            key = next(key for key in ("sp", "tp") if getattr(job, key) > 1)
            problem = (
                f"router_aux_loss_coef is {coefficient:g}, and {key} is {getattr(job, key)}: ranks have parts of it"
            )
            raise InvalidConfig(problem, hint=f"{key}: 1, or router_aux_loss_coef: null")
        self._own = float(own or 0)
        is_on = bool(coefficient) if coefficient is not None else bool(getattr(config, "output_router_logits", False))
        self.coefficient = (self._own if coefficient is None else coefficient) if is_on else 0.0
        self.arguments: dict[str, Any] = {} if own is None else {"output_router_logits": is_on}
        """What the model's forward pass gets."""

    def weighed(self, loss: torch.Tensor, outputs: Any, micro_batches: int) -> torch.Tensor:
        """Returns the loss of a micro-batch, (), with the auxiliary loss weighed anew.

        `loss` has it times the model's own coefficient and the number of ranks, over which the engine averages;
        `micro_batches` are those of a rank in a step. Raises InvalidConfig if it would train nothing.
        """
        auxiliary = getattr(outputs, "aux_loss", None)
        if not isinstance(auxiliary, torch.Tensor):
            return loss
        if self.coefficient and loss.requires_grad and not auxiliary.requires_grad:
            problem = (
                "the loss that balances experts has no gradient: adapters under ZeRO-3 need reentrant checkpointing"
            )
            raise InvalidConfig(
                f"{problem}, which makes it without", hint="router_aux_loss_coef: 0, or grad_ckpt: false"
            )
        weight = self.coefficient / micro_batches - self._own * self._num_ranks
        return loss + weight * auxiliary.to(loss.device)
