"""Rules about the text and its key names: duplicate, misspelled, misplaced, unknown, removed, renamed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from types import MappingProxyType

from dstrain.config.jsonc import REMOVED, Change, Pointer, dotted, lookup, place_of
from dstrain.config.keys import KEYS, Key, Kind, Names, children, key_of
from dstrain.config.lint.rule import ABSENT, REFUSES, Fault, Rule, Subject, fault, shown, when
from dstrain.errors import nearest
from dstrain.findings import Severity

_REFUSES = "DeepSpeed refuses it when the engine starts, after loading the model"
_THERE = " That key is there already: remove one of the two"
_IGNORES = "DeepSpeed ignores it without a warning"
_PATH = re.compile(r"[a-z]\w*(?:\.\w+)*")
_DIGIT = re.compile(r"\d")


PARAMS: tuple[Pointer, ...] = (("optimizer", "params"), ("scheduler", "params"))
"""Objects whose legal names depend on their `type`."""


def is_parked(pointer: Pointer) -> bool:
    """Returns whether a top-level name is a note: `$schema`, `_comment`, `x-note`."""
    name = str(pointer[-1])
    return len(pointer) == 1 and (name == "$schema" or name.startswith(("_", "x-")))


def _unknown(subject: Subject) -> Iterator[tuple[Pointer, Key | None]]:
    """Yields every outermost unknown name with the row of its object."""
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
"""Top-level names of other tools → DeepSpeed's."""
SURE_RATIO = 0.88
"""Similarity (difflib) above which one name is a typo of the other: a letter or two. Below, the fix needs a person."""
NEAR_ENOUGH = 0.8
"""Similarity above which one name is suggested for another if the run stops anyway."""
_NEAR_RATIO = {Names.REFUSED: NEAR_ENOUGH, Names.IGNORED: 0.84, Names.FREE: SURE_RATIO}
"""Similarity above which a name is suggested, by what the engine does with an unknown one: if it ignores the name, the
name may be a note (`comment` is not `comet`)."""
_AT_HOME = ("stage", "betas")
"""Single words that name one key only; others (`seed`, `epochs`, `offload`) have other meanings elsewhere."""


def likeness(name: str, meant: str) -> float:
    """Returns the case-insensitive similarity of two names, 0…1."""
    return SequenceMatcher(None, name.lower(), meant.lower()).ratio()


def slip_of(name: str, legal: Iterable[str]) -> str | None:
    """Returns the legal name that differs by one wrong, missing or extra letter; None if several do.

    Another digit is not a typo: it names something else.

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
    """Returns the legal names in an object."""
    names = [row.path.rsplit(".", 1)[-1] for row in children(pointer) if row.removed is None]
    return [name for name in names if name != "*"]


def is_missing(subject: Subject, name: str) -> bool:
    """Returns whether a key at the top is missing, and no other name there is a typo of it, which has its own rule."""
    others = ((other,) for other in subject.config if key_of((other,)) is None and not is_parked((other,)))
    return not subject.has(name) and not any(near_name(other) == name for other in others)


def near_name(pointer: Pointer) -> str | None:
    """Returns the legal name in the same object that an unknown name most likely means."""
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
    """Returns the path of a key with the same name elsewhere, or None.

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


def _refuses(parent: Key | None) -> bool:
    return parent is not None and parent.names is Names.REFUSED


def _effect(parent: Key | None) -> str:
    return _REFUSES if _refuses(parent) else _IGNORES


def _misspelled(subject: Subject) -> Iterator[Fault]:
    for pointer, parent in _unknown(subject):
        meant = near_name(pointer)
        if meant is None:
            continue
        name, target = str(pointer[-1]), (*pointer[:-1], meant)
        is_slip = slip_of(name, _names_in(pointer[:-1])) == meant and not _is_at_home(name, pointer[:-1])
        is_safe = is_slip and not subject.has(dotted(target))
        fix = f'did you mean "{meant}"?' + (_THERE if subject.has(dotted(target)) else "")
        changes = (Change(pointer=pointer, renamed=meant),) if is_safe else ()
        yield fault(pointer, _problem(pointer, parent), _effect(parent), fix, changes=changes)


def _problem(pointer: Pointer, parent: Key | None) -> str:
    return f'"{pointer[-1]}" is not a key of {parent.path if parent is not None else "DeepSpeed"}'


def _misplaced(subject: Subject) -> Iterator[Fault]:
    for pointer, parent in _unknown(subject):
        if near_name(pointer) is None and (home := elsewhere(pointer)) is not None:
            fix = f"it belongs to {home}" if "." in home else "move it to the top of the file"
            fix += _THERE if subject.has(home) else ""
            yield fault(pointer, _problem(pointer, parent), _effect(parent), fix)


def _meaningless(subject: Subject) -> Iterator[Fault]:
    for pointer, parent in _unknown(subject):
        if near_name(pointer) is not None or elsewhere(pointer) is not None:
            continue
        refused = _refuses(parent)
        if refused or not str(pointer[-1]).startswith("_"):
            fix = "remove it" + ("" if pointer[:-1] else '; to keep it as a note, name it "_…" or "x-…"')
            severity = Severity.ERROR if refused else Severity.WARNING
            yield fault(pointer, _problem(pointer, parent), _effect(parent), fix, severity=severity)


