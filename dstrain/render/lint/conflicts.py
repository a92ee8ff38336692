"""Rules about choices that exclude each other: DeepSpeed stops, most often after the model was loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dstrain.render.lint.finding import Fault, Severity
from dstrain.render.lint.rule import Rule, when
from dstrain.render.lint.subject import Subject

_DS = "deepspeed 0.19.8 "
_ZERO = "zero_optimization."
_E = Severity.ERROR


def _optimizer(s: Subject) -> str:
    name = s.at("optimizer.type", "")
    return name.lower() if isinstance(name, str) else ""


def _is_offloaded(s: Subject) -> bool:
    return s.stage > 0 and s.device("offload_optimizer") != "none"


def _has_zenflow(s: Subject) -> bool:
    return isinstance(s.at(_ZERO + "zenflow"), dict)


def _reduces_by_scatter(s: Subject) -> bool:
    return s.stage in (2, 3) and s.is_true(_ZERO + "reduce_scatter", default=True)


def _is_odd(s: Subject) -> bool:
    return s.number(_ZERO + "allgather_bucket_size", 0) % 2 == 1


def _zenflow_strategy(s: Subject) -> bool:
    section = s.at(_ZERO + "zenflow", {})
    if not isinstance(section, dict):
        return False
    is_auto = bool(section.get("select_strategy", "auto") == "auto")
    interval = section.get("select_interval", "auto")
    return is_auto == (isinstance(interval, int) and not isinstance(interval, bool))


def _zenflow_intervals(s: Subject) -> bool:
    select, update = s.at(_ZERO + "zenflow.select_interval", 0), s.at(_ZERO + "zenflow.update_interval", 0)
    is_step = s.at(_ZERO + "zenflow.select_strategy", "auto") == "step"
    return is_step and all(type(each) is int for each in (select, update)) and select < update


def _old_and_new_offload(subject: Subject) -> Iterator[Fault]:
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_params", "offload_param")):
        if subject.at(_ZERO + old, None) is not None and subject.has(_ZERO + new):
            yield Fault(
                pointer=("zero_optimization", old),
                problem=f"{old} beside {new}",
                effect="DeepSpeed refuses the old and the new name together",
                fix=f"remove {old}",
            )


def _nvme_without_path(subject: Subject) -> Iterator[Fault]:
    for section in ("offload_optimizer", "offload_param"):
        path = subject.at(f"{_ZERO}{section}.nvme_path", None)
        if subject.stage == 3 and subject.device(section) == "nvme" and not isinstance(path, str):
            yield Fault(
                pointer=("zero_optimization", section, "device"),
                problem=f"{section} on NVMe, and nvme_path is missing",
                effect="the run stops with a TypeError when the engine starts",
                fix='write "nvme_path": "/a/folder/on/the/drive"',
            )


def _low_precision_states(subject: Subject) -> Iterator[Fault]:
    for section, master in (("bf16", "bf16_master_weights_and_grads"), ("fp16", "fp16_master_weights_and_grads")):
        if subject.is_true(f"{section}.{master}") and subject.stage == 0:
            yield Fault(
                pointer=(section, master),
                problem=f"{master} with ZeRO-0",
                effect="DeepSpeed refuses it: the copies are ZeRO's",
                fix='write "stage": 1 or more, or remove the line',
            )
    if subject.is_true("bf16.bf16_optimizer_states") and not subject.is_true("bf16.bf16_master_weights_and_grads"):
        yield Fault(
            pointer=("bf16", "bf16_optimizer_states"),
            problem="bf16_optimizer_states without bf16_master_weights_and_grads",
            effect="DeepSpeed refuses it",
            fix='write "bf16_master_weights_and_grads": true too, or remove the line',
        )


def _autoep(s: Subject) -> bool:
    return s.is_true("expert_parallel.enabled")


_AUTOEP_ZERO3: dict[str, Callable[[Subject], bool]] = {
    "zero_optimization.zero_quantized_gradients": lambda s: s.is_true(_ZERO + "zero_quantized_gradients"),
    "zero_optimization.zero_hpz_partition_size": lambda s: s.number(_ZERO + "zero_hpz_partition_size", 1) > 1,
}


def _autoep_zero3(subject: Subject) -> Iterator[Fault]:
    for path, breaks in _AUTOEP_ZERO3.items():
        if _autoep(subject) and subject.stage == 3 and breaks(subject):
            yield Fault(
                pointer=tuple(path.split(".")),
                problem=f"AutoEP under ZeRO-3 with {path.rsplit('.', 1)[-1]}",
                effect="the run stops when the engine starts",
                fix="remove one of them",
            )


_MIXED_SUMS = (("fp32", True, False), ("fp32", False, True), ("bf16", False, True), ("fp16", True, False))
"""Dtype of the sums, bf16 on, fp16 on: what ZeRO-0 does not mix."""


def _not_mean(s: Subject) -> bool:
    return bool(s.at("gradient_allreduce_op", "mean") == "sum")


# fmt: off
RULES = (
    Rule(id="DS301", severity=_E, title="fp16 and bf16",
         find=when("fp16.enabled", lambda s: s.is_true("fp16.enabled") and s.is_true("bf16.enabled"),
                   problem="fp16 and bf16 are both on",
                   effect="DeepSpeed refuses it", fix='write "enabled": "auto" in both; job.yaml says which'),
         source=_DS + "runtime/config.py, accelerate 1.15 utils/dataclasses.py: set_mixed_precision"),
    Rule(id="DS302", severity=_E, title="an odd allgather_bucket_size",
         find=when(_ZERO + "allgather_bucket_size", lambda s: s.stage in (1, 2) and _is_odd(s),
                   problem="allgather_bucket_size is {value}, an odd number",
                   effect="the run stops when the engine starts", fix="remove the line: nothing else reads it"),
         source=_DS + "runtime/zero/stage_1_and_2.py: nccl_start_alignment_factor"),
    Rule(id="DS303", severity=_E, title="Muon and reduce_scatter under ZeRO-3",
         find=when(_ZERO + "reduce_scatter",
                   lambda s: _optimizer(s) == "muon" and s.stage == 3 and _reduces_by_scatter(s),
                   problem="Muon under ZeRO-3 with reduce_scatter",
                   effect="the run stops when the engine starts", fix='write "reduce_scatter": false'),
         source=_DS + "runtime/zero/stage3.py: Muon and reduce scatter cannot be used together"),
    Rule(id="DS304", severity=_E, title="scaling before reduce_scatter",
         find=when("prescale_gradients", lambda s: s.is_true("prescale_gradients") and _reduces_by_scatter(s),
                   problem="prescale_gradients with reduce_scatter",
                   effect="the run stops when the engine starts",
                   fix='remove the line, or write "reduce_scatter": false'),
         source=_DS + "runtime/zero/stage_1_and_2.py, stage3.py: postscale_gradients"),
    Rule(id="DS305", severity=_E, title="dividing before reduce_scatter",
         find=when("gradient_predivide_factor",
                   lambda s: s.number("gradient_predivide_factor", 1.0) != 1.0 and _reduces_by_scatter(s),
                   problem="gradient_predivide_factor is {value} with reduce_scatter",
                   effect="the run stops when the engine starts",
                   fix='remove the line, or write "reduce_scatter": false'),
         source=_DS + "runtime/zero/stage_1_and_2.py, stage3.py: gradient_predivide_factor"),
    Rule(id="DS306", severity=_E, title="low-precision states without what they need", find=_low_precision_states,
         source=_DS + "runtime/config.py: _do_error_check"),
    Rule(id="DS307", severity=_E, title="ZenFlow without an offloaded optimizer",
         find=when(_ZERO + "zenflow",
                   lambda s: _has_zenflow(s) and s.stage > 0 and s.device("offload_optimizer") != "cpu",
                   problem="zenflow without an optimizer on the CPU",
                   effect="the run stops when the engine starts",
                   fix='write "offload_optimizer": {{"device": "cpu"}}, or remove zenflow'),
         source=_DS + "runtime/zenflow/zenflow_stage_1_and_2.py: Zenflow must be used with cpu offload"),
    Rule(id="DS308", severity=_E, title="ZenFlow's strategy and interval",
         find=when(_ZERO + "zenflow.select_interval", lambda s: _has_zenflow(s) and _zenflow_strategy(s),
                   problem="zenflow's select_strategy and select_interval do not go together",
                   effect="the run stops when the engine starts",
                   fix='write "select_strategy": "step" with a number, or leave both out'),
         source=_DS + "runtime/zenflow/engine.py: configure_zenflow"),
    Rule(id="DS309", severity=_E, title="ZenFlow's two intervals",
         find=when(_ZERO + "zenflow.update_interval", _zenflow_intervals,
                   problem="zenflow updates every {value} steps and selects more often",
                   effect="the run stops when the engine starts",
                   fix="write a select_interval of at least update_interval"),
         source=_DS + "runtime/zenflow/engine.py: configure_zenflow"),
    Rule(id="DS310", severity=_E, title="ZenFlow with the Trainer's optimizer",
         find=when(_ZERO + "zenflow", lambda s: _has_zenflow(s) and s.is_trainers and not s.has("optimizer"),
                   problem="zenflow without an optimizer section",
                   effect="the run stops when the engine starts: ZenFlow reads the optimizer's parameters here",
                   fix='write "optimizer": {{"type": "AdamW", "params": {{"lr": "auto"}}}}'),
         source=_DS + "runtime/zenflow/zenflow_stage_1_and_2.py: optimizer_params"),
    Rule(id="DS311", severity=_E, title="NVMe without a path", find=_nvme_without_path,
         source=_DS + "runtime/swap_tensor: os.path.join(nvme_path, …)"),
    Rule(id="DS312", severity=_E, title="old and new names of offload", find=_old_and_new_offload,
         source=_DS + "runtime/config_utils.py: _process_deprecated_field"),
    Rule(id="DS313", severity=_E, title="the old ZeRO-1",
         find=when(_ZERO + "legacy_stage1", lambda s: s.stage > 0 and s.is_true(_ZERO + "legacy_stage1"),
                   problem="legacy_stage1 is on", effect="the run stops when the engine starts",
                   fix="remove the line"),
         source=_DS + "runtime/engine.py: _configure_zero_optimizer"),
    Rule(id="DS314", severity=_E, title="summed gradients",
         find=when("gradient_allreduce_op",
                   lambda s: _not_mean(s) and (s.stage == 3 or _has_zenflow(s) or s.is_true("compile.deepcompile")),
                   problem='gradient_allreduce_op is "sum" under ZeRO-3, ZenFlow or DeepCompile',
                   effect="DeepSpeed refuses it", fix='write "mean", or remove the line'),
         source=_DS + "runtime/config.py: _do_error_check"),
    Rule(id="DS315", severity=_E, title="no gradient norm, and clipping",
         find=when(_ZERO + "compute_grad_norm",
                   lambda s: s.stage in (1, 2) and s.at(_ZERO + "compute_grad_norm", True) is False
                   and (s.at("gradient_clipping", 1.0) != 0 or _has_zenflow(s) or _is_offloaded(s)),
                   problem="compute_grad_norm is false beside clipping, ZenFlow or an offloaded optimizer",
                   effect="the run stops when the engine starts",
                   fix='remove the line, or write "gradient_clipping": 0 and keep the optimizer on the GPU'),
         source=_DS + "runtime/zero/stage_1_and_2.py: compute_grad_norm"),
    Rule(id="DS316", severity=_E, title="unmanaged accumulation",
         find=when("managed_gradient_accumulation",
                   lambda s: s.at("managed_gradient_accumulation", True) is False
                   and (s.is_true("compile.deepcompile")
                        or (s.stage != 2 and s.at(_ZERO + "overlap_comm", s.stage == 3) is True)),
                   problem="managed_gradient_accumulation is false beside DeepCompile, or beside overlap_comm "
                           "with ZeRO-{stage}",
                   effect="the run stops when the engine starts", fix='remove the line, or "overlap_comm": false'),
         source=_DS + "runtime/engine.py: _do_sanity_check"),
    Rule(id="DS317", severity=_E, title="quantised gradients without reduce_scatter",
         find=when(_ZERO + "zero_quantized_gradients",
                   lambda s: s.stage == 3 and s.is_true(_ZERO + "zero_quantized_gradients")
                   and (s.at(_ZERO + "reduce_scatter", True) is False or _optimizer(s) == "muon"),
                   problem="zero_quantized_gradients without reduce_scatter, or with Muon",
                   effect="the run stops when the engine starts", fix='write "reduce_scatter": true, with AdamW'),
         source=_DS + "runtime/zero/stage3.py: all2all_process_group"),
    Rule(id="DS318", severity=_E, title="SuperOffload and NVMe",
         find=when(_ZERO + "offload_optimizer.super_offload",
                   lambda s: s.stage == 3 and s.is_true(_ZERO + "offload_optimizer.super_offload")
                   and s.device("offload_optimizer") == "nvme",
                   problem="super_offload with an optimizer on NVMe",
                   effect="SuperOffload steps in host RAM, and does not read the drive",
                   fix='write "device": "cpu"'),
         source=_DS + "runtime/superoffload/superoffload_stage3.py"),
    Rule(id="DS319", severity=_E, title="two ways to offload optimizer states",
         find=when("compile.offload_opt_states",
                   lambda s: s.is_true("compile.deepcompile") and s.is_true("compile.offload_opt_states")
                   and s.stage == 3 and _is_offloaded(s),
                   problem="compile.offload_opt_states beside offload_optimizer",
                   effect="the run stops when the model is compiled", fix="remove one of them"),
         source=_DS + "compile/init_z3.py"),
    Rule(id="DS320", severity=_E, title="two offload passes",
         find=when("compile.offload_activation",
                   lambda s: s.is_true("compile.deepcompile") and s.is_true("compile.offload_activation")
                   and (s.is_true("compile.offload_parameters") or s.is_true("compile.offload_opt_states")),
                   problem="compile.offload_activation beside another offload pass",
                   effect="the run stops when the model is compiled", fix="remove one of them"),
         source=_DS + "compile/init_z3.py"),
    Rule(id="DS321", severity=_E, title="AutoEP under ZeRO-3", find=_autoep_zero3,
         source=_DS + "runtime/engine.py: _validate_zero3_moe (AutoEP with ZeRO Stage 3 does not support …)"),
    Rule(id="DS322", severity=_E, title="AutoEP's load balancing",
         find=when("expert_parallel.load_balance_coeff",
                   lambda s: _autoep(s) and s.at("expert_parallel.load_balance_coeff", None) is not None,
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
    Rule(id="DS324", severity=_E, title="tensor and sequence parallelism",
         find=when("tensor_parallel.autotp_size",
                   lambda s: s.number("tensor_parallel.autotp_size", 0) > 1
                   and s.number("sequence_parallel_size", 1) > 1,
                   problem="tensor_parallel beside sequence_parallel_size",
                   effect="they exclude each other: AutoTP replaces the groups that SP comes with",
                   fix="remove one of them"),
         source=_DS + "runtime/engine.py: _configure_tensor_parallel_states"),
    Rule(id="DS325", severity=_E, title="sums of gradients in another dtype without ZeRO",
         find=when("data_types.grad_accum_dtype",
                   lambda s: s.stage == 0 and (s.at("data_types.grad_accum_dtype", None), s.is_true("bf16.enabled"),
                                               s.is_true("fp16.enabled")) in _MIXED_SUMS,
                   problem="data_types.grad_accum_dtype is {value} with ZeRO-0",
                   effect="the run stops when the engine starts (NotImplementedError)",
                   fix='write "stage": 1 or more, or remove the line'),
         source=_DS + "runtime/engine.py: _do_optimizer_sanity_check"),
)
"""Rules about choices that exclude each other."""
# fmt: on
