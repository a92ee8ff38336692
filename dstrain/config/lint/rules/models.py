"""Rules about the model: its experts, dtype, saving and shape, and buffers that are larger than it needs."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.choices import Method, Precision
from dstrain.config.key_bytes import cost, scale
from dstrain.config.lint.rule import Broken, Fault, Rule, Subject, fault, in_job, shown, when
from dstrain.config.lint.rules.releases import trains_in
from dstrain.config.resolve_auto import GATHERS
from dstrain.facts.model.families import LIGER
from dstrain.facts.model.traits import PLAIN
from dstrain.findings import Severity
from dstrain.job.schema import Job
from dstrain.plan.memory.params import adapted_experts
from dstrain.plan.training_code import needs_reentrant
from dstrain.units import format_bytes, format_count

_ZERO = "zero_optimization."
_OLD_GATHERS = "stage3_gather_fp16_weights_on_model_save"
_DEFAULT_LEAVES = ("MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock")
"""Source: deepspeed 0.19.8 runtime/zero/leaf_module_config.py: DEFAULT_LEAF_MODULE_CLASSES."""
_BY_HIDDEN_SIZE = ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
LARGE_BUCKET = 500_000_000
"""DeepSpeed's default, in elements: 1 GB in bf16, far more than a collective needs to reach its link's bandwidth."""
LARGE_SUB_GROUP = 2_000_000_000
"""Twice DeepSpeed's default, in elements."""


def _saves_nothing(s: Subject) -> Broken:
    gathers = any(s.is_true(_ZERO + name) for name in (GATHERS, _OLD_GATHERS))
    is_found = s.stage == 3 and s.is_trainers and not gathers
    return {"at": f".{GATHERS}" if GATHERS in s.zero else ""} if is_found else None


def _lacks_leaves(s: Subject) -> bool:
    moe = s.model.moe if s.model is not None else None
    given = s.at(_ZERO + "leaf_module", {})
    section = given if isinstance(given, dict) else {}
    classes = section.get("classes", list(_DEFAULT_LEAVES))
    named = [str(name).rsplit(".", 1)[-1] for name in (classes if isinstance(classes, list) else [classes])]
    is_written = bool(section.get("names") or section.get("name_suffixes"))
    return moe is not None and s.stage == 3 and moe.block_class not in named and not is_written


def _composite(s: Subject) -> list[dict[str, str]]:
    """Returns sizes that neither Transformers nor accelerate fills below ZeRO-3: hidden_size is not at the top of
    config.json."""
    if s.model is None or s.model.vision is None or not s.is_trainers or s.stage == 3:
        return []
    return [{"key": name} for name in _BY_HIDDEN_SIZE if s.at(_ZERO + name, None) == "auto"]


def _overflows(s: Subject) -> Broken:
    has_choice = s.cluster is None or s.cluster.gpu.has_bf16
    if s.model is None or s.model.dtype != "bfloat16" or not has_choice or not trains_in(s, Precision.FP16):
        return None
    by_job = s.at("fp16.enabled", False) == "auto"
    return {"instead": "precision: bf16 in job.yaml" if by_job else '"bf16": {"enabled": true}'}


def _is_reentrant(s: Subject) -> bool:
    return s.asked is not None and s.asked.grad_ckpt and needs_reentrant(s.asked.method, s.stage)


def _reentrant(s: Subject) -> Broken:
    return {"at": s.job.locate(("grad_ckpt",))} if s.job is not None and _is_reentrant(s) else None


def _router_loss(s: Subject, job: Job) -> Broken:
    """Returns why the loss of routers cannot be computed."""
    if s.model is None or not job.router_aux_loss_coef:
        return None
    more = ", or write grad_ckpt: false" if _is_reentrant(s) else ""
    if s.model.moe is None:
        return {"why": f"{s.model.name} has no experts", "more": more}
    if shared := next((key for key in ("sp", "tp") if getattr(job, key) > 1), None):
        return {"why": f"{shared} is above 1", "more": more}
    why = "no gradient comes from it through the checkpointing that adapters under ZeRO-3 need"
    return {"why": why, "more": more} if more else None


