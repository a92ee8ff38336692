"""Converts job files and run-directory files to frozen records and back, through pydantic, with did-you-mean hints."""

from __future__ import annotations

import ast
import dataclasses
import json
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from dstrain.errors import InvalidConfig, Place, nearest

if TYPE_CHECKING:
    from pydantic import ConfigDict, TypeAdapter

type_config: ConfigDict = {
    "extra": "forbid", "strict": True, "allow_inf_nan": False, "use_attribute_docstrings": True,
}  # fmt: skip
"""The `__pydantic_config__` of every record read from a file: no unknown key, no silent conversion."""

Keys = tuple[str | int, ...]
"""The keys and indices that lead to a value."""
Locator = Callable[[Keys], Place]
"""Returns the place of the value at these keys."""
T = TypeVar("T")


_MISSING = frozenset({"missing", "missing_argument", "missing_keyword_only_argument"})
"""Pydantic's types of a fault for a key that is not there."""
_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def _adapter(record: Any) -> TypeAdapter[Any]:
    """Returns the reader and writer of a record type, built once.

    Pydantic is imported with the first one, since many commands read and write no record.
    """
    from pydantic import TypeAdapter

    if record not in _ADAPTERS:
        _ADAPTERS[record] = TypeAdapter(record)
    return _ADAPTERS[record]


def to_data(record: Any) -> Any:
    """Returns the record as JSON-ready dicts, lists, strings and numbers."""
    return _adapter(type(record)).dump_python(record, mode="json")


def to_json(record: Any) -> str:
    """Returns the record as indented JSON text, ending in a newline."""
    return json.dumps(to_data(record), indent=2, ensure_ascii=False) + "\n"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested mappings by dotted key.

    >>> flat({"seed": 1, "lora": {"r": 8, "targets": ["q_proj"]}})
    {'seed': 1, 'lora.r': 8, 'lora.targets': ['q_proj']}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def json_schema(record: type[Any]) -> dict[str, Any]:
    """Returns the JSON schema (draft 2020-12) of a record; docstrings of fields are descriptions."""
    return _adapter(record).json_schema()


@cache
def field_docs(record: type[Any]) -> Mapping[str, str]:
    """Returns the docstring of each field of a record, on one line, for its schema, its page and its option.

    It is read from the source, as pydantic does it, which many commands do not import.
    """
    source = Path(str(sys.modules[record.__module__].__file__)).read_text(encoding="utf-8")
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    body = next(node.body for node in classes if node.name == record.__name__)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


@cache
def annotations_of(record: type[Any]) -> Mapping[str, tuple[Any, ...]]:
    """Returns the metadata that each field's annotation has beside its type, such as the bounds of a number."""
    hints = get_type_hints(record, include_extras=True)
    return {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}


_BOUNDS = {
    "gt": (operator.gt, "above"),
    "ge": (operator.ge, "of at least"),
    "lt": (operator.lt, "below"),
    "le": (operator.le, "of at most"),
}


def require_in_range(record: Any, prefix: str = "") -> None:
    """Raises InvalidConfig for a number of a record that is out of its bounds; options are named with `prefix`."""
    kind: Any = type(record)
    for name, said in annotations_of(kind).items():
        value = getattr(record, name)
        bounds = [(bound, getattr(one, bound)) for one in said for bound in _BOUNDS if hasattr(one, bound)]
        if value is None or all(_BOUNDS[bound][0](value, limit) for bound, limit in bounds):
            continue
        option = f"--{prefix}{name}".replace("_", "-")
        legal = " and ".join(f"{_BOUNDS[bound][1]} {limit}" for bound, limit in bounds)
        raise InvalidConfig(f"{option} is {value:g}", hint=f"Write {option} with a number {legal}.")


def from_data(
    record: type[T],
    data: Any,
    *,
    locate: Callable[[Keys], Place | str],
    synonyms: Callable[[], Mapping[str, str]] = dict,
    removed: Mapping[str, str] = MappingProxyType({}),
) -> T:
    """Returns `data` as a record of the given type.

    Raises InvalidConfig with one problem per line, each with its place; for an unknown key with the closest legal one
    or that in `synonyms()`, which maps names of other tools to ours. `removed` maps keys and values of earlier versions
    to the way that remains: `kto`, `monitor.notify`, `task=kto`.
    """
    from pydantic import ValidationError

    try:
        # as JSON: strict validation takes a list for a tuple and a text for an enum only from it
        text = json.dumps(data, default=str)
        validated: T = _adapter(record).validate_json(text)
        return validated
    except ValidationError as error:
        faults = _faults(error.errors(include_url=False), data)
        problems = [
            _gone(keys, fault, locate, removed) or _describe(record, keys, fault, locate, synonyms)
            for keys, fault in faults.items()
        ]
        raise InvalidConfig("\n".join(dict.fromkeys(problems))) from None


