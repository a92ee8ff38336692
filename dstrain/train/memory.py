"""The memory of a rank: allocates optimizer states, measures model states, and records a failed allocation.

The measured bytes are compared with predictions.
"""

from __future__ import annotations

import json
import os
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from types import FrameType
from typing import Any

import torch
import transformers
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3  # type: ignore[import-untyped]
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dstrain.oom import Allocator, Blocks, ModelStates, OutOfMemory, Phase
from dstrain.paths import write_atomic
from dstrain.records import to_json
from dstrain.rundir import RunDir
from dstrain.train.rank import of_all_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes(ModelStates):
    """Bytes of model states on one rank, right before an optimizer step, with the size of the model."""

    trainable: int
    """Number of trainable parameters, over all ranks."""
    frozen: int
    """Number of frozen parameters, over all ranks."""


class _Counter:
    """Counts each storage once, on the device or on the host."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._seen: set[int] = set()
        self._on_gpu = on_gpu
        self.host = 0

    def count(self, tensors: Iterator[Any], *, is_offloaded: bool) -> int:
        """Returns the bytes on the device, and adds offloaded bytes to `host`; without a GPU the device is the CPU."""
        on_device = 0
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            if not storage.nbytes() or storage.data_ptr() in self._seen:
                continue
            self._seen.add(storage.data_ptr())
            on_host = is_offloaded or (self._on_gpu and tensor.device.type == "cpu")
            if on_host:
                self.host += storage.nbytes()
            else:
                on_device += storage.nbytes()
        return on_device


def model_state_bytes(engine: Any) -> StateBytes:
    """Returns the bytes of this rank; call it between backward pass and step, once Adam has its moments."""
    zero = engine._config.zero_config
    offloads_optimizer = _is_offloaded(zero.offload_optimizer)
    counter = _Counter(on_gpu=torch.cuda.is_available())
    parameters = list(engine.module.parameters())
    params = counter.count(_parameters(parameters), is_offloaded=_is_offloaded(zero.offload_param))
    optimizer = counter.count(_optimizer_states(engine.optimizer), is_offloaded=offloads_optimizer)
    grads = counter.count(_gradients(engine.optimizer, parameters), is_offloaded=offloads_optimizer)
    return StateBytes(
        params=params,
        grads=grads,
        optimizer=optimizer,
        host=counter.host,
        trainable=sum(numel(p) for p in parameters if p.requires_grad),
        frozen=sum(numel(p) for p in parameters if not p.requires_grad),
    )


def _is_offloaded(config: Any) -> bool:
    return config is not None and str(getattr(config.device, "value", config.device)) != "none"


def numel(parameter: Any) -> int:
    """Returns the elements of a parameter, of which a rank may hold a part under ZeRO-3."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _parameters(parameters: list[Any]) -> Iterator[Any]:
    for parameter in parameters:
        yield parameter.data
        yield getattr(parameter, "ds_tensor", None)
        yield from _scales(getattr(parameter, "quant_state", None))


def _scales(state: Any) -> Iterator[Any]:
    """Yields the scales of weights in 4 bits, which are quantised too. Source: bitsandbytes 0.50 functional.py."""
    while state is not None:
        yield state.absmax
        state = state.state2


_MASTERS = (
    "single_partition_of_fp32_groups",  # ZeRO-1 and 2
    "fp32_partitioned_groups_flat",  # ZeRO-3
    "fp32_groups_flat_partition",  # bf16 with fp32 gradients
    "fp32_groups_flat",  # ZeRO-0
    "fp32_groups",
)
"""Attributes of DeepSpeed's optimizers with fp32 weights. Source: deepspeed 0.19.8 runtime/zero, bf16_optimizer."""


def _optimizer_states(optimizer: Any) -> Iterator[Any]:
    """Yields master weights and the moments of the optimizer inside."""
    for name in _MASTERS:
        for master in getattr(optimizer, name, None) or []:
            yield from master if isinstance(master, list) else [master]
    inner = getattr(optimizer, "optimizer", optimizer)
    for states in inner.state.values():
        yield from states.values()
    for pending in (getattr(optimizer, "_muon_pending_momentum", None) or {}).values():
        yield pending[0]  # deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: _muon_staging_momentum


def _gradients(optimizer: Any, parameters: list[Any]) -> Iterator[Any]:
    """Yields the partition buffers, and gradients of parameters and of offloaded master weights."""
    yield getattr(optimizer, "grad_partitions_flat_buffer", None)
    for name in ("averaged_gradients", "all_grad_tensors"):
        for group in (getattr(optimizer, name, None) or {}).values():
            yield from group or []
    for parameter in parameters:
        yield parameter.grad
        yield getattr(parameter, "grad_accum", None)
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        for master in getattr(optimizer, name, None) or []:
            yield master.grad


