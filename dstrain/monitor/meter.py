"""Counts what a rank does in a logging window, without synchronizing devices: tokens, waiting, memory, expert loads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import nn

from dstrain.monitor.collectives import Collectives, Span, StreamSpan
from dstrain.monitor.expert_balance import EVENT, balance, load_map
from dstrain.monitor.metrics import Reading
from dstrain.monitor.traffic import NOTHING
from dstrain.records import to_data

UNKNOWN = float("nan")
"""A measurement that a machine does not give."""


class RunQueue:
    """How long this process's main thread was ready to run while other processes had its CPU."""

    def __init__(self) -> None:
        """Opens the kernel's counter, if it exists. Source: Linux, Documentation/scheduler/sched-stats.rst."""
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


def used_bytes() -> float:
    """Returns the bytes of this GPU that are in use, by all processes; asking does not wait for its kernels."""
    free, total = torch.cuda.mem_get_info()
    return float(total - free)


def nvml(read: Callable[[], float]) -> float:
    """Returns NVML's figures; NaN without a GPU, or without an answer."""
    if torch.cuda.is_available():
        with suppress(Exception):  # NVML has many errors, and none matters to training
            return float(read())
    return UNKNOWN


@cache
def power_limit_w() -> float:
    """Returns the enforced power limit of this GPU in watts; NaN if it is not known."""

    def read() -> float:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
        return float(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1000

    return nvml(read)


def resident_bytes() -> float:
    """Returns the resident memory of this process; NaN if it is not known."""
    with suppress(psutil.Error, OSError):
        return float(psutil.Process().memory_info().rss)
    return UNKNOWN


def ram_bytes() -> int:
    """Returns the RAM of this machine, of which `used_share` is a share; a container's limit may be lower."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def used_share() -> float:
    """Returns the share of this machine's RAM that no process could have."""
    with suppress(psutil.Error, OSError):
        memory = psutil.virtual_memory()
        return 1 - memory.available / memory.total
    return UNKNOWN


COUNTS = "dstrain_counts"
"""Key of the counts in a micro-batch; the Trainer removes it."""


class Counts(NamedTuple):
    """Contents of a micro-batch."""

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


class Meter:
    """Counts tokens, waiting and forward time in this rank's window, without synchronizing the device."""

    def __init__(self, collectives: Collectives | None = None) -> None:
        """Starts with an empty window; `collectives` are this rank's."""
        self.collectives = collectives or Collectives()
        self.traffic = NOTHING
        """Collectives of the window that was closed last."""
        self._run_queue = RunQueue()
        self._between: Span | None = None  # since the last step ended
        self._ended_at_s = 0.0
        self._stalls: list[tuple[int, Span]] = []
        self._num_stalls = 0
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
        self._others: list[tuple[Span, list[tuple[int, Span]]]] = []
        self._at_hosts_pace: list[Span] = []
        self._cpu_began_s, self._elsewhere_s, self._aside_s = time.thread_time(), 0.0, 0.0
        self._earlier_peaks = (0, 0)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches and counts the time spent waiting for them."""
        while True:
            before, busy = time.monotonic(), time.thread_time()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._wait_s += time.monotonic() - before
            self._elsewhere_s += time.thread_time() - busy
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

    def begin_step(self) -> None:
        """Ends what is neither a step nor a checkpoint: callbacks, logging."""
        if self._between is not None:
            self._between.end()
            stalls = self._stalls[self._num_stalls :]
            if self._stalls is not self.collectives.stalls:  # a window was closed meanwhile
                stalls = [*stalls, *self.collectives.stalls]
            self._others.append((self._between, stalls))
            self._between = None
            self._elsewhere_s += time.thread_time() - self._ended_at_s

    def end_step(self) -> None:
        """Begins what is no step: on a GPU at what its stream does next, so that only what it waits for counts.

        Collectives in it, such as the logged loss's, do not count there.
        """
        self._stalls, self._num_stalls = self.collectives.stalls, len(self.collectives.stalls)
        self._between, self._ended_at_s = self.collectives.new_span(), time.thread_time()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leaves out of the window what happens inside, such as a checkpoint or an evaluation; its seconds count
        apart.
        """
        self.begin_step()
        peaks = self._peaks()
        kept, kept_collectives, began = dict(vars(self)), dict(vars(self.collectives)), time.monotonic()
        busy, queued = time.thread_time(), self._run_queue.wait_s()
        self.restart()
        yield
        self.restart()  # the peak
        vars(self).update(kept)
        vars(self.collectives).update(kept_collectives)
        seconds = time.monotonic() - began
        self._started += seconds
        self._aside_s += seconds
        self._cpu_began_s += time.thread_time() - busy
        self._queued_s += self._run_queue.wait_s() - queued
        self._earlier_peaks = peaks
        self.end_step()

    def _peaks(self) -> tuple[int, int]:
        """Returns the peaks of allocated and of reserved GPU memory in the window; 0 without a GPU."""
        stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
        names = ("allocated_bytes.all.peak", "reserved_bytes.all.peak")
        allocated, reserved = (max(stats.get(name, 0), at) for name, at in zip(names, self._earlier_peaks, strict=True))
        return allocated, reserved

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
            if torch.cuda.current_stream().query():  # all that was launched is done: the GPU waits for the host
                self._at_hosts_pace.append(whole)
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
            return UNKNOWN, UNKNOWN
        quarter = len(passes) // 4
        return sorted(s for s, _ in passes)[quarter], sorted(s / positions for s, positions in passes)[quarter]

    def _other_s(self) -> float:
        """Returns the seconds of the window between steps, without collectives."""
        pairs = ((span.seconds() or 0.0, stalls) for span, stalls in self._others)
        return sum(max(0.0, seconds - sum(stall.seconds() or 0.0 for _, stall in stalls)) for seconds, stalls in pairs)

    def _idle_s(self, own_s: float) -> float:
        """Returns the seconds of the window in which the device had nothing to do but to wait for this process.

        On a GPU: in forward passes at whose end it had done all that was launched. On a CPU: while the
        main thread was in a step, in no collective, waited for no data and had no core: for other processes, a disk, a
        lock.
        """
        if self.collectives.on_gpu:
            return sum(span.seconds() or 0.0 for span in self._at_hosts_pace)
        return max(0.0, own_s - self._other_s() - (time.thread_time() - self._cpu_began_s - self._elsewhere_s))

    def close(self) -> Reading:
        """Returns the counters of the window and starts the next one."""
        on_gpu = torch.cuda.is_available()
        forward_s, forward_s_per_token = self._forward_s()
        window_s = time.monotonic() - self._started
        traffic = self.collectives.close()
        stats = torch.cuda.memory_stats() if on_gpu else {}
        # the time in which this rank waited for nobody
        own_s = max(0.0, window_s - self._wait_s - self._paused_s - sum(traffic.exposed_s))
        peaks = self._peaks()
        reading = Reading(
            tokens=self._tokens,
            padding=self._padding,
            squared_tokens=self._squared,
            window_s=window_s,
            wait_s=self._wait_s,
            peak_bytes=peaks[0] if on_gpu else UNKNOWN,
            reserved_bytes=peaks[1] if on_gpu else UNKNOWN,
            outside_bytes=used_bytes() - stats.get("reserved_bytes.all.current", 0) if on_gpu else UNKNOWN,
            alloc_retries=stats.get("num_alloc_retries", 0),
            gpu_utilization=nvml(lambda: torch.cuda.utilization() / 100),
            gpu_power_w=nvml(lambda: torch.cuda.power_draw() / 1000),
            host_bytes=resident_bytes(),
            host_used_share=used_share(),
            samples=self._samples,
            masked_samples=self._masked,
            targets=self._targets,
            forward_s=forward_s,
            forward_s_per_token=forward_s_per_token,
            cpu_wait_share=self._cpu_wait_s / self._host_s if self._host_s else UNKNOWN,
            gpu_clock_mhz=nvml(torch.cuda.clock_rate),
            gpu_power_limit_w=power_limit_w(),
            own_s=own_s,
            queued_s=UNKNOWN if on_gpu else self._run_queue.wait_s() - self._queued_s,
            host_s=self._idle_s(own_s),
            other_s=self._other_s(),
            aside_s=self._aside_s,
        )
        self.restart()
        self.traffic = traffic
        return reading


def _counts(batch: dict[str, Any]) -> Counts:
    """Returns the counts of a micro-batch.

    `input_ids`, `labels`, `position_ids` and `attention_mask`: (batch, seq). In packed rows a sample begins at
    position 0, and a last sample without labels is padding. Positions with images are (4, batch, seq), text first.
    """
    inputs = batch["input_ids"]
    has_label = batch["labels"] != -100 if "labels" in batch else torch.zeros(0, dtype=torch.bool)
    masked = int((~has_label.any(dim=1)).sum()) if "labels" in batch else 0
    if "attention_mask" in batch:
        lengths = batch["attention_mask"].sum(dim=1)
    elif "position_ids" in batch:
        sample = (batch["position_ids"].reshape(-1, inputs.numel())[0] == 0).cumsum(0) - 1
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


def routers_of(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """Returns the routers of a model with the numbers of their layers, in their order; none of a dense one.

    Classes of Transformers 5 name theirs among the outputs that can be recorded; a router returns logits, weights and
    the chosen experts. Source: Transformers 5.23 utils/output_capturing.py.
    """
    recorders = [getattr(module, "_can_record_outputs", None) or {} for module in model.modules()]
    named = [recorder["router_logits"] for recorder in recorders if "router_logits" in recorder]
    listed = [one for many in named for one in (many if isinstance(many, list) else [many])]
    classes = tuple({getattr(one, "target_class", one) for one in listed})
    return [(_layer(name), module) for name, module in model.named_modules() if isinstance(module, classes)]


def _layer(name: str) -> int:
    """Returns the number of a module's layer.

    >>> _layer("base_model.model.model.layers.3.mlp.gate")
    3
    """
    return next((int(part) for part in name.split(".") if part.isdigit()), 0)


class ExpertLoads:
    """Counts on the device, while the model trains; recomputed tokens count twice, for all alike."""

    def __init__(self, routers: Sequence[tuple[int, nn.Module]], group: Any) -> None:
        """Watches routers, given with their layers; `group` is a gloo group of all ranks, or None with one rank."""
        self._counts: dict[int, torch.Tensor] = {}
        self._group = group
        self._layers = [layer for layer, _ in routers]
        self._closed: list[list[int]] = []
        for place, (_, router) in enumerate(routers):
            router.register_forward_hook(partial(self._count, place))

    def _count(self, place: int, router: nn.Module, _inputs: Any, outputs: Any) -> None:
        """Adds a micro-batch; `outputs`: logits (tokens, experts), weights and chosen experts (tokens, top-k)."""
        if not router.training:
            return
        logits, chosen = outputs[0], outputs[2].detach().reshape(-1)
        if place not in self._counts:
            self._counts[place] = torch.zeros(logits.shape[-1], dtype=torch.int64, device=chosen.device)
        one = torch.ones((), dtype=torch.int64, device=chosen.device)
        self._counts[place].scatter_add_(0, chosen, one.expand_as(chosen))

    def restart(self) -> None:
        """Starts a new window."""
        self._counts.clear()

    def close(self) -> dict[str, Any]:
        """Returns the metrics of the window, over all ranks, and starts the next one."""
        if not self._layers or len(self._counts) < len(self._layers):
            return {}
        counts = torch.stack([self._counts[place] for place in sorted(self._counts)]).cpu()
        self.restart()
        if self._group is not None:
            dist.all_reduce(counts, group=self._group)
        self._closed = counts.tolist()
        return balance(self._closed, self._layers)

    def record(self, step: int) -> dict[str, Any] | None:
        """Returns the line of `metrics.jsonl` with the loads of the last window, once; None without a new one."""
        counts, self._closed = self._closed, []
        return {"event": EVENT, **to_data(load_map(counts, self._layers, step))} if counts else None
