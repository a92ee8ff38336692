"""Prints the explanation of one key, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dstrain.cli.output.effects import cost_text, effect_text
from dstrain.cli.output.plan import subject_lines
from dstrain.config.document import REMOVED, lookup
from dstrain.config.explain.key import OF_JOB, Chosen, Here, Way, choose, counted, ways, why
from dstrain.config.jsonc import Pointer
from dstrain.config.key_bytes import Scale, cost, scale
from dstrain.config.key_text import default_text, kind_text, meaning
from dstrain.config.keys.key import Key, Kind
from dstrain.config.keys.table import children, is_read
from dstrain.config.lint.finding import json_pointer
from dstrain.config.lint.subject import ABSENT
from dstrain.config.resolve_auto import JOB_KEYS
from dstrain.errors import DstrainError
from dstrain.facts.ds_config import zero_stage
from dstrain.plan.effect import Effect
from dstrain.plan.estimate import unplanned_optimizer
from dstrain.units import format_bytes, format_seconds
from dstrain.wrapping import wrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The explanation of a key."""

    pointer: Pointer
    """Its place in a configuration."""
    key: Key
    """Its row in the table of keys."""
    here: Here | None
    """The job with its configuration, model and machines; None if one of them is missing."""
    missing: str | None
    """What is missing, if something is."""
    chosen: Chosen | None
    """What dstrain would write."""
    unchosen: str | None
    """Why dstrain cannot choose, if it cannot."""
    ways: tuple[Way, ...]
    """Its possible values, with the effect of each."""


def explain(pointer: Pointer, key: Key, here: Here | None, missing: str | None) -> Explanation:
    """Returns the explanation of a key; with a job this plans once and estimates a few configurations."""
    chosen, unchosen = None, None
    if here is not None and key.removed is None:
        try:
            chosen = choose(key, here)
        except DstrainError as error:
            unchosen = error.problem
    values = tuple(ways(key, here, chosen)) if here is not None and key.removed is None else ()
    return Explanation(
        pointer=pointer, key=key, here=here, missing=missing, chosen=chosen, unchosen=unchosen, ways=values
    )


def lines(explanation: Explanation) -> list[str]:
    """Returns the explanation in lines that fit a terminal."""
    key = explanation.key
    text = [".".join(map(str, explanation.pointer)), f"  {meaning(key)}", ""]
    text += [f"  {label:<9} {value}" for label, value in _facts(key)]
    if key.kind is Kind.OBJECT and (inside := [row.path.rsplit(".", 1)[-1] for row in _live(explanation.pointer)]):
        text.append(f"  inside    {', '.join(inside)}")
    if key.removed is None:
        text += ["", *_here_lines(explanation)]
    return [wrapped(line) for line in text]


def _live(pointer: Pointer) -> list[Key]:
    return [row for row in children(pointer) if row.removed is None]


def _facts(key: Key) -> list[tuple[str, str]]:
    """Returns the facts about a key that hold for every job, with labels."""
    facts = [("type", kind_text(key))]
    if (default := default_text(key)) is not None:
        facts.append(("default", default))
    if key.kind is not Kind.OBJECT and key.removed is None:
        nobody = "not filled in; the Trainer ends the run"
        facts.append(('"auto"', f"the Trainer fills in {key.filled}" if key.filled else nobody))
    if (of_job := JOB_KEYS.get(tuple(key.path.split(".")))) is not None:
        facts.append(("job.yaml", f"{of_job}; dstrain explain {of_job} says more"))
    if key.alias_of is not None:
        facts.append(("same as", key.alias_of))
    if key.since is not None:
        facts.append(("since", f"DeepSpeed {key.since}"))
    if key.removed is not None:
        facts.append(("gone", f"since DeepSpeed {key.removed}"))
    if key.instead is not None:
        facts.append(("instead", key.instead))
    return [*facts, ("source", f"deepspeed/{key.source}")]


def _here_lines(explanation: Explanation) -> list[str]:
    """Returns what holds for the job, or what is missing to say so."""
    key, here = explanation.key, explanation.here
    if here is None:
        return [
            f"No numbers: {explanation.missing}.",
            "With a job and a known model, this shows the choice of dstrain and the cost of each value.",
        ]
    model, cluster = here.workload.model, here.workload.cluster
    by = scale(here.config, here.request, model, num_ranks=cluster.num_gpus)
    path = tuple(key.path.split(".")) if "*" not in key.path else explanation.pointer
    text = [*(f"{line}" for line in subject_lines(here.workload)), ""]
    stage = zero_stage(here.config)
    idle = "" if is_read(path, stage) else f"; not read under ZeRO-{stage}"
    now = lookup(here.config, path)
    text.append(f"  here      {_value_text(now, here.config, key, by)}{_of_job(key, here, now)}{idle}")
    text += _chosen_lines(explanation, path, by)
    return [*text, "", *_way_lines(explanation, by)]


