"""The checkpoint that a run resumes from: the job as it must be then, and its conversion for another number of GPUs.

DeepSpeed loads shards only on the number of ranks that wrote them. Its universal checkpoint, a copy with one file per
weight, loads on any number: `train.checkpoints.universal_checkpoint` writes it, and the ranks read it if the numbers
differ.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain import child_process
from dstrain.choices import Optimizer
from dstrain.config.lint.rule import JobContext
from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.ds_config import zero_stage
from dstrain.facts.this_machine import ACCELERATOR
from dstrain.findings import too_full
from dstrain.job.file import JobFile
from dstrain.job.schema import Job
from dstrain.paths import python, shown
from dstrain.rundir import UNIVERSAL, UNIVERSAL_PART, RunDir, damage, lacks_states, read_record
from dstrain.units import counted, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """The checkpoint that a run resumes from, as its own record describes it."""

    folder: Path
    world_size: int
    """The ranks that wrote it."""
    zero_stage: int
    micro_batch: int
    """Samples in one forward pass of one rank."""
    grad_accum: int
    """Micro-batches per step."""
    sp: int
    tp: int
    ep: int
    """Sequence-, tensor- and expert-parallel ranks."""
    optimizer: str
    """The job's `optimizer`, whose states it holds."""
    rope_scaling: Mapping[str, Any] | None
    """How positions were stretched."""
    attn: str | None = None
    """The attention of its ranks; None if it is not recorded."""

    @property
    def global_batch(self) -> int:
        """Samples of one step."""
        return self.micro_batch * self.grad_accum * (self.world_size // (self.sp * self.tp))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resuming:
    """A job, and the checkpoint it resumes from."""

    job: Job
    """With the global batch of the checkpoint."""
    saved: SavedCheckpoint | None = None
    """None for a new run."""
    notes: tuple[str, ...] = ()
    """Lines to print before the launch."""

    def explained(self, error: InvalidConfig) -> InvalidConfig:
        """Returns an error about the changed job, with the reason for the change in its hint."""
        hint = "\n".join([*self.notes, *([error.hint] if error.hint else [])])
        return InvalidConfig(error.problem, hint=hint or None)


def resuming(job: Job, *, num_ranks: int) -> Resuming:
    """Returns the job with the global batch of the checkpoint it resumes from, on any number of ranks.

    A step then takes the same samples as before, and the schedule has the same number of steps. Raises InvalidConfig if
    that batch does not divide by the number of ranks, or if its positions or its optimizer are not the job's.
    """
    saved = find(job)
    if saved is None:
        return Resuming(job=job, notes=_skipped(job, "training starts over"))
    _require_positions(job, saved)
    _require_optimizer(job, saved, num_ranks=num_ranks)
    kept = keep_batch(job, saved, num_ranks=num_ranks)
    notes = _skipped(job, f"resuming from {saved.folder.name}") + _notes(job, kept, saved, num_ranks=num_ranks)
    return Resuming(job=kept, saved=saved, notes=notes)


def _require_positions(job: Job, saved: SavedCheckpoint) -> None:
    """Raises InvalidConfig if the job stretches positions otherwise than the checkpoint it resumes from."""
    scaling = asdict(job.rope_scaling) if job.rope_scaling else None
    if scaling != saved.rope_scaling:
        name, was, now = shown(str(saved.folder)), json.dumps(saved.rope_scaling), json.dumps(scaling)
        anew = "" if saved.rope_scaling else f", or {weights_of(name)}"  # exported positions are not stretched again
        raise InvalidConfig(
            f"{name} was trained with rope_scaling {was}; the job has {now}", hint=f"Write rope_scaling: {was}{anew}."
        )


def _require_optimizer(job: Job, saved: SavedCheckpoint, *, num_ranks: int) -> None:
    """Raises InvalidConfig for states of another optimizer, and for 8-bit states that other ranks cannot share.

    Their scales belong to blocks of the flat shards. Source: bitsandbytes 0.50 optim/optimizer.py: init_state;
    deepspeed 0.19.8 checkpoint/ds_to_universal.py, which takes states of a weight's size only.
    """
    name = shown(str(saved.folder))
    if job.optimizer != saved.optimizer:
        raise InvalidConfig(
            f"{name} was trained with optimizer {saved.optimizer}; the job has {job.optimizer}",
            hint=f"Write optimizer: {saved.optimizer}, or {weights_of(name)}.",
        )
    if saved.optimizer == Optimizer.ADAMW_8BIT and saved.world_size != num_ranks and saved.zero_stage:
        raise InvalidConfig(
            f"{name} holds 8-bit states of {counted(saved.world_size, 'rank')}, "
            f"which cannot be converted for {num_ranks}",
            hint=f"Run on {counted(saved.world_size, 'GPU')}, or {weights_of(name)}.",
        )


def _skipped(job: Job, instead: str) -> tuple[str, ...]:
    """Returns a warning for each newer checkpoint that `resume: auto` cannot use."""
    if job.resume != "auto":
        return ()
    newest = RunDir(Path(job.output_dir)).newest_checkpoint(for_resume=True)
    return tuple(f"warning: {problem}: {instead}" for problem in newest.skipped)


def check_resume(file: JobFile, context: JobContext) -> None:
    """Raises InvalidConfig if the folder to resume from does not exist, is not whole, or lacks optimizer states."""
    name, place = shown(file.job.resume), file.locate(("resume",))
    folder = Path(file.job.resume)
    if file.job.resume in ("never", "auto"):
        return
    if (problem := damage(folder)) is not None:
        raise InvalidConfig(
            f"checkpoint {name} {problem if folder.is_dir() else 'does not exist'}",
            place=place,
            hint="Write resume: auto to continue from the newest complete checkpoint of output_dir.",
        )
    if (problem := lacks_states(folder)) is not None:
        hint = f"Name an older checkpoint, or {weights_of(name)}."
        raise InvalidConfig(f"checkpoint {name} {problem}", place=place, hint=hint)


def find(job: Job) -> SavedCheckpoint | None:
    """Returns the checkpoint that the job's `resume` selects: none, the newest complete one, or a folder.

    A checkpoint without a recorded batch gets the job's.
    """
    if job.resume == "never":
        return None
    is_auto, run_dir = job.resume == "auto", RunDir(Path(job.output_dir))
    folder = run_dir.newest_checkpoint(for_resume=True).folder if is_auto else Path(job.resume)
    if folder is None:
        return None
    record = read_record(folder)
    return SavedCheckpoint(
        folder=folder,
        world_size=record["world_size"],
        zero_stage=record["zero_stage"],
        micro_batch=record.get("micro_batch", job.micro_batch),
        grad_accum=record.get("grad_accum", job.grad_accum),
        **{key: record.get(key, 1) for key in ("sp", "tp", "ep")},
        optimizer=record.get("optimizer", Optimizer.ADAMW),
        rope_scaling=record.get("rope_scaling"),
        attn=record.get("attn"),
    )


def keep_batch(job: Job, saved: SavedCheckpoint, *, num_ranks: int) -> Job:
    """Returns the job with the checkpoint's global batch: with its own micro-batch if that divides, else a smaller one.

    Raises InvalidConfig, with the possible numbers of GPUs, if the batch does not divide by the number of ranks.
    """
    total = saved.global_batch
    if job.samples_per_step(num_ranks) == total:
        return job
    groups = job.data_parallel(num_ranks)
    if total % groups:
        nearby = range(job.ranks_per_batch, 2 * max(saved.world_size, num_ranks) + 1, job.ranks_per_batch)
        legal = ", ".join(str(count) for count in nearby if total % job.data_parallel(count) == 0)
        raise InvalidConfig(
            f"{shown(str(saved.folder))} was trained with a global batch of {total}; {num_ranks} GPUs cannot share it",
            hint=f"Numbers of GPUs that can: {legal}.",
        )
    share = total // groups
    micro_batch = next(size for size in range(min(job.micro_batch, share), 0, -1) if share % size == 0)
    return replace(job, micro_batch=micro_batch, grad_accum=share // micro_batch)


def _notes(job: Job, kept: Job, saved: SavedCheckpoint, *, num_ranks: int) -> tuple[str, ...]:
    """Returns a note if the ranks or the batch differ from the checkpoint's."""
    changes = [
        f"{name} {getattr(job, name)} → {getattr(kept, name)}"
        for name in ("micro_batch", "grad_accum")
        if getattr(job, name) != getattr(kept, name)
    ]
    ranks = "" if saved.world_size == num_ranks else f" of {counted(saved.world_size, 'rank')} on {num_ranks}"
    if not changes and not ranks:
        return ()
    by = f" by {', '.join(changes)}" if changes else ""
    return (f"resuming {saved.folder.name}{ranks}: global batch {saved.global_batch} kept{by}",)


def weights_of(name: str) -> str:
    """Returns the alternative to resuming, which always works."""
    return f"start from its weights: dstrain export {name} WEIGHTS, then model: WEIGHTS and another output_dir"


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
    # the shards fit, or there are none
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
        takes = f"converting {folder.name} for another number of GPUs, which keeps half of that, takes"
        problem = too_full(takes, 2 * shards, free_bytes, f"in {shown(str(folder))}")
        raise EnvironmentProblem(problem, hint="Free some space, or delete older checkpoints.")


def _failed(resize: Resize, code: int, output: str) -> EnvironmentProblem | InvalidConfig:
    """Returns the error of a failed conversion."""
    name = shown(str(resize.checkpoint))
    hint = f"Run on {counted(resize.from_ranks, 'GPU')}, or {weights_of(name)}."
    kind = InvalidConfig if code == InvalidConfig.exit_code else EnvironmentProblem
    lines = output.strip().splitlines() or [f"it ended with exit code {code}"]
    ours = next((number for number, line in enumerate(lines) if line.startswith("Error: ")), None)
    last = lines[-10:] if ours is None else lines[ours:]
    return kind("\n".join([f"{name} cannot be converted for {counted(resize.to_ranks, 'rank')}:", *last]), hint=hint)
