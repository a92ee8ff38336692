"""Measures the bytes of model states in the live engine, for comparison with predictions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dstrain.paths import write_atomic
from dstrain.rundir import RunDir
from dstrain.train.rank import of_all_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of model states on one rank, right before an optimizer step."""

    params: int
    """Parameters on the device: full ones, and the partitions of ZeRO-3."""
    grads: int
    """Gradients for the step, on the device."""
    optimizer: int
    """Fp32 master weights and Adam's moments, on the device."""
    host: int
    """All of these that are offloaded to RAM."""
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
