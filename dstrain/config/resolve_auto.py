"""Resolves the configuration that the Trainer is given: adds what is missing and fills every known "auto"."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dstrain.choices import Optimizer
from dstrain.config.jsonc import Pointer
from dstrain.plan.configuration import BF16_STATES, choices
from dstrain.plan.estimate import auto_sizes

if TYPE_CHECKING:
    from dstrain.facts.model.model_facts import ModelFacts
    from dstrain.job.schema import Job

_PRECISIONS = ("bf16", "fp16")
GATHERS = "stage3_gather_16bit_weights_on_model_save"
"""Key of `zero_optimization`: accelerate gathers weights by it under ZeRO-3 and from tensor-parallel ranks."""
REPEATED_KEYS: Mapping[str, str] = MappingProxyType(
    {key: name for name, choice in choices().items() for key in choice.repeated}
)
"""Keys of ds_config.json that repeat choices of the job, unless they are "auto" → the job's key."""
BATCH_KEYS: Mapping[str, str] = MappingProxyType({key: name for key, name in REPEATED_KEYS.items() if "." not in key})
"""The keys of the batch among them."""
JOB_KEYS: Mapping[Pointer, str] = MappingProxyType(
    {
        **{(key,): name for key, name in BATCH_KEYS.items()},
        ("train_batch_size",): "micro_batch",
        ("gradient_clipping",): "max_grad_norm",
        ("bf16", "enabled"): "precision",
        ("fp16", "enabled"): "precision",
        ("optimizer", "params", "lr"): "learning_rate",
        ("optimizer", "params", "betas"): "adam_beta1",
        ("optimizer", "params", "weight_decay"): "weight_decay",
        ("optimizer", "params", "eps"): "adam_epsilon",
        ("scheduler", "params", "warmup_max_lr"): "learning_rate",
    }
)
"""Keys that the Trainer compares with its arguments → the job's key."""


def for_trainer(config: Mapping[str, Any], job: Job, model: ModelFacts | None, *, num_ranks: int) -> dict[str, Any]:
    """Returns the configuration without `$schema` and notes, with the keys that the Trainer fills only if they exist.

    Without these keys DeepSpeed clips at its own 1.0, counts one accumulation step, and trains in fp32. Values that
    depend on the number of steps stay "auto": only the ranks know the length of the data.
    """
    effective = {key: copy.deepcopy(value) for key, value in config.items() if not key.startswith(("$", "_", "x-"))}
    for key in (*BATCH_KEYS, "gradient_clipping"):
        effective.setdefault(key, "auto")
    for section in _PRECISIONS:
        given = effective.get(section, {} if section == job.precision else None)
        if isinstance(given, dict) and "enabled" not in given:
            effective[section] = {**given, "enabled": "auto"}
    if job.optimizer is Optimizer.MUON:
        effective.setdefault("optimizer", _muon(job))
    effective = with_bf16_states(effective, job)
    for pointer, value in filled(job, model, num_ranks=num_ranks).items():
        _fill(effective, pointer, value)
    if job.ranks_per_batch > 1 and "train_batch_size" in effective:
        effective["train_batch_size"] = "auto"  # Transformers counts every rank, and accelerate corrects that
    if job.tp > 1:
        effective["tensor_parallel"] = {**(effective.get("tensor_parallel") or {}), "autotp_size": job.tp}
    if job.ep > 1:
        given = effective.get("expert_parallel") or {}
        effective["expert_parallel"] = {**given, "enabled": True, "autoep_size": job.ep}
    if job.tp > 1 or job.ep > 1:
        effective.setdefault("zero_optimization", {}).setdefault(GATHERS, True)
    return effective


def with_bf16_states(config: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """Returns the configuration with the keys of the job's optimizer, if its states are in bf16."""
    if job.optimizer is not Optimizer.ADAMW_BF16:
        return dict(config)
    return {**config, "bf16": {**dict.fromkeys(BF16_STATES, True), **(config.get("bf16") or {})}}


def _muon(job: Job) -> dict[str, Any]:
    """Returns the section of DeepSpeed's Muon. Source: deepspeed 0.19.8 runtime/engine.py: _muon_param_groups."""
    adam = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    of_matrices = {} if job.muon_learning_rate is None else {"muon_lr": job.muon_learning_rate}
    return {"type": "Muon", "params": {**adam, **of_matrices}}


def _fill(config: dict[str, Any], pointer: Pointer, value: Any) -> None:
    """Replaces "auto" by a value."""
    node: Any = config
    for part in pointer[:-1]:
        node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, dict) and node.get(pointer[-1]) == "auto":
        node[pointer[-1]] = value


def filled(job: Job, model: ModelFacts | None, *, num_ranks: int | None) -> dict[Pointer, Any]:
    """Returns the Trainer's values for "auto", except those that depend on the number of steps.

    Source: Transformers 5.23 integrations/deepspeed.py: trainer_config_process, trainer_config_finalize.
    """
    values: dict[Pointer, Any] = {pointer: getattr(job, key) for pointer, key in JOB_KEYS.items()}
    values |= {(section, "enabled"): job.precision == section for section in _PRECISIONS}
    values[("optimizer", "params", "betas")] = [job.adam_beta1, job.adam_beta2]
    values[("scheduler", "params", "warmup_min_lr")] = 0
    if num_ranks is None:
        del values[("train_batch_size",)]
    else:
        values[("train_batch_size",)] = job.samples_per_step(num_ranks)
    if model is not None:
        values |= {("zero_optimization", key): size for key, size in auto_sizes(model.hidden_size).items()}
    return values
