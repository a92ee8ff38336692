"""Resumes from a checkpoint on another number of GPUs: converts the shards once.

DeepSpeed loads shards only on the number of ranks that wrote them. Its universal checkpoint, a copy with one file per
weight, loads on any number: `train.checkpoints.universal_checkpoint` writes it, and the ranks read it if the numbers
differ.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain import child_process
from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.ds_config import zero_stage
from dstrain.facts.this_machine import ACCELERATOR
from dstrain.launch.prepare.resume import SavedCheckpoint, weights_of
from dstrain.paths import python, shown
from dstrain.rundir import UNIVERSAL, UNIVERSAL_PART
from dstrain.units import counted, format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """A checkpoint to convert before the launch."""

    checkpoint: Path
    from_ranks: int
    to_ranks: int


_FAMILY = MappingProxyType({0: 0, 1: 1, 2: 1, 3: 3})
"""ZeRO stage → the first stage whose shards have the same form."""
_ADAM = ("adam", "adamw")
"""Optimizers whose states the converter knows: two moments. Source: deepspeed 0.19.8 ds_to_universal.py"""


def _is_nvme(device: Any) -> bool:
    return bool(device == "nvme")


def _is_several(size: Any) -> bool:
    return isinstance(size, int) and size > 1


_REFUSED: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "optimizer.type": lambda name: str(name).lower() not in _ADAM,
        "zero_optimization.round_robin_gradients": bool,  # loads, and puts weights in each other's places
        "zero_optimization.elastic_checkpoint": bool,
        "zero_optimization.zenflow": bool,
        "zero_optimization.offload_optimizer.device": _is_nvme,
        "zero_optimization.offload_optimizer.super_offload": bool,
        "zero_optimization.offload_param.device": _is_nvme,
        "tensor_parallel.autotp_size": _is_several,
        "expert_parallel.enabled": bool,
        "sequence_parallel_size": _is_several,
        "checkpoint.use_node_local_storage": bool,
    }
)
"""Key → whether its value rules out a universal checkpoint, in DeepSpeed 0.19.8 with our Trainer."""


def decide(saved: SavedCheckpoint | None, config: Mapping[str, Any], *, num_ranks: int) -> Resize | None:
    """Returns the conversion that this number of ranks needs before it resumes; None if it needs none.

    Raises InvalidConfig for a checkpoint that DeepSpeed cannot resume from: shards of another ZeRO stage, or a feature
    that universal checkpoints do not support.
    """
    if saved is None:
        return None
    name = shown(str(saved.folder))
    stage = zero_stage(config)
    if _FAMILY.get(stage) != _FAMILY.get(saved.zero_stage):
        raise InvalidConfig(
            f"{name} was written under ZeRO-{saved.zero_stage}; ZeRO-{stage} cannot load its shards",
            hint=f"Set stage back to {saved.zero_stage}, or {weights_of(name)}.",
        )
    experts = _at(config, "expert_parallel.enabled") and _at(config, "expert_parallel.autoep_size")
    for key, size in {"tp": _at(config, "tensor_parallel.autotp_size"), "ep": experts}.items():
        if (now := size or 1) != (was := getattr(saved, key)):
            problem = f"{name} was written with {key} {was}, and the job has {key} {now}"
            raise InvalidConfig(problem, hint=f"Write {key}: {was}, or {weights_of(name)}.")
    if saved.world_size == num_ranks or not saved.zero_stage:
        return None
    broken = [
        key if isinstance(value, Mapping) else f"{key} {json.dumps(value)}"
        for key, is_broken in _REFUSED.items()
        if (value := _at(config, key)) is not None and is_broken(value)
    ]
    if saved.sp > 1 and saved.zero_stage < 3:  # its files count as those of tensor-parallel ranks
        broken.append(f"sp {saved.sp} under ZeRO-{saved.zero_stage}")
    if broken:
        raise InvalidConfig(
            f"{name} was written by {counted(saved.world_size, 'rank')}; DeepSpeed cannot convert it for {num_ranks} "
            f"with {', '.join(broken)}",
            hint=f"Run on {counted(saved.world_size, 'GPU')}, or {weights_of(name)}.",
        )
    return Resize(checkpoint=saved.folder, from_ranks=saved.world_size, to_ranks=num_ranks)


def _at(config: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a dotted key, or None."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def convert(resize: Resize, environment: Mapping[str, str], tell: Callable[[str], None]) -> None:
    """Writes the universal copy of a checkpoint in a child process, unless it exists, and reports progress.

    Raises EnvironmentProblem if the disk is too small or the conversion fails, and InvalidConfig for a checkpoint that
    cannot be converted, both with the last lines of output.
    """
    folder = resize.checkpoint
    if (folder / UNIVERSAL).is_file():
        return
    _check_disk(folder)
    tell(f"converting {folder.name} of {counted(resize.from_ranks, 'rank')} for {resize.to_ranks}, once")
    begin = time.monotonic()
    line = python("-m", "dstrain.train.checkpoints.universal_checkpoint", str(folder))
    on_cpu = {**environment, ACCELERATOR: "cpu"}
    try:
        code, output = child_process.run_reporting(line, on_cpu, tell, f"converting {folder.name}")
    except BaseException:
        shutil.rmtree(folder / UNIVERSAL_PART, ignore_errors=True)
        raise
    if code != 0:
        raise _failed(resize, code, output)
    tell(f"converted {folder.name} in {format_seconds(time.monotonic() - begin)}")


def _check_disk(folder: Path) -> None:
    """Raises EnvironmentProblem if the disk is too small for the copy and for pieces of the same size."""
    shards = sum(file.stat().st_size for file in folder.glob("global_step*/*_optim_states.pt"))
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < 2 * shards:
        raise EnvironmentProblem(
            f"{shown(str(folder))}: {format_bytes(free_bytes)} free; converting it for another number of GPUs needs "
            f"{format_bytes(2 * shards)}, and keeps half of that",
            hint="Free some space, or delete older checkpoints.",
        )


def _failed(resize: Resize, code: int, output: str) -> EnvironmentProblem | InvalidConfig:
    """Returns the error of a failed conversion."""
    name = shown(str(resize.checkpoint))
    hint = f"Run on {counted(resize.from_ranks, 'GPU')}, or {weights_of(name)}."
    kind = InvalidConfig if code == InvalidConfig.exit_code else EnvironmentProblem
    lines = output.strip().splitlines() or [f"it ended with exit code {code}"]
    ours = next((number for number, line in enumerate(lines) if line.startswith("Error: ")), None)
    last = lines[-10:] if ours is None else lines[ours:]
    return kind("\n".join([f"{name} cannot be converted for {counted(resize.to_ranks, 'rank')}:", *last]), hint=hint)
