"""Rules about key names: misspelt, misplaced, unknown, removed, renamed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from types import MappingProxyType

from dstrain.config.document import REMOVED, Change, dotted, lookup
from dstrain.config.jsonc import Pointer
from dstrain.config.keys.key import Key, Kind, Names
from dstrain.config.keys.table import KEYS, children, key_of
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule
from dstrain.config.lint.subject import ABSENT, Subject
from dstrain.errors import nearest

_REFUSES = "DeepSpeed refuses it when the engine starts, after the model was loaded"
_IGNORES = "DeepSpeed does not read it and says nothing"
_DIGIT = re.compile(r"\d")


PARAMS: tuple[Pointer, ...] = (("optimizer", "params"), ("scheduler", "params"))
"""Objects whose legal names depend on a type beside them."""


def is_parked(pointer: Pointer) -> bool:
    """Returns whether a name at the top says itself that it is nobody's: `$schema`, `_comment`, `x-note`."""
    name = str(pointer[-1])
    return len(pointer) == 1 and (name == "$schema" or name.startswith(("_", "x-")))


def _unknown(subject: Subject) -> Iterator[tuple[Pointer, Key | None]]:
    """Yields every name that the table does not have, outermost only, with the row of its object."""
    hidden: set[Pointer] = set()
    for pointer, _ in subject.walk():
        outside = pointer[:-1]
        if outside in hidden or (outside and key_of(outside) is None):
            hidden.add(pointer)
            continue
        if isinstance(pointer[-1], int) or key_of(pointer) is not None or outside in PARAMS:
            continue
        hidden.add(pointer)
        parent = key_of(outside) if outside else None
        is_free = parent is not None and (parent.names is Names.FREE or parent.kind is not Kind.OBJECT)
        if not is_parked(pointer) and not is_free:
            yield pointer, parent


MEANT_AT_TOP: Mapping[str, str] = MappingProxyType(
    {
        "batch_size": "train_micro_batch_size_per_gpu",
        "micro_batch_size": "train_micro_batch_size_per_gpu",
        "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
        "max_grad_norm": "gradient_clipping",
        "clip_grad": "gradient_clipping",
        "zero": "zero_optimization",
        "zero_optimizer": "zero_optimization",
        "train_batch": "train_batch_size",
    }
)
"""What people of other tools call keys at the top."""
SURE_RATIO = 0.88
"""Likeness (difflib) from which one name is a slip of the other: a letter or two. Below, only a person knows."""
NEAR_ENOUGH = 0.8
"""Likeness from which one name is worth offering for another, where the run ends anyway."""
_NEAR_RATIO = {Names.REFUSED: NEAR_ENOUGH, Names.IGNORED: 0.84, Names.FREE: SURE_RATIO}
"""Likeness from which a name is offered, by what the engine does with the unknown one: where it reads on, the name may
as well be a note (`comment` is no `comet`)."""
_AT_HOME = ("stage", "betas")
"""Single words that name one key only; others (`seed`, `epochs`, `offload`) mean something else elsewhere."""


def likeness(name: str, meant: str) -> float:
    """Returns how alike two names are, 0…1, in any case of letters."""
    return SequenceMatcher(None, name.lower(), meant.lower()).ratio()


def slip_of(name: str, legal: Iterable[str]) -> str | None:
    """Returns the legal name that a name is with a letter wrong, missing or too many; None where two are as near.

    Another digit is no slip: it tells one thing from another.

    >>> slip_of("overlap_com", ["overlap_comm", "offload_param"]), slip_of("gpu", ["cpu", "nvme"])
    ('overlap_comm', None)
    >>> slip_of("warmup_mix_lr", ["warmup_min_lr", "warmup_max_lr"]), slip_of("polynomial", ["PolynomialLR"])
    (None, None)
    """
    near = {
        meant
        for meant in legal
        if abs(len(meant) - len(name)) < 2
        and _DIGIT.findall(name) == _DIGIT.findall(meant)
        and likeness(name, meant) >= SURE_RATIO
    }
    return near.pop() if len(near) == 1 else None


