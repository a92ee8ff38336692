"""Rules about parallelism and compilation: AutoTP, AutoEP, DeepCompile, and their incompatibilities."""

from __future__ import annotations

from dstrain.config.lint.rule import REFUSES, REMOVE_ONE, Breaks, Broken, Rule, Subject, each_of, together, when
from dstrain.config.lint.rules.no_effect import above, has_pass, is_on
from dstrain.findings import Severity

_DS = "deepspeed 0.19.8 "
_FOLDING = _DS + "module_inject/auto_ep_folding.py: validate_folding_global"
_AUTOEP = _DS + "module_inject/auto_ep_config.py: validate_autoep_config"
_COMPILE = _DS + "runtime/engine.py: compile"
_EP, _ZERO, _TP = "expert_parallel.", "zero_optimization.", "tensor_parallel."
_OFFLOADS = ("offload_optimizer", "offload_param")
_STOPS_GROUPING = "the run stops when the groups are created"
_STOPS_COMPILING = "the run stops when the model is compiled"
_E = Severity.ERROR

_has_tp = above(_TP + "autotp_size", 1)
_has_sp = above("sequence_parallel_size", 1)
_has_autoep = is_on(_EP + "enabled")


def _has_section(path: str) -> Breaks:
    return lambda subject: isinstance(subject.at(path), dict)


def _offloads(section: str) -> Breaks:
    return lambda subject: subject.device(section) != "none"


def _uses_deepep(s: Subject) -> bool:
    return bool(s.at(_EP + "comm_backend", "comm") == "deepep")


def _has_autoep_and_tp(s: Subject) -> bool:
    return bool(_has_autoep(s) and _has_tp(s))


def _deepcompiles_on_cpu(s: Subject) -> bool:
    compiles = s.is_true("compile.deepcompile") and s.job is not None and s.job.job.torch_compile
    return compiles and s.cluster is not None and s.cluster.gpu.is_cpu


def _combines_autotp_pass(s: Subject) -> bool:
    return has_pass(s, "autotp") and any(has_pass(s, name) for name in ("z1", "z3", "autosp"))


def _unroutable(s: Subject) -> list[dict[str, str]]:
    """Returns the keys of AutoEP's routing that lack what they need."""
    groups, limited = (s.at(_EP + name, None) for name in ("num_expert_groups", "num_limited_groups"))
    is_fused = {name: s.at(_EP + name, None) == "fused" for name in ("row_weighting_impl", "gate_up_impl")}
    is_grouped = s.is_true(_EP + "use_grouped_mm", default=True)
    lacks = {
        "row_weighting_impl": is_fused["row_weighting_impl"] and not _uses_deepep(s),
        "gate_up_impl": is_fused["gate_up_impl"] and not is_grouped,
        "num_limited_groups": isinstance(groups, int) and isinstance(limited, int) and limited > groups,
    }
    return [{"key": key, "needed": _NEEDED[key]} for key, is_broken in lacks.items() if is_broken and _has_autoep(s)]


_NEEDED = {
    "row_weighting_impl": 'it needs "comm_backend": "deepep"',
    "gate_up_impl": 'it needs "use_grouped_mm": true',
    "num_limited_groups": "it must be at most num_expert_groups",
}
_WHOLE_MEMORY = ("offload_activation", "offload_parameters", "offload_opt_states")
"""Passes of DeepCompile that each plan with the whole memory. Source: deepspeed 0.19.8 compile/init_z3.py."""


def _two_passes(s: Subject) -> Broken:
    passes = [name for name in _WHOLE_MEMORY if s.is_true(f"compile.{name}")]
    is_found = s.is_true("compile.deepcompile") and s.stage == 3 and len(passes) > 1
    return {"first": passes[0], "others": " and ".join(passes[1:])} if is_found else None


def _fuses_sum(s: Subject) -> bool:
    is_deepep = _uses_deepep(s) and s.number(_EP + "autoep_size", 1) > 1
    is_fused = s.at(_EP + "combine_impl", None) == "fused_weighted_sum"
    return bool(_has_autoep(s) and is_fused and (_has_tp(s) or is_deepep))


