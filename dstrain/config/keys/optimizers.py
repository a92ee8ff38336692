"""The parameters of every optimizer and schedule that a configuration can name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_SWITCHES: dict[str, Any] = {"foreach": None, "maximize": False, "differentiable": False}
_GRAPH: dict[str, Any] = {**_SWITCHES, "capturable": False}
_BETAS, _NO_DECAY = [0.9, 0.999], {"weight_decay": 0}
_TORCH_ADAM: dict[str, Any] = {"lr": 1e-3, "betas": _BETAS, "eps": 1e-8, "amsgrad": False, "fused": None, **_GRAPH}
_ADAM: dict[str, Any] = {"lr": 1e-3, "betas": _BETAS, "eps": 1e-8, "weight_decay": 0, "bias_correction": True,
                         "amsgrad": False}  # fmt: skip
ENGINE_ADAM: Mapping[str, Any] = MappingProxyType(
    {"adam_w_mode": True, "torch_adam": False, "fp32_optimizer_states": True}
)
"""Parameters of Adam and AdamW that the engine itself reads."""

# fmt: off
TORCH_OPTIMIZERS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "ASGD": {"lr": 0.01, "lambd": 1e-4, "alpha": 0.75, "t0": 1e6, **_NO_DECAY, **_GRAPH},
    "Adadelta": {"lr": 1.0, "rho": 0.9, "eps": 1e-6, **_NO_DECAY, **_GRAPH},
    "Adafactor": {"lr": 0.01, "beta2_decay": -0.8, "eps": [None, 0.001], "d": 1.0, **_NO_DECAY, "foreach": None,
                  "maximize": False},
    "Adagrad": {"lr": 0.01, "lr_decay": 0, **_NO_DECAY, "initial_accumulator_value": 0, "eps": 1e-10, "fused": None,
                **_SWITCHES},
    "Adam": {**_TORCH_ADAM, **_NO_DECAY, "decoupled_weight_decay": False},
    "AdamW": {**_TORCH_ADAM, "weight_decay": 0.01},
    "Adamax": {"lr": 0.002, "betas": _BETAS, "eps": 1e-8, **_NO_DECAY, **_GRAPH},
    "LBFGS": {"lr": 1, "max_iter": 20, "max_eval": None, "tolerance_grad": 1e-7, "tolerance_change": 1e-9,
              "history_size": 100, "line_search_fn": None},
    "NAdam": {"lr": 0.002, "betas": _BETAS, "eps": 1e-8, **_NO_DECAY, "momentum_decay": 0.004,
              "decoupled_weight_decay": False, **_GRAPH},
    "RAdam": {"lr": 1e-3, "betas": _BETAS, "eps": 1e-8, **_NO_DECAY, "decoupled_weight_decay": False, **_GRAPH},
    "RMSprop": {"lr": 0.01, "alpha": 0.99, "eps": 1e-8, **_NO_DECAY, "momentum": 0, "centered": False, **_GRAPH},
    "Rprop": {"lr": 0.01, "etas": [0.5, 1.2], "step_sizes": [1e-6, 50], **_GRAPH},
    "SGD": {"lr": 1e-3, "momentum": 0, "dampening": 0, **_NO_DECAY, "nesterov": False, "fused": None, **_SWITCHES},
    "SparseAdam": {"lr": 1e-3, "betas": _BETAS, "eps": 1e-8, "maximize": False},
})
"""Classes of torch.optim, spelled exactly → their parameters with defaults.

Source: the signatures of torch 2.13; the names Adagrad, Adam, AdamW and Muon select DeepSpeed's own.
"""
_CPU_ADAGRAD: dict[str, Any] = {"lr": 0.01, "eps": 1e-10, "weight_decay": 0, "amsgrad": False,
                                "fp32_optimizer_states": True}
_LION: dict[str, Any] = {"lr": 1e-3, "betas": _BETAS, "weight_decay": 0}
OWN_OPTIMIZERS: Mapping[str, Mapping[str, Any] | None] = MappingProxyType({
    "adam": {**_ADAM, "set_grad_none": True, **ENGINE_ADAM},
    "adamw": {**_ADAM, "set_grad_none": True, **ENGINE_ADAM},
    "adagrad": TORCH_OPTIMIZERS["Adagrad"],
    "lamb": {**_ADAM, "eps_inside_sqrt": False, "max_coeff": 10.0, "min_coeff": 0.01},
    "lion": {**_LION, "set_grad_none": True},
    "muon": {"lr": 0.02, "muon_lr": None, "adam_lr": None, "momentum": 0.95, "weight_decay": 0, "ns_method": "gram",
             "betas": [0.9, 0.95], "eps": 1e-10, "per_head_muon": False, "foreach": None, **ENGINE_ADAM},
    "muadam": None,
    "muadamw": None,
    "musgd": None,
})
"""DeepSpeed's optimizers, case-insensitive → their parameters with defaults; None: mup's.

