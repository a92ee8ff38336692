"""Plans that several tests look at: every template, several models and GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from dstrain.cli.options.question import PlanInputs, plan_inputs
from dstrain.config.files import generated
from dstrain.plan.estimate_records import Plan
from dstrain.plan.search.decide import decide

TINY_CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
"""A config.json of a model that nobody ships."""

_BLANK: dict[str, Any] = {
    "gpus": None, "gpu": "a100-80g", "gpu_memory_limit": None, "gpus_per_node": None, "hosts": None, "hostfile": None, "host_memory": None,
    "nvme": None, "interconnect": None, "hub": "hf", "method": "full", "seq_len": None, "global_batch": None,
    "micro_batch": None, "zero_stage": None, "offload": None, "grad_ckpt": None, "precision": None, "attn": None,
    "packing": False,
}  # fmt: skip


def ask(**options: Any) -> PlanInputs:
    """Returns the question that these options of gen-config ask."""
    from dstrain.choices import Attention, Hub, Method, Offload, Precision

    types = {"hub": Hub, "method": Method, "offload": Offload, "precision": Precision, "attn": Attention}
    merged = {**_BLANK, **options}
    return plan_inputs({k: types[k](v) if k in types and v is not None else v for k, v in merged.items()})


@cache
def _decided(options: tuple[tuple[str, Any], ...]) -> tuple[PlanInputs, Plan]:
    """Returns the question that these options ask, and its plan."""
    asked = ask(**dict(options))
    return asked, decide(asked.workload, asked.request)


def plan(**options: Any) -> Plan:
    """Returns the plan for these options."""
    return _decided(tuple(options.items()))[1]


def files(**options: Any) -> dict[str, str]:
    """Returns the generated files for these options."""
    asked, chosen = _decided(tuple(options.items()))
    job = {
        "model": asked.workload.model.source,
        "data": "train.jsonl",
        "eval_data": None,
        "hub": "hf",
        "output_dir": "output",
    }
    return generated(chosen, asked.workload, asked.hosts, template_dir=None, job=job)


@dataclass(frozen=True)
class Case:
    """One golden."""

    name: str
    template: str
    options: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("qwen3-0.6b-1xh100", "zero0.json.j2", {"model": "qwen3-0.6b", "gpus": 1, "gpu": "h100"}),
    Case("qwen3-8b-2xh100-zero1", "zero1_offload_optimizer.json.j2", {"model": "qwen3-8b", "gpus": 2, "gpu": "h100", "zero_stage": 1, "offload": "optimizer", "host_memory": 2**40, "sp": 1}),
    Case("qwen3-8b-8xh200", "zero1.json.j2", {"model": "qwen3-8b", "gpus": 8, "gpu": "h200"}),
    Case("qwen3-8b-8xh100", "zero2.json.j2", {"model": "qwen3-8b", "gpus": 8, "gpu": "h100", "zero_stage": 2}),
    Case("qwen3-32b-16xa100", "zero3.json.j2", {"model": "qwen3-32b", "gpus": 16}),
    Case("qwen3-30b-a3b-16xh100", "zero3.json.j2", {"model": "qwen3-30b-a3b", "gpus": 16, "gpu": "h100"}),
    Case("qwen3-vl-30b-a3b-16xh100", "zero3.json.j2", {"model": "qwen3-vl-30b-a3b", "gpus": 16, "gpu": "h100"}),
    Case("qwen3-8b-1xa100", "zero2_offload_optimizer.json.j2", {"model": "qwen3-8b", "gpus": 1, "zero_stage": 2, "offload": "optimizer", "host_memory": 2**39}),
    Case("qwen3-32b-8xa100", "zero3_offload_optimizer.json.j2", {"model": "qwen3-32b", "gpus": 8, "zero_stage": 3, "sp": 1, "offload": "optimizer"}),
    Case("qwen3-32b-16xa100-32k", "zero3.json.j2", {"model": "qwen3-32b", "gpus": 16, "seq_len": 32768}),
    Case("llama-3.1-70b-8xa100", "zero3_offload_all.json.j2", {"model": "llama-3.1-70b", "gpus": 8, "offload": "params", "host_memory": 4 * 2**40}),
    Case("llama-3.1-70b-8x4090-nvme", "zero3_nvme.json.j2", {"model": "llama-3.1-70b", "gpus": 8, "gpu": "4090", "nvme": "/nvme", "offload": "nvme", "seq_len": 1024, "host_memory": 2**40}),
    Case("qwen2.5-1.5b-8xv100", "zero2.json.j2", {"model": "qwen2.5-1.5b", "gpus": 8, "gpu": "v100-32g", "zero_stage": 2}),
    Case("qwen3-8b-lora-1x4090", "zero0.json.j2", {"model": "qwen3-8b", "gpus": 1, "gpu": "4090", "method": "lora", "seq_len": 1024}),
    Case("mixtral-8x7b-lora-4xh100", "zero3.json.j2", {"model": "mixtral-8x7b", "gpus": 4, "gpu": "h100", "method": "lora"}),
)  # fmt: skip