def state_bytes_or_none(engine: Any) -> dict[str, int] | None:
    """Returns the measurement, or None for an engine of another structure, which must not end training."""
    try:
        return asdict(model_state_bytes(engine))
    except (AttributeError, TypeError, RuntimeError):
        return None


class MeasureCallback(TrainerCallback):
    """Measures right before the second optimizer step of this process, and has rank 0 write `states.json`."""

    def __init__(self, engine: Callable[[], Any], run_dir: RunDir, *, group: Any, is_first: bool) -> None:
        """`engine` returns the DeepSpeed engine once training has begun; `group` is a gloo group of all ranks."""
        self._engine = engine
        self._run_dir = run_dir
        self._group = group
        self._is_first = is_first

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wraps the engine's step, since Transformers has no event between backward and step."""
        engine = self._engine()
        original, calls = engine.step, 0

        def step(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                del engine.step  # restores the method of the class
                self._write(state_bytes_or_none(engine))
            return original(*arguments, **options)

        engine.step = step

    def _write(self, mine: dict[str, int] | None) -> None:
        ranks = of_all_ranks(mine, self._group)
        if self._is_first and None not in ranks:
            write_atomic(self._run_dir.states, json.dumps({"ranks": ranks}, indent=2) + "\n")


def allocate_states(engine: Any) -> None:
    """Allocates the states of PyTorch's AdamW, which its first step would allocate between what lives then.

    The free memory is in one piece then, for all steps that follow. A resumed run has loaded the states; other
    optimizers make theirs in the first step. Source: torch 2.13 optim/adam.py: _init_group.
    """
    inner = _inner(engine)
    if type(inner) is torch.optim.AdamW and not inner.defaults["amsgrad"]:
        is_on_device = inner.defaults["fused"] or inner.defaults["capturable"]
        for master in _without_states(engine):
            step = torch.zeros((), dtype=torch.float32, device=master.device if is_on_device else "cpu")
            moments = {name: torch.zeros_like(master.data) for name in ("exp_avg", "exp_avg_sq")}
            inner.state[master] = {"step": step, **moments}


def _inner(engine: Any) -> Any:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _without_states(engine: Any) -> list[torch.Tensor]:
    """Returns the master copies on the engine's device that have no optimizer states yet."""
    inner = _inner(engine)
    masters = [parameter for group in inner.param_groups for parameter in group["params"]]
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        masters = engine.optimizer.fp32_partitioned_groups_flat
    device = torch.device(engine.device).type
    return [master for master in masters if master.device.type == device and not inner.state.get(master)]


def states_to_come(engine: Any, *, bytes_per_state: int | None) -> int:
    """Returns the bytes of Adam's two moments that the first step will allocate on the engine's device.

    `bytes_per_state`: bytes of a number of a state; None: as many as a parameter's.
    """
    return sum(2 * master.numel() * (bytes_per_state or master.element_size()) for master in _without_states(engine))


def reserved_for_first_step(engine: Any, *, bytes_per_state: int | None) -> torch.Tensor:
    """Returns memory for the states that the first step will allocate, so that it is missing in the passes before."""
    count = states_to_come(engine, bytes_per_state=bytes_per_state)
    return torch.empty(count, dtype=torch.uint8, device=engine.device)


NUM_LARGEST = 8
"""Sizes of live blocks that are recorded."""

_PHASES = (
    ("evaluation_loop", "/trainer.py", Phase.EVALUATION),
    ("_save_checkpoint", "dstrain/train/trainer.py", Phase.SAVE),
    ("save_final", "dstrain/train/parts/saving.py", Phase.SAVE),
    ("step", "deepspeed/runtime/engine.py", Phase.STEP),
    ("allocate_states", "dstrain/train/memory.py", Phase.STEP),
    ("reserved_for_first_step", "dstrain/train/memory.py", Phase.STEP),
    ("backward", "deepspeed/runtime/engine.py", Phase.BACKWARD),
    ("training_step", "transformers/trainer.py", Phase.FORWARD),
)
"""Functions that a failed allocation happened in, each with the end of its file; the first one found counts, since
evaluation has forward passes, and accelerate steps inside `backward`. Source: deepspeed 0.19.8 runtime/engine.py;
accelerate 1.15 utils/deepspeed.py: DeepSpeedEngineWrapper.backward; Transformers 5.23 trainer.py: training_step."""

_OF_LIBRARIES = re.compile(r"CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure 2 'out of memory'")
"""Messages of CUDA, cuBLAS and NCCL, which allocate without PyTorch."""


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
    """Returns the allocator's present state, for an allocation of another library that failed; None without CUDA."""
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
