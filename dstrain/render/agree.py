"""Whether ds_config.json and the job say the same, and what the Trainer must be given to fill in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.choices import Precision
from dstrain.errors import InvalidConfig
from dstrain.job import Job
from dstrain.records import Locator
from dstrain.render import jsonc
from dstrain.render.jsonc import Document, Pointer


def read_config(path: Path, shown: str) -> Document:
    """Returns the DeepSpeed configuration in a file.

    Raises InvalidConfig when the file is missing, is no JSON object, repeats a key, or has a stage that only looks like
    a number: Transformers compares it with 3 and would load the whole model on every rank.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidConfig(f"{shown}: no such file", hint="dstrain gen-config writes one.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{shown}: cannot be read: {error}") from None
    document = jsonc.parse(text, shown)
    if not isinstance(document.value, dict):
        raise InvalidConfig(f"{shown}:1:1: a DeepSpeed configuration is an object in braces")
    zero = document.value.get("zero_optimization")
    if not isinstance(zero, dict):
        raise InvalidConfig(
            f'{document.where(("zero_optimization",))}: "zero_optimization" is missing or is no object',
            hint='The Trainer needs it: write "zero_optimization": {"stage": 2}.',
        )
    stage = zero.get("stage", 0)
    if not isinstance(stage, int) or isinstance(stage, bool) or not 0 <= stage <= 3:
        raise InvalidConfig(
            f"{document.where(('zero_optimization', 'stage'))}: stage is {stage!r}; ZeRO has the stages 0, 1, 2 and 3,"
            " written without quotes"
        )
    return document


def _job_values(job: Job, num_ranks: int) -> dict[Pointer, tuple[str, Any]]:
    """Returns, for every key that the Trainer fills, the job's key and value.

    Source: Transformers 5.23 integrations/deepspeed.py: trainer_config_process.
    """
    return {
        ("train_micro_batch_size_per_gpu",): ("micro_batch", job.micro_batch),
        ("gradient_accumulation_steps",): ("grad_accum", job.grad_accum),
        ("train_batch_size",): ("micro_batch", job.micro_batch * job.grad_accum * num_ranks),
        ("gradient_clipping",): ("max_grad_norm", job.max_grad_norm),
        ("bf16", "enabled"): ("precision", job.precision is Precision.BF16),
        ("fp16", "enabled"): ("precision", job.precision is Precision.FP16),
        ("optimizer", "params", "lr"): ("learning_rate", job.learning_rate),
        ("optimizer", "params", "weight_decay"): ("weight_decay", job.weight_decay),
        ("optimizer", "params", "eps"): ("adam_epsilon", job.adam_epsilon),
        ("scheduler", "params", "warmup_max_lr"): ("learning_rate", job.learning_rate),
    }


def disagreements(document: Document, job: Job, locate: Locator, num_ranks: int) -> list[str]:
    """Returns one line for every literal in the configuration that contradicts the job, with both places."""
    found = []
    for pointer, (key, wanted) in _job_values(job, num_ranks).items():
        value = _lookup(document.value, pointer)
        if value is None or value == "auto" or value == wanted:
            continue
        what = str(wanted)
        if pointer == ("train_batch_size",):
            what = f"{job.micro_batch} × {job.grad_accum} × {num_ranks} GPUs = {wanted}"
        found.append(
            f"{document.where(pointer)}: {'.'.join(map(str, pointer))} is {value!r}, and {locate((key,))}: {key}"
            f' makes it {what}; write "auto" here'
        )
    return found


def _lookup(value: Any, pointer: Pointer) -> Any:
    for key in pointer:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def for_trainer(config: Mapping[str, Any], job: Job) -> tuple[dict[str, Any], list[str]]:
    """Returns the configuration as the Trainer needs it, and a line for everything that was added.

    The Trainer fills only keys that are there; without them DeepSpeed clips at its own 1.0, counts one accumulation
    step, and trains in fp32.
    """
    effective = {key: value for key, value in config.items() if not key.startswith("$")}
    added = []
    for key, wanted in (
        ("train_micro_batch_size_per_gpu", job.micro_batch),
        ("gradient_accumulation_steps", job.grad_accum),
        ("gradient_clipping", job.max_grad_norm),
    ):
        if key not in effective:
            effective[key] = "auto"
            added.append(f'"{key}" is missing in the DeepSpeed configuration: the job\'s {wanted} is used')
    section = {Precision.BF16: "bf16", Precision.FP16: "fp16"}.get(job.precision)
    if section and not isinstance(effective.get(section), Mapping):
        effective[section] = {"enabled": "auto"}
        added.append(f'"{section}" is missing in the DeepSpeed configuration: the job\'s precision is used')
    return effective, added
