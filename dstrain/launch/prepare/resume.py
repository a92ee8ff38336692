"""The checkpoint that a run resumes from, and the job as it must be then: its global batch, positions and optimizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dstrain.choices import Optimizer
from dstrain.errors import InvalidConfig
from dstrain.job.schema import Job
from dstrain.paths import shown
from dstrain.rundir import RunDir, damage, lacks_states, read_record
from dstrain.units import counted


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


def find(job: Job) -> SavedCheckpoint | None:
    """Returns the checkpoint that the job's `resume` selects: none, the newest complete one, or a folder.

    A checkpoint without a recorded batch gets the job's. Raises InvalidConfig if it cannot be read.
    """
    if job.resume == "never":
        return None
    is_auto, run_dir = job.resume == "auto", RunDir(Path(job.output_dir))
    folder = run_dir.newest_checkpoint(for_resume=True).folder if is_auto else Path(job.resume)
    if folder is None:
        return None
    problem = damage(folder)
    if problem is not None:
        raise InvalidConfig(f"{shown(str(folder))} {problem}", hint="Name an older checkpoint: resume: FOLDER.")
    problem = lacks_states(folder)
    if problem is not None:
        hint = f"Name an older checkpoint, or {weights_of(shown(str(folder)))}."
        raise InvalidConfig(f"{shown(str(folder))} {problem}", hint=hint)
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
    """Returns a note if the ranks or the batch differ from those of the checkpoint."""
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
