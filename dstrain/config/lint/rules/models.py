"""Rules about the model: its experts, dtype, saving and shape."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.choices import Method, Precision
from dstrain.config.lint.advisories import trains_in
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule
from dstrain.config.lint.rules.jobs import in_job
from dstrain.config.lint.subject import Subject
from dstrain.config.resolve_auto import GATHERS
from dstrain.plan.memory.adapters import adapted_experts
from dstrain.plan.memory.layers.kernels import LIGER, PLAIN
from dstrain.plan.training_code import needs_reentrant
from dstrain.units import format_bytes

_OLD_GATHERS = "stage3_gather_fp16_weights_on_model_save"
_DEFAULT_LEAVES = ("MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock")
"""Source: deepspeed 0.19.8 runtime/zero/leaf_module_config.py: DEFAULT_LEAF_MODULE_CLASSES."""
_BY_HIDDEN_SIZE = ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def _saving(subject: Subject) -> Iterator[Fault]:
    gathers = any(subject.is_true(f"zero_optimization.{name}") for name in (GATHERS, _OLD_GATHERS))
    if subject.stage != 3 or not subject.is_trainers or gathers:
        return
    yield Fault(
        pointer=("zero_optimization", GATHERS) if GATHERS in subject.zero else ("zero_optimization",),
        problem=f"ZeRO-3 without {GATHERS}",
        effect="save_model writes no weights, only a folder that zero_to_fp32.py converts to weights",
        fix=f'write "{GATHERS}": true',
    )


def _leaves(subject: Subject) -> Iterator[Fault]:
    moe = subject.model.moe if subject.model is not None else None
    if subject.model is None or moe is None or subject.stage != 3:
        return
    given = subject.at("zero_optimization.leaf_module", {})
    section = given if isinstance(given, dict) else {}
    classes = section.get("classes", list(_DEFAULT_LEAVES))
    named = [*classes] if isinstance(classes, list) else [classes]
    is_named = any(str(name).rsplit(".", 1)[-1] == moe.block_class for name in named)
    if is_named or section.get("names") or section.get("name_suffixes"):
        return
    yield Fault(
        pointer=("zero_optimization", "leaf_module", "classes"),
        problem=f"the experts of {subject.model.name} ({moe.block_class}) are not a leaf module",
        effect="ranks that route tokens to different experts issue all-gathers in different orders and deadlock",
        fix=f'write "leaf_module": {{"classes": ["{moe.block_class}"]}}',
    )


def _composite(subject: Subject) -> Iterator[Fault]:
    """Reports sizes that neither Transformers nor accelerate fills below ZeRO-3: hidden_size is not at the top of
    config.json."""
    if subject.model is None or subject.model.vision is None or not subject.is_trainers or subject.stage == 3:
        return
    for name in _BY_HIDDEN_SIZE:
        if subject.at(f"zero_optimization.{name}", None) == "auto":
            yield Fault(
                pointer=("zero_optimization", name),
                problem=f'{name} is "auto", but config.json of {subject.model.name} has no top-level hidden_size',
                effect="accelerate ends the run because it cannot compute the value",
                fix="remove the line: nothing reads it below ZeRO-3",
            )


def _fp16(subject: Subject) -> Iterator[Fault]:
    by_job = subject.at("fp16.enabled", False) == "auto"
    has_choice = subject.cluster is None or subject.cluster.gpu.has_bf16
    if subject.model is None or subject.model.dtype != "bfloat16" or not has_choice:
        return
    if not trains_in(subject, Precision.FP16):
        return
    yield Fault(
        pointer=("fp16", "enabled"),
        problem=f"fp16 for {subject.model.name}, which was trained in bf16",
        effect="its activations may exceed the range of fp16: overflows, a falling loss scale, NaN",
        fix="write precision: bf16 in job.yaml" if by_job else 'write "bf16": {"enabled": true}',
    )


def _reentrant(subject: Subject) -> Iterator[Fault]:
    """Reports what non-reentrant checkpointing of adapters would cost a script of one's own."""
    if subject.job is None:
        return
    job = subject.job.job
    if job.grad_ckpt and needs_reentrant(job.method, subject.stage):
        yield Fault(
            pointer=("zero_optimization", "stage"),
            problem=f"{job.method} under ZeRO-3 with grad_ckpt ({subject.job.locate(('grad_ckpt',))})",
            effect="non-reentrant checkpointing gathers frozen parameters once more, and failed in DeepSpeed 0.19.2",
            fix="nothing for dstrain run; set use_reentrant in the checkpointing arguments of your own script",
        )


