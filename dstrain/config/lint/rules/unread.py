"""Rules about settings that nothing reads because another one is missing or overrides them."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.config.document import dotted, lookup
from dstrain.config.jsonc import Pointer
from dstrain.config.keys.table import is_read, key_of
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule
from dstrain.config.lint.rules.no_effect import QUANTIZED
from dstrain.config.lint.subject import Subject
from dstrain.facts.ds_config import OLD_OFFLOADS

_DS = "deepspeed 0.19.8 "
_ZERO = "zero_optimization."


def _deviceless(subject: Subject) -> Iterator[Fault]:
    for section, old in OLD_OFFLOADS.items():
        value = subject.at(_ZERO + section)
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
    *("loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale"),
    "consecutive_hysteresis",
)
_OTHER_RULES = ("stage", *QUANTIZED, "zero_hpz_partition_size", "cpu_offload", "cpu_offload_param", "legacy_stage1",
                "overlap_comm", "offload_param", "offload_optimizer", "zenflow")  # fmt: skip
"""Keys that have their own rules, and those that are deprecated."""


def _unread(subject: Subject) -> Iterator[Fault]:
    for pointer, reason in _unread_keys(subject):
        yield Fault(
            pointer=pointer,
            problem=f"{dotted(pointer)} has no effect here",
            effect=f"nothing reads it: {reason}",
            fix="leave it or remove it",
        )


def _unread_keys(subject: Subject) -> Iterator[tuple[Pointer, str]]:
    """Yields keys that nothing reads because of another key, with the reason, unless another rule reports them."""
    for section, names in _OF_NVME.items():
        device = subject.at(f"{_ZERO}{section}.device", None)
        for name in names if device in ("cpu", "none") else ():
            if subject.at(f"{_ZERO}{section}.{name}", None) is not None:
                yield ("zero_optimization", section, name), f'{section}.device is "{device}", and only "nvme" uses it'
    if subject.is_true("fp16.enabled") and subject.number("fp16.loss_scale", 0) > 0:
        for name in _OF_DYNAMIC_SCALE:
            if subject.has(f"fp16.{name}"):
                yield ("fp16", name), "fp16.loss_scale is fixed, and only the dynamic scale (0) uses it"
    for name in subject.zero:
        pointer = ("zero_optimization", name)
        row = key_of(pointer)
        if row is None or row.removed is not None or name in _OTHER_RULES or name.startswith("stage3_"):
            continue
        if not is_read(pointer, subject.stage):
            yield pointer, "ZeRO-0 ignores this section" if subject.stage == 0 else f"ZeRO-{subject.stage} does not"


def _never_on(subject: Subject) -> Iterator[Fault]:
    """Yields sections with settings but without their switch, which is off by default."""
    for pointer, value in subject.walk():
        row = key_of((*pointer, "enabled"))
        is_switched = row is not None and row.path.endswith(".enabled") and row.default is False
        if not is_switched or not isinstance(value, dict) or not value or "enabled" in value:
            continue
        if pointer[0] in ("bf16", "bfloat16", "fp16") and subject.job is not None:
            continue  # dstrain run adds it
        outer = [pointer[:end] for end in range(1, len(pointer))]
        if not any(lookup(subject.config, (*section, "enabled")) is False for section in outer):
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
    Rule(id="DS219", severity=Severity.INFO, title="setting that another one makes unused", find=_unread,
         source=_DS + "runtime/zero/stage3.py, runtime/swap_tensor, runtime/fp16/loss_scaler.py, runtime/engine.py"),
    Rule(id="DS220", severity=Severity.WARNING, title="section that is never enabled", find=_never_on,
         source=_DS + "section by section: dstrain/config/keys"),
)
"""Rules about settings that nothing reads."""
# fmt: on
