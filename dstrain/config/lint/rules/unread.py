"""Rules about settings that nothing reads because another one is missing or overrides them."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.config.document import dotted, lookup
from dstrain.config.jsonc import Pointer
from dstrain.config.keys.key import Kind
from dstrain.config.keys.table import key_of
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule
from dstrain.config.lint.rules.no_effect import QUANTIZED
from dstrain.config.lint.subject import Subject

_DS = "deepspeed 0.19.8 "
_ZERO = "zero_optimization."


def _deviceless(subject: Subject) -> Iterator[Fault]:
    for section in ("offload_optimizer", "offload_param"):
        value, old = subject.at(_ZERO + section), "cpu_offload" + ("_param" if section == "offload_param" else "")
        if isinstance(value, dict) and "device" not in value and not subject.has(_ZERO + old):
            yield Fault(
                pointer=("zero_optimization", section),
                problem=f"{section} has no device",
                effect='nothing is offloaded: the default is "none"',
                fix='write "device": "cpu", or remove the section',
            )


_OF_NVME = {
    "offload_optimizer": ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init"),
    "offload_param": ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
}
_OF_DYNAMIC_SCALE = (
    "loss_scale_window",
    "initial_scale_power",
    "hysteresis",
    "min_loss_scale",
    "consecutive_hysteresis",
)


def _unread(subject: Subject) -> Iterator[Fault]:
    """Yields keys that nothing reads because of another one, as far as no rule of its own speaks of them."""
    for section, names in _OF_NVME.items():
        device = subject.at(f"{_ZERO}{section}.device", None)
        for name in names if device in ("cpu", "none") else ():
            if subject.at(f"{_ZERO}{section}.{name}", None) is not None:
                pointer = ("zero_optimization", section, name)
                yield _unread_fault(pointer, f'{section}.device is "{device}", and only "nvme" reads it')
    if subject.is_true("fp16.enabled") and subject.number("fp16.loss_scale", 0) > 0:
        for name in _OF_DYNAMIC_SCALE:
            if subject.has(f"fp16.{name}"):
                yield _unread_fault(("fp16", name), "fp16.loss_scale is fixed, and only a dynamic one (0) reads it")
    zero = subject.at("zero_optimization", {})
    for name in zero if subject.stage == 0 and isinstance(zero, dict) else ():
        row = key_of(("zero_optimization", name))
        is_plain = row is not None and row.removed is None and row.kind is not Kind.OBJECT
        if is_plain and not name.startswith("stage3_") and name not in _SPOKEN_OF:
            yield _unread_fault(("zero_optimization", name), "nothing of this section is read at ZeRO-0")


_SPOKEN_OF = ("stage", *QUANTIZED, "zero_hpz_partition_size", "cpu_offload", "cpu_offload_param", "legacy_stage1",
              "compute_grad_norm", "allgather_bucket_size", "overlap_comm", "ignore_unused_parameters")  # fmt: skip
"""Keys with rules of their own, and those that ZeRO-0 reads or reports."""


def _unread_fault(pointer: Pointer, why: str) -> Fault:
    problem = f"{dotted(pointer)} has no effect here"
    return Fault(pointer=pointer, problem=problem, effect=f"nothing reads it: {why}", fix="leave it or remove it")


def _never_on(subject: Subject) -> Iterator[Fault]:
    """A section with settings whose switch is missing, and that is off without it."""
    for pointer, value in subject.walk():
        row = key_of((*pointer, "enabled"))
        is_switched = row is not None and row.path.endswith(".enabled") and row.default is False
        if not is_switched or not isinstance(value, dict) or not value or "enabled" in value:
            continue
        if pointer[0] in ("bf16", "bfloat16", "fp16") and subject.job is not None:
            continue  # dstrain run adds it
        outer = [pointer[:end] for end in range(1, len(pointer))]
        if not any(lookup(subject.config, (*each, "enabled")) is False for each in outer):
            yield Fault(
                pointer=pointer,
                problem=f'{dotted(pointer)} has no "enabled"',
                effect="it is off: the default is false",
                fix='write "enabled": true, or remove the section',
            )


# fmt: off
RULES = (
    Rule(id="DS218", severity=Severity.ERROR, title="offload without a device", find=_deviceless,
         source=_DS + "runtime/zero/offload_config.py: OffloadDeviceEnum.none is the default"),
    Rule(id="DS219", severity=Severity.INFO, title="a setting that another one leaves unread", find=_unread,
         source=_DS + "runtime/zero/stage3.py, runtime/swap_tensor, runtime/fp16/loss_scaler.py, runtime/engine.py"),
    Rule(id="DS220", severity=Severity.WARNING, title="a section that is never turned on", find=_never_on,
         source=_DS + "section by section: dstrain/config/keys"),
)
"""Rules about what is unread."""
# fmt: on
