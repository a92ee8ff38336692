"""Rules about "auto": the Trainer fills some values, and accelerate ends the run at any other."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.config.document import REMOVED, Change, dotted
from dstrain.config.jsonc import Pointer
from dstrain.config.keys.key import Key
from dstrain.config.keys.table import key_of
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule
from dstrain.config.lint.rules.key_names import elsewhere, is_parked, near_name
from dstrain.config.lint.rules.values import STAGE, example, is_pydantic, rows
from dstrain.config.lint.subject import Subject, shown
from dstrain.config.resolve_auto import GATHERS

_FILLED_BY_ACCELERATE: dict[Pointer, str] = {
    STAGE: "2",
    ("zero_optimization", "offload_optimizer", "device"): '"none"',
    ("zero_optimization", "offload_param", "device"): '"none"',
    ("zero_optimization", "offload_optimizer", "nvme_path"): '"none"',
    ("zero_optimization", "offload_param", "nvme_path"): '"none"',
    ("zero_optimization", GATHERS): "false",
}
"""accelerate's values for an "auto" that the Trainer does not fill, unless environment variables override them.

Source: accelerate 1.15 utils/dataclasses.py: DeepSpeedPlugin.__post_init__ (plugin_to_config_mapping).
"""


def _autos(subject: Subject) -> Iterator[Fault]:
    """Reports each "auto" at which accelerate, which checks every value, ends the run under the Trainer."""
    if not subject.is_trainers:
        return
    for pointer, value in subject.walk():
        if value != "auto" or any(isinstance(part, int) for part in pointer):
            continue
        row = key_of(pointer)
        if pointer == STAGE or (row is not None and row.filled is not None) or _is_unread(subject, pointer, row):
            continue
        default = row.default if row is not None else None
        filled = _FILLED_BY_ACCELERATE.get(pointer)
        effect = 'accelerate ends the run at an "auto" that it cannot fill (ValueError)'
        yield Fault(
            pointer=pointer,
            severity=Severity.WARNING if filled else None,
            problem=f'{dotted(pointer)} is "auto", but the Trainer does not fill this key',
            effect=f"accelerate sets {filled}, unless accelerate launch sets another value" if filled else effect,
            fix="remove the line" + (f": DeepSpeed's default is {shown(default)}" if default is not None else ""),
            changes=(Change(pointer=pointer, value=REMOVED),) if filled is None else (),
        )


def _is_unread(subject: Subject, pointer: Pointer, row: Key | None) -> bool:
    """Returns whether nothing reads a value, or another rule reports its key as misspelled or removed."""
    if row is not None:
        return row.removed is not None
    outer = key_of(pointer[:1])
    if outer is not None and outer.removed is not None:
        return True
    if is_parked(pointer[:1]):
        return subject.job is not None  # dstrain run removes notes
    unknown = next(pointer[:end] for end in range(1, len(pointer) + 1) if key_of(pointer[:end]) is None)
    return near_name(unknown) is not None or elsewhere(unknown) is not None


def _raw_autos(subject: Subject) -> Iterator[Fault]:
    if subject.is_trainers:
        return
    for pointer, value, row in rows(subject):
        if value != "auto" or "auto" in row.words or pointer == STAGE:
            continue
        default = f"DeepSpeed uses its default, {shown(row.default)}"
        yield Fault(
            pointer=pointer,
            problem=f'{dotted(pointer)} is "auto", which only the Hugging Face Trainer fills',
            effect=default if is_pydantic(pointer) else "DeepSpeed stops, or uses the text",
            fix=f"write {example(row)}",
        )


# fmt: off
RULES = (
    Rule(id="DS120", severity=Severity.ERROR, title='"auto" that nothing fills', find=_autos,
         source="accelerate 1.15 utils/dataclasses.py: DeepSpeedPlugin.fill_match, deepspeed_config_process"),
    Rule(id="DS121", severity=Severity.ERROR, title='"auto" without the Trainer', find=_raw_autos,
         source="deepspeed 0.19.8 runtime/config_utils.py: DeepSpeedConfigModel.__init__ drops it"),
)
"""Rules about "auto"."""
# fmt: on