Source: deepspeed 0.19.8 runtime/config.py: DEEPSPEED_OPTIMIZERS, runtime/engine.py: _configure_basic_optimizer.
"""
CPU_OPTIMIZERS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "adam": {**_ADAM, **ENGINE_ADAM},
    "adamw": {**_ADAM, **ENGINE_ADAM},
    "adagrad": _CPU_ADAGRAD,
    "lion": {**_LION, "fp32_optimizer_states": True},
})
"""Optimizers that have other parameters if offloaded. Source: deepspeed 0.19.8 ops."""
# fmt: on


def parameters(name: str, given: Mapping[str, Any], *, is_offloaded: bool) -> Mapping[str, Any] | None:
    """Returns the parameters of an optimizer with their defaults, or None if they are unknown.

    >>> parameters("AdamW", {"torch_adam": True}, is_offloaded=False)["weight_decay"]
    0.01
    """
    own = name.lower()
    if own in ("adam", "adamw") and given.get("torch_adam") is True:
        is_plain = own == "adam" and given.get("adam_w_mode") is False
        return {**TORCH_OPTIMIZERS["Adam" if is_plain else "AdamW"], **ENGINE_ADAM}
    if own in OWN_OPTIMIZERS:
        return CPU_OPTIMIZERS.get(own, OWN_OPTIMIZERS[own]) if is_offloaded else OWN_OPTIMIZERS[own]
    return TORCH_OPTIMIZERS.get(name)


_LAST: dict[str, Any] = {"last_batch_iteration": -1}
_WARMUP: dict[str, Any] = {"warmup_num_steps": 1000, "warmup_type": "log", **_LAST}
_EPOCH: dict[str, Any] = {"last_epoch": -1}

# fmt: off
OWN_SCHEDULES: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2000, "lr_range_test_step_rate": 1.0,
                    "lr_range_test_staircase": False, **_LAST},
    "OneCycle": {"cycle_min_lr": ..., "cycle_max_lr": ..., "decay_lr_rate": 0.0, "cycle_first_step_size": 2000,
                 "cycle_second_step_size": None, "cycle_first_stair_count": 0, "cycle_second_stair_count": None,
                 "decay_step_size": 0, "cycle_momentum": True, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9,
                 "decay_mom_rate": 0.0, **_LAST},
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, **_WARMUP},
    "WarmupDecayLR": {"total_num_steps": ..., "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, **_WARMUP},
    "WarmupCosineLR": {"total_num_steps": ..., "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001, **_WARMUP},
})
"""DeepSpeed's schedules → their parameters with defaults; `...` marks required ones.

Source: the signatures in deepspeed 0.19.8 runtime/lr_schedules.py.
"""
TORCH_SCHEDULES: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "ConstantLR": {"factor": 1 / 3, "total_iters": 5, **_EPOCH},
    "CosineAnnealingLR": {"T_max": ..., "eta_min": 0.0, **_EPOCH},
    "CosineAnnealingWarmRestarts": {"T_0": ..., "T_mult": 1, "eta_min": 0.0, **_EPOCH},
    "CyclicLR": {"base_lr": ..., "max_lr": ..., "step_size_up": 2000, "step_size_down": None, "mode": "triangular",
                 "gamma": 1.0, "scale_fn": None, "scale_mode": "cycle", "cycle_momentum": True, "base_momentum": 0.8,
                 "max_momentum": 0.9, **_EPOCH},
    "ExponentialLR": {"gamma": ..., **_EPOCH},
    "LinearLR": {"start_factor": 1 / 3, "end_factor": 1.0, "total_iters": 5, **_EPOCH},
    "MultiStepLR": {"milestones": ..., "gamma": 0.1, **_EPOCH},
    "OneCycleLR": {"max_lr": ..., "total_steps": None, "epochs": None, "steps_per_epoch": None, "pct_start": 0.3,
                   "anneal_strategy": "cos", "cycle_momentum": True, "base_momentum": 0.85, "max_momentum": 0.95,
                   "div_factor": 25.0, "final_div_factor": 10000.0, "three_phase": False, **_EPOCH},
    "PolynomialLR": {"total_iters": 5, "power": 1.0, **_EPOCH},
    "ReduceLROnPlateau": {"mode": "min", "factor": 0.1, "patience": 10, "threshold": 0.0001, "threshold_mode": "rel",
                          "cooldown": 0, "min_lr": 0, "eps": 1e-8},
    "StepLR": {"step_size": ..., "gamma": 0.1, **_EPOCH},
})
"""Classes of torch.optim.lr_scheduler that JSON can express, likewise. Source: the signatures of torch 2.13."""
PYTHON_SCHEDULES = ("ChainedScheduler", "LambdaLR", "MultiplicativeLR", "SequentialLR")
"""Classes of torch.optim.lr_scheduler that need functions or other schedules, which JSON cannot express."""
# fmt: on
