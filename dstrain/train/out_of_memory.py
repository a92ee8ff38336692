"""Records that this rank ran out of GPU memory: where, on which micro-batch, and what the allocator held."""

from __future__ import annotations

import os
import re
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from types import FrameType
from typing import Any

import torch
import transformers

from dstrain.oom import Allocator, Blocks, ModelStates, OutOfMemory, Phase
from dstrain.records import to_json
from dstrain.rundir import RunDir
from dstrain.train.measure_states import state_bytes_or_none

NUM_LARGEST = 8
"""Sizes of live blocks that are recorded."""

_PHASES = (
    ("evaluation_loop", "/trainer.py", Phase.EVALUATION),
    ("_save_checkpoint", "dstrain/train/trainer.py", Phase.SAVE),
    ("save_final", "dstrain/train/saving.py", Phase.SAVE),
    ("step", "deepspeed/runtime/engine.py", Phase.STEP),
    ("allocate_states", "dstrain/train/optimizer_states.py", Phase.STEP),
    ("reserved_for_first_step", "dstrain/train/optimizer_states.py", Phase.STEP),
    ("backward", "deepspeed/runtime/engine.py", Phase.BACKWARD),
    ("training_step", "transformers/trainer.py", Phase.FORWARD),
)
"""Functions that a failed allocation happened in, each with the end of its file; the first one found counts, since
evaluation has forward passes, and accelerate steps inside `backward`. Source: deepspeed 0.19.8 runtime/engine.py;
accelerate 1.15 utils/deepspeed.py: DeepSpeedEngineWrapper.backward; Transformers 5.23 trainer.py: training_step."""

_OF_LIBRARIES = re.compile(r"CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure 2 'out of memory'")
"""What CUDA, cuBLAS and NCCL say, which allocate without PyTorch."""


class Observer:
    """Notes what the allocator held at the last failed allocation; PyTorch calls it before it raises."""

    last: Allocator | None = None

    def __call__(self, device: int, requested: int, total: int, free: int) -> None:
        """Source: c10/cuda/CUDACachingAllocator.cpp of pytorch/pytorch: DeviceCachingAllocator::malloc."""
        stats = torch.cuda.memory_stats(device)
        self.last = Allocator(
            requested_bytes=requested,
            allocated_bytes=stats.get("allocated_bytes.all.current", 0),
            reserved_bytes=stats.get("reserved_bytes.all.current", 0),
            free_bytes=free,
            device_bytes=total,
        )


OBSERVER = Observer()
"""The observer of this process."""


def observe() -> None:
    """Makes the allocator call `OBSERVER` before it raises; costs nothing until then."""
    attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None and torch.cuda.is_available():
        attach(OBSERVER)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error, or one that it was raised from, is an allocation on the GPU that failed."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError):
            return True
        if isinstance(cause, RuntimeError) and _OF_LIBRARIES.search(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def record(error: BaseException, run_dir: RunDir, rank: int) -> None:
    """Writes `oom.json` if the error is an allocation that failed and no other rank has written it already."""
    if not is_out_of_memory(error):
        return
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    owners: list[Any] = [frame.f_locals.get("self") for frame in frames]
    trainer: Any = next((owner for owner in owners if isinstance(owner, transformers.Trainer)), None)
    found = OutOfMemory(
        rank=rank,
        phase=phase_of(frames),
        step=trainer.state.global_step if trainer is not None else 0,
        batch=trainer.batch if trainer is not None else None,
        measured=OBSERVER.last or _now(),
        largest=tuple(_largest()),
        states=_states(trainer.model_wrapped) if trainer is not None else None,
    )
    _write_first(run_dir, to_json(found), rank)


def phase_of(frames: list[FrameType]) -> Phase:
    """Returns the phase in which an allocation failed, by the functions on the stack."""
    seen = [(frame.f_code.co_name, frame.f_code.co_filename) for frame in frames]
    for function, file, phase in _PHASES:
        if any(name == function and path.endswith(file) for name, path in seen):
            return phase
    return Phase.LOAD


def _states(engine: Any) -> ModelStates | None:
    """Returns the bytes of the rank's model states; None before the engine is set up."""
    counted = state_bytes_or_none(engine)
    return None if counted is None else ModelStates(**{one.name: counted[one.name] for one in fields(ModelStates)})


def _write_first(run_dir: RunDir, text: str, rank: int) -> None:
    """Writes the file whole unless it exists: `link` refuses to replace one."""
    draft = run_dir.path / f".oom-{rank}"
    with suppress(OSError):  # a full disk must not hide the error itself
        draft.write_text(text, encoding="utf-8")
        os.link(draft, run_dir.oom)
    draft.unlink(missing_ok=True)


def _now() -> Allocator | None:
    """Returns what the allocator holds now, for an allocation of another library that failed; None without CUDA."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    OBSERVER(torch.cuda.current_device(), 0, total, free)
    return OBSERVER.last


def _largest() -> Iterator[Blocks]:
    """Yields the largest live blocks by size, where CUDA is."""
    if not torch.cuda.is_available():
        return
    sizes: Counter[int] = Counter()
    snapshot: Any = torch.cuda.memory_snapshot  # without types
    for segment in snapshot():
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                sizes[block["size"]] += 1
    by_bytes = sorted(sizes.items(), key=lambda item: item[0] * item[1], reverse=True)
    for size, count in by_bytes[:NUM_LARGEST]:
        yield Blocks(size_bytes=size, count=count)
