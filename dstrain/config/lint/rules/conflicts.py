"""Rules about settings that exclude each other, at which DeepSpeed usually stops after loading the model, and about the
states of optimizers: their dtypes, ZenFlow, and the optimizer that a job asks for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from dstrain.choices import Optimizer, Precision
from dstrain.config.lint.rule import (
    REFUSES,
    STOPS,
    Broken,
    Fault,
    Rule,
    Subject,
    fault,
    has_zenflow,
    in_job,
    job_fault,
    together,
    type_of,
    when,
)
from dstrain.config.lint.rules.releases import accumulation, trains_in
from dstrain.facts.ds_config import OLD_OFFLOADS
from dstrain.findings import Severity
from dstrain.job.schema import Job
from dstrain.plan.configuration import BF16_STATES
from dstrain.plan.labels import bf16_losses

_DS = "deepspeed 0.19.8 "
_ZERO = "zero_optimization."
_OFFLOAD = _ZERO + "offload_optimizer."
_ZENFLOW = _ZERO + "zenflow"
_BF16_MASTERS, _FP16_MASTERS = (f"{name}.{name}_master_weights_and_grads" for name in ("bf16", "fp16"))
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


def _named_twice(s: Subject) -> list[dict[str, str]]:
    old_names = {old: new for new, old in OLD_OFFLOADS.items() if s.at(_ZERO + old, None) is not None}
    return [{"new": new, "old": old} for old, new in old_names.items() if s.has(_ZERO + new)]


def _pathless(s: Subject) -> list[dict[str, str]]:
    on_nvme = [name for name in OLD_OFFLOADS if s.stage == 3 and s.device(name) == "nvme"]
    return [{"section": name} for name in on_nvme if not isinstance(s.at(f"{_ZERO}{name}.nvme_path", None), str)]


def _clipped_muon(s: Subject) -> Broken:
    if _optimizer(s) != "muon" or s.stage == 0 or not _clips(s):
        return None
    named = "optimizer.type" if s.has("optimizer.type") else ""
    return {"at": "gradient_clipping" if s.has("gradient_clipping") else named}


_DTYPES = {"fp32": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16", "half": "fp16", "bf16": "bf16",
           "bfloat16": "bf16"}  # fmt: skip


def _other_dtype(s: Subject) -> Broken:
    """Returns the dtype in which the model trains, if `param_dtype` is another."""
    dtype = s.at("data_types.param_dtype", None)
    bf16, fp16 = (s.at(f"{name}.enabled", False) for name in ("bf16", "fp16"))
    if not isinstance(dtype, str) or "auto" in (bf16, fp16) or dtype.lower() not in _DTYPES:
        return None
    trained = "fp16" if fp16 is True else "bf16" if bf16 is True else "fp32"
    return {"trained": trained} if _DTYPES[dtype.lower()] != trained else None


_MIXED_SUMS = (("fp32", True, False), ("fp32", False, True), ("bf16", False, True), ("fp16", True, False))
"""Combinations of accumulation dtype, bf16 and fp16 that ZeRO-0 does not support."""


def _mixes_sums(s: Subject) -> bool:
    dtype = s.at("data_types.grad_accum_dtype", None)
    return s.stage == 0 and (dtype, trains_in(s, Precision.BF16), trains_in(s, Precision.FP16)) in _MIXED_SUMS


def _has_masters(path: str, s: Subject, *, of_zero: bool = True) -> bool:
    """Returns whether master weights are of 16 bits, on the GPU under ZeRO, or without it."""
    return s.is_true(path) and (s.stage > 0 and not s.offloads_optimizer if of_zero else s.stage == 0)


def _bf16_states(s: Subject) -> bool:
    return s.is_true("bf16.bf16_optimizer_states")


def _has_both(s: Subject) -> bool:
    return s.is_true(_BF16_MASTERS) and s.is_true(_FP16_MASTERS)


def _bf16_masters(subject: Subject) -> Iterator[Fault]:
    """Reports what is lost where weights are stepped in bf16, as keys or the job's optimizer say."""
    job = subject.asked
    of_job = job is not None and job.optimizer is Optimizer.ADAMW_BF16 and job.precision is Precision.BF16
    key, moments = BF16_STATES
    is_kept, has_moments = (subject.at(f"bf16.{name}", of_job) is True for name in (key, moments))
    if subject.stage == 0 or not is_kept or (of_job and sums_in_fp32(subject)):
        return  # DS225 reports what keeps the job's states from bf16
    if sums_in_fp32(subject):
        effect = "it has no effect: ZeRO-1 that sums in fp32 is another engine, with fp32 states"
        yield fault(("bf16", key), f"{key} with ZeRO-1 and fp32 sums", effect, "remove it")
        return
    lost = bf16_losses(job.learning_rate if job else None, job.adam_beta2 if job and has_moments else None)
    if of_job:
        problem = "optimizer is adamw_bf16: master weights, gradients and moments are kept in bf16"
        fix = "write optimizer: adamw, unless losses are those of a run in fp32"
        yield job_fault(subject, "optimizer", problem, lost, fix)
        return
    is_counted = has_moments and (job is None or job.optimizer is Optimizer.ADAMW)
    effect = lost + ("" if is_counted else "; estimates count fp32 here, which takes more")
    fix = "remove the line, unless losses are those of a run in fp32"
    yield fault(("bf16", key), "master weights and gradients are kept in bf16", effect, fix)


