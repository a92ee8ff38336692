"""Counts the tokens of each expert in a logging window, layer by layer, with one kernel per layer and micro-batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Returns the routers of a model, in the order of its layers; none of a dense one.

    Classes of Transformers 5 name theirs among the outputs that can be recorded; a router returns logits, weights and
    the chosen experts. Source: Transformers 5.23 utils/output_capturing.py.
    """
    recorders = [getattr(module, "_can_record_outputs", None) or {} for module in model.modules()]
    named = [recorder["router_logits"] for recorder in recorders if "router_logits" in recorder]
    listed = [one for many in named for one in (many if isinstance(many, list) else [many])]
    classes = tuple({getattr(one, "target_class", one) for one in listed})
    return [module for module in model.modules() if isinstance(module, classes)]


class ExpertLoads:
    """Counts on the device, while the model trains; what a backward pass recomputes counts twice, for all alike."""

    def __init__(self, routers: Sequence[nn.Module], group: Any) -> None:
        """Watches the routers; `group` is a gloo group of all ranks, or None with one rank."""
        self._counts: dict[int, torch.Tensor] = {}
        self._group = group
        self._num_layers = len(routers)
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._count, layer))

    def _count(self, layer: int, router: nn.Module, _inputs: Any, outputs: Any) -> None:
        """Adds a micro-batch; `outputs`: logits (tokens, experts), weights and chosen experts (tokens, top-k)."""
        if not router.training:
            return
        logits, chosen = outputs[0], outputs[2].detach().reshape(-1)
        if layer not in self._counts:
            self._counts[layer] = torch.zeros(logits.shape[-1], dtype=torch.int64, device=chosen.device)
        one = torch.ones((), dtype=torch.int64, device=chosen.device)
        self._counts[layer].scatter_add_(0, chosen, one.expand_as(chosen))

    def restart(self) -> None:
        """Starts a new window."""
        self._counts.clear()

    def close(self) -> dict[str, Any]:
        """Returns the metrics of the window, over all ranks, and starts the next one."""
        if not self._num_layers or len(self._counts) < self._num_layers:
            return {}
        counts = torch.stack([self._counts[layer] for layer in sorted(self._counts)]).cpu()
        self.restart()
        if self._group is not None:
            dist.all_reduce(counts, group=self._group)
        return balance(counts.tolist())


def balance(counts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Returns how evenly the experts of each layer are used; `counts`: (layers, experts), tokens.

    The coefficient of variation is the standard deviation over the mean; the diversity is exp(entropy) of the load over
    the number of experts: 1 if all are used alike. Means over the layers, the worst layer's where the name says so.
    Source: NVIDIA NeMo AutoModel components/moe/load_balance_metrics.py (cv, diversity, dead experts).

    >>> found = balance([[10, 10, 10, 10], [40, 0, 0, 0]])
    >>> round(found["expert_load_cv_worst_layer"], 3), found["dead_experts_by_layer"]
    (1.732, [0, 3])
    """
    layers = [_balance(layer) for layer in counts]
    cv, busiest, diversity = zip(*layers, strict=True)
    return {
        "expert_load_cv": sum(cv) / len(cv),
        "expert_load_cv_worst_layer": max(cv),
        "expert_load_max_over_mean": max(busiest),
        "expert_load_diversity": sum(diversity) / len(diversity),
        "dead_experts": sum(load == 0 for layer in counts for load in layer),
        "experts": sum(map(len, counts)),
        "expert_load_cv_by_layer": list(cv),
        "expert_load_max_over_mean_by_layer": list(busiest),
        "expert_load_diversity_by_layer": list(diversity),
        "dead_experts_by_layer": [sum(load == 0 for load in layer) for layer in counts],
    }


def _balance(loads: Sequence[int]) -> tuple[float, float, float]:
    """Returns coefficient of variation, largest over mean, and diversity of one layer."""
    total, number = sum(loads), len(loads)
    mean = total / number
    cv = math.sqrt(sum((load - mean) ** 2 for load in loads) / number) / mean
    entropy = -sum(load / total * math.log(load / total) for load in loads if load)
    return cv, max(loads) / mean, math.exp(entropy) / number
