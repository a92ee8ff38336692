"""MLPs that are computed for a tile of tokens at a time, as DeepSpeed's ALST does, and again in the backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from dstrain.errors import InvalidConfig
from dstrain.train.data.collate import without_adapter


def tile_mlps(model: Any) -> None:
    """Makes the MLP of every decoder layer compute as many tokens at a time as the hidden states are wide.

    Raises InvalidConfig for a model whose layers have no dense MLP. ZeRO-3 gathers an MLP's weights once for all its
    tiles. Source: deepspeed 0.19.8 runtime/sequence_parallel/ulysses_sp.py: TiledMLP, which names that size.
    """
    from deepspeed.utils import set_z3_leaf_module  # type: ignore[import-untyped]

    for mlp in _mlps(model):
        mlp.forward = partial(_tiled, mlp, mlp.forward)
        set_z3_leaf_module(mlp, True)


def _mlps(model: Any) -> Iterator[Any]:
    layers = getattr(without_adapter(model).get_decoder(), "layers", ())
    found = [getattr(layer, "mlp", None) for layer in layers]
    if not found or any(not hasattr(mlp, "down_proj") for mlp in found):
        problem = f"tiled_mlp is set, but layers of {type(without_adapter(model)).__name__} have no dense MLP"
        raise InvalidConfig(problem, hint="tiled_mlp: false")
    yield from found


def _tiled(mlp: Any, compute: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    """Returns what an MLP makes of hidden states, both (batch, seq, hidden)."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP  # type: ignore[import-untyped]

    if torch.is_grad_enabled() and not hidden.requires_grad:
        return compute(hidden)  # as before the first adapter: TiledMLP knows gradients of its input only
    device = hidden.device.type
    as_now: Callable[[], AbstractContextManager[object]] = nullcontext
    if device != "meta" and torch.is_autocast_enabled(device):
        as_now = partial(torch.autocast, device, dtype=torch.get_autocast_dtype(device))

    def of_tile(_: Any, tile: torch.Tensor) -> torch.Tensor:
        with as_now():  # in the backward pass too
            return compute(tile)

    width = hidden.shape[-1]
    trained = [weight for weight in mlp.parameters() if weight.requires_grad]
    result: torch.Tensor = TiledMLP.apply(of_tile, mlp, hidden, math.ceil(hidden.numel() / width**2), trained)
    return result
