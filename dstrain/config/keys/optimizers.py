"""`optimizer` and `scheduler`, with the parameters of every one that they can name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dstrain.config.keys.key import ANY, BOOL, INT, LIST, NUMBER, TEXT, Key, Names, flag, row, section, within

CONFIG = "runtime/config.py: get_optimizer_name"
ENGINE = "runtime/engine.py: _configure_basic_optimizer"
ADAM = "ops/adam/fused_adam.py: FusedAdam"
CPU_ADAM = "ops/adam/cpu_adam.py: DeepSpeedCPUAdam"
LAMB = "ops/lamb/fused_lamb.py: FusedLamb"
MUON = "runtime/zero/muon/original_muon.py: MuonWithAuxAdam"
TORCH = "runtime/engine.py: _configure_basic_optimizer (torch.optim)"

# fmt: off
OPTIMIZERS: tuple[Key, ...] = (
    *section("optimizer", CONFIG, "The optimizer that the engine builds if the caller passes none.",
        names=Names.IGNORED)(
        row("type", TEXT, "Its name: one of DeepSpeed's, case-insensitive, or a class of torch.optim, spelled exactly.",
            words=(
                "Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD", "adam", "adamw",
                "adagrad", "lamb", "lion", "muon", "muadam", "muadamw", "musgd", "ADAM", "ADAMW", "LAMB", "ASGD",
                "Adadelta", "Adafactor", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam",
            )),
        flag("legacy_fusion", "fp16 without ZeRO: the old fused Adam path."),
    ),
    *section("optimizer.params", ADAM, "Arguments of the optimizer; an unknown one raises (Muon ignores it).",
        own_source=ENGINE)(
        row("lr", NUMBER, "Learning rate.", default=0.001,
            default_note="0.001; Adagrad 0.01; Muon 0.02 for matrices and 0.0003 for the rest", least=0,
            filled="learning_rate"),
    ),
    *section("optimizer.params.betas", ADAM,
        "Decay rates of the two running means (Adam variants, Lamb, Lion, Muon's Adam part).", kind=LIST,
        default=[0.9, 0.999], default_note="[0.9, 0.999]", filled="[adam_beta1, adam_beta2]")(
        row("*", NUMBER, "One rate, at least 0 and below 1.", least=0, below=1),
    ),
    *within("optimizer.params", TORCH)(
        row("eps", NUMBER, "Added to the divisor for stability (Adam variants, Adagrad, Lamb, Muon's Adam part).",
            default=1e-8, default_note="1e-8; Adagrad 1e-10", least=0, filled="adam_epsilon", source=ADAM),
        row("weight_decay", NUMBER, "Decay of the weights towards 0, per step and learning rate.", default=0.0,
            default_note="0; torch's AdamW (torch_adam) 0.01", least=0, filled="weight_decay", source=ADAM),
        row("bias_correction", BOOL, "Adam, AdamW, Lamb: corrects the running means in the first steps.", default=True,
            source=ADAM),
        flag("amsgrad", "The AMSGrad variant: available with torch_adam; DeepSpeed's own Adam and Lamb raise on true.",
            source=ADAM),
        row("set_grad_none", BOOL,
            "Adam, AdamW, Lion on the GPU: zero_grad releases the gradients instead of zeroing them.", default=True,
            source=ADAM),
        row("adam_w_mode", BOOL,
            "Adam, Muon: decoupled weight decay (AdamW). false makes type Adam plain Adam with L2.", default=True,
            source=ENGINE),
        flag("torch_adam", "Adam, AdamW, Muon: uses torch.optim's implementation instead of DeepSpeed's.",
            source=ENGINE),
        row("fp32_optimizer_states", BOOL,
            "Offloaded Adam, Adagrad, Lion: keeps states in fp32; false keeps them in the data type of the weights.",
            default=True, source=CPU_ADAM),
        row("foreach", BOOL, "torch_adam and torch.optim: updates many tensors at once; more memory, faster.",
            is_nullable=True, source=ENGINE),
        flag("eps_inside_sqrt", "Lamb: adds eps inside the square root.", source=LAMB),
        row("max_coeff", NUMBER, "Lamb: upper bound of the trust ratio.", default=10.0, least=0, source=LAMB),
        row("min_coeff", NUMBER, "Lamb: lower bound of the trust ratio.", default=0.01, least=0, source=LAMB),
        row("max_grad_norm", NUMBER, "Refused by the engine for every optimizer.",
            instead="write gradient_clipping at the top", source=ENGINE),
        row("muon_lr", NUMBER, "Muon: learning rate of the matrices.", default_note="lr", least=0, since="0.18.3",
            source=ENGINE),
        row("adam_lr", NUMBER, "Muon: learning rate of everything else (embeddings, norms, head).", default_note="lr",
            least=0, since="0.18.3", source=ENGINE),
        row("momentum", NUMBER,
            "Muon: momentum of the matrices. Also SGD and RMSprop of torch.optim, whose default is 0.", default=0.95,
            least=0, source=MUON),
        row("ns_method", TEXT, "Muon: how an update is orthogonalized; gram is faster.", default="gram",
            words=("gram", "standard"), since="0.19.0", source=MUON),
        flag("per_head_muon", "Muon: treats each attention head's part of a projection as a separate matrix.",
            since="0.19.8", source="__init__.py: set_optimizer_flags"),
        flag("decoupled_wd", "MuAdam, MuSGD of the mup package: scales the decay independently of the learning rate.",
            source=ENGINE),
        flag("maximize", "torch.optim: maximizes instead of minimizing."),
        flag("capturable", "torch.optim: safe inside a CUDA graph."),
        flag("differentiable", "torch.optim: autograd runs through the step."),
        row("fused", BOOL, "torch.optim (Adam by torch_adam, Adagrad, SGD): one fused kernel.", is_nullable=True),
        flag("decoupled_weight_decay", "Adam of torch, NAdam, RAdam: applies the decay independently of the gradient."),
        row("momentum_decay", NUMBER, "NAdam: decay of the momentum.", default=0.004, least=0),
        flag("nesterov", "SGD: Nesterov momentum."),
        row("dampening", NUMBER, "SGD: damping of the momentum.", default=0),
        row("alpha", NUMBER, "RMSprop: smoothing constant; ASGD (0.75): power of the step size.", default=0.99,
            least=0),
        flag("centered", "RMSprop: divides by the estimated variance."),
        row("rho", NUMBER, "Adadelta: decay of the running mean of squares.", default=0.9, least=0, most=1),
        row("lr_decay", NUMBER, "Adagrad on the GPU: decay of the learning rate.", default=0, least=0),
        row("initial_accumulator_value", NUMBER, "Adagrad on the GPU: initial value of the sum of squares.", default=0,
            least=0),
        row("lambd", NUMBER, "ASGD: decay term.", default=0.0001),
        row("t0", NUMBER, "ASGD: step at which averaging starts.", default=1000000.0),
        row("beta2_decay", NUMBER, "Adafactor: decay rate of the second moment's coefficient.", default=-0.8, most=0),
        row("d", NUMBER, "Adafactor: clipping threshold of the update.", default=1.0, least=1),
        row("etas", LIST, "Rprop: factors that shrink and grow the step.", default=[0.5, 1.2]),
        row("step_sizes", LIST, "Rprop: smallest and largest step size.", default=[1e-06, 50]),
        row("max_iter", INT, "LBFGS: iterations per step.", default=20, least=1),
        row("max_eval", INT, "LBFGS: evaluations per step.", default_note="1.25 × max_iter", least=1, is_nullable=True),
        row("tolerance_grad", NUMBER, "LBFGS: stops at this first-order optimality.", default=1e-07),
        row("tolerance_change", NUMBER, "LBFGS: stops at this change.", default=1e-09),
        row("history_size", INT, "LBFGS: number of updates kept.", default=100, least=1),
        row("line_search_fn", TEXT, "LBFGS: line search.", words=("strong_wolfe",), is_nullable=True),
    ),
)
# fmt: on

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


LR_CONFIG = "runtime/config.py: get_scheduler_name"
LR_ENGINE = "runtime/engine.py: _scheduler_from_config"
RANGE = "runtime/lr_schedules.py: LRRangeTest"
CYCLE = "runtime/lr_schedules.py: OneCycle"
WARMUP = "runtime/lr_schedules.py: WarmupLR"
DECAY = "runtime/lr_schedules.py: WarmupDecayLR"
COSINE = "runtime/lr_schedules.py: WarmupCosineLR"
LR_TORCH = "runtime/engine.py: _scheduler_from_config (torch.optim.lr_scheduler)"

# fmt: off
SCHEDULERS: tuple[Key, ...] = (
    *section("scheduler", LR_ENGINE,
        "The learning-rate schedule that the engine builds and steps if the caller passes none.", names=Names.IGNORED,
        own_source=LR_CONFIG)(
        row("type", TEXT, "Its name, spelled exactly: a schedule of DeepSpeed or a class of torch.optim.lr_scheduler.",
            words=(
                "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest", "ConstantLR",
                "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LinearLR",
                "MultiStepLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "StepLR",
            )),
    ),
    *section("scheduler.params", LR_TORCH, "Arguments of the schedule; an unknown one raises. Required, even if {}.",
        own_source=LR_ENGINE)(
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