def _small(s: Subject, optimizers: tuple[Optimizer, ...] = (Optimizer.ADAMW_8BIT, Optimizer.ADAMW_BF16)) -> Broken:
    """Returns the words for the job's AdamW with states of 8 or 16 bits."""
    if s.job is None or s.job.job.optimizer not in optimizers:
        return None
    return {"said": f"{s.job.locate(('optimizer',))}: optimizer is {s.job.job.optimizer}"}


def _in_bf16(s: Subject) -> Broken:
    return _small(s, (Optimizer.ADAMW_BF16,))


def _lacks_zero(s: Subject, job: Job) -> bool:
    return job.optimizer is Optimizer.ADAMW_BF16 and s.stage == 0


def _kept_in_fp32(s: Subject) -> list[dict[str, Any]]:
    """Returns the keys that keep states of the job's adamw_bf16 in fp32."""
    words = _in_bf16(s)
    keys = [key for key in BF16_STATES if s.at(f"bf16.{key}", True) is False]
    return [{"key": key, **words} for key in keys] if isinstance(words, dict) else []


def _is_interval_inconsistent(s: Subject) -> bool:
    is_auto = bool(s.at(_ZENFLOW + ".select_strategy", "auto") == "auto")
    interval = s.at(_ZENFLOW + ".select_interval", "auto")
    return has_zenflow(s) and is_auto == (isinstance(interval, int) and not isinstance(interval, bool))


def _selects_more_often(s: Subject) -> bool:
    select, update = s.at(_ZENFLOW + ".select_interval", 0), s.at(_ZENFLOW + ".update_interval", 0)
    is_step = s.at(_ZENFLOW + ".select_strategy", "auto") == "step"
    return is_step and type(select) is int and type(update) is int and select < update


def _does_not_overlap(s: Subject) -> bool:
    is_overlapped = s.at(_ZERO + "overlap_comm", s.stage == 3) is True
    return s.is_true(_ZENFLOW + ".offload") and s.stage > 0 and not is_overlapped


