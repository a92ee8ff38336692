"""Prints the explanation of a key of ds_config.json or job.yaml, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dstrain.cli.edits import cost_text, effect_text
from dstrain.cli.output.plan import subject_lines
from dstrain.config.explain import Chosen, Here, JobKey, Way, choose, counted, ways, why
from dstrain.config.jsonc import REMOVED, Pointer, json_pointer, lookup
from dstrain.config.key_bytes import Scale, cost, scale
from dstrain.config.keys import Key, Kind, children, default_text, is_read, kind_text, meaning
from dstrain.config.lint.rule import ABSENT
from dstrain.config.resolve_auto import JOB_KEYS, REPEATED_KEYS
from dstrain.errors import DstrainError
from dstrain.facts.ds_config import zero_stage
from dstrain.plan.estimate import unplanned_optimizer
from dstrain.plan.labels import title
from dstrain.units import format_bytes, format_seconds
from dstrain.wrapping import aligned, wrapped


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
    """The missing piece, if there is one."""
    chosen: Chosen | None
    """The value that dstrain would write."""
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
    """Returns the value for the job, or the piece that is missing to say it."""
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
    """Returns the number that ranks get from the job if the configuration lacks it."""
    name = REPEATED_KEYS.get(key.path, "precision")
    if now not in (ABSENT, REMOVED, "auto") or name == "precision" or getattr(here.request, name) is None:
        return ""
    return f"; ranks get {getattr(here.request, name)} ({name} of the job)"


def _chosen_lines(explanation: Explanation, path: Pointer, by: Scale) -> list[str]:
    chosen = explanation.chosen
    if chosen is None:
        return [f"  dstrain   unknown: {explanation.unchosen}"]
    fits = "" if chosen.fits else " (the closest; does not fit)"
    value = _value_text(lookup(chosen.config, path), chosen.config, explanation.key, by)
    text = [f"  dstrain   {value}, with {title(chosen.configuration)}{fits}"]
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
    of_job = REPEATED_KEYS.get(path)
    what = f"{of_job} of the job" if of_job is not None else place[1].path.removeprefix("zero_optimization.")
    text = [f"Memory and time if only {what} changes"]
    if path.startswith("optimizer") and explanation.here and (note := unplanned_optimizer(explanation.here.config)):
        text.append(f"  {note}")
    labels = [
        "not written" if w.value is REMOVED else json.dumps(w.value, ensure_ascii=False) for w in explanation.ways
    ]
    return text + [f"  {line}" for line in aligned(list(zip(labels, map(_does, explanation.ways), strict=True)))]


def _does(way: Way) -> str:
    marks = [name for name, is_so in (("current", way.is_here), ("dstrain's", way.is_chosen)) if is_so]
    name = f" ({', '.join(marks)})" if marks else ""
    if way.effect is None or way.estimate is None:
        return f"cannot be estimated: {way.problem}{name}"
    if not way.is_here:
        effect = way.effect
        is_felt = effect.device_bytes_per_gpu or effect.host_bytes_per_node or effect.step_ratio
        return (effect_text(effect) if is_felt else way.remark or "no difference") + name
    step = f", {format_seconds(way.estimate.speed.step_s)} a step" if way.estimate.speed else ""
    return f"{format_bytes(way.estimate.memory.device_bytes_per_gpu)} a GPU{step}{name}"


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
    # a key with a name of the user's in its path, such as a group's, is looked up where the user pointed
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
            "title": title(chosen.configuration),
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


def job_key_lines(key: JobKey, job: Mapping[str, Any] | None) -> list[str]:
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


def job_key_document(key: JobKey) -> dict[str, Any]:
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
