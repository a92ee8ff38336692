"""Prints the explanation of a key of job.yaml, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dstrain.config.document import lookup
from dstrain.config.explain.job_key import JobKey
from dstrain.config.lint.subject import ABSENT
from dstrain.wrapping import wrapped


def lines(key: JobKey, job: Mapping[str, Any] | None) -> list[str]:
    """Returns the explanation in lines that fit a terminal; `job` is the job file here, if there is one."""
    facts = [("type", key.type_text)]
    if (default := key.default_text) is not None:
        facts.append(("default", default))
    if key.inside:
        facts.append(("inside", ", ".join(key.inside)))
    if key.fills:
        facts.append(("fills in", f'"auto" of {", ".join(key.fills)} in ds_config.json'))
    if (here := _here(key, job)) is not None:
        facts.append(("here", here))
    text = [f"{key.path} of job.yaml", f"  {key.meaning}", "", *(f"  {label:<9} {value}" for label, value in facts)]
    return [wrapped(line) for line in text]


def _here(key: JobKey, job: Mapping[str, Any] | None) -> str | None:
    """Returns the value in the job here; None without a job, and for a key of several data sets or rules."""
    if job is None or "[]" in key.path or ".RULE." in key.path:
        return None
    value = lookup(job, tuple(key.path.split(".")))
    return "not written" if value is ABSENT else json.dumps(value, ensure_ascii=False)


def document(key: JobKey) -> dict[str, Any]:
    """Returns the answer as JSON-ready data."""
    return {
        "key": key.path,
        "meaning": key.meaning,
        "type": key.type_text,
        "default": key.schema.get("default"),
        "is_required": key.is_required,
        "inside": list(key.inside),
        "fills": list(key.fills),
    }
