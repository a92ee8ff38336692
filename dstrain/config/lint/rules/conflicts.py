"""Rules about settings that exclude each other; DeepSpeed stops at them, usually after loading the model."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.choices import Optimizer
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import REFUSES, STOPS, Rule, when
from dstrain.config.lint.subject import Subject, has_zenflow, type_of
from dstrain.facts.ds_config import OLD_OFFLOADS

_DS = "deepspeed 0.19.8 "
_ZERO = "zero_optimization."
_OFFLOAD = _ZERO + "offload_optimizer."
_E, _W = Severity.ERROR, Severity.WARNING


def _optimizer(s: Subject) -> str:
    """Returns the optimizer that the configuration names, or Muon where the job alone does."""
    if not s.has("optimizer") and s.job is not None and s.job.job.optimizer is Optimizer.MUON:
        return "muon"
    return (type_of(s, "optimizer") or "").lower()


def _sums(s: Subject) -> bool:
    return str(s.at("gradient_allreduce_op", "mean")).lower() == "sum"


def _reduces_by_scatter(s: Subject) -> bool:
    if s.stage == 2 and _sums(s):
        return False  # the engine divides nothing and does not check
    return s.stage in (2, 3) and s.is_true(_ZERO + "reduce_scatter", default=True)


def _clips(s: Subject) -> bool:
    given = s.at("gradient_clipping", 1.0 if s.asked is None else "auto")  # dstrain run adds the key
    if given == "auto" and s.asked is not None:
        given = s.asked.max_grad_norm
    return bool(given != 0)


def sums_in_fp32(s: Subject) -> bool:
    """Returns whether ZeRO-1 runs on the engine that adds gradients up in fp32 and keeps fp32 states."""
    return s.stage == 1 and s.at("data_types.grad_accum_dtype", None) == "fp32" and not s.offloads_optimizer


def _needs_grad_norm(s: Subject) -> bool:
    return s.stage not in (1, 2) or _clips(s) or has_zenflow(s) or s.offloads_optimizer or sums_in_fp32(s)


def _unmanaged(s: Subject) -> bool:
    is_overlapped = s.stage < 2 and s.is_true(_ZERO + "overlap_comm")
    is_managed = s.at("managed_gradient_accumulation", True) is not False
    return not is_managed and (s.is_true("compile.deepcompile") or is_overlapped)


def _old_and_new_offload(subject: Subject) -> Iterator[Fault]:
    for new, old in OLD_OFFLOADS.items():
        if subject.at(_ZERO + old, None) is not None and subject.has(_ZERO + new):
            yield Fault(
                pointer=("zero_optimization", old),
                problem=f"{old} together with {new}",
                effect="DeepSpeed refuses the old and the new name together",
                fix=f"remove {old}",
            )


def _nvme_without_path(subject: Subject) -> Iterator[Fault]:
    for section in OLD_OFFLOADS:
        path = subject.at(f"{_ZERO}{section}.nvme_path", None)
        if subject.stage == 3 and subject.device(section) == "nvme" and not isinstance(path, str):
            yield Fault(
                pointer=("zero_optimization", section, "device"),
                problem=f"{section} on NVMe without nvme_path",
                effect="the run stops with a TypeError when the engine starts",
                fix='write "nvme_path": "/a/folder/on/the/drive"',
            )


def _clipped_muon(subject: Subject) -> Iterator[Fault]:
    if _optimizer(subject) != "muon" or subject.stage == 0 or not _clips(subject):
        return
    key: tuple[str, ...] = ("gradient_clipping",) if subject.has("gradient_clipping") else ()
    if not key and subject.has("optimizer.type"):
        key = ("optimizer", "type")
    yield Fault(
        pointer=key,
        problem="Muon with clipped gradients",
        effect="DeepSpeed takes the norm of Muon's orthogonalised updates, far above 1, and divides every update by it",
        fix='write "gradient_clipping": 0, and max_grad_norm: 0 in job.yaml',
    )


_DTYPES = {"fp32": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16", "half": "fp16", "bf16": "bf16",
           "bfloat16": "bf16"}  # fmt: skip


def _param_dtype(subject: Subject) -> Iterator[Fault]:
    dtype = subject.at("data_types.param_dtype", None)
    sections = [subject.at(f"{name}.enabled", False) for name in ("bf16", "fp16")]
    if not isinstance(dtype, str) or "auto" in sections or dtype.lower() not in _DTYPES:
        return
    trained = "fp16" if sections[1] is True else "bf16" if sections[0] is True else "fp32"
    if _DTYPES[dtype.lower()] != trained:
        yield Fault(
            pointer=("data_types", "param_dtype"),
            problem=f'data_types.param_dtype is "{dtype}", but the model trains in {trained}',
            effect=STOPS,
            fix="remove the line: the bf16 and fp16 sections set the data type",
        )


_MIXED_SUMS = (("fp32", True, False), ("fp32", False, True), ("bf16", False, True), ("fp16", True, False))
"""Combinations of accumulation dtype, bf16 and fp16 that ZeRO-0 does not support."""


def _mixes_sums(s: Subject) -> bool:
    dtype = s.at("data_types.grad_accum_dtype", None)
    return s.stage == 0 and (dtype, s.is_true("bf16.enabled"), s.is_true("fp16.enabled")) in _MIXED_SUMS


# fmt: off
RULES = (
    Rule(id="DS301", severity=_E, title="fp16 and bf16",
         find=when("fp16.enabled", lambda s: s.is_true("fp16.enabled") and s.is_true("bf16.enabled"),
                   problem="fp16 and bf16 are both enabled", effect=REFUSES, fix="disable one of them"),
         source=_DS + "runtime/config.py, accelerate 1.15 utils/dataclasses.py: set_mixed_precision"),
    Rule(id="DS302", severity=_E, title="odd allgather_bucket_size",
         find=when(_ZERO + "allgather_bucket_size",
                   lambda s: s.stage in (1, 2) and s.number(_ZERO + "allgather_bucket_size", 0) % 2 == 1,
                   problem="allgather_bucket_size is {value}, an odd number",
                   fix="remove the line: nothing else reads it"),
         source=_DS + "runtime/zero/stage_1_and_2.py: nccl_start_alignment_factor"),
    Rule(id="DS303", severity=_E, title="Muon with reduce_scatter under ZeRO-3",
         find=when(_ZERO + "reduce_scatter",
                   lambda s: _optimizer(s) == "muon" and s.stage == 3 and _reduces_by_scatter(s),
                   problem="Muon under ZeRO-3 with reduce_scatter", fix='write "reduce_scatter": false'),
         source=_DS + "runtime/zero/stage3.py: Muon and reduce scatter cannot be used together"),
    Rule(id="DS331", severity=_W, title="Muon with clipped gradients", find=_clipped_muon,
         source=_DS + "runtime/zero/stage3.py: step; stage_1_and_2.py: scaled_global_norm; updates 97 % smaller on CPU"
                      " ranks with gradient_clipping 1.0"),
    Rule(id="DS304", severity=_E, title="prescale_gradients with reduce_scatter",
         find=when("prescale_gradients", lambda s: s.is_true("prescale_gradients") and _reduces_by_scatter(s),
                   problem="prescale_gradients with reduce_scatter",
                   fix='remove the line, or write "reduce_scatter": false'),
         source=_DS + "runtime/zero/stage_1_and_2.py, stage3.py: postscale_gradients"),
    Rule(id="DS305", severity=_E, title="gradient_predivide_factor with reduce_scatter",
         find=when("gradient_predivide_factor",
                   lambda s: s.number("gradient_predivide_factor", 1.0) != 1.0 and _reduces_by_scatter(s),
                   problem="gradient_predivide_factor is {value} with reduce_scatter",
                   fix='remove the line, or write "reduce_scatter": false'),
         source=_DS + "runtime/zero/stage_1_and_2.py, stage3.py: gradient_predivide_factor"),
    Rule(id="DS311", severity=_E, title="NVMe offload without a path", find=_nvme_without_path,
         source=_DS + "runtime/swap_tensor: os.path.join(nvme_path, …)"),
    Rule(id="DS312", severity=_E, title="old and new names of offload", find=_old_and_new_offload,
         source=_DS + "runtime/config_utils.py: _process_deprecated_field"),
    Rule(id="DS313", severity=_E, title="the old ZeRO-1 implementation",
         find=when(_ZERO + "legacy_stage1", lambda s: s.stage > 0 and s.is_true(_ZERO + "legacy_stage1"),
                   problem="legacy_stage1 is enabled", fix="remove the line"),
         source=_DS + "runtime/engine.py: _configure_zero_optimizer"),
    Rule(id="DS314", severity=_E, title="summed gradients",
         find=when("gradient_allreduce_op",
                   lambda s: _sums(s) and (s.stage == 3 or has_zenflow(s) or s.is_true("compile.deepcompile")),
                   problem='gradient_allreduce_op is "sum" under ZeRO-3, ZenFlow or DeepCompile',
                   effect=REFUSES, fix='write "mean", or remove the line'),
         source=_DS + "runtime/config.py: _do_error_check"),
    Rule(id="DS315", severity=_E, title="compute_grad_norm disabled but needed",
         find=when(_ZERO + "compute_grad_norm",
                   lambda s: s.at(_ZERO + "compute_grad_norm", True) is False and _needs_grad_norm(s),
                   problem="compute_grad_norm is false with ZeRO-{stage}, clipping, ZenFlow, fp32 accumulation or an "
                           "offloaded optimizer",
                   fix='remove the line, or write "gradient_clipping": 0 and keep the optimizer on the GPU'),
         source=_DS + "runtime/zero/stage_1_and_2.py: compute_grad_norm"),
    Rule(id="DS316", severity=_E, title="unmanaged gradient accumulation",
         find=when("managed_gradient_accumulation", _unmanaged,
                   problem="managed_gradient_accumulation is false with DeepCompile, or with overlap_comm under "
                           "ZeRO-{stage}",
                   fix='remove the line, or write "overlap_comm": false'),
         source=_DS + "runtime/engine.py: _do_sanity_check"),
    Rule(id="DS317", severity=_E, title="quantized gradients without reduce_scatter",
         find=when(_ZERO + "zero_quantized_gradients",
                   lambda s: s.stage == 3 and s.is_true(_ZERO + "zero_quantized_gradients")
                   and (s.at(_ZERO + "reduce_scatter", True) is False or _optimizer(s) == "muon"),
                   problem="zero_quantized_gradients without reduce_scatter, or with Muon",
                   fix='write "reduce_scatter": true, and use AdamW'),
         source=_DS + "runtime/zero/stage3.py: all2all_process_group"),
    Rule(id="DS318", severity=_W, title="SuperOffload with NVMe",
         find=when(_OFFLOAD + "super_offload",
                   lambda s: s.stage == 3 and s.is_true(_OFFLOAD + "super_offload")
                   and s.device("offload_optimizer") == "nvme",
                   problem="super_offload with an optimizer on NVMe",
                   effect="SuperOffload updates in host RAM and does not read the drive",
                   fix='write "device": "cpu"'),
         source=_DS + "runtime/superoffload/superoffload_stage3.py"),
    Rule(id="DS325", severity=_E, title="gradient accumulation in another dtype without ZeRO",
         find=when("data_types.grad_accum_dtype", _mixes_sums,
                   problem="data_types.grad_accum_dtype is {value} with ZeRO-0",
                   effect=f"{STOPS} (NotImplementedError)",
                   fix='write "stage": 1 or higher, or remove the line'),
         source=_DS + "runtime/engine.py: _do_optimizer_sanity_check"),
    Rule(id="DS328", severity=_E, title="autocast with quantized weights",
         find=when("torch_autocast.enabled",
                   lambda s: s.stage == 3 and s.is_true("torch_autocast.enabled")
                   and s.is_true(_ZERO + "zero_quantized_weights"),
                   problem="torch_autocast with zero_quantized_weights", fix="keep one of them"),
         source=_DS + "runtime/torch_autocast.py: Cannot enable both torch autocast and zero quantized weights"),
    Rule(id="DS329", severity=_E, title="param_dtype that contradicts the precision", find=_param_dtype,
         source=_DS + "runtime/engine.py: _assert_valid_mixed_precision_config"),
    Rule(id="DS330", severity=_E, title="partial offload with an optimizer other than Adam",
         find=when(_OFFLOAD + "ratio",
                   lambda s: s.stage == 3 and s.number(_OFFLOAD + "ratio", 1.0) < 1
                   and _optimizer(s) not in ("", "adam", "adamw"),
                   problem="offload_optimizer.ratio is {value} with an optimizer other than Adam",
                   fix='write "AdamW", or remove the line'),
         source=_DS + "runtime/zero/stage3.py: Hybrid Optimizer Only Supports DeepSpeedCPUAdam"),
)
"""Rules about settings that exclude each other."""
# fmt: on
