"""Counts what a rank does in a logging window: tokens, waiting, memory; without synchronizing devices."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dstrain.monitor.collectives import Collectives, StreamSpan
from dstrain.monitor.metrics import Reading
from dstrain.monitor.traffic import NOTHING, Traffic

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
    masked: int = 0
    """Samples of which no token has a label."""
    targets: int = 0
    """Tokens with a label."""


class RunQueue:
    """How long this process's main thread was ready to run while other processes had its CPU."""

    def __init__(self) -> None:
        """Opens the kernel's counter, where there is one. Source: Linux, Documentation/scheduler/sched-stats.rst."""
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open("/proc/self/schedstat", os.O_RDONLY)

    def __del__(self) -> None:
        """Closes the counter."""
        if self._file is not None:
            os.close(self._file)

    def wait_s(self) -> float:
        """Returns the seconds since the process began; 0 if they are not known. It takes a microsecond."""
        if self._file is None:
            return 0.0
        with suppress(OSError, ValueError, IndexError):
            return int(os.pread(self._file, 64, 0).split()[1]) / 1e9
        return 0.0


class Meter:
    """Counts tokens, waiting and forward time in this rank's window, without synchronizing the device."""

    def __init__(self, collectives: Collectives | None = None) -> None:
        """Starts with an empty window; `collectives` are those of this rank."""
        self.collectives = collectives or Collectives()
        self.traffic = NOTHING
        """Collectives of the window that was closed last."""
        self._run_queue = RunQueue()
        self.restart()

    def restart(self) -> None:
        """Starts a new window."""
        self.collectives.restart()
        self._started = time.monotonic()
        self._queued_s, self._paused_s = self._run_queue.wait_s(), 0.0
        self._tokens = 0
        self._padding = 0
        self._squared = 0
        self._wait_s = 0.0
        self._host_s = self._cpu_wait_s = 0.0
        self._samples = self._masked = self._targets = 0
        self._passes: list[tuple[float, int]] = []
        self._events: list[tuple[Any, int, list[Any]]] = []
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
        self._samples += len(counts.samples)
        self._masked += counts.masked
        self._targets += counts.targets

    def pause(self, seconds: float) -> None:
        """Takes out seconds in which this rank did something that the others did not, such as writing metrics."""
        self._paused_s += seconds

    @contextmanager
    def forward(self, positions: int) -> Iterator[None]:
        """Times a forward pass over so many tokens, padding included: on a GPU by events, which wait for nothing.

        Collectives in it do not count there. On a CPU the time in which other processes had it does not count, and a
        pass with collectives is left out: the threads that carry them take its cores, too.
        """
        whole = StreamSpan() if self.collectives.on_gpu else None
        stalls = len(self.collectives.stalls)
        before, queued = time.perf_counter(), self._run_queue.wait_s()
        yield
        seconds, queued = time.perf_counter() - before, self._run_queue.wait_s() - queued
        if whole is not None:
            whole.end()
            self._events.append((whole, positions, self.collectives.stalls[stalls:]))
        elif len(self.collectives.stalls) > stalls:
            return
        else:
            self._passes.append((max(seconds - queued, 1e-9), positions))
        self._host_s += seconds
        self._cpu_wait_s += queued

    def _forward_s(self) -> tuple[float, float]:
        """Returns the seconds of a forward pass, and of a token in one: lower quartiles, which others disturb least.

        Passes that the GPU has not finished are left out.
        """
        passes = list(self._passes)
        for whole, positions, stalls in self._events:
            seconds = whole.seconds()
            if seconds is not None:
                stalled = sum(span.seconds() or 0.0 for _, span in stalls)
                passes.append((max(seconds - stalled, 1e-9), positions))
        if not passes:
            return _NAN, _NAN
        quarter = len(passes) // 4
        return sorted(s for s, _ in passes)[quarter], sorted(s / positions for s, positions in passes)[quarter]

    def _own_s(self, window_s: float, traffic: Traffic) -> float:
        """Returns the seconds of the window in which this rank waited for nobody."""
        return max(0.0, window_s - self._wait_s - self._paused_s - sum(traffic.exposed_s))

    def close(self) -> Reading:
        """Returns the counters of the window and starts the next one."""
        on_gpu = torch.cuda.is_available()
        forward_s, forward_s_per_token = self._forward_s()
        window_s = time.monotonic() - self._started
        traffic = self.collectives.close()
        stats = torch.cuda.memory_stats() if on_gpu else {}
        reading = Reading(
            tokens=self._tokens,
            padding=self._padding,
            squared_tokens=self._squared,
            window_s=window_s,
            wait_s=self._wait_s,
            peak_bytes=stats.get("allocated_bytes.all.peak", 0) if on_gpu else _NAN,
            reserved_bytes=stats.get("reserved_bytes.all.peak", 0) if on_gpu else _NAN,
            outside_bytes=_used_bytes() - stats.get("reserved_bytes.all.current", 0) if on_gpu else _NAN,
            alloc_retries=stats.get("num_alloc_retries", 0),
            gpu_utilization=_nvml(lambda: torch.cuda.utilization() / 100),
            gpu_power_w=_nvml(lambda: torch.cuda.power_draw() / 1000),
            host_bytes=_resident_bytes(),
            host_used_share=_used_share(),
            samples=self._samples,
            masked_samples=self._masked,
            targets=self._targets,
            forward_s=forward_s,
            forward_s_per_token=forward_s_per_token,
            cpu_wait_share=self._cpu_wait_s / self._host_s if self._host_s else _NAN,
            gpu_clock_mhz=_nvml(torch.cuda.clock_rate),
            gpu_power_limit_w=_power_limit_w(),
            own_s=self._own_s(window_s, traffic),
            queued_s=_NAN if on_gpu else self._run_queue.wait_s() - self._queued_s,
        )
        self.restart()
        self.traffic = traffic
        return reading


def _counts(batch: dict[str, Any]) -> Counts:
    """Returns the counts of a micro-batch.

    `input_ids`, `labels`, `position_ids` and `attention_mask`: (batch, seq). In packed rows a sample begins at
    position 0, and a last sample without labels is padding.
    """
    inputs = batch["input_ids"]
    has_label = batch["labels"] != -100 if "labels" in batch else torch.zeros(0, dtype=torch.bool)
    masked = int((~has_label.any(dim=1)).sum()) if "labels" in batch else 0
    if "attention_mask" in batch:
        lengths = batch["attention_mask"].sum(dim=1)
    elif "position_ids" in batch:
        sample = (batch["position_ids"].reshape(-1) == 0).cumsum(0) - 1
        teaches = torch.bincount(sample, weights=has_label.reshape(-1).double()) > 0
        is_padding = torch.zeros_like(teaches)
        is_padding[sample.reshape(inputs.shape)[:, -1]] = True
        is_padding &= ~teaches
        lengths, masked = torch.bincount(sample)[~is_padding], int((~teaches & ~is_padding).sum())
    else:
        lengths = torch.full((inputs.shape[0],), inputs.shape[-1])
    tokens = int(lengths.sum())
    samples = tuple(map(int, lengths.tolist()))
    return Counts(tokens, inputs.numel() - tokens, int((lengths**2).sum()), samples, masked, int(has_label.sum()))


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


@cache
def _power_limit_w() -> float:
    def read() -> float:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
        return float(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1000

    return _nvml(read)


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