def _instead(subject: Subject, row: Key) -> str:
    """Returns the replacement of a key to remove; if it is there already, only the removal."""
    text = row.instead or "remove it"
    named = [path for path in _PATH.findall(text) if tuple(path.split(".")) in KEYS]
    present = [path for path in named if lookup(subject.config, tuple(path.split("."))) is not ABSENT]
    is_done = bool(present) if " or " in text else bool(named) and present == named
    if not text.startswith("write ") or not is_done:
        return text
    return f"remove it: {' and '.join(present)} {'is' if len(present) == 1 else 'are'} there already"


def is_refused(row: Key) -> bool:
    """Returns whether the engine raises for a removed key instead of ignoring it."""
    return "_REMOVED_" in row.source


def _removed(subject: Subject) -> Iterator[Fault]:
    for pointer, _ in subject.walk():
        row = key_of(pointer)
        if row is None or row.removed is None or pointer[:-1] in PARAMS:
            continue
        refused = is_refused(row)
        problem, effect = f'DeepSpeed {row.removed} removed "{row.path}"', REFUSES if refused else _IGNORES
        severity = None if refused else Severity.WARNING
        yield fault(pointer, problem, effect, _instead(subject, row), severity=severity)


def _deprecated(subject: Subject) -> Iterator[Fault]:
    for pointer, _ in subject.walk():
        row = key_of(pointer)
        if row is None or pointer[:-1] in PARAMS:
            continue  # parameters of optimizers have their own rules
        if row.removed is None and row.instead is not None and row.alias_of is None:
            effect = "DeepSpeed still reads it, but warns that a later release will not"
            yield fault(pointer, f'"{row.path}" is deprecated', effect, _instead(subject, row))


def _twice_named(subject: Subject) -> Iterator[Fault]:
    for pointer, _ in subject.walk():
        row = key_of(pointer)
        if row is None or row.alias_of is None:
            continue
        other = lookup(subject.config, tuple(row.alias_of.split(".")))
        if other is not ABSENT:
            refused = _refuses(key_of(pointer[:-1]))
            is_safe = not refused and lookup(subject.config, pointer) == other
            yield fault(
                pointer,
                f'"{row.path}" and "{row.alias_of}" are two names of one key',
                _REFUSES if refused else f"DeepSpeed reads {row.alias_of} and ignores this one",
                "keep one of them",
                changes=(Change(pointer=pointer, value=REMOVED),) if is_safe else (),
            )


def _is_unknown_alias(s: Subject) -> bool:
    """Returns whether Transformers and accelerate read bfloat16, DeepSpeed's other name of bf16, which they ignore."""
    return "bfloat16" in s.config and "bf16" not in s.config and s.is_trainers


_TABLE = "deepspeed 0.19.8, section by section: dstrain/config/keys.toml"
_E, _W = Severity.ERROR, Severity.WARNING


SYNTAX, NO_OBJECT = "DS001", "DS003"
"""Rules that `read` applies to files without a configuration."""


def _repeated(subject: Subject) -> Iterator[Fault]:
    document = subject.document
    for key in document.repeated:
        line = place_of(document.text, key.first, document.name).line
        value = lookup(document.value, key.pointer)
        last = "" if value is ABSENT else f", {shown(value)},"  # absent if an outer key is repeated too
        yield fault(
            key.pointer,
            f'"{key.pointer[-1]}" is repeated (first on line {line})',
            f"the Trainer uses the last value{last} without a warning; DeepSpeed itself refuses the file",
            "keep one of them",
            at=key.at,
        )


def _extras(subject: Subject) -> Iterator[Fault]:
    effect = "dstrain and DeepSpeed accept it; a Trainer that reads the file by its path stops"
    fix = "leave it for dstrain run; remove it for other tools"
    for name, offset in subject.document.extras.items() if subject.job is None else ():
        yield fault("", f"{name} is not plain JSON", effect, fix, at=offset)


_JSON_LOAD = "accelerate 1.15 utils/deepspeed.py: HfDeepSpeedConfig (json.load)"


# fmt: off
RULES = (
    Rule(id="DS101", severity=_E, title="misspelled key", find=_misspelled, source=_TABLE),
    Rule(id="DS102", severity=_E, title="key in the wrong place", find=_misplaced, source=_TABLE),
    Rule(id="DS103", severity=_W, title="unknown key", find=_meaningless, source=_TABLE),
    Rule(id="DS104", severity=_E, title="removed key", find=_removed, source="deepspeed 0.19.8 runtime/config.py"),
    Rule(id="DS105", severity=_W, title="deprecated key", find=_deprecated, source=_TABLE),
    Rule(id="DS106", severity=_E, title="two names of one key", find=_twice_named, source=_TABLE),
    Rule(id="DS107", severity=_E, title="bfloat16 under the Trainer",
         find=when("bfloat16", _is_unknown_alias,
                   problem='the Trainer does not know "bfloat16", DeepSpeed\'s other name of bf16',
                   effect="the Trainer adds its own bf16 section, and DeepSpeed reads that section instead of this one",
                   fix='write "bf16"', changes=(Change(pointer=("bfloat16",), renamed="bf16"),)),
         source="accelerate 1.15 utils/dataclasses.py: DeepSpeedPlugin.set_mixed_precision"),
    Rule(id="DS002", severity=Severity.ERROR, title="repeated key", find=_repeated,
         source=_JSON_LOAD + "; deepspeed 0.19.8 runtime/config_utils.py: dict_raise_error_on_duplicate_keys"),
    Rule(id="DS004", severity=Severity.INFO, title="comments, trailing commas, BOM", find=_extras, source=_JSON_LOAD),
)
"""Rules about the text and names."""
# fmt: on