# fmt: off
RULES = (
    Rule(id="DS319", severity=_E, title="two ways to offload optimizer states",
         find=when("compile.offload_opt_states",
                   lambda s: s.is_true("compile.deepcompile") and s.is_true("compile.offload_opt_states")
                   and s.stage == 3 and s.offloads_optimizer,
                   problem="compile.offload_opt_states together with offload_optimizer",
                   effect=_STOPS_COMPILING, fix=REMOVE_ONE),
         source=_DS + "compile/init_z3.py"),
    Rule(id="DS320", severity=_E, title="two offload passes",
         find=when("compile.{first}", _two_passes, problem="compile.{first} together with {others}",
                   effect=_STOPS_COMPILING, fix=REMOVE_ONE),
         source=_DS + "compile/init_z3.py"),
    Rule(id="DS321", severity=_E, title="AutoEP under ZeRO-3",
         find=each_of({"sequence_parallel_size": _has_sp,
                       _ZERO + "offload_optimizer.device": lambda s: s.device("offload_optimizer") == "nvme",
                       _ZERO + "zero_quantized_gradients": is_on(_ZERO + "zero_quantized_gradients"),
                       _ZERO + "zero_hpz_partition_size": above(_ZERO + "zero_hpz_partition_size", 1)},
                      lambda s: _has_autoep(s) and s.stage == 3,
                      problem="AutoEP under ZeRO-3 with {name}"),
         source=_DS + "runtime/engine.py: _validate_zero3_moe (AutoEP with ZeRO Stage 3 does not support …)"),
    Rule(id="DS322", severity=_E, title="AutoEP's load balancing",
         find=when(_EP + "load_balance_coeff", lambda s: s.at(_EP + "load_balance_coeff", None) is not None,
                   problem="expert_parallel.load_balance_coeff is {value}",
                   effect="DeepSpeed refuses it: it is not implemented yet", fix="remove the line"),
         source=_DS + "module_inject/auto_ep_config.py"),
    Rule(id="DS323", severity=_E, title="DeepEP's buffers",
         find=when(_EP + "comm_backend",
                   lambda s: _has_autoep(s) and _uses_deepep(s) and not above(_EP + "comm_max_tokens_per_rank", 0)(s),
                   problem="comm_backend is deepep, but comm_max_tokens_per_rank is missing",
                   effect=REFUSES, fix='write "comm_max_tokens_per_rank": micro-batch × seq_len'),
         source=_DS + "module_inject/auto_ep_config.py"),
    Rule(id="DS324", severity=Severity.WARNING, title="tensor and sequence parallelism",
         find=when(_TP + "autotp_size", lambda s: _has_tp(s) and _has_sp(s),
                   problem="tensor_parallel together with sequence_parallel_size",
                   effect="they exclude each other: AutoTP replaces the groups of sequence parallelism",
                   fix=REMOVE_ONE),
         source=_DS + "runtime/engine.py: _configure_tensor_parallel_states"),
    Rule(id="DS340", severity=_E, title="AutoEP with AutoTP",
         find=together(
             each_of({path: is_on(path) for path in ("compile.deepcompile", "use_data_before_expert_parallelism",
                                                     _EP + "async_split_plan")}
                     | {_ZERO + section: _has_section(_ZERO + section) for section in _OFFLOADS}, _has_autoep_and_tp,
                     problem="AutoEP and AutoTP together with {name}", effect=_STOPS_GROUPING),
             when(_EP + "autoep_size", lambda s: _has_autoep_and_tp(s) and s.number(_EP + "autoep_size", 1) == 1,
                  problem="AutoEP and AutoTP together with an autoep_size of 1", effect=_STOPS_GROUPING,
                  fix="write an autoep_size above 1")),
         source=_FOLDING),
    Rule(id="DS348", severity=_E, title="DeepCompile on a CPU",
         find=when("compile.deepcompile", _deepcompiles_on_cpu,
                   problem="compile.deepcompile is enabled, and so is torch_compile in job.yaml, on a CPU",
                   effect="the run stops when the model is compiled: DeepCompile builds extensions for CUDA",
                   fix="remove it: torch_compile alone compiles the layers"),
         source=_DS + "compile/util.py: is_deepcompile_supported; tried on CPU ranks"),
    Rule(id="DS341", severity=_E, title="compiling around the experts",
         find=each_of({"compile.deepcompile": is_on("compile.deepcompile"),
                       _EP + "comm_backend": lambda s: s.at(_EP + "comm_backend", "comm") != "comm",
                       _TP + "autotp_size": _has_tp,
                       "sequence_parallel_size": _has_sp,
                       _ZERO + "stage": lambda s: s.stage == 3,
                       **{_ZERO + section: _offloads(section) for section in _OFFLOADS}},
                      is_on("compile.autoep_non_moe"),
                      problem="compile.autoep_non_moe with {name}", effect=_STOPS_COMPILING),
         source=_COMPILE + " (autoep_non_moe)"),
    Rule(id="DS342", severity=_E, title="AutoEP's fused sum",
         find=when(_EP + "combine_impl", _fuses_sum,
                   problem="combine_impl is fused_weighted_sum together with deepep or AutoTP",
                   effect=REFUSES, fix="remove the line"),
         source=_AUTOEP),
    Rule(id="DS343", severity=_E, title="tensor parallelism inside an expert",
         find=when(_EP + "expert_tensor_parallel_size",
                   lambda s: _has_autoep(s) and s.number(_EP + "expert_tensor_parallel_size", 1) != 1,
                   problem="expert_parallel.expert_tensor_parallel_size is {value}",
                   effect="DeepSpeed refuses it: the key is reserved", fix="write 1, or remove the line"),
         source=_FOLDING),
    Rule(id="DS344", severity=_E, title="dtype that JSON cannot express",
         find=when(_TP + "dtype", lambda s: s.has(_TP + "dtype"), problem="tensor_parallel.dtype is {value}",
                   effect="DeepSpeed refuses it: it expects a torch.dtype, which JSON cannot express",
                   fix="remove the line; the bf16 and fp16 sections set the data type"),
         source=_DS + "runtime/tensor_parallel/config.py: TPTrainingConfig"),
    Rule(id="DS345", severity=_E, title="compile passes that cannot be combined",
         find=when("compile.passes", _combines_autotp_pass,
                   problem="the compile pass autotp together with another one",
                   effect=f"{_STOPS_COMPILING} (NotImplementedError)", fix="keep one of them"),
         source=_COMPILE + " (The AutoTP compile pass cannot yet be combined)"),
    Rule(id="DS346", severity=_E, title="AutoEP's fused routing",
         find=when(_EP + "{key}", _unroutable, problem="{path} is {value}; {needed}", effect=REFUSES,
                   fix="remove the line"),
         source=_AUTOEP),
)
"""Rules about parallelism and compilation."""
# fmt: on