def _names_in(pointer: Pointer) -> list[str]:
    """Returns the names that are legal in an object."""
    names = [row.path.rsplit(".", 1)[-1] for row in children(pointer) if row.removed is None]
    return [name for name in names if name != "*"]


def near_name(pointer: Pointer) -> str | None:
    """Returns the legal name beside an unknown one that it most likely meant."""
    name = str(pointer[-1])
    if len(pointer) == 1 and name in MEANT_AT_TOP:
        return MEANT_AT_TOP[name]
    parent = key_of(pointer[:-1])
    meant = nearest(name, _names_in(pointer[:-1]))
    least = SURE_RATIO if _is_at_home(name, pointer[:-1]) else _NEAR_RATIO[parent.names if parent else Names.IGNORED]
    return meant if meant is not None and likeness(name, meant) >= least else None


def _is_at_home(name: str, outside: Pointer) -> bool:
    """Returns whether a name is a key of another object."""
    return any(path[-1] == name and path[:-1] != outside for path in KEYS)


def elsewhere(pointer: Pointer) -> str | None:
    """Returns the path where a name that is unknown here belongs, or None where none has it.

    >>> elsewhere(("overlap_comm",)), elsewhere(("optimizer", "lr")), elsewhere(("seed",))
    ('zero_optimization.overlap_comm', 'optimizer.params.lr', None)
    """
    name, params = str(pointer[-1]), (*pointer[:-1], "params")
    if params in PARAMS and key_of((*params, name)) is not None:
        return dotted((*params, name))
    if "_" not in name and name not in _AT_HOME:
        return None
    rows = [path for path, row in KEYS.items() if row.removed is None and row.alias_of is None]
    same = sorted((path for path in rows if path[-1] == name), key=lambda path: (path[0] != "zero_optimization", path))
    return ".".join(same[0]) if same and same[0][:-1] != pointer[:-1] else None


def _effect(parent: Key | None) -> str:
    return _REFUSES if parent is not None and parent.names is Names.REFUSED else _IGNORES


def _misspelt(subject: Subject) -> Iterator[Fault]:
    for pointer, parent in _unknown(subject):
        meant = near_name(pointer)
        if meant is None:
            continue
        name, target = str(pointer[-1]), (*pointer[:-1], meant)
        is_slip = slip_of(name, _names_in(pointer[:-1])) == meant and not _is_at_home(name, pointer[:-1])
        is_safe = is_slip and not subject.has(dotted(target))
        yield Fault(
            pointer=pointer,
            problem=f'"{pointer[-1]}" is no key{_inside(parent)}',
            effect=_effect(parent),
            fix=f'did you mean "{meant}"?',
            changes=(Change(pointer=pointer, renamed=meant),) if is_safe else (),
        )


def _inside(parent: Key | None) -> str:
    return f" of {parent.path}" if parent is not None else " of DeepSpeed"


def _misplaced(subject: Subject) -> Iterator[Fault]:
    for pointer, parent in _unknown(subject):
        if near_name(pointer) is None and (home := elsewhere(pointer)) is not None:
            yield Fault(
                pointer=pointer,
                problem=f'"{pointer[-1]}" is no key{_inside(parent)}',
                effect=_effect(parent),
                fix=f"it belongs to {home}" if "." in home else "move it to the top of the file",
            )


def _unheard(subject: Subject) -> Iterator[Fault]:
    for pointer, parent in _unknown(subject):
        if near_name(pointer) is not None or elsewhere(pointer) is not None:
            continue
        is_refused = parent is not None and parent.names is Names.REFUSED
        is_note = str(pointer[-1]).startswith("_") and not is_refused
        if is_note:
            continue
        yield Fault(
            pointer=pointer,
            severity=Severity.ERROR if is_refused else Severity.WARNING,
            problem=f'"{pointer[-1]}" is no key{_inside(parent)}',
            effect=_effect(parent),
            fix="remove it" + ("" if pointer[:-1] else '; a block that waits for later may be named "_…" or "x-…"'),
        )


