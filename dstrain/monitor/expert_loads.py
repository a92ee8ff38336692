"""Counts the tokens of each expert in a logging window, layer by layer, with one kernel per layer and micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dstrain.monitor.expert_balance import EVENT, balance, load_map
from dstrain.records import to_data


def routers_of(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """Returns the routers of a model with the numbers of their layers, in their order; none of a dense one.

    Classes of Transformers 5 name theirs among the outputs that can be recorded; a router returns logits, weights and
    the chosen experts. Source: Transformers 5.23 utils/output_capturing.py.
    """
    recorders = [getattr(module, "_can_record_outputs", None) or {} for module in model.modules()]
    named = [recorder["router_logits"] for recorder in recorders if "router_logits" in recorder]
    listed = [one for many in named for one in (many if isinstance(many, list) else [many])]
    classes = tuple({getattr(one, "target_class", one) for one in listed})
    return [(_layer(name), module) for name, module in model.named_modules() if isinstance(module, classes)]


def _layer(name: str) -> int:
    """Returns the number of a module's layer.

    >>> _layer("base_model.model.model.layers.3.mlp.gate")
    3
    """
    return next((int(part) for part in name.split(".") if part.isdigit()), 0)


class ExpertLoads:
    """Counts on the device, while the model trains; recomputed tokens count twice, for all alike."""

    def __init__(self, routers: Sequence[tuple[int, nn.Module]], group: Any) -> None:
        """Watches routers, given with their layers; `group` is a gloo group of all ranks, or None with one rank."""
        self._counts: dict[int, torch.Tensor] = {}
        self._group = group
        self._layers = [layer for layer, _ in routers]
        self._closed: list[list[int]] = []
        for place, (_, router) in enumerate(routers):
            router.register_forward_hook(partial(self._count, place))

    def _count(self, place: int, router: nn.Module, _inputs: Any, outputs: Any) -> None:
        """Adds a micro-batch; `outputs`: logits (tokens, experts), weights and chosen experts (tokens, top-k)."""
        if not router.training:
            return
        logits, chosen = outputs[0], outputs[2].detach().reshape(-1)
        if place not in self._counts:
            self._counts[place] = torch.zeros(logits.shape[-1], dtype=torch.int64, device=chosen.device)
        one = torch.ones((), dtype=torch.int64, device=chosen.device)
        self._counts[place].scatter_add_(0, chosen, one.expand_as(chosen))

    def restart(self) -> None:
        """Starts a new window."""
        self._counts.clear()

    def close(self) -> dict[str, Any]:
        """Returns the metrics of the window, over all ranks, and starts the next one."""
        if not self._layers or len(self._counts) < len(self._layers):
            return {}
        counts = torch.stack([self._counts[place] for place in sorted(self._counts)]).cpu()
        self.restart()
        if self._group is not None:
            dist.all_reduce(counts, group=self._group)
        self._closed = counts.tolist()
        return balance(self._closed, self._layers)

    def record(self, step: int) -> dict[str, Any] | None:
        """Returns the line of `metrics.jsonl` with the loads of the last window, once; None without a new one."""
        counts, self._closed = self._closed, []
        return {"event": EVENT, **to_data(load_map(counts, self._layers, step))} if counts else None
