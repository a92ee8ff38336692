"""Measures what it costs to trust a checkpoint: `python benchmarks/checkpoints.py [--gib 1] [--folder .]`.

Prints a table in Markdown: CPU seconds and seconds for each GiB of a file of tensors, written, read back and verified.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers.modeling_utils
import xxhash
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import (  # type: ignore[import-untyped]
    TorchCheckpointEngine,
)

from dstrain.train.checkpoints.checkpoints import checksum
from dstrain.train.checkpoints.tensor_files import nonfinite_weights, reading_back
from dstrain.units import GIB

writer: Any = transformers.modeling_utils

_BLOCK = 2**22


def seconds(do: Callable[[], object]) -> tuple[float, float]:
    """Returns the best of three: CPU seconds and seconds."""
    times = []
    for _ in range(3):
        cpu, wall = time.process_time(), time.perf_counter()
        do()
        times.append((time.process_time() - cpu, time.perf_counter() - wall))
    return min(times)


def read(path: Path, update: Callable[[Any], object]) -> None:
    """Reads a file in blocks, as `dstrain.train.checkpoints.tensor_files` does."""
    block = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            update(block[:count])


def crc32(path: Path) -> int:
    """Returns the CRC-32 of a file."""
    value = 0

    def update(block: Any) -> None:
        nonlocal value
        value = zlib.crc32(block, value)

    read(path, update)
    return value


def measured(tensors: dict[str, torch.Tensor], folder: Path) -> dict[str, tuple[float, float]]:
    """Returns the seconds of each way."""
    model, states = folder / "model.safetensors", folder / "states.pt"
    engine = SimpleNamespace(checkpoint_engine=TorchCheckpointEngine.__new__(TorchCheckpointEngine))
    engine.checkpoint_engine.zipfile_serialization = True
    layers = SimpleNamespace(named_parameters=lambda: ((name, torch.nn.Parameter(t)) for name, t in tensors.items()))

    def checked(save: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            with reading_back(engine):
                save()

        return run

    def save_model() -> None:
        writer.safe_save_file(tensors, model)

    def save_states() -> None:
        engine.checkpoint_engine.save(tensors, states)

    return {
        "write a model (safetensors)": seconds(save_model),
        "write it, read it back, with checksum": seconds(checked(save_model)),
        "write states (torch.save)": seconds(save_states),
        "write them, read them back, with checksum": seconds(checked(save_states)),
        "look for NaN": seconds(lambda: nonfinite_weights(layers)),
        "read alone": seconds(lambda: read(model, lambda block: None)),
        "verify: XXH3, 128 bits": seconds(lambda: checksum(model)),
        "verify: CRC-32 of zlib": seconds(lambda: crc32(model)),
        "verify: BLAKE2b of hashlib": seconds(lambda: read(model, hashlib.blake2b().update)),
        "verify: XXH3, 64 bits": seconds(lambda: read(model, xxhash.xxh3_64().update)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the file (default: 1)")
    parser.add_argument("--folder", type=Path, help="where it is written (default: a temporary folder)")
    given = parser.parse_args()
    tensors = {f"layer.{index}": torch.randn(int(given.gib * GIB) // 32, dtype=torch.float32) for index in range(8)}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        print("| what | CPU s/GiB | s/GiB |\n|---|---|---|")
        for what, (cpu, wall) in measured(tensors, Path(folder)).items():
            print(f"| {what} | {cpu / given.gib:.2f} | {wall / given.gib:.2f} |")


if __name__ == "__main__":
    main()