def _router_loss(subject: Subject) -> Iterator[Fault]:
    job = subject.asked
    if job is None or subject.model is None or not job.router_aux_loss_coef:
        return
    shared = next((key for key in ("sp", "tp") if getattr(job, key) > 1), None)
    is_reentrant = job.grad_ckpt and needs_reentrant(job.method, subject.stage)
    if subject.model.moe is None:
        why = f"{subject.model.name} has no experts"
    elif shared is not None:
        why = f"{shared} is above 1"
    elif is_reentrant:
        why = "no gradient comes from it through the checkpointing that adapters under ZeRO-3 need"
    else:
        return
    problem = f"router_aux_loss_coef is {job.router_aux_loss_coef:g}, but {why}"
    fix = "remove the line" + (", or write grad_ckpt: false" if is_reentrant else "")
    yield in_job(subject, "router_aux_loss_coef", problem, "the run stops before its first step", fix)


def _rounded_experts(subject: Subject) -> Iterator[Fault]:
    job = subject.asked
    if job is None or subject.model is None or not job.liger or job.tf32:
        return
    if job.precision is Precision.FP32 and LIGER.get(subject.model.model_type, PLAIN).experts:
        effect = "on GPUs with TF32, Liger's kernel for experts multiplies in it all the same"
        yield in_job(subject, "liger", "liger is true, precision is fp32, and tf32 is false", effect,
                     "write tf32: true, which says so, or liger: false")  # fmt: skip


def _kept_copies(subject: Subject) -> Iterator[Fault]:
    job = subject.asked
    if job is None or subject.model is None or job.method is Method.FULL or job.grad_ckpt:
        return
    groups = adapted_experts(subject.model, job.lora)
    copies = job.precision.num_bytes * sum(group.numel * group.count for group in groups)
    if groups:
        effect = f"the copies of their weights with the adapters added stay: {format_bytes(copies)} of GPU memory"
        yield in_job(subject, "grad_ckpt", "grad_ckpt is false, and lora: target_parameters has experts", effect,
                     "write grad_ckpt: true, which makes one layer's copies at a time")  # fmt: skip


# fmt: off
RULES = (
    Rule(id="DS601", severity=Severity.WARNING, title="ZeRO-3 that saves no weights", find=_saving,
         source="Transformers 5.23 trainer.py: save_model"),
    Rule(id="DS602", severity=Severity.WARNING, title="experts that are not a leaf module", find=_leaves,
         source="deepspeed 0.19.8 runtime/zero/leaf_module_config.py; ms-swift#5875, DeepSpeed#7461"),
    Rule(id="DS603", severity=Severity.ERROR, title="size that cannot be computed", find=_composite,
         source="accelerate 1.15 accelerator.py: _prepare_deepspeed, hidden_size_based_keys"),
    Rule(id="DS605", severity=Severity.INFO, title="adapters under ZeRO-3 with checkpointing", find=_reentrant,
         source="DeepSpeed#8148, transformers#47254; dstrain/train/arguments.py: checkpointing_kwargs"),
    Rule(id="DS606", severity=Severity.ERROR, title="loss of routers that cannot be computed", find=_router_loss,
         source="dstrain/train/loss.py"),
    Rule(id="DS607", severity=Severity.WARNING, title="experts in TF32", find=_rounded_experts,
         source="liger-kernel 0.8.5 ops/fused_moe_kernels.py: tl.dot, whose input_precision is tf32 by default"),
    Rule(id="DS608", severity=Severity.WARNING, title="copies of all experts", find=_kept_copies,
         source="peft 0.21 tuners/lora/layer.py: ParamWrapper, _LoraFactorsProxy"),
    Rule(id="DS604", severity=Severity.WARNING, title="fp16 for a model trained in bf16", find=_fp16,
         source="Transformers' DeepSpeed guide; T5 and Gemma"),
)
"""Rules about the model."""
# fmt: on