def _faults(errors: list[Any], data: Any) -> dict[Keys, Any]:
    """Returns the faults of validation by the keys that lead to them.

    Of the forms that a value may have, pydantic says of each why it is not that one, and names it in `loc`; those that
    come furthest are meant.
    """
    faults: dict[Keys, Any] = {}
    for fault in errors:
        faults.setdefault(_keys(fault, data), fault)
    return {
        keys: fault for keys, fault in faults.items() if not any(keys == deep[: len(keys)] != deep for deep in faults)
    }


def _keys(fault: Any, data: Any) -> Keys:
    """Returns the keys of a fault, without the names of forms."""
    keys: list[str | int] = []
    for part in fault["loc"]:
        if (isinstance(data, Mapping) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        ):
            keys.append(part)
            data = data[part]
    return (*keys, fault["loc"][-1]) if fault["type"] in _MISSING else tuple(keys)


def _gone(keys: Keys, fault: Any, locate: Callable[[Keys], Place | str], removed: Mapping[str, str]) -> str | None:
    """Returns the problem of a key or value of an earlier version; None: it is none."""
    key = ".".join(part for part in keys if isinstance(part, str))
    if key in removed:
        return f'{locate(keys)}: "{_key(keys)}" is gone; {removed[key]}'
    if (way := removed.get(f"{key}={fault['input']}")) is not None:
        return f'{locate(keys)}: {_key(keys)} "{fault["input"]}" is gone; {way}'
    return None


def _describe(
    record: Any,
    keys: Keys,
    fault: Any,
    locate: Callable[[Keys], Place | str],
    synonyms: Callable[[], Mapping[str, str]],
) -> str:
    where = locate(keys)
    key = _key(keys)
    if fault["type"] in {"unexpected_keyword_argument", "extra_forbidden"}:
        legal = _legal_keys(record, keys[:-1])
        near = synonyms().get(key) or nearest(key, legal)
        advice = f'did you mean "{near}"?' if near else "known keys: " + ", ".join(legal)
        return f'{where}: unknown key "{key}"; {advice}'
    if fault["type"] in _MISSING:
        return f'{where}: "{key}" is missing'
    if fault["type"] in {"enum", "literal_error"}:
        value = str(fault["input"])
        key = key if fault["loc"][-1] != "[key]" else f"a key of {_key(keys[:-1])}"
        legal = str(fault["ctx"]["expected"]).split("'")[1::2]  # in quotes: 'full' or <LossKernel.FULL: 'full'>
        near = nearest(value, legal)
        advice = f'did you mean "{near}"? Legal values:' if near else "legal values:"
        return f'{where}: {key} is "{value}"; {advice} {", ".join(legal)}'
    message = str(fault["msg"])
    if fault["type"] == "dataclass_type":
        message += f" with the keys {', '.join(_legal_keys(record, keys))}"
    return f"{where}: {key} is {json.dumps(fault['input'], default=str)}; {message[:1].lower()}{message[1:]}"


def _key(keys: Keys) -> str:
    """Returns the name of the last key for messages.

    >>> _key(("seq_len",)), _key(("monitor", "sinks", 0))
    ('seq_len', 'sinks[0]')
    """
    if len(keys) > 1 and isinstance(keys[-1], int):
        return f"{_key(keys[:-1])}[{keys[-1]}]"
    return str(keys[-1]) if keys else ""


def _legal_keys(record: Any, keys: Keys) -> list[str]:
    """Returns the field names of the record at `keys`."""
    for key in keys:
        if isinstance(key, int):
            continue  # the items of a list are of the same type
        hint = get_type_hints(record).get(key)
        record = next((form for form in _forms(hint) if dataclasses.is_dataclass(form)), None)
        if record is None:
            return []
    return [field.name for field in dataclasses.fields(record)]


def _forms(hint: Any) -> Iterator[Any]:
    """Yields a type and those inside it."""
    yield hint
    for inner in getattr(hint, "__args__", ()):
        yield from _forms(inner)


def load_json(record: type[T], path: Path, *, upgrade: Callable[[Any], Any] = lambda data: data) -> T:
    """Returns the record in a JSON file that dstrain wrote; `upgrade` converts the data of older versions.

    Raises InvalidConfig if it is missing, damaged, or written by a newer dstrain.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidConfig(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{path}: cannot be read: {error}") from None
    _require_known_schema(record, data, path)
    return from_data(record, upgrade(data), locate=lambda place: f"{path}: /{'/'.join(map(str, place))}")


def _require_known_schema(record: Any, data: Any, path: Path) -> None:
    """Raises InvalidConfig for a file of a newer version than the record's, whose unknown keys are no typos."""
    supported = next((field.default for field in dataclasses.fields(record) if field.name == "schema"), None)
    schema = data.get("schema") if isinstance(data, dict) else None
    if isinstance(supported, int) and isinstance(schema, int) and schema > supported:
        problem = f"{path}: written by a newer dstrain (schema {schema}; this version reads up to {supported})"
        raise InvalidConfig(problem, hint="pip install --upgrade dstrain")
