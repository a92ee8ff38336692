"""Finds keys of job.yaml, and says what they are in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from dstrain.config.document import dotted
from dstrain.config.keys.table import listed
from dstrain.config.resolve_auto import JOB_KEYS
from dstrain.config.schema import job_schema

_KINDS = {"boolean": "true or false", "integer": "whole number", "number": "number", "string": "text"}
_BOUNDS = {"minimum": "at least", "maximum": "at most", "exclusiveMinimum": "above", "exclusiveMaximum": "below"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKey:
    """A key of job.yaml."""

    path: str
    """Dotted; `data[].weight` is a key of each data set, `health.RULE.warn` one of each rule."""
    schema: Mapping[str, Any]
    """Its JSON schema; the description is the docstring of its field."""
    is_required: bool = False

    @property
    def meaning(self) -> str:
        """Its sentence."""
        return " ".join(str(self.schema.get("description", "")).split())

    @property
    def type_text(self) -> str:
        """Its type in words, with its bounds and legal values."""
        return _type_text(self.schema)

    @property
    def default_text(self) -> str | None:
        """Its default as it is written; None for a section."""
        if self.is_required:
            return "none: it is required"
        return json.dumps(self.schema["default"], ensure_ascii=False) if "default" in self.schema else None

    @property
    def inside(self) -> tuple[str, ...]:
        """The names in a section."""
        return tuple(name for _, part in _sections(self.schema) for name in part)

    @property
    def fills(self) -> tuple[str, ...]:
        """The keys of ds_config.json whose "auto" it fills in."""
        return tuple(dotted(pointer) for pointer, key in JOB_KEYS.items() if key == self.path)


@cache
def job_keys() -> Mapping[str, JobKey]:
    """Returns every key by its path.

    >>> job_keys()["lora.rank"].type_text, job_keys()["data[].weight"].default_text
    ('whole number above 0', 'null')
    """
    schema = job_schema()
    return {key.path: key for key in _keys(schema, "", frozenset(schema["required"]))}


def find(text: str) -> list[JobKey]:
    """Returns the key with a path, or all keys whose path ends with it.

    >>> [key.path for key in find("rank")], find("overlap_comm")
    (['lora.rank'], [])
    """
    path, keys = text.strip("/. ").replace("/", "."), job_keys()
    if path in keys:
        return [keys[path]]
    return [key for name, key in keys.items() if name.endswith(f".{path}")]


def _keys(schema: Mapping[str, Any], prefix: str, required: frozenset[str] = frozenset()) -> Iterator[JobKey]:
    for between, properties in _sections(schema):
        for name, inner in properties.items():
            path = f"{prefix}{between}{'.' if prefix else ''}{name}"
            yield JobKey(path=path, schema=inner, is_required=name in required)
            yield from _keys(inner, path)


def _sections(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the named keys in a value, with what is between its path and theirs; one in a list once."""
    forms = list(schema.get("anyOf", [schema]))
    lists = [form["items"] for form in forms if isinstance(form.get("items"), dict)]
    forms = [inner for form in forms for inner in form.get("anyOf", [form])]
    rows = [inner for item in lists for inner in item.get("anyOf", [item]) if "properties" in inner]
    if rows:
        yield "[]", rows[0]["properties"]
        return
    for form in forms:
        if "properties" in form:
            yield "", form["properties"]
        elif isinstance(rule := form.get("additionalProperties"), dict) and "properties" in rule:
            yield ".RULE", rule["properties"]


def _type_text(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        forms = [form for form in schema["anyOf"] if form.get("type") != "null"]
        or_null = ", or null" if len(forms) < len(schema["anyOf"]) else ""
        return listed(list(dict.fromkeys(map(_type_text, forms)))) + or_null
    if "enum" in schema:
        return listed([str(word) for word in schema["enum"]])
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_type_text(schema.get('items', {}))}"
    if kind == "object":
        return "section" if list(_sections(schema)) else "names with values"
    bounds = [f"{words} {schema[key]}" for key, words in _BOUNDS.items() if key in schema]
    return " ".join([_KINDS.get(str(kind), "any value"), " and ".join(bounds)]).strip()