def _rounds_experts(s: Subject, job: Job) -> bool:
    is_full = job.liger and not job.tf32 and job.precision is Precision.FP32
    return is_full and s.model is not None and LIGER.get(s.model.model_type, PLAIN).experts


def _kept_copies(s: Subject, job: Job) -> Broken:
    if s.model is None or job.method is Method.FULL or job.grad_ckpt:
        return None
    groups = adapted_experts(s.model, job.lora)
    copies = job.precision.num_bytes * sum(group.numel * group.count for group in groups)
    return {"bytes": format_bytes(copies)} if groups else None


def _bytes(subject: Subject, key: str, value: float) -> int:
    """Returns the bytes that a size takes, as `dstrain explain` counts them."""
    by = scale(subject.config, subject.asked, subject.model, num_ranks=subject.num_ranks)
    memory = cost(_ZERO + key, value, subject.config, by)
    return memory.count_bytes if memory is not None else 0


def _buckets(subject: Subject) -> Iterator[Fault]:
    size = subject.number(_ZERO + "reduce_bucket_size", 0)
    params = subject.model.num_params if subject.model is not None else None
    if subject.stage == 0 or (size <= LARGE_BUCKET and (params is None or size <= params)):
        return
    needed = _bytes(subject, "reduce_bucket_size", size)
    larger = f", more than the {format_count(params)} parameters of the model" if params and size > params else ""
    least = min(200_000_000, params) if params else 200_000_000
    saved = needed - _bytes(subject, "reduce_bucket_size", least)
    yield fault(
        _ZERO + "reduce_bucket_size",
        f"reduce_bucket_size is {shown(subject.at(_ZERO + 'reduce_bucket_size'))}{larger}",
        f"its buffers take up to {format_bytes(needed)} of each GPU without being faster than smaller ones",
        f"write {least}, which takes {format_bytes(saved)} less",
    )


def _prefetches_more(s: Subject) -> Broken:
    """Returns the words for a prefetch bucket beyond max_live_parameters, which bounds prefetching."""
    prefetch = s.number(_ZERO + "stage3_prefetch_bucket_size", 50_000_000)
    live = s.number(_ZERO + "stage3_max_live_parameters", 1_000_000_000)
    is_written = isinstance(s.at(_ZERO + "stage3_prefetch_bucket_size", None), int | float)
    return {"size": prefetch, "live": live} if s.stage == 3 and is_written and prefetch > live else None


def _sub_groups(s: Subject) -> Broken:
    size = s.number(_ZERO + "sub_group_size", 0)
    if s.stage != 3 or s.offloads_optimizer or size <= LARGE_SUB_GROUP:
        return None
    share = s.model.num_params // s.num_ranks if s.model is not None and s.num_ranks else 0
    if s.model is not None and s.num_ranks and share <= LARGE_SUB_GROUP:
        return None
    return {"extra": ("" if share else "up to ") + format_bytes(_bytes(s, "sub_group_size", size))}


