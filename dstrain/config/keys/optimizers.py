"""`optimizer` and the parameters of every optimizer it can name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dstrain.config.keys.key import Key, Kind, Names

CONFIG = "runtime/config.py: get_optimizer_name"
ENGINE = "runtime/engine.py: _configure_basic_optimizer"
ADAM = "ops/adam/fused_adam.py: FusedAdam"
CPU_ADAM = "ops/adam/cpu_adam.py: DeepSpeedCPUAdam"
LAMB = "ops/lamb/fused_lamb.py: FusedLamb"
MUON = "runtime/zero/muon/original_muon.py: MuonWithAuxAdam"
TORCH = "runtime/engine.py: _configure_basic_optimizer (torch.optim)"

# fmt: off
OPTIMIZERS: tuple[Key, ...] = (
    Key(path="optimizer", kind=Kind.OBJECT, names=Names.IGNORED, source=CONFIG,
        meaning="The optimizer that the engine makes, where the caller gives none."),
    Key(path="optimizer.type", kind=Kind.TEXT,
        words=(
            "Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD", "adam", "adamw",
            "adagrad", "lamb", "lion", "muon", "muadam", "muadamw", "musgd", "ADAM", "ADAMW", "LAMB", "ASGD",
            "Adadelta", "Adafactor", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"
        ), source=CONFIG,
        meaning="Its name: one of DeepSpeed's, in any case of letters, or a class of torch.optim, exactly."),
    Key(path="optimizer.legacy_fusion", kind=Kind.BOOL, default=False, source=CONFIG,
        meaning="fp16 without ZeRO: the old fused Adam path."),
    Key(path="optimizer.params", kind=Kind.OBJECT, source=ENGINE,
        meaning="What the optimizer is made with; one it does not take raises (Muon ignores it)."),
    Key(path="optimizer.params.lr", kind=Kind.NUMBER, least=0, default=0.001,
        default_note="0.001; Adagrad 0.01; Muon 0.02 for matrices and 0.0003 for the rest", filled="learning_rate",
        source=ADAM, meaning="Learning rate."),
    Key(path="optimizer.params.betas", kind=Kind.LIST, default=[0.9, 0.999], default_note="[0.9, 0.999]",
        filled="[adam_beta1, adam_beta2]", source=ADAM,
        meaning="Decay rates of the two running means (the Adams, Lamb, Lion, Muon's Adam half)."),
    Key(path="optimizer.params.betas.*", kind=Kind.NUMBER, least=0, below=1, source=ADAM,
        meaning="One rate, from 0 to below 1."),
    Key(path="optimizer.params.eps", kind=Kind.NUMBER, least=0, default=1e-08, default_note="1e-8; Adagrad 1e-10",
        filled="adam_epsilon", source=ADAM,
        meaning="Added to the divisor for stability (the Adams, Adagrad, Lamb, Muon's Adam half)."),
    Key(path="optimizer.params.weight_decay", kind=Kind.NUMBER, least=0, default=0.0,
        default_note="0; torch's AdamW (torch_adam) 0.01", filled="weight_decay", source=ADAM,
        meaning="Pull of the weights towards 0, per step and learning rate."),
    Key(path="optimizer.params.bias_correction", kind=Kind.BOOL, default=True, source=ADAM,
        meaning="Adam, AdamW, Lamb: corrects the running means in the first steps."),
    Key(path="optimizer.params.amsgrad", kind=Kind.BOOL, default=False, source=ADAM,
        meaning="The AMSGrad variant: taken by torch_adam; DeepSpeed's own Adam and Lamb raise on true."),
    Key(path="optimizer.params.set_grad_none", kind=Kind.BOOL, default=True, source=ADAM,
        meaning="Adam, AdamW, Lion on the GPU: zero_grad drops the gradients rather than zeroing them."),
    Key(path="optimizer.params.adam_w_mode", kind=Kind.BOOL, default=True, source=ENGINE,
        meaning="Adam, Muon: decoupled weight decay (AdamW). false makes type Adam plain Adam with L2."),
    Key(path="optimizer.params.torch_adam", kind=Kind.BOOL, default=False, source=ENGINE,
        meaning="Adam, AdamW, Muon: uses torch.optim's instead of DeepSpeed's."),
    Key(path="optimizer.params.fp32_optimizer_states", kind=Kind.BOOL, default=True, source=CPU_ADAM,
        meaning="Offloaded Adam, Adagrad, Lion: states in fp32; false keeps them in the weights' format."),
    Key(path="optimizer.params.foreach", kind=Kind.BOOL, is_nullable=True, source=ENGINE,
        meaning="torch_adam and torch.optim: updates many tensors at once; more memory, faster."),
    Key(path="optimizer.params.eps_inside_sqrt", kind=Kind.BOOL, default=False, source=LAMB,
        meaning="Lamb: adds eps below the root."),
    Key(path="optimizer.params.max_coeff", kind=Kind.NUMBER, least=0, default=10.0, source=LAMB,
        meaning="Lamb: upper bound of the trust ratio."),
    Key(path="optimizer.params.min_coeff", kind=Kind.NUMBER, least=0, default=0.01, source=LAMB,
        meaning="Lamb: lower bound of the trust ratio."),
    Key(path="optimizer.params.max_grad_norm", kind=Kind.NUMBER, instead="write gradient_clipping at the top",
        source=ENGINE, meaning="Refused by the engine for every optimizer."),
    Key(path="optimizer.params.muon_lr", kind=Kind.NUMBER, least=0, default_note="lr", since="0.18.3", source=ENGINE,
        meaning="Muon: learning rate of the matrices."),
    Key(path="optimizer.params.adam_lr", kind=Kind.NUMBER, least=0, default_note="lr", since="0.18.3", source=ENGINE,
        meaning="Muon: learning rate of all that is no matrix (embeddings, norms, head)."),
    Key(path="optimizer.params.momentum", kind=Kind.NUMBER, least=0, default=0.95, source=MUON,
        meaning="Muon: momentum of the matrices. Also SGD, RMSprop of torch.optim, whose default is 0."),
    Key(path="optimizer.params.ns_method", kind=Kind.TEXT, default="gram", words=("gram", "standard"), since="0.19.0",
        source=MUON, meaning="Muon: how an update is made orthogonal; gram is the faster."),
    Key(path="optimizer.params.per_head_muon", kind=Kind.BOOL, default=False, since="0.19.8",
        source="__init__.py: set_optimizer_flags",
        meaning="Muon: treats every attention head's part of a projection as a matrix of its own."),
    Key(path="optimizer.params.decoupled_wd", kind=Kind.BOOL, default=False, source=ENGINE,
        meaning="MuAdam, MuSGD of the mup package: decay scaled apart from the learning rate."),
    Key(path="optimizer.params.maximize", kind=Kind.BOOL, default=False, source=TORCH,
        meaning="torch.optim: maximises instead of minimising."),
    Key(path="optimizer.params.capturable", kind=Kind.BOOL, default=False, source=TORCH,
        meaning="torch.optim: safe inside a CUDA graph."),
    Key(path="optimizer.params.differentiable", kind=Kind.BOOL, default=False, source=TORCH,
        meaning="torch.optim: autograd goes through the step."),
    Key(path="optimizer.params.fused", kind=Kind.BOOL, is_nullable=True, source=TORCH,
        meaning="torch.optim (Adam by torch_adam, Adagrad, SGD): one fused kernel."),
    Key(path="optimizer.params.decoupled_weight_decay", kind=Kind.BOOL, default=False, source=TORCH,
        meaning="Adam of torch, NAdam, RAdam: decay apart from the gradient."),
    Key(path="optimizer.params.momentum_decay", kind=Kind.NUMBER, least=0, default=0.004, source=TORCH,
        meaning="NAdam: decay of the momentum."),
    Key(path="optimizer.params.nesterov", kind=Kind.BOOL, default=False, source=TORCH,
        meaning="SGD: Nesterov momentum."),
    Key(path="optimizer.params.dampening", kind=Kind.NUMBER, default=0, source=TORCH,
        meaning="SGD: damping of the momentum."),
    Key(path="optimizer.params.alpha", kind=Kind.NUMBER, least=0, default=0.99, source=TORCH,
        meaning="RMSprop: smoothing constant; ASGD (0.75): power of the step size."),
    Key(path="optimizer.params.centered", kind=Kind.BOOL, default=False, source=TORCH,
        meaning="RMSprop: divides by the estimated variance."),
    Key(path="optimizer.params.rho", kind=Kind.NUMBER, least=0, most=1, default=0.9, source=TORCH,
        meaning="Adadelta: decay of the running mean of squares."),
    Key(path="optimizer.params.lr_decay", kind=Kind.NUMBER, least=0, default=0, source=TORCH,
        meaning="Adagrad on the GPU: decay of the learning rate."),
    Key(path="optimizer.params.initial_accumulator_value", kind=Kind.NUMBER, least=0, default=0, source=TORCH,
        meaning="Adagrad on the GPU: first value of the sum of squares."),
    Key(path="optimizer.params.lambd", kind=Kind.NUMBER, default=0.0001, source=TORCH, meaning="ASGD: decay term."),
    Key(path="optimizer.params.t0", kind=Kind.NUMBER, default=1000000.0, source=TORCH,
        meaning="ASGD: step at which averaging starts."),
    Key(path="optimizer.params.beta2_decay", kind=Kind.NUMBER, most=0, default=-0.8, source=TORCH,
        meaning="Adafactor: decay rate of the second moment's coefficient."),
    Key(path="optimizer.params.d", kind=Kind.NUMBER, least=1, default=1.0, source=TORCH,
        meaning="Adafactor: clipping threshold of the update."),
    Key(path="optimizer.params.etas", kind=Kind.LIST, default=[0.5, 1.2], source=TORCH,
        meaning="Rprop: factors that shrink and grow the step."),
    Key(path="optimizer.params.step_sizes", kind=Kind.LIST, default=[1e-06, 50], source=TORCH,
        meaning="Rprop: smallest and largest step."),
    Key(path="optimizer.params.max_iter", kind=Kind.INT, least=1, default=20, source=TORCH,
        meaning="LBFGS: iterations per step."),
    Key(path="optimizer.params.max_eval", kind=Kind.INT, least=1, default_note="1.25 × max_iter", is_nullable=True,
        source=TORCH,
        meaning="LBFGS: evaluations per step."),
    Key(path="optimizer.params.tolerance_grad", kind=Kind.NUMBER, default=1e-07, source=TORCH,
        meaning="LBFGS: stops at this first-order optimality."),
    Key(path="optimizer.params.tolerance_change", kind=Kind.NUMBER, default=1e-09, source=TORCH,
        meaning="LBFGS: stops at this change."),
    Key(path="optimizer.params.history_size", kind=Kind.INT, least=1, default=100, source=TORCH,
        meaning="LBFGS: updates remembered."),
    Key(path="optimizer.params.line_search_fn", kind=Kind.TEXT, words=("strong_wolfe",), is_nullable=True, source=TORCH,
        meaning="LBFGS: line search."),
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
"""What the engine itself reads among the parameters of Adam and AdamW."""

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
"""Classes of torch.optim, written exactly so → the parameters that they take, with their defaults.

Source: the signatures of torch 2.13; DeepSpeed's own Adagrad, Adam, AdamW and Muon are asked for by those names.
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
"""DeepSpeed's optimizers, in any case → the parameters that they take, with their defaults; None: those of mup.

Source: deepspeed 0.19.8 runtime/config.py: DEEPSPEED_OPTIMIZERS, runtime/engine.py: _configure_basic_optimizer.
"""
CPU_OPTIMIZERS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "adam": {**_ADAM, **ENGINE_ADAM},
    "adamw": {**_ADAM, **ENGINE_ADAM},
    "adagrad": _CPU_ADAGRAD,
    "lion": {**_LION, "fp32_optimizer_states": True},
})
"""Those that take other parameters where the optimizer is offloaded. Source: deepspeed 0.19.8 ops."""
# fmt: on


def parameters(name: str, given: Mapping[str, Any], *, is_offloaded: bool) -> Mapping[str, Any] | None:
    """Returns what an optimizer takes, with its defaults, as it is asked for; None where nobody knows.

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
