"""Prints the explanation of one key, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dstrain.cli.console import wrapped
from dstrain.cli.output.effects import effect_text
from dstrain.cli.output.explain import said_bytes
from dstrain.cli.output.plan import subject_lines
from dstrain.config.document import REMOVED, lookup
from dstrain.config.explain.file import is_idle, stage_of
from dstrain.config.explain.key import OF_JOB, Chosen, Here, Way, choose, counted, ways, why
from dstrain.config.jsonc import Pointer
from dstrain.config.key_bytes import Scale, cost, scale
from dstrain.config.key_text import default_text, kind_text, meaning
from dstrain.config.keys.key import Key, Kind
from dstrain.config.keys.table import children
from dstrain.config.lint.finding import json_pointer
from dstrain.config.lint.subject import ABSENT
from dstrain.errors import DstrainError
from dstrain.plan.effect import Effect
from dstrain.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A key with all that is known of it here."""

    pointer: Pointer
    """Where it stands, or would."""
    key: Key
    """Its row."""
    here: Here | None
    """The job here."""
    missing: str | None
    """What is missing for numbers."""
    chosen: Chosen | None
    """What dstrain would write."""
    unchosen: str | None
    """Why nobody can say that."""
    ways: tuple[Way, ...]
    """What it could be, with what each does."""


def explained(pointer: Pointer, key: Key, here: Here | None, missing: str | None) -> Explained:
    """Returns all that is known of a key; with a job here this plans once and estimates a few configurations."""
    chosen, unchosen = None, None
    if here is not None and key.removed is None:
        try:
            chosen = choose(key, here)
        except DstrainError as error:
            unchosen = error.problem
    found = tuple(ways(key, here, chosen)) if here is not None and key.removed is None else ()
    return Explained(pointer=pointer, key=key, here=here, missing=missing, chosen=chosen, unchosen=unchosen, ways=found)


def lines(found: Explained) -> list[str]:
    """Returns a key in lines that fit a terminal."""
    key = found.key
    text = [".".join(map(str, found.pointer)), f"  {meaning(key)}", ""]
    text += [f"  {label:<9} {value}" for label, value in _facts(key)]
    if key.kind is Kind.OBJECT and (inside := [row.path.rsplit(".", 1)[-1] for row in _live(found.pointer)]):
        text.append(f"  inside    {', '.join(inside)}")
    if key.removed is None:
        text += ["", *_here_lines(found)]
    return [wrapped(line) for line in text]


def _live(pointer: Pointer) -> list[Key]:
    return [row for row in children(pointer) if row.removed is None]


def _facts(key: Key) -> list[tuple[str, str]]:
    """Returns what is known of a key wherever it stands, with labels."""
    facts = [("type", kind_text(key))]
    if (default := default_text(key)) is not None:
        facts.append(("default", default))
    if key.kind is not Kind.OBJECT and key.removed is None:
        nobody = "nothing fills it in, and the Trainer ends the run"
        facts.append(('"auto"', f"the Trainer fills in {key.filled}" if key.filled else nobody))
    if key.alias_of is not None:
        facts.append(("same as", key.alias_of))
    if key.since is not None:
        facts.append(("since", f"DeepSpeed {key.since}"))
    if key.removed is not None:
        facts.append(("gone", f"since DeepSpeed {key.removed}"))
    if key.instead is not None:
        facts.append(("instead", key.instead))
    return [*facts, ("source", f"deepspeed/{key.source}")]


def _here_lines(found: Explained) -> list[str]:
    """Returns what holds here, or what is missing to say so."""
    key, here = found.key, found.here
    if here is None:
        return [
            f"No numbers: {found.missing}.",
            "With a job whose model is known: what dstrain would choose, and what each value costs.",
        ]
    model, cluster = here.workload.model, here.workload.cluster
    by = scale(here.config, here.request, model, num_ranks=cluster.num_gpus)
    path = tuple(key.path.split(".")) if "*" not in key.path else found.pointer
    text = [*(f"{line}" for line in subject_lines(here.workload)), ""]
    stage = stage_of(here.config)
    idle = f"; nothing reads it under ZeRO-{stage}" if is_idle(key, stage) else ""
    text.append(f"  here      {_said(lookup(here.config, path), here.config, key, by)}{idle}")
    text += _chosen_lines(found, path, by)
    return [*text, "", *_way_lines(found, by)]


