"""Turns an imported file into the options of gen-config that ask for the same."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dstrain.choices import Offload
from dstrain.cli.options.question import PlanInputs, plan_inputs, request_of
from dstrain.cli.options.remembered import ResolvedOptions, as_input, relative
from dstrain.cli.options.typed import spelled
from dstrain.cli.verbs import gen_config
from dstrain.config import jsonc
from dstrain.config.files import config_text
from dstrain.config.imports.converters import HYBRID
from dstrain.config.imports.source import Fate
from dstrain.config.imports.walk import Imported, Note, Value, is_full
from dstrain.config.jsonc import REMOVED, lookup
from dstrain.errors import EnvironmentProblem, InvalidConfig, Place
from dstrain.facts.model.families import LIGER
from dstrain.job.model_changes import ALL_LINEAR
from dstrain.job.schema import Job
from dstrain.plan.estimate import effective
from dstrain.plan.memory.params import named_targets
from dstrain.plan.request import SPEED, Request
from dstrain.plan.rope_scaling import TooLong
from dstrain.plan.search.search_space import Terms, Unsatisfiable

_DEFAULTS = {param.name: param.default for param in gen_config.command.params}
_JOB = {field.name: field.default for field in fields(Job)}
_REQUESTED = tuple(name for name in _JOB if name in _DEFAULTS and name in {*Request.__dataclass_fields__, "hub"})
"""Keys of a job that are options of gen-config, too."""
_CHOSEN = frozenset({"micro_batch", "grad_accum", "grad_ckpt", "grad_ckpt_every_n_layers", "loss", "attn"})
"""Choices that the planner makes for a file without their keys."""
_UNASKED = {
    name: _JOB[name] for name in SPEED if name in _REQUESTED and _DEFAULTS[name] is None and name not in _CHOSEN
}
"""Further choices that it makes if nobody asks, as a job without the key has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportInputs:
    """The questions of an imported file to the planner."""

    imported: Imported
    """With the values that depend on the machines."""
    asked: ResolvedOptions
    """As options of gen-config."""
    facts: PlanInputs
    config: str | None
    """The text of its DeepSpeed configuration; None if gen-config's is to be written."""
    config_name: str
    """The name of that configuration in messages."""


def import_inputs(imported: Imported, typed: Mapping[str, Any], out: Path) -> ImportInputs:
    """Returns the options that ask for what a file says; those that were typed come first.

    Raises InvalidConfig if the file names no model, or its DeepSpeed configuration cannot be read.
    """
    imported = _with_relative_data(imported, typed, out)
    values = imported.values
    model = typed.get("model") or (values["model"].value if "model" in values else None)
    if model is None:
        title = imported.source.tool.title
        raise InvalidConfig(
            f"{imported.source.path}: names no model, as a file of {title} need not", hint="Add --model NAME."
        )
    asked = ((name, values[name].value) for name in _REQUESTED if name in values)
    given = {name: value for name, value in asked if not isinstance(value, Mapping) and value != _DEFAULTS[name]}
    given |= {key: values[key].value for key in _DATA if key in values and isinstance(values[key].value, str)}
    options = {"model": str(model), **_machines(imported), **_UNASKED, **given, **typed}
    if "output_dir" in values:
        options["output_dir"] = str(values["output_dir"].value)
    config, name = _config(imported)
    plan = imported.of("plan")
    options |= {key: plan[key] for key in ("zero_stage", "offload") if key in plan}
    if "zero_stage" in plan:
        options.setdefault("offload", Offload.NONE.value)
    facts = _facts(options, imported)
    if "liger" in given and facts.workload.model.model_type not in LIGER:
        imported, facts = _without_liger(imported, facts)
        options.pop("liger")
    added = _whole(plan, facts) if config is None else _strategy(config, name, facts)
    # last: the batch of other tools is by GPU, so it depends on the machines and the parallelism
    imported, batch = _with_batch(_with_targets(imported, facts), facts)
    options |= added | batch
    if added or batch:
        facts = replace(facts, request=request_of(_parsed(options)))
    inputs = {key: as_input(key, value, out) for key, value in options.items()}
    resolved = ResolvedOptions(options=_parsed(options), inputs=inputs, is_repeated=False)
    return ImportInputs(imported=imported, asked=resolved, facts=facts, config=config, config_name=name)


