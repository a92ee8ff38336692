"""Counts live tensor bytes while the real engine trains on CPU ranks, as if the ranks had a device of their own.

On a CPU the engine's device and its host are the same memory. Here they are told apart as a GPU machine would: the
accelerator is called `cpu:0` and the host `cpu`, `tensor.device` answers with one of the two, `.to()`, `.cpu()` and
`pin_memory` between them copy as they would have to, and every storage carries the place it was asked for; what
arithmetic makes lies where its inputs lie. Meta tensors are no memory and are not counted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks.measured_run import PRODUCTS, in_fp32

_true_to = torch._C.TensorBase.to
_true_device = torch._C.TensorBase.device.__get__  # type: ignore[attr-defined]

DEVICE, HOST = "device", "host"
ALLOCATOR_BLOCK_BYTES = 512
"""Source: torch 2.13 c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize."""


class _DeviceName(str):
    """The word `cpu` where it means the accelerator."""


def tensors_in(found: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in arguments or results."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, (tuple, list)):
        for each in found:
            yield from tensors_in(each)
    elif isinstance(found, dict):
        yield from tensors_in(tuple(found.values()))


class TwoPlaceAccelerator(CPU_Accelerator):  # type: ignore[misc]
    """DeepSpeed's CPU accelerator, with names that differ from the host's and with pinned memory that is a copy."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._name = "cpu:0"
        self._ledger = ledger
        self.is_full = False
        """Whether the engine is told that the device has no memory left."""

    def device_name(self, device_index: int | None = None) -> str:
        return _DeviceName("cpu") if device_index is None else "cpu:0"

    def current_device_name(self) -> str:
        return "cpu:0"

    def device_count(self) -> int:
        return 1

    def available_memory(self, device_index: int | None = None) -> int:
        return 0 if self.is_full else int(super().available_memory(device_index))

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return self._ledger.place(tensor) == DEVICE

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        shape = tensor.shape if match_shape else (tensor.numel(),)
        with self._ledger.placing(HOST):
            pinned = tensor.clone() if make_copy else torch.empty(shape, dtype=tensor.dtype)
        self._ledger.pinned[pinned.untyped_storage()._cdata] = pinned.untyped_storage().nbytes()
        return pinned

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return self.pin_memory(tensor.new_empty(shape))


