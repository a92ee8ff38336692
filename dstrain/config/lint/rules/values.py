"""Rules about single values: type, range, allowed words, and "auto", which the Trainer fills in for some keys only."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from dstrain.config.jsonc import REMOVED, Change, Pointer, dotted
from dstrain.config.keys import Key, Kind, Names, key_of
from dstrain.config.lint.rule import STOPS, Fault, Rule, Subject, fault, is_number, shown
from dstrain.config.lint.rules.key_names import PARAMS, elsewhere, is_parked, near_name, slip_of
from dstrain.config.resolve_auto import GATHERS
from dstrain.findings import Severity

STAGE = ("zero_optimization", "stage")
_OTHER_RULES: tuple[Pointer, ...] = (("optimizer", "type"), ("scheduler", "type"), ("tensor_parallel", "preset_model"))
"""Words that other rules check."""
_UNCHECKED = "DeepSpeed does not check it: the run stops where it is used, or "
_NUMBER = re.compile(r"\s*[+-]?\d+(\.\d*)?([eE][+-]?\d+)?\s*", re.ASCII)
_SWITCHES = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}


def rows(subject: Subject) -> Iterator[tuple[Pointer, Any, Key]]:
    """Yields every value whose key is known and not removed."""
    for pointer, value in subject.walk():
        row = key_of(pointer)
        if row is not None and row.removed is None:
            yield pointer, value, row


def has_kind(value: Any, kind: Kind) -> bool:
    """Returns whether a value has a kind; 5e8 is a whole number, true is not."""
    if kind is Kind.BOOL:
        return isinstance(value, bool)
    if kind in (Kind.INT, Kind.NUMBER):
        return is_number(value) and (kind is Kind.NUMBER or not math.isfinite(value) or value == int(value))
    types = {Kind.TEXT: str, Kind.OBJECT: dict, Kind.LIST: list, Kind.ANY: object}
    return isinstance(value, types[kind])


def _is_legal(value: Any, row: Key) -> bool:
    takes_list = row.kind is Kind.NUMBER and row.path.startswith(("scheduler.", "optimizer.params.eps"))
    if takes_list and isinstance(value, list):
        return all(item is None or is_number(item) for item in value)  # one per parameter group
    return has_kind(value, row.kind) or (isinstance(value, str) and value in row.words)


def converted(value: Any, kind: Kind) -> Any:
    """Returns the value that another type clearly stands for, or None: "5e8" is a number, "true" is a boolean.

    >>> converted("5e8", Kind.INT), converted("no", Kind.BOOL), converted("many", Kind.INT)
    (500000000, False, None)
    >>> converted("1e400", Kind.INT) is None
    True
    """
    if kind in (Kind.INT, Kind.NUMBER) and isinstance(value, str) and len(value) < 40 and _NUMBER.fullmatch(value):
        number = float(value)
        if not math.isfinite(number):
            return None
        if number == int(number) and abs(number) < 2**53:
            return int(number)
        return number if kind is Kind.NUMBER else None
    if kind is Kind.BOOL and isinstance(value, str):
        return _SWITCHES.get(value.strip().lower())
    if kind is Kind.BOOL and value in (0, 1) and not isinstance(value, float):
        return bool(value)
    return None


def is_pydantic(pointer: Pointer) -> bool:
    """Returns whether the engine reads the object around a key with a pydantic model, which checks and converts."""
    parent = key_of(pointer[:-1]) if len(pointer) > 1 and pointer[:-1] not in PARAMS else None
    return parent is not None and parent.names is Names.REFUSED


def _types(subject: Subject) -> Iterator[Fault]:
    for pointer, value, row in rows(subject):
        if pointer == STAGE or value is None or value == "auto" or _is_legal(value, row) or row.kind is Kind.TEXT:
            continue
        meant, checked = converted(value, row.kind), is_pydantic(pointer)
        converts = checked and meant is not None and _engine_converts(value, row.kind)
        if pointer == ("zero_optimization",) and isinstance(value, bool) and not subject.is_trainers:
            yield _old_form(value)
            continue
        yield fault(
            pointer,
            f"{dotted(pointer)} is {shown(value)}, but must be {_wanted(row)}",
            _type_effect(pointer, converts=converts, checked=checked, row=row),
            f"write {shown(meant)}" if meant is not None else f"write {example(row)}",
            severity=Severity.WARNING if converts else None,
            changes=(Change(pointer=pointer, value=meant),) if meant is not None else (),
        )


def _old_form(value: bool) -> Fault:
    """Returns the fault of `"zero_optimization": true`, the form that predates stages."""
    stage = int(value)
    pointer = ("zero_optimization",)
    return fault(
        pointer,
        f"zero_optimization is {shown(value)}, an old form that predates stages",
        f"DeepSpeed reads it as ZeRO-{stage}",
        f'write {{"stage": {stage}}}',
        severity=Severity.WARNING,
        changes=(Change(pointer=pointer, value={"stage": stage}),),
    )


def _engine_converts(value: Any, kind: Kind) -> bool:
    """Returns whether pydantic converts a value as `converted` does; it does not convert "5e8" to a whole number."""
    return kind is not Kind.INT or not isinstance(value, str) or "e" not in value.lower()


def _type_effect(pointer: Pointer, *, converts: bool, checked: bool, row: Key) -> str:
    if converts:
        return "DeepSpeed converts it; other readers of the file (Transformers, accelerate) compare it unconverted"
    if checked:
        return "DeepSpeed refuses it when the engine starts, after loading the model"
    if row.kind is Kind.BOOL:
        return "DeepSpeed does not check it: any text counts as true"
    if pointer[:-1] in PARAMS:
        return "it is passed on unchanged, and the run stops when the engine starts"
    return _UNCHECKED + "uses another value"


def _wanted(row: Key) -> str:
    article = "an" if row.kind in (Kind.OBJECT, Kind.ANY) else "a" if row.kind is not Kind.BOOL else ""
    words = "".join(f' or "{word}"' for word in row.words) if row.kind is not Kind.TEXT else ""
    return f"{article} {row.kind}{words}".strip() + (" of elements" if row.path.endswith("bucket_size") else "")


def example(row: Key) -> str:
    if row.kind is Kind.OBJECT:
        return '{"enabled": true}' if row.path in ("bf16", "fp16") else "an object in braces: {…}"
    if row.default is not None and has_kind(row.default, row.kind):
        return f"{_wanted(row)}, such as {shown(row.default)}"
    return _wanted(row)


def _stage(subject: Subject) -> Iterator[Fault]:
    stage = subject.at("zero_optimization.stage", 0)
    if isinstance(stage, int | float) and not isinstance(stage, bool) and stage in (0, 1, 2, 3):
        return
    meant = converted(stage, Kind.INT)
    is_one = meant in (0, 1, 2, 3)
    effect = "DeepSpeed refuses it: the stages are 0, 1, 2 and 3"
    if stage == "auto":
        effect = "without the Trainer it means stage 0, with it accelerate sets 2"
    elif is_one or isinstance(stage, bool):
        effect = (
            "DeepSpeed reads it as the number, but Transformers does not: under ZeRO-3 it then loads the whole model "
            "on every rank"
        )
    yield fault(
        STAGE,
        f"zero_optimization.stage is {shown(stage)}",
        effect,
        f"write {meant}" if is_one else "write 0, 1, 2 or 3, without quotes",
        changes=(Change(pointer=STAGE, value=meant),) if is_one else (),
    )


def _ranges(subject: Subject) -> Iterator[Fault]:
    for pointer, value, row in rows(subject):
        if pointer == STAGE or row.kind not in (Kind.INT, Kind.NUMBER) or not is_number(value):
            continue
        bound = _broken_bound(value, row)
        if bound is not None:
            yield fault(
                pointer,
                f"{dotted(pointer)} is {shown(value)}, but must be {bound}",
                "DeepSpeed refuses it" if is_pydantic(pointer) else _UNCHECKED + "trains with another value",
                f"write a number that is {bound}" + (f", such as {shown(row.default)}" if row.default else ""),
            )


def _broken_bound(value: float, row: Key) -> str | None:
    """Returns the bound that a number violates, in words."""
    if row.least is not None and value < row.least:
        return f"at least {row.least:g}"
    if row.above is not None and value <= row.above:
        return f"above {row.above:g}"
    if row.below is not None and value >= row.below:
        return f"below {row.below:g}"
    if row.most is not None and value > row.most:
        return f"at most {row.most:g}"
    if not abs(value) < 2**63:
        return f"at most {2**63 - 1:g}" if value > 0 else f"at least {-(2**63):g}"
    return None


def _words(subject: Subject) -> Iterator[Fault]:
    for pointer, value, row in rows(subject):
        if row.kind is not Kind.TEXT or value is None or value == "auto":
            continue
        if pointer in _OTHER_RULES and isinstance(value, str):
            continue
        if not isinstance(value, str):
            legal = " or ".join(f'"{word}"' for word in row.words[:4]) or "a text in double quotes"
            yield _word_fault(pointer, value, f"write {legal}", None)
        elif row.words and value not in row.words and not _is_folded(pointer, value, row):
            meant = slip_of(value, row.words)
            fix = f'did you mean "{meant}"?' if meant else "write " + " or ".join(f'"{word}"' for word in row.words)
            yield _word_fault(pointer, value, fix, meant)


def _is_folded(pointer: Pointer, value: str, row: Key) -> bool:
    """Returns whether a word is legal because the engine ignores its case."""
    folds = pointer[0] == "checkpoint" or pointer[-1] in ("partition_type", "gradient_allreduce_op")
    return folds and value.lower() in (word.lower() for word in row.words)


def _word_fault(pointer: Pointer, value: Any, fix: str, meant: str | None) -> Fault:
    checked = is_pydantic(pointer)
    return fault(
        pointer,
        f"{dotted(pointer)} is {shown(value)}",
        "DeepSpeed refuses it when the engine starts" if checked else _unknown_word(pointer),
        fix,
        changes=(Change(pointer=pointer, value=meant),) if meant else (),
    )


def _unknown_word(pointer: Pointer) -> str:
    """Returns the effect of an unknown word that the engine does not check when it reads the configuration."""
    if pointer == ("scheduler", "params", "warmup_type"):
        return 'DeepSpeed uses "log" instead'
    if pointer[0] in ("optimizer", "scheduler", "data_types", "checkpoint") or pointer[-1] == "type":
        return STOPS
    return _UNCHECKED + "continues without it"


def _nulls(subject: Subject) -> Iterator[Fault]:
    for pointer, value, row in rows(subject):
        if value is not None:
            continue
        is_section = row.kind is Kind.OBJECT
        if row.is_nullable and not (is_section and subject.is_trainers):
            continue
        checked = is_pydantic(pointer) and not row.is_nullable
        is_param = pointer[:-1] in PARAMS
        effect = "DeepSpeed refuses it" if checked else "DeepSpeed uses its own default"
        if is_param:
            effect = "it is passed on as None, and the run stops"
        if is_section:
            effect = "the Trainer reads keys from it, and stops" if subject.is_trainers else "the run stops"
        yield fault(
            pointer,
            f"{dotted(pointer)} is null",
            effect,
            "remove the line",
            severity=None if checked or is_section or is_param else Severity.WARNING,
            changes=(Change(pointer=pointer, value=REMOVED),),
        )


_CONFIG = "deepspeed 0.19.8 runtime/config_utils.py: DeepSpeedConfigModel; runtime/config.py"
_E = Severity.ERROR


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
        yield fault(
            pointer,
            f'{dotted(pointer)} is "auto", but the Trainer does not fill this key',
            f"accelerate sets {filled}, unless accelerate launch sets another value" if filled else effect,
            "remove the line" + (f": DeepSpeed's default is {shown(default)}" if default is not None else ""),
            severity=Severity.WARNING if filled else None,
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
        yield fault(
            pointer,
            f'{dotted(pointer)} is "auto", which only the Hugging Face Trainer fills',
            default if is_pydantic(pointer) else "DeepSpeed stops, or uses the text",
            f"write {example(row)}",
        )


# fmt: off
RULES = (
    Rule(id="DS110", severity=_E, title="value of the wrong type", find=_types, source=_CONFIG),
    Rule(id="DS111", severity=_E, title="illegal stage", find=_stage,
         source="Transformers 5.23 integrations/deepspeed.py, accelerate 1.15 utils/deepspeed.py: is_zero3"),
    Rule(id="DS112", severity=_E, title="number out of range", find=_ranges, source=_CONFIG),
    Rule(id="DS113", severity=_E, title="illegal word", find=_words, source=_CONFIG),
    Rule(id="DS114", severity=_E, title="null", find=_nulls,
         source='accelerate 1.15 accelerator.py: .get("offload_optimizer", {}).get("device") is None.get; ' + _CONFIG),
    Rule(id="DS120", severity=Severity.ERROR, title='"auto" that nothing fills', find=_autos,
         source="accelerate 1.15 utils/dataclasses.py: DeepSpeedPlugin.fill_match, deepspeed_config_process"),
    Rule(id="DS121", severity=Severity.ERROR, title='"auto" without the Trainer', find=_raw_autos,
         source="deepspeed 0.19.8 runtime/config_utils.py: DeepSpeedConfigModel.__init__ drops it"),
)
"""Rules about values."""
# fmt: on
