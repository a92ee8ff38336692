"""JSON schemas of ds_config.json and job.yaml for editors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from dstrain.config.key_text import description
from dstrain.config.keys.key import Key, Kind, Names
from dstrain.config.keys.table import children
from dstrain.job.schema import Job
from dstrain.records import json_schema

DRAFT = "http://json-schema.org/draft-07/schema#"
"""The newest draft that the JSON and YAML servers of editors know whole."""
CONFIG_SCHEMA = ".dstrain/ds_config.schema.json"
"""Where the schema of ds_config.json stands, from the folder of the generated files."""
JOB_SCHEMA = ".dstrain/job.schema.json"
"""Where the schema of job.yaml stands."""
SCHEMA_KEY = "$schema"
"""The key by which a JSON file names its schema to editors; DeepSpeed ignores it."""

_TYPES = {
    Kind.BOOL: "boolean",
    Kind.INT: "integer",  # draft 7 counts 5e8 as one
    Kind.NUMBER: "number",
    Kind.TEXT: "string",
    Kind.OBJECT: "object",
    Kind.LIST: "array",
}
_AUTO = "auto"


def schema_files() -> dict[str, str]:
    """Returns the schemas that stand beside generated files: relative path and text."""
    return {CONFIG_SCHEMA: text(config_schema()), JOB_SCHEMA: text(job_schema())}


def text(schema: Mapping[str, Any]) -> str:
    """Returns a schema as a file."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def config_schema() -> dict[str, Any]:
    """Returns the schema of a DeepSpeed configuration that the Trainer is given.

    Names that the engine refuses or ignores are errors: both are typos. Removed keys are not there.

    >>> config_schema()["properties"]["bf16"]["properties"]["enabled"]["anyOf"]
    [{'type': 'boolean'}, {'enum': ['auto']}]
    """
    named = {
        SCHEMA_KEY: {"type": "string", "description": "Where editors find this schema; DeepSpeed ignores it."},
        **_properties(()),
    }
    return {
        "$schema": DRAFT,
        "title": "DeepSpeed configuration, as 0.19.8 reads it",
        "description": "Everything that the engine reads. A name that begins with _ or x- is a note of your own.",
        "type": "object",
        "properties": named,
        "patternProperties": {"^(_|x-)": {"description": "A note of your own; the engine ignores it."}},
        "additionalProperties": False,
    }


def _properties(path: tuple[str, ...]) -> dict[str, Any]:
    """Returns the schemas of the names directly below a path."""
    return {name: _value((*path, name), key) for name, key in _named(path) if name != "*"}


def _named(path: tuple[str, ...]) -> Iterable[tuple[str, Key]]:
    return ((key.path.rsplit(".", 1)[-1], key) for key in children(path) if key.removed is None)


def _value(path: tuple[str, ...], key: Key) -> dict[str, Any]:
    """Returns the schema of what may stand at a path, with all that is known of it."""
    own = _own(path, key)
    words = key.words if key.kind is not Kind.TEXT else ()
    words = (*words, _AUTO) if key.filled is not None and _AUTO not in words else words
    found: dict[str, Any] = {"anyOf": [own, {"enum": list(words)}]} if words else own
    found["description"] = description(key)
    if key.default is not None:
        found["default"] = key.default
    if key.instead is not None:
        found |= {"deprecated": True, "deprecationMessage": f"Deprecated: {key.instead}."}
    return found


def _own(path: tuple[str, ...], key: Key) -> dict[str, Any]:
    """Returns the schema of a value of the key's own kind."""
    found: dict[str, Any] = {}
    if key.kind in _TYPES:
        found["type"] = [_TYPES[key.kind], "null"] if key.is_nullable else _TYPES[key.kind]
    bounds = {"minimum": key.least, "maximum": key.most, "exclusiveMinimum": key.above, "exclusiveMaximum": key.below}
    found |= {name: bound for name, bound in bounds.items() if bound is not None}
    if key.kind is Kind.TEXT and key.words:
        found["enum"] = [*key.words, *([None] if key.is_nullable else [])]
    below = dict(_named(path))
    if key.kind is Kind.LIST and "*" in below:
        found["items"] = _value((*path, "*"), below["*"])
    if key.kind is Kind.OBJECT:
        found["properties"] = _properties(path)
        if "*" in below:
            found["additionalProperties"] = _value((*path, "*"), below["*"])
        elif key.names is not Names.FREE:
            found["additionalProperties"] = False
    return found


def job_schema() -> dict[str, Any]:
    """Returns the schema of a job file, with the docstrings of its fields.

    >>> job_schema()["properties"]["seq_len"]["exclusiveMinimum"]
    0
    """
    made = json_schema(Job)
    found: dict[str, Any] = _inlined(made, made.get("$defs", {}))
    found["properties"]["env"]["additionalProperties"] = {"type": ["string", "number", "boolean"]}  # read as text
    return {"$schema": DRAFT, **found, "title": "Job of dstrain", "description": (Job.__doc__ or "").strip()}


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Returns a schema with the definitions in the places that name them: in draft 7 nothing counts beside a $ref."""
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _inlined(value, definitions) for name, value in schema.items() if name not in ("$ref", "$defs")}
    if "$ref" in schema:
        found = {**_inlined(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions), **found}
    if isinstance(found.get("title"), str):
        del found["title"]  # the name of the field again
    return found