class Ledger:
    """Live storages with their places, and the most there has been of them in each phase."""

    def __init__(self) -> None:
        self.live: dict[int, tuple[str, int, Any]] = {}
        self.bytes = {DEVICE: 0, HOST: 0}
        self.pinned: dict[int, int] = {}
        self.peaks: Counter[str] = Counter()
        """Phase → most bytes on the device during it."""
        self.host_peak = 0
        self._phase = "start"
        self._placing: list[str] = []

    def place(self, tensor: torch.Tensor) -> str | None:
        """Returns where a tensor lies; None for one that is no memory or that was made before counting began."""
        if tensor.is_meta:
            return None
        try:
            entry = self.live.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return None
        return entry[0] if entry else None

    @contextmanager
    def placing(self, place: str) -> Iterator[None]:
        """Makes new tensors lie in a place."""
        self._placing.append(place)
        try:
            yield
        finally:
            self._placing.pop()

    def place_for(self, arguments: Any) -> str:
        """Returns where the result of an operation on these arguments lies."""
        if self._placing:
            return self._placing[-1]
        places = {self.place(tensor) for tensor in tensors_in(arguments) if tensor.dim()}
        return HOST if places == {HOST} else DEVICE

    def add(self, tensor: torch.Tensor, place: str) -> None:
        """Counts a storage that is new."""
        if tensor.is_meta or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key, count = storage._cdata, storage.nbytes()
        if key in self.live:  # an empty storage is kept too: a freed parameter of ZeRO-3 still has a device
            return
        size = -(-count // ALLOCATOR_BLOCK_BYTES) * ALLOCATOR_BLOCK_BYTES if place == DEVICE else count
        self.live[key] = (place, size, weakref.ref(storage, lambda _, key=key: self._free(key)))  # type: ignore[misc]
        self.bytes[place] += size
        if place == HOST:
            self.host_peak = max(self.host_peak, self.bytes[HOST])
        elif self.bytes[DEVICE] > self.peaks[self._phase]:
            self.peaks[self._phase] = self.bytes[DEVICE]

    def _free(self, key: int) -> None:
        place, size, _ = self.live.pop(key)
        self.pinned.pop(key, None)
        self.bytes[place] -= size

    def enter(self, phase: str) -> None:
        """Begins a phase; what lives now counts in it."""
        self._phase = phase
        self.peaks[phase] = max(self.peaks[phase], self.bytes[DEVICE])

    def forget_peaks(self) -> None:
        """Starts measuring peaks anew."""
        self.peaks.clear()
        self.host_peak = self.bytes[HOST]


class CountStorages(TorchDispatchMode):
    """Tells the ledger of every tensor that an operation returns."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = in_fp32(func, args) if func in PRODUCTS else func(*args, **(kwargs or {}))
        new = list(tensors_in(out))
        if new:
            place = self._ledger.place_for((args, kwargs))
            for tensor in new:
                self._ledger.add(tensor, place)
        return out


class PlaceNew(TorchFunctionMode):
    """Makes the `device=` of what allocates a tensor mean one of the two places; without one it is the host."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:
            return self._backward(args[0])
        device = kwargs.get("device")
        place = None if device is None else _place(device)
        if place is None and next(tensors_in((args, kwargs)), None) is None:
            place = HOST
        if place is None:
            return func(*args, **kwargs)
        with self._ledger.placing(place):
            return func(*args, **kwargs)

    def _backward(self, loss: torch.Tensor) -> None:
        """Runs the backward pass inside this mode, which an intercepted call would leave.

        Source: torch 2.13 autograd/__init__.py: backward.
        """
        first = torch.ones_like(loss)
        with self:
            _engine_run_backward((loss,), (first,), False, False, (), allow_unreachable=True, accumulate_grad=True)


class _Moves:
    """What `tensor.device`, `.to()` and `.cpu()` do where there are two places."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def device(self, tensor: torch.Tensor) -> torch.device:
        return torch.device("cpu", 0) if self._ledger.place(tensor) == DEVICE else _true_device(tensor)

    def moved(self, tensor: torch.Tensor, place: str | None, rest: dict[str, Any]) -> torch.Tensor:
        """Returns the tensor in a place: itself when it is there already, with that dtype."""
        if place is None or place == self._ledger.place(tensor):
            return _true_to(tensor, **rest) if rest else tensor
        with self._ledger.placing(place):
            return _true_to(tensor, **{**rest, "copy": True})

    def to(self, tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Reads the arguments of `Tensor.to`."""
        rest = dict(kwargs)
        device = rest.pop("device", None)
        place = None
        names = iter(("non_blocking", "copy"))
        for argument in args:
            if isinstance(argument, torch.dtype):
                rest["dtype"] = argument
            elif isinstance(argument, bool):
                rest[next(names)] = argument
            elif isinstance(argument, torch.Tensor):
                place, rest["dtype"] = self._ledger.place(argument), argument.dtype
            elif argument is not None:
                device = argument
        if rest.get("dtype", 0) is None:
            del rest["dtype"]
        if device is not None:
            place = _place(device)
            if place is None:
                rest["device"] = device
        return self.moved(tensor, place, rest)


@contextmanager
def two_places(ledger: Ledger) -> Iterator[None]:
    """Counts everything inside, with a device and a host."""
    moves = _Moves(ledger)
    # methods of the class, not of the mode: PyTorch's own Python code, which runs outside of a mode, asks too
    methods = {
        "device": property(moves.device),
        "to": lambda tensor, *args, **kwargs: moves.to(tensor, args, kwargs),
        "cpu": lambda tensor: moves.moved(tensor, HOST, {}),
    }
    for name, method in methods.items():
        setattr(torch.Tensor, name, method)
    try:
        with PlaceNew(ledger), CountStorages(ledger):
            yield
    finally:
        for name in methods:
            delattr(torch.Tensor, name)


class _Done:
    """A collective that is over."""

    def wait(self) -> None:
        pass


def use_private_buffers() -> None:
    """Gives collectives copies that are not counted.

    Gloo's thread lets go of its tensors some time after `wait`, NCCL at once: a peak would depend on chance.
    """

    def private(name: str, *, result: int, given: int) -> None:
        collective = getattr(dist, name)

        def call(*tensors: Any, async_op: bool = False, **options: Any) -> _Done:
            arguments = [*tensors, *(options.pop(word) for word in _TENSOR_WORDS if word in options)]
            with _disable_current_modes():
                copies = [torch.empty_like(arguments[result])] if result != given else []
                copies.append(arguments[given].clone())
                collective(*copies, **options)
                arguments[result].copy_(copies[0])
            return _Done()

        setattr(dist, name, call)

    private("all_gather_into_tensor", result=0, given=1)
    private("reduce_scatter_tensor", result=0, given=1)
    private("all_reduce", result=0, given=0)


_TENSOR_WORDS = ("output_tensor", "output", "input_tensor", "input", "tensor")
"""Keywords under which collectives take tensors, results first."""


def _place(device: Any) -> str | None:
    """Returns the place that a device argument means; None for meta."""
    if isinstance(device, _DeviceName):
        return DEVICE
    device = torch.device(device)
    if device.type == "meta":
        return None
    return HOST if device.index is None else DEVICE
