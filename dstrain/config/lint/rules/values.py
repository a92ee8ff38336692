"""Rules about single values: type, range, and allowed words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from dstrain.config.document import REMOVED, Change, dotted
from dstrain.config.jsonc import Pointer
from dstrain.config.keys.key import Key, Kind, Names
from dstrain.config.keys.table import key_of
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule
from dstrain.config.lint.rules.key_names import PARAMS, slip_of
from dstrain.config.lint.subject import Subject, shown

STAGE = ("zero_optimization", "stage")
_RULES_OF_THEIR_OWN: tuple[Pointer, ...] = (
    ("optimizer", "type"),
    ("scheduler", "type"),
    ("tensor_parallel", "preset_model"),
)
_NUMBER = re.compile(r"\s*[+-]?\d+(\.\d*)?([eE][+-]?\d+)?\s*", re.ASCII)
_SWITCHES = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}


def rows(subject: Subject) -> Iterator[tuple[Pointer, Any, Key]]:
    """Yields every value whose key is in the table and not gone."""
    for pointer, value in subject.walk():
        row = key_of(pointer)
        if row is not None and row.removed is None:
            yield pointer, value, row


def has_kind(value: Any, kind: Kind) -> bool:
    """Returns whether a value is of a kind; 5e8 is a whole number, true is none."""
    if kind is Kind.BOOL:
        return isinstance(value, bool)
    if kind in (Kind.INT, Kind.NUMBER):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (kind is Kind.NUMBER or not math.isfinite(value) or value == int(value))
    types = {Kind.TEXT: str, Kind.OBJECT: dict, Kind.LIST: list, Kind.ANY: object}
    return isinstance(value, types[kind])


def _is_legal(value: Any, row: Key) -> bool:
    if (
        isinstance(value, list)
        and row.kind is Kind.NUMBER
        and row.path.startswith(("scheduler.", "optimizer.params.eps"))
    ):
        return all(each is None or _is_number(each) for each in value)  # one for each group of parameters
    return has_kind(value, row.kind) or (isinstance(value, str) and value in row.words)


def converted(value: Any, kind: Kind) -> Any:
    """Returns what a value of another type plainly means, or None: the text "5e8" is a number, "true" a switch.

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
    """Returns whether the engine reads the object around a key with a model that checks and converts."""
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
        yield Fault(
            pointer=pointer,
            severity=Severity.WARNING if converts else None,
            problem=f"{dotted(pointer)} is {shown(value)}, and takes {_wanted(row)}",
            effect=_type_effect(pointer, converts=converts, checked=checked, row=row),
            fix=f"write {shown(meant)}" if meant is not None else f"write {example(row)}",
            changes=(Change(pointer=pointer, value=meant),) if meant is not None else (),
        )


def _old_form(value: bool) -> Fault:
    """Returns what to say of `"zero_optimization": true`, which DeepSpeed took before there were stages."""
    stage = int(value)
    pointer = ("zero_optimization",)
    return Fault(
        pointer=pointer,
        severity=Severity.WARNING,
        problem=f"zero_optimization is {shown(value)}, its form of before there were stages",
        effect=f"DeepSpeed takes it for ZeRO-{stage}",
        fix=f'write {{"stage": {stage}}}',
        changes=(Change(pointer=pointer, value={"stage": stage}),),
    )


def _engine_converts(value: Any, kind: Kind) -> bool:
    """Returns whether pydantic makes of a value what it plainly means: of "5e8" it makes no whole number."""
    return kind is not Kind.INT or not isinstance(value, str) or "e" not in value.lower()


def _type_effect(pointer: Pointer, *, converts: bool, checked: bool, row: Key) -> str:
    if converts:
        return "DeepSpeed converts it; what else reads the file (Transformers, accelerate) compares it as it stands"
    if checked:
        return "DeepSpeed refuses it when the engine starts, after the model was loaded"
    if row.kind is Kind.BOOL:
        return "DeepSpeed does not check it: any text counts as true"
    if pointer[:-1] in PARAMS:
        return "it is handed on as it stands, and the run stops when the engine starts"
    return "DeepSpeed does not check it: the run stops where it is used, or counts with something else"


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
    if isinstance(stage, int) and not isinstance(stage, bool) and 0 <= stage <= 3:
        return
    meant = converted(stage, Kind.INT)
    is_one = meant in (0, 1, 2, 3)
    effect = "DeepSpeed refuses it: the stages are 0, 1, 2 and 3"
    if stage == "auto":
        effect = "without the Trainer it is stage 0, under it accelerate makes it 2"
    elif is_one or isinstance(stage, bool):
        effect = (
            "DeepSpeed takes it for the number, and Transformers does not: under ZeRO-3 it then loads the whole model "
            "on every rank"
        )
    yield Fault(
        pointer=STAGE,
        problem=f"zero_optimization.stage is {shown(stage)}",
        effect=effect,
        fix=f"write {meant}" if is_one else "write 0, 1, 2 or 3, without quotes",
        changes=(Change(pointer=STAGE, value=meant),) if is_one else (),
    )