def _whole(plan: Mapping[str, Any], facts: PlanInputs) -> dict[str, Any]:
    """Returns the options that keep the planner from adding to the strategy of a file: neither a part of the optimizer
    stays on the GPU (Twin-Flow), nor is there a second copy of the parameters (hpZ), unless the file asks for it."""
    if "zero_stage" not in plan:
        return {}
    cluster = facts.workload.cluster
    has_copy = plan.get("hpz") == HYBRID and cluster.num_nodes > 1 and plan.get("offload") != Offload.PARAMS.value
    return {"offload_ratio": 1.0, "hpz": cluster.gpus_per_node if has_copy else 1}


def of_file(error: InvalidConfig, inputs: ImportInputs) -> InvalidConfig:
    """Returns the error of a request that no way satisfies, in the keys of the file that made the request."""
    path = inputs.imported.source.path
    if isinstance(error, TooLong) and (key := _key_of("seq_len", inputs)) is not None:
        name = inputs.imported.values["seq_len"].key
        return InvalidConfig(f"{path}: {key} {error.why}", hint=f"Write `{name}` {error.longest} or less.")
    keys = {name: _key_of(name, inputs) for name in error.names} if isinstance(error, Unsatisfiable) else {}
    if not isinstance(error, Unsatisfiable) or not any(keys.values()):
        return InvalidConfig(f"{path}: {error.problem}", hint=error.hint)
    terms = Terms(choices="these keys", spell=lambda name: keys[name] or error.spell(name))
    return InvalidConfig(f"{path}: {error.say(terms)}", hint="Change one of them." if len(keys) > 1 else "Change it.")


def _key_of(name: str, inputs: ImportInputs) -> str | None:
    """Returns the key of the file that asks for a choice, with its value and its place; None if it has none."""
    imported = inputs.imported
    value = imported.values.get(name)
    if name in ("zero_stage", "offload"):
        value = imported.values.get(f"plan.{name}")
        if value is None and inputs.config is not None:
            inner = ("zero_optimization", "stage" if name == "zero_stage" else "offload_optimizer")
            document = jsonc.read(inputs.config, inputs.config_name)
            found = lookup(document.value, inner)
            return None if found is REMOVED else f"`{'.'.join(inner)}` ({document.place(inner)})"
    if value is None or value.is_default:
        return None
    setting = imported.source.settings.get(value.key)
    given = "" if setting is None else f": {str(setting.value).lower() if setting.value is True else setting.value}"
    return f"`{value.key}{given}` ({value.place})"


def _without_liger(imported: Imported, facts: PlanInputs) -> tuple[Imported, PlanInputs]:
    """Returns the file without Liger's kernels, which its tool too would leave out of an unknown family."""
    values = {target: value for target, value in imported.values.items() if target != "liger"}
    text = f"Liger has no kernels that are planned for {facts.workload.model.model_type}"
    note = Note(fate=Fate.MISSING, key="liger", place=imported.values["liger"].place, text=text)
    request = replace(facts.request, liger=False)
    return replace(imported, values=values, notes=(*imported.notes, note)), replace(facts, request=request)


def _with_targets(imported: Imported, facts: PlanInputs) -> Imported:
    """Returns the file with the names of linear layers in place of an `all-linear` beside other names."""
    value = imported.values.get("lora.targets")
    if value is None or is_full(imported.values) or ALL_LINEAR not in value.value or len(value.value) == 1:
        return imported
    names = list(named_targets(facts.workload.model, value.value))
    text = f"PEFT takes {ALL_LINEAR} alone, so the job names the layers: {', '.join(names)}"
    note = Note(fate=Fate.CHANGED, key=value.key, place=value.place, text=text)
    values = {**imported.values, "lora.targets": replace(value, value=names)}
    return replace(imported, values=values, notes=(*imported.notes, note))


