"""`scheduler` and the parameters of every learning-rate schedule it can name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dstrain.config.keys.key import ANY, BOOL, INT, LIST, NUMBER, TEXT, Key, Names, flag, row, section

CONFIG = "runtime/config.py: get_scheduler_name"
ENGINE = "runtime/engine.py: _scheduler_from_config"
RANGE = "runtime/lr_schedules.py: LRRangeTest"
CYCLE = "runtime/lr_schedules.py: OneCycle"
WARMUP = "runtime/lr_schedules.py: WarmupLR"
DECAY = "runtime/lr_schedules.py: WarmupDecayLR"
COSINE = "runtime/lr_schedules.py: WarmupCosineLR"
TORCH = "runtime/engine.py: _scheduler_from_config (torch.optim.lr_scheduler)"

# fmt: off
SCHEDULERS: tuple[Key, ...] = (
    *section("scheduler", ENGINE,
        "The learning-rate schedule that the engine builds and steps if the caller passes none.", names=Names.IGNORED,
        own_source=CONFIG)(
        row("type", TEXT, "Its name, spelled exactly: a schedule of DeepSpeed or a class of torch.optim.lr_scheduler.",
            words=(
                "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest", "ConstantLR",
                "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LinearLR",
                "MultiStepLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "StepLR",
            )),
    ),
    *section("scheduler.params", TORCH, "Arguments of the schedule; an unknown one raises. Required, even if {}.",
        own_source=ENGINE)(
        row("warmup_min_lr", NUMBER, "WarmupLR, WarmupDecayLR: learning rate at the start.", default=0.0, least=0,
            filled="0", source=WARMUP),
        row("warmup_max_lr", NUMBER, "WarmupLR, WarmupDecayLR: learning rate after the warm-up.", default=0.001,
            default_note="WarmupDecayLR 0.001; WarmupLR the optimizer's lr", least=0, is_nullable=True,
            filled="learning_rate", source=DECAY),
        row("warmup_num_steps", INT, "Warm-up schedules: optimizer steps of the warm-up; 1 counts as 2.", default=1000,
            least=1, filled="max(1, warmup steps)", source=WARMUP),
        row("warmup_type", TEXT, "Warm-up schedules: shape of the rise.", default="log", words=("log", "linear"),
            source=WARMUP),
        row("total_num_steps", INT,
            "WarmupDecayLR, WarmupCosineLR (required there): optimizer steps of the whole schedule.", least=1,
            filled="number of training steps", source=DECAY),
        row("warmup_min_ratio", NUMBER, "WarmupCosineLR: first learning rate, as a fraction of the optimizer's lr.",
            default=0.0, least=0, most=1, source=COSINE),
        row("cos_min_ratio", NUMBER, "WarmupCosineLR: last learning rate, as a fraction of the optimizer's lr.",
            default=0.0001, least=0, most=1, source=COSINE),
        row("last_batch_iteration", INT,
            "DeepSpeed's schedules: index of the last batch; -1 starts from the beginning.", default=-1, source=WARMUP),
        row("lr_range_test_min_lr", NUMBER, "LRRangeTest: first learning rate (or a list, one per parameter group).",
            default=0.001, least=0, source=RANGE),
        row("lr_range_test_step_size", INT, "LRRangeTest: steps between increases.", default=2000, least=1,
            source=RANGE),
        row("lr_range_test_step_rate", NUMBER, "LRRangeTest: growth per interval.", default=1.0, least=0, source=RANGE),
        flag("lr_range_test_staircase", "LRRangeTest: grows in steps instead of continuously.", source=RANGE),
        row("cycle_min_lr", NUMBER, "OneCycle (required): lowest learning rate of the cycle.", least=0, source=CYCLE),
        row("cycle_max_lr", NUMBER, "OneCycle (required): highest learning rate of the cycle.", least=0, source=CYCLE),
        row("decay_lr_rate", NUMBER, "OneCycle: decay of the learning rate after the cycle.", default=0.0, least=0,
            source=CYCLE),
        row("cycle_first_step_size", INT, "OneCycle: steps of the rising part.", default=2000, least=1, source=CYCLE),
        row("cycle_second_step_size", INT, "OneCycle: steps of the falling part.", default_note="cycle_first_step_size",
            least=0, is_nullable=True, source=CYCLE),
        row("cycle_first_stair_count", INT, "OneCycle: stairs in the rising part; 0 is continuous.", default=0, least=0,
            source=CYCLE),
        row("cycle_second_stair_count", INT, "OneCycle: stairs in the falling part.",
            default_note="cycle_first_stair_count", least=0, is_nullable=True, source=CYCLE),
        row("decay_step_size", INT, "OneCycle: steps between decays after the cycle; 0 disables decay.", default=0,
            least=0, source=CYCLE),
        row("cycle_momentum", BOOL, "OneCycle, CyclicLR, OneCycleLR: cycles momentum inversely to the learning rate.",
            default=True, source=CYCLE),
        row("cycle_min_mom", NUMBER, "OneCycle: lowest momentum.", default=0.8, least=0, most=1, source=CYCLE),
        row("cycle_max_mom", NUMBER, "OneCycle: highest momentum.", default=0.9, least=0, most=1, source=CYCLE),
        row("decay_mom_rate", NUMBER, "OneCycle: decay of the momentum after the cycle.", default=0.0, least=0,
            source=CYCLE),
        row("last_epoch", INT, "torch's schedules: index of the last step; -1 starts from the beginning.", default=-1),
        row("step_size", INT, "StepLR (required): steps between decays.", least=1),
        row("gamma", NUMBER, "StepLR, MultiStepLR, ExponentialLR (required there), CyclicLR: factor of the decay.",
            default=0.1, default_note="0.1; CyclicLR 1.0", least=0),
        row("milestones", LIST, "MultiStepLR (required): steps at which the learning rate decays."),
        row("factor", NUMBER, "ConstantLR, ReduceLROnPlateau: factor on the learning rate.",
            default_note="ConstantLR 1/3; ReduceLROnPlateau 0.1", least=0, most=1),
        row("total_iters", INT, "ConstantLR, LinearLR, PolynomialLR: steps until the change is complete.", default=5,
            least=1),
        row("start_factor", NUMBER, "LinearLR: factor at the start.", default_note="1/3", most=1, above=0),
        row("end_factor", NUMBER, "LinearLR: factor at the end.", default=1.0, least=0, most=1),
        row("power", NUMBER, "PolynomialLR: exponent of the polynomial.", default=1.0),
        row("T_max", INT, "CosineAnnealingLR (required): steps of half a cosine period.", least=1),
        row("T_0", INT, "CosineAnnealingWarmRestarts (required): steps until the first restart.", least=1),
        row("T_mult", INT, "CosineAnnealingWarmRestarts: factor on the interval between restarts.", default=1, least=1),
        row("eta_min", NUMBER, "CosineAnnealingLR, CosineAnnealingWarmRestarts: lowest learning rate.", default=0.0,
            least=0),
        row("base_lr", NUMBER, "CyclicLR (required): lowest learning rate.", least=0),
        row("max_lr", NUMBER, "CyclicLR, OneCycleLR (required): highest learning rate.", least=0),
        row("step_size_up", INT, "CyclicLR: steps of the rising part.", default=2000, least=1),
        row("step_size_down", INT, "CyclicLR: steps of the falling part.", default_note="step_size_up", least=0,
            is_nullable=True),
        row("mode", TEXT, "CyclicLR: shape of the cycles; ReduceLROnPlateau: whether the metric should fall or rise.",
            default_note="CyclicLR triangular; ReduceLROnPlateau min",
            words=("triangular", "triangular2", "exp_range", "min", "max")),
        row("scale_mode", TEXT, "CyclicLR: what the scaling counts.", default="cycle", words=("cycle", "iterations")),
        row("base_momentum", NUMBER, "CyclicLR, OneCycleLR: lowest momentum.",
            default_note="CyclicLR 0.8; OneCycleLR 0.85", least=0, most=1),
        row("max_momentum", NUMBER, "CyclicLR, OneCycleLR: highest momentum.",
            default_note="CyclicLR 0.9; OneCycleLR 0.95", least=0, most=1),
        row("total_steps", INT, "OneCycleLR: steps of the cycle; alternatively, set epochs and steps_per_epoch.",
            least=1, is_nullable=True),
        row("epochs", INT, "OneCycleLR: epochs of the cycle.", least=1, is_nullable=True),
        row("steps_per_epoch", INT, "OneCycleLR: steps per epoch.", least=1, is_nullable=True),
        row("pct_start", NUMBER, "OneCycleLR: fraction of the cycle that rises.", default=0.3, least=0, most=1),
        row("anneal_strategy", TEXT, "OneCycleLR: shape of the annealing.", default="cos", words=("cos", "linear")),
        row("div_factor", NUMBER, "OneCycleLR: first learning rate is max_lr divided by this.", default=25.0, above=0),
        row("final_div_factor", NUMBER, "OneCycleLR: last learning rate is the first divided by this.", default=10000.0,
            above=0),
        flag("three_phase", "OneCycleLR: adds a third phase for the final decrease."),
        row("patience", INT, "ReduceLROnPlateau: steps without improvement before the learning rate is reduced.",
            default=10, least=0),
        row("threshold", NUMBER, "ReduceLROnPlateau: smallest improvement that counts.", default=0.0001, least=0),
        row("threshold_mode", TEXT, "ReduceLROnPlateau: whether the threshold is relative.", default="rel",
            words=("rel", "abs")),
        row("cooldown", INT, "ReduceLROnPlateau: steps to wait after a reduction.", default=0, least=0),
        row("min_lr", NUMBER, "ReduceLROnPlateau: lowest learning rate.", default=0, least=0),
        row("eps", NUMBER, "ReduceLROnPlateau: smaller changes of the learning rate are skipped.", default=1e-8),
        row("scale_fn", ANY, "CyclicLR: a Python function, which JSON cannot express.", is_nullable=True),
    ),
)
# fmt: on

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