# fmt: off
_E, _W, _I = Severity.ERROR, Severity.WARNING, Severity.INFO
RULES = (
    Rule(id="DS601", severity=_W, title="ZeRO-3 that saves no weights",
         find=when("zero_optimization{at}", _saves_nothing, problem=f"ZeRO-3 without {GATHERS}",
                   effect="save_model writes no weights, only a folder that zero_to_fp32.py converts to weights",
                   fix=f'write "{GATHERS}": true'),
         source="Transformers 5.23 trainer.py: save_model"),
    Rule(id="DS602", severity=_W, title="experts that are not a leaf module",
         find=when(_ZERO + "leaf_module.classes", _lacks_leaves,
                   problem="the experts of {model.name} ({model.moe.block_class}) are not a leaf module",
                   effect="ranks that route tokens to different experts issue all-gathers in different orders and "
                          "deadlock",
                   fix='write "leaf_module": {{"classes": ["{model.moe.block_class}"]}}'),
         source="deepspeed 0.19.8 runtime/zero/leaf_module_config.py; ms-swift#5875, DeepSpeed#7461"),
    Rule(id="DS603", severity=_E, title="size that cannot be computed",
         find=when(_ZERO + "{key}", _composite,
                   problem='{key} is "auto", but config.json of {model.name} has no top-level hidden_size',
                   effect="accelerate ends the run because it cannot compute the value",
                   fix="remove the line: nothing reads it below ZeRO-3"),
         source="accelerate 1.15 accelerator.py: _prepare_deepspeed, hidden_size_based_keys"),
    Rule(id="DS604", severity=_W, title="fp16 for a model trained in bf16",
         find=when("fp16.enabled", _overflows, problem="fp16 for {model.name}, which was trained in bf16",
                   effect="its activations may exceed the range of fp16: overflows, a falling loss scale, NaN",
                   fix="write {instead}"),
         source="Transformers' DeepSpeed guide; T5 and Gemma"),
    Rule(id="DS605", severity=_I, title="adapters under ZeRO-3 with checkpointing",
         find=when(_ZERO + "stage", _reentrant, problem="{job.method} under ZeRO-3 with grad_ckpt ({at})",
                   effect="non-reentrant checkpointing gathers frozen parameters once more, and failed in DeepSpeed "
                          "0.19.2",
                   fix="nothing for dstrain run; set use_reentrant in the checkpointing arguments of your own script"),
         source="DeepSpeed#8148, transformers#47254; dstrain/train/arguments.py: checkpointing_kwargs"),
    Rule(id="DS606", severity=_E, title="loss of routers that cannot be computed",
         find=in_job("router_aux_loss_coef", _router_loss,
                     problem="router_aux_loss_coef is {job.router_aux_loss_coef:g}, but {why}",
                     effect="the run stops before its first step", fix="remove the line{more}"),
         source="dstrain/train/loss.py"),
    Rule(id="DS607", severity=_W, title="experts in TF32",
         find=in_job("liger", _rounds_experts, problem="liger is true, precision is fp32, and tf32 is false",
                     effect="on GPUs with TF32, Liger's kernel for experts multiplies in it all the same",
                     fix="write tf32: true, which says so, or liger: false"),
         source="liger-kernel 0.8.5 ops/fused_moe_kernels.py: tl.dot, whose input_precision is tf32 by default"),
    Rule(id="DS608", severity=_W, title="copies of all experts",
         find=in_job("grad_ckpt", _kept_copies,
                     problem="grad_ckpt is false, and lora: target_parameters has experts",
                     effect="the copies of their weights with the adapters added stay: {bytes} of GPU memory",
                     fix="write grad_ckpt: true, which makes one layer's copies at a time"),
         source="peft 0.21 tuners/lora/layer.py: ParamWrapper, _LoraFactorsProxy"),
    Rule(id="DS701", severity=_W, title="reduce bucket larger than useful", find=_buckets,
         source="deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: setup_buckets, stage3.py: __init__"),
    Rule(id="DS702", severity=_I, title="prefetch bucket larger than the live parameters",
         find=when(_ZERO + "stage3_prefetch_bucket_size", _prefetches_more,
                   problem="{name} ({size:g}) is more than stage3_max_live_parameters ({live:g})",
                   effect="prefetching stops at stage3_max_live_parameters",
                   fix="raise stage3_max_live_parameters, or lower this value"),
         source="deepspeed 0.19.8 runtime/zero/partitioned_param_coordinator.py: fetch_sub_module"),
    Rule(id="DS703", severity=_W, title="sub-group larger than useful",
         find=when(_ZERO + "sub_group_size", _sub_groups, problem="{name} is {value}",
                   effect="the optimizer updates that many elements at once, which takes {extra} of each GPU on top of "
                          "the states",
                   fix="write 1000000000, DeepSpeed's default, which is as fast"),
         source="deepspeed 0.19.8 runtime/zero/stage3.py: _prepare_sub_group"),
)
"""Rules about the model."""
# fmt: on
