"""Measures the memory that tokenized data takes on a rank, in bytes a sample, besides files that are mapped into it.

Example: python benchmarks/sample_memory.py --samples 10000000

Samples of one token are written as preparing writes them, in place of tokenizing, and read as a rank reads them before
training: all of them, without those that are too long, and packed by the first rank that asks or by another one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import datasets  # type: ignore[import-untyped]
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file

from dstrain.choices import OnLongSample
from dstrain.job.schema import Job
from dstrain.train.data import prepare as preparing

_BATCH = 10**6
TOKENS = "tokens.arrow"
CASES: Mapping[str, Mapping[str, Any]] = {
    "all samples": {},
    "without long ones": {"on_long_sample": OnLongSample.DROP},
    "packed by this rank": {"packing": True},
    "packed by another one": {"packing": True},
}


def write_tokens(path: Path, samples: int) -> None:
    """Writes the tokens of samples; their lengths are random, and one of a thousand is cut."""
    random = np.random.default_rng(0)
    with pa.OSFile(str(path), "wb") as file:
        writer = None
        for start in range(0, samples, _BATCH):
            count = min(_BATCH, samples - start)
            ids = pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32)), np.zeros(count, np.int32))
            lengths = random.integers(1, 100, count, dtype=np.int32)
            figures = {"length": lengths, "num_learned": lengths // 2}
            figures |= {name: np.zeros(count, np.int32) for name in ("num_images", "num_videos")}
            figures["num_cut"] = (np.arange(count) % 1000 == 0).astype(np.int32)
            figures["crc"] = random.integers(0, 2**32, count, dtype=np.uint32)
            batch = pa.table({"input_ids": ids, "labels": ids, **figures})
            writer = writer or pa.ipc.new_stream(file, batch.schema)
            writer.write_table(batch)
        if writer is not None:
            writer.close()


def own_bytes() -> int:
    """Returns the resident memory of this process without mapped files, bytes."""
    with Path("/proc/self/status").open(encoding="ascii") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def peak_of(work: Callable[[], object]) -> int:
    """Returns by how much the memory of this process grows at most while it works, bytes."""
    before = peak = own_bytes()
    is_done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.is_set():
            peak = max(peak, own_bytes())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        is_done.set()
        watcher.join()
    return peak - before


def measured(folder: Path, case: str) -> int:
    """Returns by how much the memory of this process grows at most as it reads the tokens in a folder, bytes."""
    tokens = datasets.Dataset.from_file(str(folder / TOKENS))
    made = SimpleNamespace(dataset=tokens, said=None, num_made=0, folder=folder)
    names: dict[str, Any] = {
        "rows_of": lambda *_, **__: SimpleNamespace(name="data"),
        "tokenized": lambda *_: made,
        "_remarks": lambda *_: [],
        "cache_folder": lambda: folder,
    }
    job = Job(model="m", output_dir="", data="data", seq_len=128, **CASES[case])
    with mock.patch.multiple(preparing, **names):
        return peak_of(partial(preparing.prepare, job, None, training=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10**7, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        print(measured(Path(given.child[0]), given.child[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder) / TOKENS, given.samples)
        print("| read | bytes a sample at the peak |\n|---|---:|")
        for case in CASES:  # each in a process of its own: what one leaves behind the next one would use
            line = [sys.executable, __file__, "--child", folder, case]
            done = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True)
            print(f"| {case} | {int(done.stdout) / given.samples:.0f} |", flush=True)


if __name__ == "__main__":
    main()
