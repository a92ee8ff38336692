"""`scheduler` and the parameters of every learning-rate schedule it can name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dstrain.config.keys.key import Key, Kind, Names

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
    Key(path="scheduler", kind=Kind.OBJECT, names=Names.IGNORED, source=CONFIG,
        meaning="The learning-rate schedule that the engine makes and steps, where the caller gives none."),
    Key(path="scheduler.type", kind=Kind.TEXT,
        words=(
            "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest", "ConstantLR", "CosineAnnealingLR",
            "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LinearLR", "MultiStepLR", "OneCycleLR",
            "PolynomialLR", "ReduceLROnPlateau", "StepLR"
        ), source=ENGINE, meaning="Its name, exactly: a schedule of DeepSpeed or a class of torch.optim.lr_scheduler."),
    Key(path="scheduler.params", kind=Kind.OBJECT, source=ENGINE,
        meaning="What the schedule is made with; one it does not take raises. Must be there, if only as {}."),
    Key(path="scheduler.params.warmup_min_lr", kind=Kind.NUMBER, least=0, default=0.0, filled="0", source=WARMUP,
        meaning="WarmupLR, WarmupDecayLR: learning rate at the start."),
    Key(path="scheduler.params.warmup_max_lr", kind=Kind.NUMBER, least=0, default=0.001,
        default_note="WarmupDecayLR 0.001; WarmupLR the optimizer's lr", is_nullable=True, filled="learning_rate",
        source=DECAY, meaning="WarmupLR, WarmupDecayLR: learning rate after the warm-up."),
    Key(path="scheduler.params.warmup_num_steps", kind=Kind.INT, default=1000, least=1, filled="max(1, warmup steps)",
        source=WARMUP, meaning="Warmup schedules: optimizer steps of the warm-up; 1 counts as 2."),
    Key(path="scheduler.params.warmup_type", kind=Kind.TEXT, default="log", words=("log", "linear"), source=WARMUP,
        meaning="Warmup schedules: shape of the rise."),
    Key(path="scheduler.params.total_num_steps", kind=Kind.INT, least=1, filled="number of training steps",
        source=DECAY,
        meaning="WarmupDecayLR, WarmupCosineLR (required there): optimizer steps of the whole schedule."),
    Key(path="scheduler.params.warmup_min_ratio", kind=Kind.NUMBER, least=0, most=1, default=0.0, source=COSINE,
        meaning="WarmupCosineLR: first learning rate, as a share of the optimizer's lr."),
    Key(path="scheduler.params.cos_min_ratio", kind=Kind.NUMBER, least=0, most=1, default=0.0001, source=COSINE,
        meaning="WarmupCosineLR: last learning rate, as a share of the optimizer's lr."),
    Key(path="scheduler.params.last_batch_iteration", kind=Kind.INT, default=-1, source=WARMUP,
        meaning="DeepSpeed's schedules: index of the last batch seen; -1 starts anew."),
    Key(path="scheduler.params.lr_range_test_min_lr", kind=Kind.NUMBER, least=0, default=0.001, source=RANGE,
        meaning="LRRangeTest: first learning rate (or a list, one per parameter group)."),
    Key(path="scheduler.params.lr_range_test_step_size", kind=Kind.INT, default=2000, least=1, source=RANGE,
        meaning="LRRangeTest: steps between increases."),
    Key(path="scheduler.params.lr_range_test_step_rate", kind=Kind.NUMBER, least=0, default=1.0, source=RANGE,
        meaning="LRRangeTest: growth per interval."),
    Key(path="scheduler.params.lr_range_test_staircase", kind=Kind.BOOL, default=False, source=RANGE,
        meaning="LRRangeTest: grows in steps, not continuously."),
    Key(path="scheduler.params.cycle_min_lr", kind=Kind.NUMBER, least=0, source=CYCLE,
        meaning="OneCycle (required): lowest learning rate of the cycle."),
    Key(path="scheduler.params.cycle_max_lr", kind=Kind.NUMBER, least=0, source=CYCLE,
        meaning="OneCycle (required): highest learning rate of the cycle."),
    Key(path="scheduler.params.decay_lr_rate", kind=Kind.NUMBER, least=0, default=0.0, source=CYCLE,
        meaning="OneCycle: decay of the learning rate after the cycle."),
    Key(path="scheduler.params.cycle_first_step_size", kind=Kind.INT, default=2000, least=1, source=CYCLE,
        meaning="OneCycle: steps of the rising half."),
    Key(path="scheduler.params.cycle_second_step_size", kind=Kind.INT, default_note="cycle_first_step_size", least=0,
        is_nullable=True, source=CYCLE, meaning="OneCycle: steps of the falling half."),
    Key(path="scheduler.params.cycle_first_stair_count", kind=Kind.INT, least=0, default=0, source=CYCLE,
        meaning="OneCycle: stairs in the rising half; 0 is continuous."),
    Key(path="scheduler.params.cycle_second_stair_count", kind=Kind.INT, least=0,
        default_note="cycle_first_stair_count",
        is_nullable=True, source=CYCLE, meaning="OneCycle: stairs in the falling half."),
    Key(path="scheduler.params.decay_step_size", kind=Kind.INT, least=0, default=0, source=CYCLE,
        meaning="OneCycle: steps between decays after the cycle; 0 decays not at all."),
    Key(path="scheduler.params.cycle_momentum", kind=Kind.BOOL, default=True, source=CYCLE,
        meaning="OneCycle, CyclicLR, OneCycleLR: momentum runs against the learning rate."),
    Key(path="scheduler.params.cycle_min_mom", kind=Kind.NUMBER, least=0, most=1, default=0.8, source=CYCLE,
        meaning="OneCycle: lowest momentum."),
    Key(path="scheduler.params.cycle_max_mom", kind=Kind.NUMBER, least=0, most=1, default=0.9, source=CYCLE,
        meaning="OneCycle: highest momentum."),
    Key(path="scheduler.params.decay_mom_rate", kind=Kind.NUMBER, least=0, default=0.0, source=CYCLE,
        meaning="OneCycle: decay of the momentum after the cycle."),
    Key(path="scheduler.params.last_epoch", kind=Kind.INT, default=-1, source=TORCH,
        meaning="torch's schedules: index of the last step; -1 starts anew."),
    Key(path="scheduler.params.step_size", kind=Kind.INT, least=1, source=TORCH,
        meaning="StepLR (required): steps between decays."),
    Key(path="scheduler.params.gamma", kind=Kind.NUMBER, least=0, default=0.1, default_note="0.1; CyclicLR 1.0",
        source=TORCH,
        meaning="StepLR, MultiStepLR, ExponentialLR (required there), CyclicLR: factor of the decay."),
    Key(path="scheduler.params.milestones", kind=Kind.LIST, source=TORCH,
        meaning="MultiStepLR (required): steps at which the rate decays."),
    Key(path="scheduler.params.factor", kind=Kind.NUMBER, least=0, most=1,
        default_note="ConstantLR 1/3; ReduceLROnPlateau 0.1",
        source=TORCH, meaning="ConstantLR, ReduceLROnPlateau: factor on the learning rate."),
    Key(path="scheduler.params.total_iters", kind=Kind.INT, least=1, default=5, source=TORCH,
        meaning="ConstantLR, LinearLR, PolynomialLR: steps until the end of the change."),
    Key(path="scheduler.params.start_factor", kind=Kind.NUMBER, above=0, most=1, default_note="1/3", source=TORCH,
        meaning="LinearLR: factor at the start."),
    Key(path="scheduler.params.end_factor", kind=Kind.NUMBER, least=0, most=1, default=1.0, source=TORCH,
        meaning="LinearLR: factor at the end."),
    Key(path="scheduler.params.power", kind=Kind.NUMBER, default=1.0, source=TORCH,
        meaning="PolynomialLR: power of the polynomial."),
    Key(path="scheduler.params.T_max", kind=Kind.INT, least=1, source=TORCH,
        meaning="CosineAnnealingLR (required): steps of half a cosine."),
    Key(path="scheduler.params.T_0", kind=Kind.INT, least=1, source=TORCH,
        meaning="CosineAnnealingWarmRestarts (required): steps until the first restart."),
    Key(path="scheduler.params.T_mult", kind=Kind.INT, least=1, default=1, source=TORCH,
        meaning="CosineAnnealingWarmRestarts: factor on the distance between restarts."),
    Key(path="scheduler.params.eta_min", kind=Kind.NUMBER, least=0, default=0.0, source=TORCH,
        meaning="CosineAnnealingLR, CosineAnnealingWarmRestarts: lowest learning rate."),
    Key(path="scheduler.params.base_lr", kind=Kind.NUMBER, least=0, source=TORCH,
        meaning="CyclicLR (required): lowest learning rate."),
    Key(path="scheduler.params.max_lr", kind=Kind.NUMBER, least=0, source=TORCH,
        meaning="CyclicLR, OneCycleLR (required): highest learning rate."),
    Key(path="scheduler.params.step_size_up", kind=Kind.INT, least=1, default=2000, source=TORCH,
        meaning="CyclicLR: steps of the rising half."),
    Key(path="scheduler.params.step_size_down", kind=Kind.INT, least=0, default_note="step_size_up", is_nullable=True,
        source=TORCH, meaning="CyclicLR: steps of the falling half."),
    Key(path="scheduler.params.mode", kind=Kind.TEXT, default_note="CyclicLR triangular; ReduceLROnPlateau min",
        words=("triangular", "triangular2", "exp_range", "min", "max"), source=TORCH,
        meaning="CyclicLR: shape of the cycles; ReduceLROnPlateau: whether the metric should fall or rise."),
    Key(path="scheduler.params.scale_mode", kind=Kind.TEXT, default="cycle", words=("cycle", "iterations"),
        source=TORCH, meaning="CyclicLR: what the scaling counts."),
    Key(path="scheduler.params.base_momentum", kind=Kind.NUMBER, least=0, most=1,
        default_note="CyclicLR 0.8; OneCycleLR 0.85",
        source=TORCH, meaning="CyclicLR, OneCycleLR: lowest momentum."),
    Key(path="scheduler.params.max_momentum", kind=Kind.NUMBER, least=0, most=1,
        default_note="CyclicLR 0.9; OneCycleLR 0.95",
        source=TORCH, meaning="CyclicLR, OneCycleLR: highest momentum."),
    Key(path="scheduler.params.total_steps", kind=Kind.INT, least=1, is_nullable=True, source=TORCH,
        meaning="OneCycleLR: steps of the cycle; or give epochs and steps_per_epoch."),
    Key(path="scheduler.params.epochs", kind=Kind.INT, least=1, is_nullable=True, source=TORCH,
        meaning="OneCycleLR: epochs of the cycle."),
    Key(path="scheduler.params.steps_per_epoch", kind=Kind.INT, least=1, is_nullable=True, source=TORCH,
        meaning="OneCycleLR: steps per epoch."),
    Key(path="scheduler.params.pct_start", kind=Kind.NUMBER, least=0, most=1, default=0.3, source=TORCH,
        meaning="OneCycleLR: share of the cycle that rises."),
    Key(path="scheduler.params.anneal_strategy", kind=Kind.TEXT, default="cos", words=("cos", "linear"), source=TORCH,
        meaning="OneCycleLR: shape of the change."),
    Key(path="scheduler.params.div_factor", kind=Kind.NUMBER, above=0, default=25.0, source=TORCH,
        meaning="OneCycleLR: first learning rate is max_lr divided by this."),
    Key(path="scheduler.params.final_div_factor", kind=Kind.NUMBER, above=0, default=10000.0, source=TORCH,
        meaning="OneCycleLR: last learning rate is the first divided by this."),
    Key(path="scheduler.params.three_phase", kind=Kind.BOOL, default=False, source=TORCH,
        meaning="OneCycleLR: a third phase for the last fall."),
    Key(path="scheduler.params.patience", kind=Kind.INT, least=0, default=10, source=TORCH,
        meaning="ReduceLROnPlateau: steps without progress before the rate falls."),
    Key(path="scheduler.params.threshold", kind=Kind.NUMBER, least=0, default=0.0001, source=TORCH,
        meaning="ReduceLROnPlateau: smallest progress that counts."),
    Key(path="scheduler.params.threshold_mode", kind=Kind.TEXT, default="rel", words=("rel", "abs"), source=TORCH,
        meaning="ReduceLROnPlateau: whether the threshold is relative."),
    Key(path="scheduler.params.cooldown", kind=Kind.INT, least=0, default=0, source=TORCH,
        meaning="ReduceLROnPlateau: steps of rest after a fall."),
    Key(path="scheduler.params.min_lr", kind=Kind.NUMBER, least=0, default=0, source=TORCH,
        meaning="ReduceLROnPlateau: lowest learning rate."),
    Key(path="scheduler.params.eps", kind=Kind.NUMBER, default=1e-08, source=TORCH,
        meaning="ReduceLROnPlateau: smaller changes of the rate are left out."),
    Key(path="scheduler.params.scale_fn", kind=Kind.ANY, is_nullable=True, source=TORCH,
        meaning="CyclicLR: a Python function; not to be written in JSON."),
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
"""DeepSpeed's schedules → the parameters that they take, with their defaults; `...` must be given.

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
"""Classes of torch.optim.lr_scheduler that JSON can ask for, likewise. Source: the signatures of torch 2.13."""
PYTHON_SCHEDULES = ("ChainedScheduler", "LambdaLR", "MultiplicativeLR", "SequentialLR")
"""Classes of torch.optim.lr_scheduler that take functions or other schedules, which JSON cannot say."""
# fmt: on
