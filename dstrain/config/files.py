"""Renders the files of a plan (ds_config.json, job.yaml and hostfile) with the values that fill the templates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain.choices import Offload
from dstrain.config.lint import engine
from dstrain.config.lint.rule import Subject
from dstrain.config.schema import CONFIG_SCHEMA, SCHEMA_KEY
from dstrain.config.templates import render_json, render_yaml
from dstrain.errors import InvalidConfig
from dstrain.facts.cluster import hostfile
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.findings import errors
from dstrain.job.limits import PARTS
from dstrain.plan.configuration import Configuration, choices, flat
from dstrain.plan.estimate import effective
from dstrain.plan.estimate_records import Plan
from dstrain.plan.labels import label
from dstrain.plan.request import Request

_TEMPLATES = {
    (0, Offload.NONE): "zero0.json.j2",
    (1, Offload.NONE): "zero1.json.j2",
    (2, Offload.NONE): "zero2.json.j2",
    (3, Offload.NONE): "zero3.json.j2",
    (1, Offload.OPTIMIZER): "zero1_offload_optimizer.json.j2",
    (2, Offload.OPTIMIZER): "zero2_offload_optimizer.json.j2",
    (3, Offload.OPTIMIZER): "zero3_offload_optimizer.json.j2",
    (3, Offload.PARAMS): "zero3_offload_all.json.j2",
    (3, Offload.NVME): "zero3_nvme.json.j2",
}
"""The template of each ZeRO stage and offload."""


def template_of(configuration: Configuration) -> str:
    """Returns the name of the template for a configuration."""
    return _TEMPLATES[configuration.zero.stage, configuration.zero.offload]


def config_values(plan: Plan, workload: Workload) -> dict[str, Any]:
    """Returns the values of DeepSpeed templates."""
    configuration, model, cluster = plan.chosen.configuration, workload.model, workload.cluster
    is_leaf = configuration.zero.stage == 3 and configuration.parallel.ep == 1  # AutoEP has blocks of its own
    moe_block = model.moe.block_class if model.moe and is_leaf else None
    return {
        **flat(configuration),
        "moe_block_class": moe_block,
        "nvme_path": cluster.nvme_path,
        "nvme_buffer_size": _nvme_buffer_size(workload),
        "fp16": configuration.model.precision == "fp16",
    }


def _nvme_buffer_size(workload: Workload) -> int:
    """Returns the elements of one swap buffer: the largest parameter's partition, rounded up to a power of two.

    Source: deepspeed 0.19.8 runtime/swap_tensor/partitioned_param_swapper.py: a buffer must hold a whole partition.
    """
    share = -(-workload.model.largest_tensor_numel // workload.cluster.num_gpus)
    return int(max(2**20, 1 << (share - 1).bit_length()))


def job_values(plan: Plan, cluster: Cluster, **given: Any) -> dict[str, Any]:
    """Returns the values of the job template; `given` has the user's model, data, hub and output folder."""
    configuration = plan.chosen.configuration
    return {
        **flat(configuration),
        "is_adapter": not configuration.model.is_full,
        "learning_rate": plan.learning_rate,
        "global_batch": plan.global_batch,
        "env": {"DS_ACCELERATOR": "cpu"} if cluster.gpu.is_cpu else {},
        **PARTS,
        **given,
    }


def config_text(config: dict[str, Any]) -> str:
    """Returns a DeepSpeed configuration as strict JSON: two spaces, the template's order, UTF-8."""
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


_STRATEGY = tuple(choice.field for choice in choices().values() if choice.is_of_zero and choice.is_tuned)
"""ZeRO settings that a template must render; sizes of buffers are its own."""


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
        findings = errors(engine.check(Subject(document=document, is_trainers=True)))
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
