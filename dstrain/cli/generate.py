"""Generates the files of a plan with their record, for gen-config and import."""

from __future__ import annotations

from pathlib import Path

from dstrain import __version__
from dstrain.choices import Attention
from dstrain.cli.options import remembered
from dstrain.cli.options.question import PlanInputs
from dstrain.cli.options.remembered import ResolvedOptions
from dstrain.config.edits import edit
from dstrain.config.edits.lock import Lock
from dstrain.config.templates.files import generated, template_of
from dstrain.config.templates.templates import template_hash
from dstrain.facts.releases import installed
from dstrain.job.task_limits import PARTS
from dstrain.plan.estimate_records import Plan
from dstrain.plan.request import Request


def lock_of(asked: ResolvedOptions, facts: PlanInputs, plan: Plan, out: Path, before: Lock | None = None) -> Lock:
    """Returns the generated files of a plan with their inputs; `out` is the folder they are for, `before` its lock."""
    options = asked.options
    template, template_dir = template_of(plan.chosen.configuration), options["template_dir"]
    job = {
        "model": _model(facts.workload.model.source, out),
        "data": remembered.relative(options["data"], out),
        "eval_data": remembered.relative(options["eval_data"], out),
        "hub": options["hub"],
        "output_dir": options["output_dir"],
        **{name: options[name] for name in PARTS},
        "attn": _attention(facts.request, plan, before),
    }
    files = generated(plan, facts.workload, facts.hosts, template_dir=template_dir, job=job)
    if options["hostfile"] and options["hostfile"].resolve() == (out / "hostfile").resolve():
        del files["hostfile"]  # it is the user's own, comments and all
    return Lock(
        dstrain=__version__,
        deepspeed=installed("deepspeed") or "none",
        template=template,
        template_sha256=template_hash(template, override=template_dir),
        inputs=asked.inputs,
        cluster=facts.workload.cluster,
        contents=facts.workload.contents,
        base=files,
    )


def _attention(request: Request, plan: Plan, before: Lock | None) -> Attention:
    """Returns the attention of a job: `auto` if it is open, unless the files of before name the planned one."""
    planned = plan.chosen.configuration.kernels.attn
    text = before.base.get("job.yaml") if before is not None and request.attn is None else None
    is_kept = text is not None and edit.read(text, "job.yaml").get("attn") == planned
    return planned if is_kept or not request.has_open_attention else Attention.AUTO


def _model(source: str, out: Path) -> str | None:
    """Returns the model as job.yaml must name it; a relative folder begins with `./`, so that it is no hub id."""
    named = remembered.relative(source, out)
    return f"./{named}" if Path(source).exists() and named and not Path(named).is_absolute() else named
