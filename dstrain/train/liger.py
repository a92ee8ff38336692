"""Liger's Triton kernels in place of a model's own norms, rotary embedding, MLPs and experts."""

from __future__ import annotations

from typing import Any

from dstrain.errors import InvalidConfig
from dstrain.plan.memory.layers.kernels import LIGER
from dstrain.train.data.collate import without_adapter

_OWN_LOSS = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""The loss stays that of the job, which the plan counts: Liger's replaces the forward method of the model, on which
`loss: fused` rests, or the cross entropy of the whole process."""


def replace_kernels(model: Any) -> None:
    """Makes a model, with or without adapter, compute on Liger's kernels what the planner counts (`LIGER`).

    Transformers' Trainer has a switch that does the same when training starts, over MLPs that are tiled by then, and
    with an argument of its own for evaluations (Transformers 5.23 trainer.py: use_liger_kernel, skip_logits).
    Raises InvalidConfig for a model that the installed Liger, or the planner, does not know.
    """
    base = without_adapter(model)
    family, owner = base.config.model_type, type(base).__module__
    if not owner.startswith("transformers.") or family not in LIGER:
        raise _refused(f"has no kernels that are planned for {family} of {owner}")
    from liger_kernel.transformers.monkey_patch import (  # type: ignore[import-not-found]  # an extra
        MODEL_TYPE_TO_APPLY_LIGER_FN,
    )
    from transformers.integrations.liger import apply_liger_kernel

    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise _refused(f"as it is installed has no kernels for {family}")
    try:
        apply_liger_kernel(model, _OWN_LOSS)  # type: ignore[no-untyped-call]
    except (AttributeError, ImportError, NotImplementedError, TypeError) as error:
        raise _refused(f"cannot replace the parts of {type(base).__name__}: {error}") from error


def _refused(why: str) -> InvalidConfig:
    return InvalidConfig(f"liger is true, but Liger {why}", hint="liger: false")