def _ranges(subject: Subject) -> Iterator[Fault]:
    for pointer, value, row in rows(subject):
        if pointer == STAGE or row.kind not in (Kind.INT, Kind.NUMBER) or not _is_number(value):
            continue
        bound = _broken_bound(value, row)
        if bound is not None:
            checked = is_pydantic(pointer)
            yield Fault(
                pointer=pointer,
                problem=f"{dotted(pointer)} is {shown(value)}, and must be {bound}",
                effect="DeepSpeed refuses it"
                if checked
                else "DeepSpeed does not check it: the run stops where it is used, or trains something else",
                fix=f"write a number {bound}" + (f", such as {shown(row.default)}" if row.default else ""),
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _broken_bound(value: float, row: Key) -> str | None:
    """Returns the bound of a key that a number does not keep, in words."""
    if row.least is not None and value < row.least:
        return f"of at least {row.least:g}"
    if row.above is not None and value <= row.above:
        return f"above {row.above:g}"
    if row.below is not None and value >= row.below:
        return f"below {row.below:g}"
    if row.most is not None and value > row.most:
        return f"of at most {row.most:g}"
    if not abs(value) < 2**63:
        return f"of at most {2**63 - 1:g}" if value > 0 else f"of at least {-(2**63):g}"
    return None


def _words(subject: Subject) -> Iterator[Fault]:
    for pointer, value, row in rows(subject):
        if row.kind is not Kind.TEXT or value is None or value == "auto":
            continue
        if pointer in _RULES_OF_THEIR_OWN and isinstance(value, str):
            continue  # optimizers, schedules and presets have rules of their own
        if not isinstance(value, str):
            legal = " or ".join(f'"{word}"' for word in row.words[:4]) or "it in double quotes"
            yield _word_fault(pointer, value, f"write {legal}", None)
        elif row.words and value not in row.words and not _is_folded(pointer, value, row):
            meant = slip_of(value, row.words)
            fix = f'did you mean "{meant}"?' if meant else "write " + " or ".join(f'"{word}"' for word in row.words)
            yield _word_fault(pointer, value, fix, meant)


def _is_folded(pointer: Pointer, value: str, row: Key) -> bool:
    """Returns whether a word is legal in other letters, where the engine folds case."""
    folds = pointer[0] == "checkpoint" or pointer[-1] in ("partition_type", "gradient_allreduce_op")
    return folds and value.lower() in (word.lower() for word in row.words)


def _word_fault(pointer: Pointer, value: Any, fix: str, meant: str | None) -> Fault:
    checked = is_pydantic(pointer)
    return Fault(
        pointer=pointer,
        problem=f"{dotted(pointer)} is {shown(value)}",
        effect="DeepSpeed refuses it when the engine starts" if checked else _unknown_word(pointer),
        fix=fix,
        changes=(Change(pointer=pointer, value=meant),) if meant else (),
    )


def _unknown_word(pointer: Pointer) -> str:
    """Returns what happens with a word that the engine does not know and that no model of it checks."""
    if pointer == ("scheduler", "params", "warmup_type"):
        return 'DeepSpeed takes "log" in its place'
    if pointer[0] in ("optimizer", "scheduler", "data_types", "checkpoint") or pointer[-1] == "type":
        return "the run stops when the engine starts"
    return "DeepSpeed does not check it: the run stops where it is used, or goes on as if it were not there"


def _nulls(subject: Subject) -> Iterator[Fault]:
    for pointer, value, row in rows(subject):
        if value is not None:
            continue
        is_section = row.kind is Kind.OBJECT
        if row.is_nullable and not (is_section and subject.is_trainers):
            continue
        checked = is_pydantic(pointer) and not row.is_nullable
        is_param = pointer[:-1] in PARAMS
        effect = "DeepSpeed refuses it" if checked else "DeepSpeed takes its own default"
        if is_param:
            effect = "it is handed on as None, and the run stops"
        if is_section:
            effect = "the Trainer reads keys from it, and stops" if subject.is_trainers else "the run stops"
        yield Fault(
            pointer=pointer,
            severity=None if checked or is_section or is_param else Severity.WARNING,
            problem=f"{dotted(pointer)} is null",
            effect=effect,
            fix="remove the line",
            changes=(Change(pointer=pointer, value=REMOVED),),
        )


_CONFIG = "deepspeed 0.19.8 runtime/config_utils.py: DeepSpeedConfigModel; runtime/config.py"

RULES = (
    Rule(id="DS110", severity=Severity.ERROR, title="a value of the wrong type", find=_types, source=_CONFIG),
    Rule(
        id="DS111",
        severity=Severity.ERROR,
        title="a stage that only looks like one",
        find=_stage,
        source="Transformers 5.23 integrations/deepspeed.py, accelerate 1.15 utils/deepspeed.py: is_zero3",
    ),
    Rule(id="DS112", severity=Severity.ERROR, title="a number out of its range", find=_ranges, source=_CONFIG),
    Rule(id="DS113", severity=Severity.ERROR, title="a word that is not legal", find=_words, source=_CONFIG),
    Rule(
        id="DS114",
        severity=Severity.ERROR,
        title="null",
        find=_nulls,
        source='accelerate 1.15 accelerator.py: .get("offload_optimizer", {}).get("device") is None.get; ' + _CONFIG,
    ),
)
"""Rules about values."""
