"""Tracks live bytes of tensor storages while real code runs on tensors without data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_INDEXED = frozenset(
    {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
)


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts each meta storage once, from the operation that returns it until its last tensor is gone.

    Storages that exist before (parameters, buffers) are not counted. Allocations inside a kernel are not seen.
    A question to the data that has yes or no for an answer is answered no: an attention mask has padding in it, and
    nothing is infinite. A boolean index, whose result depends on data, is taken to be true as often as `see` says, and
    becomes the integer index that CUDA makes of it. Source: torch 2.13
    aten/src/ATen/native/IndexingUtils.h: expandTensors.
    """

    def __init__(self, *, round_bytes: int, known: Sequence[torch.Tensor]) -> None:
        """Sizes are rounded up to `round_bytes`; `known` tensors are not counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[tuple[int, int]] = []
        """Number of a storage and its bytes, above 0 when it is allocated and below 0 when it is freed."""
        self.phases: list[tuple[int, str, int | None]] = []
        """How many events came before a phase began, the phase's name, and the layer it belongs to."""
        self.live_bytes = 0
        self._num_true = 0
        self._round_bytes = round_bytes
        self._count = 0
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def enter_phase(self, name: str, layer: int | None = None) -> None:
        """Begins a phase with a name."""
        self.phases.append((len(self.events), name, layer))

    def see(self, num_tokens: int) -> None:
        """Says how many tokens of the images of a micro-batch stand in the rows."""
        self._num_true = num_tokens

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the number of a live tensor's storage, or None if it is not counted."""
        entry = self._numbers.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[0]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operation and counts what it returns."""
        args = _together(args)
        if func in _INDEXED:
            args = self._with_integer_indices(args)
        elif func is _aten.masked_select.default:
            return self._masked_select(*args)
        elif func is _aten._local_scalar_dense.default and args[0].dtype is torch.bool and args[0].is_meta:
            return False
        out = func(*args, **(kwargs or {}))
        self._add_all(out)
        return out

    def _add_all(self, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            self._add(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                self._add_all(item)

    def _add(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._numbers or key in self._known or not storage.nbytes():
            return
        num_bytes = -(-storage.nbytes() // self._round_bytes) * self._round_bytes
        number = self._count
        self._count += 1
        self._numbers[key] = (number, weakref.ref(storage, self._freer(key, number, num_bytes)))
        self.events.append((number, num_bytes))
        self.live_bytes += num_bytes

    def _freer(self, key: int, number: int, num_bytes: int) -> Callable[[Any], None]:
        def free(_: Any) -> None:
            del self._numbers[key]
            self.events.append((number, -num_bytes))
            self.live_bytes -= num_bytes

        return free

    def _with_integer_indices(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        source, indices, *rest = args
        if not any(index is not None and index.dtype is torch.bool and index.is_meta for index in indices):
            return args
        integers: list[Any] = []
        for index in indices:
            if index is None or index.dtype is not torch.bool:
                integers.append(index)
            else:
                is_spread = index.dim() > 1 and index.stride(-1) == 0  # the same for all of the last dimension
                num_true = self._num_true * (index.shape[-1] if is_spread else 1)
                places = torch.empty((num_true, index.dim()), dtype=torch.int64, device="meta")
                self._add(places)
                integers += places.unbind(1)
        return (source, integers, *rest)

    def _masked_select(self, source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns the chosen elements of a mask that is the same for all elements of the last dimension."""
        numel = self._num_true * (source.shape[-1] if mask.shape[-1] == 1 else 1)
        out = torch.empty(numel, dtype=source.dtype, device="meta")
        self._add(out)
        return out


def _together(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns arguments whose tensors with data are on the meta device too if others are; numbers stay."""
    flat = (arg for each in args for arg in (each if isinstance(each, (list, tuple)) else (each,)))
    tensors = [arg for arg in flat if isinstance(arg, torch.Tensor)]
    if len({tensor.is_meta for tensor in tensors if tensor.is_meta or tensor.dim()}) < 2:
        return args
    return tuple(list(map(_moved, each)) if isinstance(each, (list, tuple)) else _moved(each) for each in args)


def _moved(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) and value.dim() else value