def _of_job(key: Key, here: Here, now: Any) -> str:
    """Returns what ranks get from the job in place of a number that the configuration lacks."""
    name = OF_JOB.get(key.path, "precision")
    if now not in (ABSENT, REMOVED, "auto") or name == "precision" or getattr(here.request, name) is None:
        return ""
    return f"; ranks get {getattr(here.request, name)} ({name} of the job)"


def _chosen_lines(explanation: Explanation, path: Pointer, by: Scale) -> list[str]:
    chosen = explanation.chosen
    if chosen is None:
        return [f"  dstrain   unknown: {explanation.unchosen}"]
    fits = "" if chosen.fits else " (the closest; does not fit)"
    value = _value_text(lookup(chosen.config, path), chosen.config, explanation.key, by)
    text = [f"  dstrain   {value}, with {chosen.configuration.title}{fits}"]
    return text + [f"    - {reason}" for reason in why(explanation.key, chosen)]


def _value_text(value: Any, config: Mapping[str, Any], key: Key, by: Scale) -> str:
    """Returns a value as it is written in a configuration, with its bytes."""
    if value is ABSENT or value is REMOVED:
        default = default_text(key)
        return "not written" + (f" ({default})" if default else "")
    return json.dumps(value, ensure_ascii=False) + cost_text(cost(key.alias_of or key.path, value, config, by))


def _way_lines(explanation: Explanation, by: Scale) -> list[str]:
    """Returns a line for each possible value of the key."""
    key = explanation.key
    path = key.alias_of or key.path
    place = counted(key)
    if place is None or not explanation.ways:
        return ["The planner ignores this key: its estimates do not depend on the value."]
    problem = next((way.problem for way in explanation.ways if way.problem), None)
    if problem is not None and not any(way.effect for way in explanation.ways):
        return [f"No numbers: {problem}."]
    what = f"{OF_JOB[path]} of the job" if path in OF_JOB else place[1].path.removeprefix("zero_optimization.")
    labels = [_label(way) for way in explanation.ways]
    width = max(map(len, labels))
    text = [f"Memory and time if only {what} changes"]
    if path.startswith("optimizer") and explanation.here and (note := unplanned_optimizer(explanation.here.config)):
        text.append(f"  {note}")
    return text + [f"  {label:<{width}}  {_does(way)}" for label, way in zip(labels, explanation.ways, strict=True)]


def _label(way: Way) -> str:
    return "not written" if way.value is REMOVED else json.dumps(way.value, ensure_ascii=False)


def _does(way: Way) -> str:
    marks = [name for name, is_so in (("current", way.is_here), ("dstrain's", way.is_chosen)) if is_so]
    name = f" ({', '.join(marks)})" if marks else ""
    if way.effect is None or way.estimate is None:
        return f"cannot be estimated: {way.problem}{name}"
    if not way.is_here:
        return (way.remark or "no difference" if _is_nothing(way.effect) else effect_text(way.effect)) + name
    step = f", {format_seconds(way.estimate.speed.step_s)} a step" if way.estimate.speed else ""
    return f"{format_bytes(way.estimate.memory.device_bytes_per_gpu)} a GPU{step}{name}"


def _is_nothing(effect: Effect) -> bool:
    return not effect.device_bytes_per_gpu and not effect.host_bytes_per_node and not effect.step_ratio


def document(explanation: Explanation) -> dict[str, Any]:
    """Returns the answer as JSON-ready data."""
    key = asdict(explanation.key)
    return {
        "schema": 1,
        "pointer": json_pointer(explanation.pointer),
        "key": {
            **key,
            "kind": str(explanation.key.kind),
            "names": str(explanation.key.names),
            "type": kind_text(explanation.key),
        },
        "here": None if explanation.here is None else _here_document(explanation, explanation.here),
        "missing": explanation.missing,
        "is_counted": counted(explanation.key) is not None,
    }


def _here_document(explanation: Explanation, here: Here) -> dict[str, Any]:
    path = tuple(explanation.key.path.split(".")) if "*" not in explanation.key.path else explanation.pointer
    chosen, cluster = explanation.chosen, here.workload.cluster
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
            "reasons": why(explanation.key, chosen),
        },
        "problem": explanation.unchosen,
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
            for way in explanation.ways
        ],
    }


def _plain(value: Any) -> Any:
    return None if value is ABSENT or value is REMOVED else value