def _chosen_lines(found: Explained, path: Pointer, by: Scale) -> list[str]:
    chosen = found.chosen
    if chosen is None:
        return [f"  dstrain   cannot say: {found.unchosen}"]
    fits = "" if chosen.fits else ", which comes nearest and does not fit"
    said = _said(lookup(chosen.config, path), chosen.config, found.key, by)
    text = [f"  dstrain   {said}, with {chosen.configuration.title}{fits}"]
    return text + [f"    - {reason}" for reason in why(found.key, chosen)]


def _said(value: Any, config: Mapping[str, Any], key: Key, by: Scale) -> str:
    """Returns a value as it stands in a configuration, with the bytes that it takes."""
    if value is ABSENT or value is REMOVED:
        default = default_text(key)
        return "not written" + (f" ({default})" if default else "")
    return json.dumps(value, ensure_ascii=False) + said_bytes(cost(key.alias_of or key.path, value, config, by))


def _way_lines(found: Explained, by: Scale) -> list[str]:
    """Returns a line for each value that the key could have."""
    key = found.key
    path = key.alias_of or key.path
    place = counted(key)
    if place is None or not found.ways:
        return ["The planner does not count this key: it estimates memory and speed the same either way."]
    problem = next((way.problem for way in found.ways if way.problem), None)
    if problem is not None and not any(way.effect for way in found.ways):
        return [f"No numbers: {problem}."]
    what = f"{OF_JOB[path]} of the job" if path in OF_JOB else place[1].path.removeprefix("zero_optimization.")
    labels = [_label(way) for way in found.ways]
    width = max(map(len, labels))
    text = [f"Memory and time if only {what} were"]
    return text + [f"  {label:<{width}}  {_does(way)}" for label, way in zip(labels, found.ways, strict=True)]


def _label(way: Way) -> str:
    return "not written" if way.value is REMOVED else json.dumps(way.value, ensure_ascii=False)


def _does(way: Way) -> str:
    marks = [name for name, is_so in (("as here", way.is_here), ("dstrain's", way.is_chosen)) if is_so]
    name = f" ({', '.join(marks)})" if marks else ""
    if way.effect is None or way.estimate is None:
        return f"cannot be estimated: {way.problem}{name}"
    if not way.is_here:
        return (way.remark or "no difference" if _is_nothing(way.effect) else effect_text(way.effect)) + name
    step = f", {format_seconds(way.estimate.speed.step_s)} a step" if way.estimate.speed else ""
    return f"{format_bytes(way.estimate.memory.device_bytes_per_gpu)} a GPU{step}{name}"


def _is_nothing(each: Effect) -> bool:
    return not each.device_bytes_per_gpu and not each.host_bytes_per_node and not each.step_ratio


def document(found: Explained) -> dict[str, Any]:
    """Returns the answer as JSON-ready data."""
    key = asdict(found.key)
    return {
        "schema": 1,
        "pointer": json_pointer(found.pointer),
        "key": {**key, "kind": str(found.key.kind), "names": str(found.key.names), "type": kind_text(found.key)},
        "here": None if found.here is None else _here_document(found, found.here),
        "missing": found.missing,
        "is_counted": counted(found.key) is not None,
    }


def _here_document(found: Explained, here: Here) -> dict[str, Any]:
    path = tuple(found.key.path.split(".")) if "*" not in found.key.path else found.pointer
    chosen, cluster = found.chosen, here.workload.cluster
    return {
        "model": here.workload.model.name,
        "gpus": cluster.num_gpus,
        "gpu": cluster.gpu.name,
        "is_written": lookup(here.config, path) is not ABSENT,
        "value": _plain(lookup(here.config, path)),
        "dstrain": None
        if chosen is None
        else {
            "is_written": lookup(chosen.config, path) is not ABSENT,
            "value": _plain(lookup(chosen.config, path)),
            "title": chosen.configuration.title,
            "fits": chosen.fits,
            "reasons": why(found.key, chosen),
        },
        "problem": found.unchosen,
        "ways": [
            {
                "is_written": way.value is not REMOVED,
                "value": _plain(way.value),
                "is_here": way.is_here,
                "is_chosen": way.is_chosen,
                "effect": asdict(way.effect) if way.effect else None,
                "problem": way.problem,
                "remark": way.remark,
            }
            for way in found.ways
        ],
    }


def _plain(value: Any) -> Any:
    return None if value is ABSENT or value is REMOVED else value
