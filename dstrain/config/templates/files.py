"""Renders the files of a plan: ds_config.json, job.yaml and hostfile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain.config.lint import engine
from dstrain.config.lint.subject import Subject
from dstrain.config.schema import CONFIG_SCHEMA, SCHEMA_KEY
from dstrain.config.templates.templates import render_json, render_yaml
from dstrain.config.templates.values import config_values, job_values, template_of
from dstrain.errors import InvalidConfig
from dstrain.facts.cluster import hostfile
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.plan.estimate import effective
from dstrain.plan.estimate_records import Plan
from dstrain.plan.labels import label
from dstrain.plan.request import Request


def config_text(config: dict[str, Any]) -> str:
    """Returns a DeepSpeed configuration as strict JSON: two spaces, the template's order, UTF-8."""
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


_STRATEGY = ("stage", "offload", "offload_ratio", "hpz")
"""What a template must make of ZeRO as planned; sizes of buffers are its own."""


def _require_planned(template: str, config: dict[str, Any], plan: Plan, model: ModelFacts) -> None:
    """Raises InvalidConfig if a template, which may be the user's own, does not implement the plan."""
    chosen = plan.chosen.configuration
    try:
        made = effective(model, Request(), config).zero
    except InvalidConfig as error:
        raise InvalidConfig(f"{template}: {error.problem}", hint="Correct the template.") from None
    if any(getattr(made, name) != getattr(chosen.zero, name) for name in _STRATEGY):
        raise InvalidConfig(
            f"{template} makes {label(replace(chosen, zero=made))}, but the plan is {label(chosen)}",
            hint="Correct the template, or request its strategy with --zero-stage and --offload.",
        )


def _require_sound(template: str, config: dict[str, Any]) -> None:
    """Raises InvalidConfig if lint reports errors in the output of a template, which may be the user's own."""
    document, findings = engine.read(config_text(config), template)
    if document is not None:
        findings = engine.errors(engine.check(Subject(document=document, is_trainers=True)))
    if findings:
        lines = [f"{template}: {item.pointer}: {item.rule}: {item.problem}; {item.effect}" for item in findings]
        raise InvalidConfig("\n".join(lines), hint="Correct the template.")


def generated(
    plan: Plan, workload: Workload, hosts: Hosts, *, template_dir: Path | None, job: dict[str, Any]
) -> dict[str, str]:
    """Returns file names and texts; `job` has the user's values for model, data, hub and output."""
    template = template_of(plan.chosen.configuration)
    config = render_json(template, config_values(plan, workload), override=template_dir)
    _require_planned(template, config, plan, workload.model)
    _require_sound(template, config)
    return {
        "ds_config.json": config_text({SCHEMA_KEY: f"./{CONFIG_SCHEMA}", **config}),
        "job.yaml": render_yaml("job.yaml.j2", job_values(plan, workload.cluster, **job)),
        "hostfile": hostfile.render(hosts),
    }
