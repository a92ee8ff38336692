"""Whether ds_config.json and the job say the same, and what the Trainer must be given to fill in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.choices import Precision
from dstrain.errors import InvalidConfig
from dstrain.job import Job
from dstrain.records import Locator
from dstrain.render import jsonc
from dstrain.render.jsonc import Document, Pointer

_FILLED_SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
"""Sizes that the Trainer fills where they are "auto"; accelerate ends the run at any other "auto" that is left.

Source: Transformers 5.23 integrations/deepspeed.py: trainer_config_finalize; accelerate 1.15 utils/dataclasses.py:
DeepSpeedPlugin.fill_match.
"""
_SIZES = (
    *_FILLED_SIZES,
    "allgather_bucket_size",
    "sub_group_size",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)
_MAX_SIZE = 2**63 - 1
_OFFLOADS = ("offload_optimizer", "offload_param")
_DEVICES = ("cpu", "nvme", "none")
_PRECISIONS = ("bf16", "fp16")

_OBJECTS: Mapping[Pointer, str] = MappingProxyType(
    {
        ("bf16",): '{"enabled": "auto"}',
        ("fp16",): '{"enabled": "auto"}',
        ("optimizer",): '{"type": "AdamW", "params": {"lr": "auto"}}',
        ("optimizer", "params"): '{"lr": "auto"}',
        ("scheduler",): '{"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}',
        ("scheduler", "params"): '{"warmup_max_lr": "auto"}',
        ("zero_optimization", "offload_optimizer"): '{"device": "cpu"}',
        ("zero_optimization", "offload_param"): '{"device": "cpu"}',
        ("zero_optimization", "leaf_module"): '{"classes": []}',
        ("activation_checkpointing",): "{}",
        ("aio",): "{}",
        ("amp",): "{}",
        ("checkpoint",): "{}",
        ("comms_logger",): "{}",
        ("compile",): "{}",
        ("data_types",): "{}",
        ("flops_profiler",): "{}",
        ("tensor_parallel",): "{}",
        ("torch_autocast",): "{}",
        ("tensorboard",): "{}",
        ("wandb",): "{}",
        ("csv_monitor",): "{}",
    }
)
"""What DeepSpeed, Transformers or accelerate read keys from → what to write there."""

_ABSENT = object()


def read_config(path: Path, shown: str) -> Document:
    """Returns the DeepSpeed configuration in a file.

    Raises InvalidConfig, with every problem and its place, when the file is missing, is no JSON object, repeats a key,
    has a stage that only looks like a number (Transformers compares it with 3 and would load the whole model on every
    rank), a section that is no object, or a size that is no number.
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
    zero, hint = document.value.get("zero_optimization"), None
    problems = _object_problems(document)
    if isinstance(zero, dict):
        problems += [*_stage_problems(document), *_offload_problems(document), *_size_problems(document)]
    else:
        problems.append(f'{document.where(("zero_optimization",))}: "zero_optimization" is missing or is no object')
        hint = 'The Trainer needs it: write "zero_optimization": {"stage": 2}.'
    if problems:
        raise InvalidConfig("\n".join(problems), hint=hint)
    return document


def _object_problems(document: Document) -> list[str]:
    """Returns a line for every section that is no object, or whose type is no text.

    null is none either: `.get("offload_optimizer", {})` gives None for it, and its own `.get` ends the run.
    """
    found = []
    for pointer, example in _OBJECTS.items():
        value = _lookup(document.value, pointer)
        if value is _ABSENT or isinstance(value, dict):
            continue
        wanted = "remove the line" if value is None else f'write "{pointer[-1]}": {example}'
        found.append(f"{_is(document, pointer, value)}, which is no object; {wanted}")
    for pointer in (("optimizer", "type"), ("scheduler", "type")):
        value = _lookup(document.value, pointer)
        if value is not _ABSENT and not isinstance(value, str):
            found.append(f"{_is(document, pointer, value)}; write its name in double quotes")
    if "bfloat16" in document.value:
        place = document.where(("bfloat16",))
        found.append(f'{place}: "bfloat16" is an old name that the Trainer does not know; write "bf16"')
    return found


