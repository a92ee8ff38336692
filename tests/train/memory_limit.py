"""A device of few bytes for ranks on the CPU: it counts live storages and raises beyond them.

As a `sitecustomize` it stands for a GPU whose allocator has `DSTRAIN_TEST_DEVICE_BYTES`; the limit holds once
`DSTRAIN_TEST_LIMIT_FROM` exists. `python -m tests.train.memory_limit RUN_DIR BYTES` is a rank with such a device, which
writes the most bytes that lived to `device-RANK.json` of the run directory.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator
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


def limit(most: int, since: Path) -> Callable[[], int]:
    """Makes PyTorch's main thread raise its out-of-memory error beyond `most` bytes, once the file exists.

    Returns a function that returns the most bytes that lived.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    live: dict[int, tuple[int, Any]] = {}
    count = peak = 0

    def freed(key: int, _: Any) -> None:
        nonlocal count
        count -= live.pop(key)[0]

    def fail(size: int) -> None:
        from dstrain.train.memory import OBSERVER

        stats = {"allocated_bytes.all.current": count, "reserved_bytes.all.current": count}
        torch.cuda.memory_stats = lambda device=None: stats  # what there is to ask on a GPU
        OBSERVER(0, size, most, most - count)
        raise torch.OutOfMemoryError("CUDA out of memory: that is, out of the bytes of a test")

    def add(tensor: Any) -> None:
        nonlocal count, peak
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
        peak = max(peak, count)

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in tensors_in(out):
                add(tensor)
            return out

    Counting().__enter__()
    return lambda: peak


def count_as_kernel() -> None:
    """Makes the chunked loss hold what DeepSpeed's CUDA kernel holds: on a CPU it converts a few rows to fp32."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    from dstrain.train import loss

    class CrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Any, targets: Any, ignored: int) -> Any:
            with _disable_current_modes():
                sums = logits.float().logsumexp(-1)
                losses = torch.nn.functional.cross_entropy(
                    logits.float(), targets, ignore_index=ignored, reduction="none"
                )
            sums, losses = sums.clone(), losses.clone()
            ctx.save_for_backward(logits, sums, targets)
            ctx.ignored = ignored
            return losses

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            logits, sums, targets = ctx.saved_tensors
            with _disable_current_modes():
                gradient = (logits.float() - sums.unsqueeze(1)).exp()
                counted = targets != ctx.ignored
                gradient[counted, targets[counted]] -= 1
                gradient = (gradient * (grads[0] * counted).unsqueeze(1)).to(logits.dtype)
            return gradient.clone(), None, None

    loss.token_losses = CrossEntropy.apply  # type: ignore[assignment]


def main(run_dir: Path, most: int) -> int:
    """Trains as `dstrain.train` does, on a device of `most` bytes, and returns the exit code."""
    from dstrain.train.__main__ import run

    count_as_kernel()
    peak = limit(most, run_dir)
    code = run([str(run_dir)])
    (run_dir / f"device-{os.environ['RANK']}.json").write_text(json.dumps(peak()))
    return code


if __name__ == "sitecustomize" and ("-m", "dstrain.train") in pairwise(sys.orig_argv):
    limit(int(os.environ["DSTRAIN_TEST_DEVICE_BYTES"]), Path(os.environ["DSTRAIN_TEST_LIMIT_FROM"]))
elif __name__ == "__main__":
    code = main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
