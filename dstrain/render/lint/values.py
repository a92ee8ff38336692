"""Rules about single values: their type, their range, and the words that are legal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dstrain.errors import nearest
from dstrain.render.jsonc import Pointer
from dstrain.render.keys.key import Key, Kind, Names
from dstrain.render.keys.table import key_of
from dstrain.render.lint.finding import Fault, Severity
from dstrain.render.lint.naming import PARAMS
from dstrain.render.lint.rule import Rule
from dstrain.render.lint.subject import Subject, shown
from dstrain.render.merge import REMOVED, Change, dotted

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
        return is_number and (kind is Kind.NUMBER or value == int(value))
    types = {Kind.TEXT: str, Kind.OBJECT: dict, Kind.LIST: list, Kind.ANY: object}
    return isinstance(value, types[kind])


def _is_legal(value: Any, row: Key) -> bool:
    return has_kind(value, row.kind) or (isinstance(value, str) and value in row.words)


def converted(value: Any, kind: Kind) -> Any:
    """Returns what a value of another type plainly means, or None: the text "5e8" is a number, "true" a switch.

    >>> converted("5e8", Kind.INT), converted("no", Kind.BOOL), converted("many", Kind.INT)
    (500000000, False, None)
    """
    if kind in (Kind.INT, Kind.NUMBER) and isinstance(value, str) and len(value) < 40 and _NUMBER.fullmatch(value):
        number = float(value)
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
            effect=_type_effect(converts=converts, checked=checked, row=row),
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


def _type_effect(*, converts: bool, checked: bool, row: Key) -> str:
    if converts:
        return "DeepSpeed converts it; what else reads the file (Transformers, accelerate) compares it as it stands"
    if checked:
        return "DeepSpeed refuses it when the engine starts, after the model was loaded"
    if row.kind is Kind.BOOL:
        return "DeepSpeed does not check it: any text counts as true"
    return "DeepSpeed does not check it, and stops or miscounts where it uses it"


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
        if pointer == STAGE or row.kind not in (Kind.INT, Kind.NUMBER) or not has_kind(value, row.kind):
            continue
        low = row.least is not None and value < row.least
        high = row.most is not None and value > row.most
        if low or high or abs(value) >= 2**63:
            least, most = row.least if low else -(2**63), row.most if high else 2**63 - 1
            bound = f"at least {least:g}" if low or value < 0 else f"at most {most:g}"
            checked = is_pydantic(pointer)
            yield Fault(
                pointer=pointer,
                problem=f"{dotted(pointer)} is {shown(value)}, and must be {bound}",
                effect="DeepSpeed refuses it" if checked else "DeepSpeed does not check it, and the run goes wrong",
                fix=f"write a number of {bound}" + (f", such as {shown(row.default)}" if row.default else ""),
            )


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
            meant = nearest(value, row.words)
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
        effect="DeepSpeed refuses it" if checked else "DeepSpeed does not know it: it stops, or goes on without it",
        fix=fix,
        changes=(Change(pointer=pointer, value=meant),) if meant else (),
    )


def _nulls(subject: Subject) -> Iterator[Fault]:
    for pointer, value, row in rows(subject):
        if value is not None:
            continue
        is_section = row.kind is Kind.OBJECT
        if row.is_nullable and not (is_section and subject.is_trainers):
            continue
        checked = is_pydantic(pointer) and not row.is_nullable
        effect = "DeepSpeed refuses it" if checked else "DeepSpeed takes its own default"
        if is_section:
            effect = "the Trainer reads keys from it, and stops" if subject.is_trainers else "the run stops"
        yield Fault(
            pointer=pointer,
            severity=None if checked or is_section else Severity.WARNING,
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
