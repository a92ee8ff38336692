"""The program of every rank of `dstrain doctor --network`: times all-reduces at growing sizes, printed by rank 0.

`python -m dstrain.train.network_benchmark '{"node0": 8, "node1": 8}'`, with the variables of DeepSpeed's launcher.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from dstrain.errors import EnvironmentProblem
from dstrain.facts import probe
from dstrain.facts.cluster.measured_links import Network, Timing, bus_bytes_per_s
from dstrain.records import to_data
from dstrain.train.rank import from_environment
from dstrain.units import KIB

SIZES = tuple(64 * KIB * 8**step for step in range(5))
"""Bytes of the tensors: 64 KiB to 256 MiB."""
BUDGET_S = 6.0
"""Seconds for all sizes; the larger ones are left out if they would take longer."""
_JOIN_S = 60
"""Seconds in which all ranks must have found each other."""
_BURST_S = 0.02
_MOST_CALLS = 50
_MOST_REPEATS = 5
_STEP = 8
_WIDTH = 4


class Bench:
    """Times all-reduces; all ranks make the same decisions, by the slowest one's clock."""

    def __init__(self, device: torch.device) -> None:
        """`device` has the tensors."""
        self._device = device

    def slowest(self, seconds: float) -> float:
        """Returns the maximum over all ranks, and waits for all of them."""
        tensor = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor.item())

    def ladder(self) -> list[Timing]:
        """Returns timings from the smallest size on, for about `BUDGET_S` seconds."""
        began, timings = time.perf_counter(), []
        for num_bytes in SIZES:
            seconds = self.seconds(num_bytes, BUDGET_S - self.slowest(time.perf_counter() - began))
            rate = bus_bytes_per_s(num_bytes, seconds, dist.get_world_size())
            timings.append(Timing(num_bytes=num_bytes, seconds=seconds, bus_bytes_per_s=rate))
            left_s = BUDGET_S - self.slowest(time.perf_counter() - began)
            if left_s < 3 * _STEP * seconds:
                break
        return timings

    def seconds(self, num_bytes: int, left_s: float) -> float:
        """Returns the median time of one call; small ones are made many times in a row.

        The first call opens connections, and is not counted.
        """
        tensor = torch.zeros(num_bytes // _WIDTH, dtype=torch.float32, device=self._device)
        dist.all_reduce(tensor)
        once = self._burst(tensor, 1)
        calls = max(1, min(_MOST_CALLS, int(_BURST_S / once)))
        repeats = max(1, min(_MOST_REPEATS, int(left_s / 2 / (once * calls))))
        return median(self._burst(tensor, calls) for _ in range(repeats))

    def _burst(self, tensor: torch.Tensor, calls: int) -> float:
        self._finish()
        self.slowest(0.0)
        began = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(tensor)
        self._finish()
        return max(1e-9, self.slowest((time.perf_counter() - began) / calls))

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure(hosts: dict[str, int], device: torch.device) -> Network:
    """Returns the measurement over all ranks. The process group must exist."""
    began = time.perf_counter()
    bench = Bench(device)
    latency_s = bench.seconds(_WIDTH, 1.0)
    timings = bench.ladder()
    gpu = next(iter(probe.local_gpus()), None) if device.type == "cuda" else None
    return Network(
        backend=str(dist.get_backend()),
        hosts=tuple(hosts),
        slots=tuple(hosts.values()),
        gpu=gpu.name if gpu else None,
        gpu_memory_mib=gpu.memory_mib if gpu else 0,
        latency_s=latency_s,
        timings=tuple(timings),
        seconds=time.perf_counter() - began,
    )


def main(words: Sequence[str]) -> int:
    """Runs one rank."""
    is_first = from_environment(os.environ).is_first

    def write(**line: Any) -> None:
        if is_first:
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()

    on_gpu = os.environ.get("DS_ACCELERATOR") != "cpu"
    if on_gpu and not torch.cuda.is_available():
        raise EnvironmentProblem(f"torch {torch.__version__} finds no GPU; DS_ACCELERATOR=cpu measures on the CPU")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    write(doing="waiting for all ranks")
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=_JOIN_S))
    write(doing=f"all_reduce of all {dist.get_world_size()} ranks")
    write(network=to_data(measure(json.loads(words[0]), device)))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
