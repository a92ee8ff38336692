"""A device of few bytes for ranks on the CPU: as their `sitecustomize`, it counts live storages and raises beyond them.

Stands for a GPU whose allocator has `DSTRAIN_TEST_DEVICE_BYTES`; the limit holds once `DSTRAIN_TEST_LIMIT_FROM` exists.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any


def tensors_in(found: Any) -> Iterator[Any]:
    import torch

    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, (tuple, list)):
        for each in found:
            yield from tensors_in(each)


def limit(most: int, since: Path) -> None:
    """Makes PyTorch's main thread raise its out-of-memory error beyond `most` bytes, once the file exists."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    live: dict[int, tuple[int, Any]] = {}
    count = 0

    def freed(key: int, _: Any) -> None:
        nonlocal count
        count -= live.pop(key)[0]

    def fail(size: int) -> None:
        from dstrain.train.out_of_memory import OBSERVER

        stats = {"allocated_bytes.all.current": count, "reserved_bytes.all.current": count}
        torch.cuda.memory_stats = lambda device=None: stats  # what there is to ask on a GPU
        OBSERVER(0, size, most, most - count)
        raise torch.OutOfMemoryError("CUDA out of memory: that is, out of the bytes of a test")

    def add(tensor: Any) -> None:
        nonlocal count
        if tensor.is_meta or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in live:
            return
        if count + size > most and since.exists():
            fail(size)
        live[key] = size, weakref.ref(storage, partial(freed, key))
        count += size

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in tensors_in(out):
                add(tensor)
            return out

    Counting().__enter__()


if __name__ == "sitecustomize" and ("-m", "dstrain.train") in pairwise(sys.orig_argv):
    limit(int(os.environ["DSTRAIN_TEST_DEVICE_BYTES"]), Path(os.environ["DSTRAIN_TEST_LIMIT_FROM"]))