def is_refused(row: Key) -> bool:
    """Returns whether the engine raises for a key that it no longer has; elsewhere it passes it over."""
    return "_REMOVED_" in row.source


def _removed(subject: Subject) -> Iterator[Fault]:
    for pointer, _ in subject.walk():
        row = key_of(pointer)
        if row is None or row.removed is None or pointer[:-1] in PARAMS:
            continue
        refused = is_refused(row)
        yield Fault(
            pointer=pointer,
            severity=None if refused else Severity.WARNING,
            problem=f'"{row.path}" is gone since DeepSpeed {row.removed}',
            effect="DeepSpeed refuses the configuration" if refused else _IGNORES,
            fix=row.instead or "remove it",
        )


def _deprecated(subject: Subject) -> Iterator[Fault]:
    for pointer, _ in subject.walk():
        row = key_of(pointer)
        if row is None or pointer[:-1] in PARAMS:
            continue  # parameters of optimizers have rules of their own
        if row.removed is None and row.instead is not None and row.alias_of is None:
            yield Fault(
                pointer=pointer,
                problem=f'"{row.path}" is deprecated',
                effect="DeepSpeed still reads it, and warns that a later release will not",
                fix=row.instead,
            )


def _twice_named(subject: Subject) -> Iterator[Fault]:
    for pointer, _ in subject.walk():
        row = key_of(pointer)
        if row is not None and row.alias_of is not None and _stands(subject, row.alias_of):
            is_refused = (parent := key_of(pointer[:-1])) is not None and parent.names is Names.REFUSED
            is_same = lookup(subject.config, pointer) == lookup(subject.config, tuple(row.alias_of.split(".")))
            yield Fault(
                pointer=pointer,
                problem=f'"{row.path}" and "{row.alias_of}" are two names of one key',
                effect=_REFUSES if is_refused else f"DeepSpeed reads {row.alias_of} and not this one",
                fix="keep one of them",
                changes=() if is_refused or not is_same else (Change(pointer=pointer, value=REMOVED),),
            )


def _stands(subject: Subject, path: str) -> bool:
    """Returns whether a key stands there under this very name."""
    return lookup(subject.config, tuple(path.split("."))) is not ABSENT


def _alias(subject: Subject) -> Iterator[Fault]:
    """bfloat16: DeepSpeed's other name of bf16, which Transformers and accelerate do not know."""
    if "bfloat16" in subject.config and "bf16" not in subject.config and subject.is_trainers:
        yield Fault(
            pointer=("bfloat16",),
            problem='"bfloat16" is a name of bf16 that the Trainer does not know',
            effect="the Trainer adds a bf16 section of its own, and DeepSpeed then reads that one and not this",
            fix='write "bf16"',
            changes=(Change(pointer=("bfloat16",), renamed="bf16"),),
        )


_TABLE = "deepspeed 0.19.8, section by section: dstrain/config/keys"

RULES = (
    Rule(id="DS101", severity=Severity.ERROR, title="a misspelt key", find=_misspelt, source=_TABLE),
    Rule(id="DS102", severity=Severity.ERROR, title="a key in the wrong place", find=_misplaced, source=_TABLE),
    Rule(id="DS103", severity=Severity.WARNING, title="an unknown key", find=_unheard, source=_TABLE),
    Rule(
        id="DS104",
        severity=Severity.ERROR,
        title="a key that DeepSpeed no longer has",
        find=_removed,
        source="deepspeed 0.19.8 runtime/config.py",
    ),
    Rule(id="DS105", severity=Severity.WARNING, title="a deprecated key", find=_deprecated, source=_TABLE),
    Rule(id="DS106", severity=Severity.ERROR, title="two names of one key", find=_twice_named, source=_TABLE),
    Rule(
        id="DS107",
        severity=Severity.ERROR,
        title="bfloat16 under the Trainer",
        find=_alias,
        source="accelerate 1.15 utils/dataclasses.py: DeepSpeedPlugin.set_mixed_precision",
    ),
)
"""Rules about names."""
