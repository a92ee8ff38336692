"""The learning rate of a plan, which may follow the samples of a step."""

from __future__ import annotations

import math
from dataclasses import replace

from dstrain.choices import Method, Task
from dstrain.plan.request import LrScaling, Request
from dstrain.plan.search.search_space import DEFAULT_GLOBAL_BATCH

LEARNING_RATES = {Method.FULL: 1e-5, Method.LORA: 1e-4, Method.QLORA: 2e-4}
"""Usual peak learning rates of supervised fine-tuning. Source: LLaMA-Factory's full examples (1e-5) and LoRA examples
(1e-4); QLoRA (arXiv 2305.14314), table 9 (2e-4 up to 13B)."""
PREFERENCE_RATES = {Method.FULL: 1e-6, Method.LORA: 5e-6, Method.QLORA: 5e-6}
"""Those of DPO. Source: trl 1.16 trainer/dpo_config.py (1e-6); LLaMA-Factory's LoRA example of DPO (5e-6)."""


def of_request(request: Request, num_samples: int) -> float:
    """Returns the peak learning rate for that many samples of a step: the usual one of the method, or scaled.

    The usual ones are taken to be for the default of `DEFAULT_GLOBAL_BATCH` samples, which is a judgement, as is that
    a packed row counts as one sample.
    Source: Goyal et al. (arXiv 1706.02677), linear, for SGD; Malladi et al. (arXiv 2205.10287), square root, for Adam.
    """
    usual = (PREFERENCE_RATES if request.task is Task.DPO else LEARNING_RATES)[request.method]
    ratio = num_samples / DEFAULT_GLOBAL_BATCH
    factor = {None: 1.0, LrScaling.LINEAR: ratio, LrScaling.SQRT: math.sqrt(ratio)}[request.lr_scaling]
    return float(f"{usual * factor:.3g}")


def notes(request: Request, num_samples: int, words: str) -> list[str]:
    """Returns what scaling gives if a step has another number of samples, or packed rows, than by default.

    >>> notes(Request(), 256, "256 samples")
    ['learning rate 1e-05 is meant for 64 samples a step; for 256 samples, --lr-scaling linear gives 4e-05, sqrt 2e-05']
    """
    if num_samples == DEFAULT_GLOBAL_BATCH:
        return []
    usual, linear, root = (
        f"{of_request(replace(request, lr_scaling=scaling), num_samples):g}" for scaling in (None, *LrScaling)
    )
    meant = (
        f"learning rate {usual} is meant for {DEFAULT_GLOBAL_BATCH} {'rows' if request.packing else 'samples'} a step"
    )
    if request.lr_scaling is not None:
        return [f"{meant}; for {words} it is {of_request(request, num_samples):g} ({request.lr_scaling})"]
    return [f"{meant}; for {words}, --lr-scaling linear gives {linear}, sqrt {root}"]
