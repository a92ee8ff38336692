"""A plan as people read it, and as programs do."""

from __future__ import annotations

from typing import Any

from dstrain.facts.cluster import Cluster, Origin
from dstrain.facts.model import ModelFacts
from dstrain.plan.plan import Estimate, Plan
from dstrain.records import to_data
from dstrain.units import format_bytes, format_count


def plan_lines(plan: Plan, model: ModelFacts, cluster: Cluster) -> list[str]:
    """Returns what was chosen and why, in lines."""
    gpu = cluster.gpu
    origin = {Origin.GIVEN: "", Origin.MEASURED: ", found here", Origin.ASSUMED: ", assumed"}[cluster.gpu_origin]
    active = f", {format_count(model.num_active_params)} active" if model.moe else ""
    nodes = f"{cluster.num_nodes} node{'s' if cluster.num_nodes > 1 else ''} of {cluster.gpus_per_node}"
    lines = [
        f"model    {model.name}: {model.num_params:,} parameters{active}",
        f"cluster  {cluster.num_gpus} × {gpu.name} ({format_bytes(gpu.memory_bytes)}{origin}), {nodes}",
        f"chosen   {plan.chosen.configuration.title}, {plan.chosen.configuration.precision},"
        f" {plan.chosen.configuration.seq_len} tokens",
        "",
        "why",
    ]
    lines += [f"  - {reason}" for reason in plan.reasons]
    lines += _rejections(plan)
    if plan.notes:
        lines += ["", "know"]
        lines += [f"  - {note}" for note in plan.notes]
    return lines


def _rejections(plan: Plan) -> list[str]:
    """Returns one line for each faster way that does not fit, the last few of them."""
    if not plan.rejected:
        return ["  - nothing faster was passed over"]
    shown = plan.rejected[-5:]
    lines = ["", "faster, but too large"]
    if len(plan.rejected) > len(shown):
        lines.append(f"  - … and {len(plan.rejected) - len(shown)} more")
    return lines + [f"  - {each.configuration.title}: {each.shortage}" for each in shown]


def plan_document(plan: Plan, model: ModelFacts, cluster: Cluster) -> dict[str, Any]:
    """Returns the plan as JSON-ready data; what is not known is None. Units are in the names."""
    return {
        "schema": 1,
        "model": {
            "name": model.name,
            "num_params": model.num_params,
            "num_active_params": model.num_active_params,
            "num_trainable_params": plan.chosen.num_trainable_params,
        },
        "cluster": to_data(cluster),
        "plans": [_entry(plan.chosen, plan.reasons)],
        "chosen": 0,
        "considered": {"estimated": plan.num_estimated, "excluded_by_bound": 0},
        "notes": list(plan.notes),
    }


def _entry(estimate: Estimate, reasons: tuple[str, ...]) -> dict[str, Any]:
    configuration = estimate.configuration
    memory = to_data(estimate.memory)
    memory.pop("states")
    return {
        "zero_stage": configuration.zero_stage,
        "offload": configuration.offload.value,
        "micro_batch": configuration.micro_batch,
        "grad_accum": configuration.grad_accum,
        "grad_ckpt": configuration.grad_ckpt,
        "attn": configuration.attn.value,
        "sp": 1,
        "tp": 1,
        "fits": estimate.fits,
        "memory": memory,
        "speed": {
            "step_s": None,
            "tokens_per_s_per_gpu": None,
            "mfu_ratio": None,
            "limited_by": None,
            "uncertainty_ratio": None,
        },
        "reasons": list(reasons),
    }