_DATA = ("data", "eval_data")


def _with_relative_data(imported: Imported, typed: Mapping[str, Any], out: Path) -> Imported:
    """Returns the file with lists of data sets as a job in `out` names them, and without data that were typed."""
    values = {target: value for target, value in imported.values.items() if target not in typed or target not in _DATA}
    for key in _DATA:
        if key in values and isinstance(values[key].value, list):
            sources = [{**source, "path": relative(source["path"], out)} for source in values[key].value]
            values[key] = replace(values[key], value=sources)
    return replace(imported, values=values)


def _facts(options: Mapping[str, Any], imported: Imported) -> PlanInputs:
    """Returns the inputs of the planner. Raises EnvironmentProblem if the model's facts cannot be fetched."""
    try:
        return plan_inputs(_parsed(options))
    except EnvironmentProblem as error:
        place = imported.values["model"].place if "model" in imported.values else None
        hint = "Add --model with a local folder or an alias (qwen3-8b), or set HF_ENDPOINT to a mirror."
        raise EnvironmentProblem(error.problem, place=place, hint=hint) from None


def _parsed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns every option of gen-config as if these had been typed."""
    with gen_config.command.make_context("gen-config", shlex.split(spelled(options))) as context:
        return dict(context.params)


def _machines(imported: Imported) -> dict[str, Any]:
    """Returns the options for the machines that the file names; a number of GPUs counts all nodes."""
    machines = imported.of("machines")
    nodes = machines.get("nodes", 1)
    per_node = machines.get("gpus_per_node") or machines.get("visible")
    options: dict[str, Any] = {key: machines[key] for key in ("gpu", "hostfile") if key in machines}
    total = machines.get("gpus") or (per_node * nodes if per_node else None)
    if total is None or "hostfile" in options:
        return options
    return options | {"gpus": total} | ({"gpus_per_node": total // nodes} if nodes > 1 else {})


def _config(imported: Imported) -> tuple[str | None, str]:
    """Returns the text of the DeepSpeed configuration of a file, and its name in messages."""
    source = imported.source
    if source.tool.name == "deepspeed":
        return source.path.read_text(encoding="utf-8"), str(source.path)
    value = imported.values.get("plan.ds_config")
    if value is None:
        return None, "ds_config.json"
    if isinstance(value.value, Mapping):
        return config_text(dict(value.value)), str(source.path)
    path = Path(value.value)
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path}: cannot be read: {error}", place=value.place) from None


def _strategy(config: str, name: str, facts: PlanInputs) -> dict[str, Any]:
    """Returns ZeRO's stage and offload in a DeepSpeed configuration."""
    document = jsonc.read(config, name).value
    zero = effective(facts.workload.model, Request(), document if isinstance(document, dict) else {}).zero
    return {"zero_stage": zero.stage, "offload": zero.offload.value}


def _with_batch(imported: Imported, facts: PlanInputs) -> tuple[Imported, dict[str, Any]]:
    """Returns the file with micro-batches per step, and the samples of a step as an option.

    A tool may say the samples of a step in place of the micro-batches, which then depend on the ranks.
    """
    values = dict(imported.values)
    micro = values.get("micro_batch")
    if micro is None:
        return imported, {}
    ranks = facts.workload.cluster.num_gpus
    shared = math.prod(values[name].value for name in ("sp", "tp") if name in values)
    replicas = max(1, ranks // shared)
    wanted = values.pop("plan.global_batch", None)
    if wanted is not None and "grad_accum" not in values:
        accumulation = max(1, math.ceil(wanted.value / micro.value / ranks))
        place = Place(file=str(imported.source.path))
        values["grad_accum"] = Value(
            value=accumulation, key="gradient_accumulation_steps", place=place, is_default=True
        )
    accumulation = values["grad_accum"].value if "grad_accum" in values else 1
    return replace(imported, values=values), {"global_batch": micro.value * accumulation * replicas}
