"""Rules about parallelism and compilation: AutoTP, AutoEP, DeepCompile, and their incompatibilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule, when
from dstrain.config.lint.subject import Subject, shown

_DS = "deepspeed 0.19.8 "
_ZERO = "zero_optimization."
_E = Severity.ERROR


def _tp(s: Subject) -> float:
    return s.number("tensor_parallel.autotp_size", 0)


def _autoep(s: Subject) -> bool:
    return s.is_true("expert_parallel.enabled")


_AUTOEP_ZERO3: dict[str, Callable[[Subject], bool]] = {
    "sequence_parallel_size": lambda s: s.number("sequence_parallel_size", 1) > 1,
    "zero_optimization.offload_optimizer.device": lambda s: s.device("offload_optimizer") == "nvme",
    "zero_optimization.zero_quantized_gradients": lambda s: s.is_true(_ZERO + "zero_quantized_gradients"),
    "zero_optimization.zero_hpz_partition_size": lambda s: s.number(_ZERO + "zero_hpz_partition_size", 1) > 1,
}


_FOLDED: dict[str, Callable[[Subject], bool]] = {
    "compile.deepcompile": lambda s: s.is_true("compile.deepcompile"),
    "zero_optimization.offload_optimizer": lambda s: isinstance(s.at(_ZERO + "offload_optimizer"), dict),
    "zero_optimization.offload_param": lambda s: isinstance(s.at(_ZERO + "offload_param"), dict),
    "expert_parallel.autoep_size": lambda s: s.number("expert_parallel.autoep_size", 1) == 1,
    "expert_parallel.async_split_plan": lambda s: s.is_true("expert_parallel.async_split_plan"),
    "use_data_before_expert_parallelism": lambda s: s.is_true("use_data_before_expert_parallelism"),
}
"""What AutoEP does not go with beside AutoTP. Source: deepspeed 0.19.8 module_inject/auto_ep_folding.py:
validate_folding_global; auto_ep_config.py: validate_autoep_config."""


def _folded(subject: Subject) -> Iterator[Fault]:
    for path, breaks in _FOLDED.items():
        if _autoep(subject) and _tp(subject) > 1 and breaks(subject):
            yield Fault(
                pointer=tuple(path.split(".")),
                problem=f"AutoEP beside AutoTP with {path.rsplit('.', 1)[-1]}",
                effect="the run stops when the groups are made",
                fix="remove one of them" if not path.endswith("autoep_size") else "write an autoep_size above 1",
            )


_NON_MOE: dict[str, Callable[[Subject], bool]] = {
    "compile.deepcompile": lambda s: s.is_true("compile.deepcompile"),
    "expert_parallel.comm_backend": lambda s: s.at("expert_parallel.comm_backend", "comm") != "comm",
    "tensor_parallel.autotp_size": lambda s: _tp(s) > 1,
    "sequence_parallel_size": lambda s: s.number("sequence_parallel_size", 1) > 1,
    "zero_optimization.stage": lambda s: s.stage == 3,
    "zero_optimization.offload_optimizer": lambda s: s.device("offload_optimizer") != "none",
    "zero_optimization.offload_param": lambda s: s.device("offload_param") != "none",
}
"""What compiling around the experts does not go with. Source: deepspeed 0.19.8 runtime/engine.py: compile."""


def _non_moe(subject: Subject) -> Iterator[Fault]:
    for path, breaks in _NON_MOE.items():
        if subject.is_true("compile.autoep_non_moe") and breaks(subject):
            yield Fault(
                pointer=tuple(path.split(".")),
                problem=f"compile.autoep_non_moe with {path.rsplit('.', 1)[-1]}",
                effect="the run stops when the model is compiled",
                fix="remove one of them",
            )


def _passes(subject: Subject) -> Iterator[Fault]:
    named = subject.at("compile.passes", [])
    others = {"z1", "z3", "autosp"}
    if isinstance(named, list) and "autotp" in named and others & {str(each) for each in named}:
        yield Fault(
            pointer=("compile", "passes"),
            problem="the compile pass autotp beside another",
            effect="the run stops when the model is compiled (NotImplementedError)",
            fix="keep one of them",
        )


def _fused_routing(subject: Subject) -> Iterator[Fault]:
    prefix = "expert_parallel."
    is_deepep = subject.at(prefix + "comm_backend", "comm") == "deepep"
    groups, limited = (subject.at(prefix + name, None) for name in ("num_expert_groups", "num_limited_groups"))
    both = all(isinstance(each, int) for each in (groups, limited))
    checks = {
        "row_weighting_impl": subject.at(prefix + "row_weighting_impl", None) == "fused" and not is_deepep,
        "gate_up_impl": subject.at(prefix + "gate_up_impl", None) == "fused"
        and not subject.is_true(prefix + "use_grouped_mm", default=True),
        "num_limited_groups": both and limited > groups,
    }
    wanted = {
        "row_weighting_impl": 'it needs "comm_backend": "deepep"',
        "gate_up_impl": 'it needs "use_grouped_mm": true',
        "num_limited_groups": "it may not be above num_expert_groups",
    }
    for name, breaks in checks.items():
        if breaks and _autoep(subject):
            yield Fault(
                pointer=("expert_parallel", name),
                problem=f"expert_parallel.{name} is {shown(subject.at(prefix + name))}; {wanted[name]}",
                effect="DeepSpeed refuses it",
                fix="remove the line",
            )


_ONE_TARGET = ("offload_activation", "offload_parameters", "offload_opt_states")
"""Passes of DeepCompile that plan with the whole memory each. Source: deepspeed 0.19.8 compile/init_z3.py."""


def _two_passes(subject: Subject) -> Iterator[Fault]:
    found = [name for name in _ONE_TARGET if subject.is_true(f"compile.{name}")]
    if subject.is_true("compile.deepcompile") and subject.stage == 3 and len(found) > 1:
        yield Fault(
            pointer=("compile", found[0]),
            problem=f"compile.{found[0]} beside {' and '.join(found[1:])}",
            effect="the run stops when the model is compiled",
            fix="remove one of them",
        )


def _autoep_zero3(subject: Subject) -> Iterator[Fault]:
    for path, breaks in _AUTOEP_ZERO3.items():
        if _autoep(subject) and subject.stage == 3 and breaks(subject):
            yield Fault(
                pointer=tuple(path.split(".")),
                problem=f"AutoEP under ZeRO-3 with {path.rsplit('.', 1)[-1]}",
                effect="the run stops when the engine starts",
                fix="remove one of them",
            )


# fmt: off
RULES = (
    Rule(id="DS319", severity=_E, title="two ways to offload optimizer states",
         find=when("compile.offload_opt_states",
                   lambda s: s.is_true("compile.deepcompile") and s.is_true("compile.offload_opt_states")
                   and s.stage == 3 and s.offloads_optimizer,
                   problem="compile.offload_opt_states beside offload_optimizer",
                   effect="the run stops when the model is compiled", fix="remove one of them"),
         source=_DS + "compile/init_z3.py"),
    Rule(id="DS320", severity=_E, title="two offload passes", find=_two_passes,
         source=_DS + "compile/init_z3.py"),
    Rule(id="DS321", severity=_E, title="AutoEP under ZeRO-3", find=_autoep_zero3,
         source=_DS + "runtime/engine.py: _validate_zero3_moe (AutoEP with ZeRO Stage 3 does not support …)"),
    Rule(id="DS322", severity=_E, title="AutoEP's load balancing",
         find=when("expert_parallel.load_balance_coeff",
                   lambda s: s.at("expert_parallel.load_balance_coeff", None) is not None,
                   problem="expert_parallel.load_balance_coeff is {value}",
                   effect="DeepSpeed refuses it: it is not there yet", fix="remove the line"),
         source=_DS + "module_inject/auto_ep_config.py"),
    Rule(id="DS323", severity=_E, title="DeepEP's buffers",
         find=when("expert_parallel.comm_backend",
                   lambda s: _autoep(s) and s.at("expert_parallel.comm_backend", "comm") == "deepep"
                   and s.number("expert_parallel.comm_max_tokens_per_rank", 0) <= 0,
                   problem="comm_backend is deepep, and comm_max_tokens_per_rank is not given",
                   effect="DeepSpeed refuses it", fix='write "comm_max_tokens_per_rank": micro-batch × seq_len'),
         source=_DS + "module_inject/auto_ep_config.py"),
    Rule(id="DS324", severity=Severity.WARNING, title="tensor and sequence parallelism",
         find=when("tensor_parallel.autotp_size",
                   lambda s: s.number("tensor_parallel.autotp_size", 0) > 1
                   and s.number("sequence_parallel_size", 1) > 1,
                   problem="tensor_parallel beside sequence_parallel_size",
                   effect="they exclude each other: AutoTP replaces the groups that SP comes with",
                   fix="remove one of them"),
         source=_DS + "runtime/engine.py: _configure_tensor_parallel_states"),
    Rule(id="DS340", severity=_E, title="AutoEP beside AutoTP", find=_folded,
         source=_DS + "module_inject/auto_ep_folding.py: validate_folding_global"),
    Rule(id="DS341", severity=_E, title="compiling around the experts", find=_non_moe,
         source=_DS + "runtime/engine.py: compile (autoep_non_moe)"),
    Rule(id="DS342", severity=_E, title="AutoEP's fused sum",
         find=when("expert_parallel.combine_impl",
                   lambda s: _autoep(s) and s.at("expert_parallel.combine_impl", None) == "fused_weighted_sum"
                   and (_tp(s) > 1 or (s.at("expert_parallel.comm_backend", "comm") == "deepep"
                                       and s.number("expert_parallel.autoep_size", 1) > 1)),
                   problem="combine_impl is fused_weighted_sum beside deepep or AutoTP",
                   effect="DeepSpeed refuses it", fix="remove the line"),
         source=_DS + "module_inject/auto_ep_config.py: validate_autoep_config"),
    Rule(id="DS343", severity=_E, title="AutoEP inside an expert",
         find=when("expert_parallel.expert_tensor_parallel_size",
                   lambda s: _autoep(s) and s.number("expert_parallel.expert_tensor_parallel_size", 1) != 1,
                   problem="expert_parallel.expert_tensor_parallel_size is {value}",
                   effect="DeepSpeed refuses it: the key is reserved", fix="write 1, or remove the line"),
         source=_DS + "module_inject/auto_ep_folding.py: validate_folding_global"),
    Rule(id="DS344", severity=_E, title="a dtype that JSON cannot say",
         find=when("tensor_parallel.dtype", lambda s: s.has("tensor_parallel.dtype"),
                   problem="tensor_parallel.dtype is {value}",
                   effect="DeepSpeed refuses it: it takes a torch.dtype, which no JSON value is",
                   fix="remove the line; the bf16 and fp16 sections say it"),
         source=_DS + "runtime/tensor_parallel/config.py: TPTrainingConfig"),
    Rule(id="DS345", severity=_E, title="passes of the compiler", find=_passes,
         source=_DS + "runtime/engine.py: compile (The AutoTP compile pass cannot yet be combined)"),
    Rule(id="DS346", severity=_E, title="AutoEP's fused routing", find=_fused_routing,
         source=_DS + "module_inject/auto_ep_config.py: validate_autoep_config"),
)
"""Rules about parallelism and compilation."""
# fmt: on
