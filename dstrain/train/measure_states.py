"""Measures the bytes of model states in the live engine, for comparison with predictions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dstrain.paths import write_atomic
from dstrain.rundir import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """What one rank holds right before an optimizer step."""

    params: int
    """Bytes of parameters on the device: full ones, and the partitions of ZeRO-3."""
    grads: int
    """Bytes of gradients that the step will use, on the device."""
    optimizer: int
    """Bytes of fp32 master weights and Adam's moments, on the device."""
    host: int
    """Bytes of all of these that offloading keeps in RAM."""
    trainable: int
    """Parameters that are trained, over all ranks."""
    frozen: int
    """Parameters that are not, over all ranks."""


class _Counter:
    """Counts each storage once, by the place it lies in."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._seen: set[int] = set()
        self._on_gpu = on_gpu
        self.host = 0

    def count(self, tensors: Iterator[Any], *, is_offloaded: bool) -> int:
        """Returns the bytes on the device, and adds what is offloaded to `host` (on a CPU all devices are the host)."""
        found = 0
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
                found += storage.nbytes()
        return found


def model_state_bytes(engine: Any) -> StateBytes:
    """Returns what this rank holds; call it after the backward pass, before the step, once Adam has its moments."""
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
        trainable=sum(_numel(p) for p in parameters if p.requires_grad),
        frozen=sum(_numel(p) for p in parameters if not p.requires_grad),
    )


def _is_offloaded(config: Any) -> bool:
    return config is not None and str(getattr(config.device, "value", config.device)) != "none"


def _numel(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _parameters(parameters: list[Any]) -> Iterator[Any]:
    for parameter in parameters:
        yield parameter.data
        yield getattr(parameter, "ds_tensor", None)


_MASTERS = (
    "single_partition_of_fp32_groups",  # ZeRO-1 and 2
    "fp32_partitioned_groups_flat",  # ZeRO-3
    "fp32_groups_flat_partition",  # bf16 with fp32 gradients
    "fp32_groups_flat",  # ZeRO-0
    "fp32_groups",
)
"""Where DeepSpeed's optimizers keep fp32 weights. Source: deepspeed 0.19.8 runtime/zero, bf16_optimizer, fp16."""


def _optimizer_states(optimizer: Any) -> Iterator[Any]:
    """Yields master weights and the moments of the optimizer inside."""
    for name in _MASTERS:
        for master in getattr(optimizer, name, None) or []:
            yield from master if isinstance(master, list) else [master]
    inner = getattr(optimizer, "optimizer", optimizer)
    for states in inner.state.values():
        yield from states.values()


def _gradients(optimizer: Any, parameters: list[Any]) -> Iterator[Any]:
    """Yields the partition buffers, and gradients that still hang on parameters or on the offloaded masters."""
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


def _or_none(engine: Any) -> dict[str, int] | None:
    """Returns the measurement, or None from an engine that is built differently: it must not end the training."""
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
        """Puts itself before the engine's step, as Transformers has no event between backward and step."""
        engine = self._engine()
        original, calls = engine.step, 0

        def step(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                del engine.step  # the method of the class is in force again
                self._write(_or_none(engine))
            return original(*arguments, **options)

        engine.step = step

    def _write(self, mine: dict[str, int] | None) -> None:
        every = [mine]
        if self._group is not None:
            every = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(every, mine, group=self._group)
        if self._is_first and None not in every:
            write_atomic(self._run_dir.states, json.dumps({"ranks": every}, indent=2) + "\n")