def _stage_problems(document: Document) -> list[str]:
    pointer = ("zero_optimization", "stage")
    stage = _lookup(document.value, pointer)
    if stage is _ABSENT or (isinstance(stage, int) and not isinstance(stage, bool) and 0 <= stage <= 3):
        return []
    text = f"{document.where(pointer)}: stage is {_json(stage)}"
    return [f"{text}; ZeRO has the stages 0, 1, 2 and 3, written without quotes"]


def _offload_problems(document: Document) -> list[str]:
    found = []
    for section in _OFFLOADS:
        pointer = ("zero_optimization", section, "device")
        device = _lookup(document.value, pointer)
        if device is not _ABSENT and device not in _DEVICES:
            found.append(f'{_is(document, pointer, device)}; write "cpu", "nvme" or "none"')
    return found


def _size_problems(document: Document) -> list[str]:
    found = []
    for key in _SIZES:
        pointer = ("zero_optimization", key)
        size = _lookup(document.value, pointer)
        is_filled = key in _FILLED_SIZES
        if size is _ABSENT or (size == "auto" and is_filled) or _is_size(size, at_least=_least(key)):
            continue
        problem = _is(document, pointer, size) + ("" if size != "auto" else ", and nothing fills this one")
        wanted = "write a whole number of elements, such as 500000000"
        found.append(f"{problem}; {wanted}" + (', or "auto"' if is_filled else ""))
    return found


def _least(key: str) -> int:
    """Returns the smallest legal size. Source: deepspeed 0.19.8 runtime/zero/config.py."""
    return 1 if key == "reduce_bucket_size" else 0


def _is_size(value: Any, *, at_least: int) -> bool:
    """Returns whether a value is a whole number that DeepSpeed takes for a size: 5e8 is one, true is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return at_least <= value <= _MAX_SIZE and value == int(value)


def _json(value: Any) -> str:
    """Returns a value as it stands in the file, its end left out where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"


def _is(document: Document, pointer: Pointer, value: Any) -> str:
    """Returns what stands where: `ds_config.json:3:5: optimizer.params is 1`."""
    return f"{document.where(pointer)}: {'.'.join(map(str, pointer))} is {_json(value)}"


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
        ("optimizer", "params", "betas"): ("adam_beta1", [job.adam_beta1, job.adam_beta2]),
        ("optimizer", "params", "weight_decay"): ("weight_decay", job.weight_decay),
        ("optimizer", "params", "eps"): ("adam_epsilon", job.adam_epsilon),
        ("scheduler", "params", "warmup_max_lr"): ("learning_rate", job.learning_rate),
    }


def disagreements(document: Document, job: Job, locate: Locator, num_ranks: int) -> list[str]:
    """Returns one line for every literal in the configuration that contradicts the job, with both places.

    null contradicts too: the Trainer leaves it, and DeepSpeed takes its own default or stops.
    """
    found = []
    for pointer, (key, wanted) in _job_values(job, num_ranks).items():
        value = _lookup(document.value, pointer)
        if value is _ABSENT or value == "auto" or _agrees(value, wanted):
            continue
        what = _json(wanted)
        if pointer == ("train_batch_size",):
            what = f"{job.micro_batch} × {job.grad_accum} × {num_ranks} GPUs = {wanted}"
        elif pointer[-1] == "betas":
            what += " (with adam_beta2)"
        found.append(f'{_is(document, pointer, value)}, and {locate((key,))}: {key} makes it {what}; write "auto" here')
    return found


def _agrees(value: Any, wanted: Any) -> bool:
    """Returns whether a literal is the job's value; true is not 1.

    >>> _agrees(1, 1.0), _agrees(True, 1.0), _agrees([0.9, 0.999], [0.9, 0.999])
    (True, False, True)
    """
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(_agrees, value, wanted))
    return bool(value == wanted)


def _lookup(value: Any, pointer: Pointer) -> Any:
    """Returns the value at a pointer, or _ABSENT."""
    for key in pointer:
        if not isinstance(value, Mapping) or key not in value:
            return _ABSENT
        value = value[key]
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
    for section in _PRECISIONS:
        given = effective.get(section, {} if section == job.precision else None)
        if isinstance(given, Mapping) and "enabled" not in given:
            effective[section] = {**given, "enabled": "auto"}
            name = section if section not in config else f"{section}.enabled"
            added.append(f'"{name}" is missing in the DeepSpeed configuration: the job\'s precision is used')
    return effective, added
