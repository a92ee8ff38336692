"""Counts what a rank does in a logging window: tokens, waiting, memory; without synchronizing devices."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dstrain.monitor.metrics import Reading

_NAN = float("nan")
COUNTS = "dstrain_counts"
"""Key of the counts in a micro-batch; the Trainer removes it."""


class Counts(NamedTuple):
    """What a micro-batch holds."""

    tokens: int = 0
    """Tokens without padding."""
    padding: int = 0
    squared: int = 0
    """Sum of length² over the samples."""
    samples: tuple[int, ...] = ()
    """Tokens of each sample."""


class Meter:
    """Counts tokens and waiting time in this rank's window, without device synchronization until it closes."""

    def __init__(self) -> None:
        """Starts with an empty window."""
        self.restart()

    def restart(self) -> None:
        """Starts a new window."""
        self._started = time.monotonic()
        self._tokens = 0
        self._padding = 0
        self._squared = 0
        self._wait_s = 0.0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches and counts the time spent waiting for them."""
        while True:
            before = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._wait_s += time.monotonic() - before
            yield batch

    def count(self, batch: Any) -> None:
        """Adds the counts that `CountingCollator` put into a micro-batch."""
        counts = batch[COUNTS]
        self._tokens += counts.tokens
        self._padding += counts.padding
        self._squared += counts.squared

    def close(self) -> Reading:
        """Returns the counters of the window and starts the next one."""
        on_gpu = torch.cuda.is_available()
        stats = torch.cuda.memory_stats() if on_gpu else {}
        reading = Reading(
            tokens=self._tokens,
            padding=self._padding,
            squared_tokens=self._squared,
            window_s=time.monotonic() - self._started,
            wait_s=self._wait_s,
            peak_bytes=stats.get("allocated_bytes.all.peak", 0) if on_gpu else _NAN,
            reserved_bytes=stats.get("reserved_bytes.all.peak", 0) if on_gpu else _NAN,
            outside_bytes=_used_bytes() - stats.get("reserved_bytes.all.current", 0) if on_gpu else _NAN,
            alloc_retries=stats.get("num_alloc_retries", 0),
            gpu_utilization=_nvml(lambda: torch.cuda.utilization() / 100),
            gpu_power_w=_nvml(lambda: torch.cuda.power_draw() / 1000),
            host_bytes=_resident_bytes(),
            host_used_share=_used_share(),
        )
        self.restart()
        return reading


def _counts(batch: dict[str, Any]) -> Counts:
    """Returns the counts of a micro-batch.

    `input_ids`, `labels`, `position_ids` and `attention_mask`: (batch, seq). In packed rows a sample begins at
    position 0, and the padding at the end is a sample without labels.
    """
    inputs = batch["input_ids"]
    if "attention_mask" in batch:
        lengths = batch["attention_mask"].sum(dim=1)
    elif "position_ids" in batch:
        sample = (batch["position_ids"].reshape(-1) == 0).cumsum(0) - 1
        teaches = torch.bincount(sample, weights=(batch["labels"].reshape(-1) != -100).double()) > 0
        lengths = torch.bincount(sample)[teaches]
    else:
        lengths = torch.full((inputs.shape[0],), inputs.shape[-1])
    tokens = int(lengths.sum())
    samples = tuple(map(int, lengths.tolist()))
    return Counts(tokens, inputs.numel() - tokens, int((lengths**2).sum()), samples)


class CountingCollator:
    """Counts the tokens of each micro-batch on the host, in the data loader's process."""

    def __init__(self, collator: Callable[[Any], dict[str, Any]]) -> None:
        """Wraps the collator that builds the tensors."""
        self.collator = collator

    def __call__(self, rows: Any) -> dict[str, Any]:
        """Returns the micro-batch with its counts under the key `COUNTS`."""
        batch = self.collator(rows)
        batch[COUNTS] = _counts(batch)
        return batch


def _used_bytes() -> float:
    """Returns the bytes of this GPU that are in use, by all processes; asking does not wait for its kernels."""
    free, total = torch.cuda.mem_get_info()
    return float(total - free)


def _nvml(read: Callable[[], float]) -> float:
    if torch.cuda.is_available():
        with suppress(Exception):  # NVML has many errors, and none matters to training
            return float(read())
    return _NAN


def _resident_bytes() -> float:
    with suppress(OSError, ValueError, IndexError):
        return float(int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    return _NAN


def _used_share() -> float:
    """Returns the share of this machine's RAM that no process could have."""
    with suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return 1 - sizes["MemAvailable"] / sizes["MemTotal"]
    return _NAN
