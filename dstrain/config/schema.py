"""JSON schemas of ds_config.json and job.yaml for editors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from dstrain.config.keys import Key, Kind, Names, children, description
from dstrain.job.schema import Job
from dstrain.records import json_schema

DRAFT = "http://json-schema.org/draft-07/schema#"
"""The newest draft that editors' JSON and YAML language servers fully support."""
CONFIG_SCHEMA = ".dstrain/ds_config.schema.json"
"""The path of the schema of ds_config.json, relative to the generated files."""
JOB_SCHEMA = ".dstrain/job.schema.json"
"""The path of the schema of job.yaml, relative to the generated files."""
SCHEMA_KEY = "$schema"
"""The key that tells editors the schema of a JSON file; DeepSpeed ignores it."""

_TYPES = {
    Kind.BOOL: "boolean",
    Kind.INT: "integer",  # draft 7 accepts 5e8
    Kind.NUMBER: "number",
    Kind.TEXT: "string",
    Kind.OBJECT: "object",
    Kind.LIST: "array",
}
_AUTO = "auto"


def schema_files() -> dict[str, str]:
    """Returns the schemas written next to the generated files, by relative path."""
    return {CONFIG_SCHEMA: text(config_schema()), JOB_SCHEMA: text(job_schema())}


def text(schema: Mapping[str, Any]) -> str:
    """Returns the text of a schema file."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def config_schema() -> dict[str, Any]:
    """Returns the schema of a DeepSpeed configuration for the Trainer.

    Names that the engine refuses or ignores are errors: both are typos. Removed keys are omitted.

    >>> config_schema()["properties"]["bf16"]["properties"]["enabled"]["anyOf"]
    [{'type': 'boolean'}, {'enum': ['auto']}]
    """
    named = {
        SCHEMA_KEY: {"type": "string", "description": "The path of this schema, for editors; DeepSpeed ignores it."},
        **_properties(()),
    }
    return {
        "$schema": DRAFT,
        "title": "DeepSpeed configuration (0.19.8)",
        "description": "All keys that the engine reads. Names that begin with _ or x- are your own notes.",
        "type": "object",
        "properties": named,
        "patternProperties": {"^(_|x-)": {"description": "Your own note; the engine ignores it."}},
        "additionalProperties": False,
    }


def _properties(path: tuple[str, ...]) -> dict[str, Any]:
    """Returns the schemas of the names directly below a path."""
    return {name: _value((*path, name), key) for name, key in _named(path) if name != "*"}


def _named(path: tuple[str, ...]) -> Iterable[tuple[str, Key]]:
    return ((key.path.rsplit(".", 1)[-1], key) for key in children(path) if key.removed is None)


def _value(path: tuple[str, ...], key: Key) -> dict[str, Any]:
    """Returns the schema of the value at a path, with its description and default."""
    own = _own(path, key)
    words = key.words if key.kind is not Kind.TEXT else ()
    words = (*words, _AUTO) if key.filled is not None and _AUTO not in words else words
    schema: dict[str, Any] = {"anyOf": [own, {"enum": list(words)}]} if words else own
    schema["description"] = description(key)
    if key.default is not None:
        schema["default"] = key.default
    if key.instead is not None:
        schema |= {"deprecated": True, "deprecationMessage": f"Deprecated: {key.instead}."}
    return schema


def _own(path: tuple[str, ...], key: Key) -> dict[str, Any]:
    """Returns the schema of a value of the key's own kind."""
    schema: dict[str, Any] = {}
    if key.kind in _TYPES:
        schema["type"] = [_TYPES[key.kind], "null"] if key.is_nullable else _TYPES[key.kind]
    bounds = {"minimum": key.least, "maximum": key.most, "exclusiveMinimum": key.above, "exclusiveMaximum": key.below}
    schema |= {name: bound for name, bound in bounds.items() if bound is not None}
    if key.kind is Kind.TEXT and key.words:
        schema["enum"] = [*key.words, *([None] if key.is_nullable else [])]
    inner = dict(_named(path))
    if key.kind is Kind.LIST and "*" in inner:
        schema["items"] = _value((*path, "*"), inner["*"])
    if key.kind is Kind.OBJECT:
        schema["properties"] = _properties(path)
        if "*" in inner:
            schema["additionalProperties"] = _value((*path, "*"), inner["*"])
        elif key.names is not Names.FREE:
            schema["additionalProperties"] = False
    return schema


def job_schema() -> dict[str, Any]:
    """Returns the schema of a job file; descriptions are the docstrings of its fields.

    >>> job_schema()["properties"]["seq_len"]["exclusiveMinimum"]
    0
    """
    raw = json_schema(Job)
    schema: dict[str, Any] = _inlined(raw, raw.get("$defs", {}))
    schema["properties"]["env"]["additionalProperties"] = {"type": ["string", "number", "boolean"]}  # read as text
    return {"$schema": DRAFT, **schema, "title": "dstrain job", "description": (Job.__doc__ or "").strip()}


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Returns a schema with definitions inlined: draft 7 ignores the siblings of a $ref."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inlined = {name: _inlined(value, definitions) for name, value in schema.items() if name not in ("$ref", "$defs")}
    if "$ref" in schema:
        inlined = {**_inlined(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions), **inlined}
    if isinstance(inlined.get("title"), str):
        del inlined["title"]  # it repeats the name of the field
    return inlined