_INSTEAD = ", or optimizer: adamw in job.yaml"
_CONFIGURES = _DS + "runtime/zenflow/engine.py: configure_zenflow"
_ZENFLOWS = _DS + "runtime/zenflow/zenflow_stage_1_and_2.py: "


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
    Rule(id="DS331", severity=_W, title="Muon with clipped gradients",
         find=when("{at}", _clipped_muon, problem="Muon with clipped gradients",
                   effect="DeepSpeed takes the norm of Muon's orthogonalised updates, far above 1, and divides every "
                          "update by it",
                   fix='write "gradient_clipping": 0, and max_grad_norm: 0 in job.yaml'),
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
    Rule(id="DS311", severity=_E, title="NVMe offload without a path",
         find=when(_ZERO + "{section}.device", _pathless, problem="{section} on NVMe without nvme_path",
                   effect="the run stops with a TypeError when the engine starts",
                   fix='write "nvme_path": "/a/folder/on/the/drive"'),
         source=_DS + "runtime/swap_tensor: os.path.join(nvme_path, …)"),
    Rule(id="DS312", severity=_E, title="old and new names of offload",
         find=when(_ZERO + "{old}", _named_twice, problem="{old} together with {new}",
                   effect="DeepSpeed refuses the old and the new name together", fix="remove {old}"),
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
    Rule(id="DS329", severity=_E, title="param_dtype that contradicts the precision",
         find=when("data_types.param_dtype", _other_dtype,
                   problem="data_types.param_dtype is {value}, but the model trains in {trained}",
                   fix="remove the line: the bf16 and fp16 sections set the data type"),
         source=_DS + "runtime/engine.py: _assert_valid_mixed_precision_config"),
    Rule(id="DS330", severity=_E, title="partial offload with an optimizer other than Adam",
         find=when(_OFFLOAD + "ratio",
                   lambda s: s.stage == 3 and s.number(_OFFLOAD + "ratio", 1.0) < 1
                   and _optimizer(s) not in ("", "adam", "adamw"),
                   problem="offload_optimizer.ratio is {value} with an optimizer other than Adam",
                   fix='write "AdamW", or remove the line'),
         source=_DS + "runtime/zero/stage3.py: Hybrid Optimizer Only Supports DeepSpeedCPUAdam"),
    Rule(id="DS225", severity=_E, title="another optimizer than the job's",
         find=together(
             when("optimizer", lambda s: s.has("optimizer") and _small(s),
                  problem="an optimizer of the engine, but {said}", effect="the engine's optimizer trains",
                  fix="remove the section"),
             when(_ZERO + "offload_optimizer", lambda s: s.device("offload_optimizer") != "none" and _small(s),
                  problem="an offloaded optimizer, but {said}",
                  effect="accelerate replaces it with DeepSpeed's CPU Adam without decoupled weight decay, with fp32 "
                         "moments",
                  fix="remove the section, or write optimizer: adamw in job.yaml"),
             in_job("optimizer", _lacks_zero, problem="optimizer is adamw_bf16 with ZeRO-0", effect=REFUSES,
                    fix=f'write "stage": 1 or higher in ds_config.json{_INSTEAD}'),
             when("bf16.{key}", _kept_in_fp32, problem="{key} is false, but {said}",
                  effect="states are kept in fp32", fix=f"remove the line{_INSTEAD}"),
             when("data_types.grad_accum_dtype", lambda s: sums_in_fp32(s) and _in_bf16(s),
                  problem="fp32 sums with ZeRO-1, but {said}",
                  effect="ZeRO-1 that sums in fp32 is another engine, with fp32 states",
                  fix=f'remove the line, write "stage": 2{_INSTEAD}')),
         source="Transformers 5.23 integrations/deepspeed.py: deepspeed_optim_sched; "
                "accelerate 1.15 utils/deepspeed.py: map_pytorch_optim_to_deepspeed; "
                "deepspeed 0.19.8 runtime/engine.py: _do_optimizer_sanity_check"),
    Rule(id="DS306", severity=_E, title="low-precision states without their requirements",
         find=together(
             *(when(path, partial(_has_masters, path, of_zero=False), problem="{name} with ZeRO-0",
                    effect="DeepSpeed refuses it: only ZeRO has such copies",
                    fix='write "stage": 1 or higher, or remove the line') for path in (_BF16_MASTERS, _FP16_MASTERS)),
             when(_BF16_MASTERS, lambda s: _has_masters(_BF16_MASTERS, s) and not _bf16_states(s),
                  problem="bf16_master_weights_and_grads with fp32 states on the GPU",
                  effect=f"{STOPS}: this combination needs an optimizer on the CPU",
                  fix='also write "bf16_optimizer_states": true, or offload the optimizer'),
             when(_FP16_MASTERS, _has_both, problem="{name} together with that of bf16", fix="remove one of them"),
             when(_FP16_MASTERS, lambda s: _has_masters(_FP16_MASTERS, s) and not _has_both(s),
                  problem="{name} without an offloaded optimizer", fix="offload the optimizer, or remove the line"),
             when("bf16.bf16_optimizer_states",
                  lambda s: _bf16_states(s) and s.is_true(_BF16_MASTERS) and s.offloads_optimizer and s.is_trainers
                  and not s.has("optimizer"),
                  problem="bf16_optimizer_states with an offloaded optimizer of the Trainer",
                  effect=f"{STOPS}: accelerate makes DeepSpeed's CPU Adam with fp32 moments",
                  fix='add "optimizer": {{"type": "AdamW", "params": {{"lr": "auto", "betas": "auto", '
                      '"eps": "auto"}}}}'),
             when("bf16.bf16_optimizer_states", lambda s: _bf16_states(s) and not s.is_true(_BF16_MASTERS),
                  problem="bf16_optimizer_states without bf16_master_weights_and_grads", effect=REFUSES,
                  fix='also write "bf16_master_weights_and_grads": true, or remove the line')),
         source="deepspeed 0.19.8 runtime/config.py: _do_error_check; runtime/base_optimizer.py: "
                "_configure_master_weights"),
    Rule(id="DS332", severity=_W, title="master weights in bf16", find=_bf16_masters,
         source="deepspeed 0.19.8 runtime/base_optimizer.py: _configure_master_weights; Zamirai et al. "
                "(arXiv 2010.06192); Kingma and Ba (arXiv 1412.6980), 2.1"),
    Rule(id="DS307", severity=_E, title="ZenFlow without an offloaded optimizer",
         find=when(_ZENFLOW, lambda s: has_zenflow(s) and s.stage > 0 and s.device("offload_optimizer") != "cpu",
                   problem="zenflow without an optimizer on the CPU",
                   fix='write "offload_optimizer": {{"device": "cpu"}}, or remove zenflow'),
         source=_ZENFLOWS + "Zenflow must be used with cpu offload"),
    Rule(id="DS308", severity=_E, title="ZenFlow's strategy and interval",
         find=when(_ZENFLOW + ".select_interval", _is_interval_inconsistent,
                   problem="zenflow's select_strategy and select_interval contradict each other",
                   fix='write "select_strategy": "step" with a number, or omit both'), source=_CONFIGURES),
    Rule(id="DS309", severity=_E, title="ZenFlow's two intervals",
         find=when(_ZENFLOW + ".update_interval", _selects_more_often,
                   problem="zenflow updates every {value} steps and selects more often",
                   fix="write a select_interval of at least update_interval"), source=_CONFIGURES),
    Rule(id="DS310", severity=_E, title="ZenFlow with the Trainer's optimizer",
         find=when(_ZENFLOW, lambda s: has_zenflow(s) and s.is_trainers and not s.has("optimizer"),
                   problem="zenflow without an optimizer section",
                   effect="the run stops when the engine starts: ZenFlow reads the optimizer's parameters here",
                   fix='write "optimizer": {{"type": "AdamW", "params": {{"lr": "auto"}}}}'),
         source=_ZENFLOWS + "optimizer_params"),
    Rule(id="DS326", severity=_E, title="ZenFlow's offload without overlap",
         find=when(_ZENFLOW + ".offload", _does_not_overlap, problem="zenflow.offload without overlap_comm",
                   fix='write "overlap_comm": true'),
         source=_ZENFLOWS + "offload selective optimizer"),
    Rule(id="DS327", severity=_W, title="ZenFlow with accumulation",
         find=when("gradient_accumulation_steps",
                   lambda s: has_zenflow(s) and (accumulation(s) or 0) > 1 and {"steps": accumulation(s)},
                   problem="zenflow with {steps} accumulation steps",
                   effect="the engine replaces them by zenflow's update_interval, but the Trainer keeps counting them",
                   fix="accumulate 1 step, and set update_interval"),
         source=_CONFIGURES + " sets gradient_accumulation_steps"),
)
"""Rules about settings that exclude each other."""
# fmt: on
