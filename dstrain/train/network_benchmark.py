"""The program of every rank of `dstrain doctor --network`: times collectives at growing sizes, printed by rank 0.

`python -m dstrain.train.network_benchmark '{"node0": 8, "node1": 8}'`, with the variables of DeepSpeed's launcher.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from dstrain.errors import EnvironmentProblem
from dstrain.facts import probe
from dstrain.facts.cluster.network_measurement import (
    ALL_GATHER,
    ALL_REDUCE,
    Inside,
    Network,
    Pair,
    Timing,
    bus_bytes_per_s,
    nccl_ways,
    rounds,
)
from dstrain.records import to_data
from dstrain.train.rank import Rank, from_environment
from dstrain.units import KIB, MIB

GPU_SIZES = tuple(64 * KIB * 8**step for step in range(5))
"""Bytes of the tensors: 64 KiB to 256 MiB."""
CPU_SIZES = GPU_SIZES[:4]
"""64 KiB to 32 MiB: gloo is at its best by then."""
PAIR_SIZES = tuple(MIB * 8**step for step in range(3))
"""1 MiB to 64 MiB."""
ALL_S, INSIDE_S, PAIR_S, PAIRS_S = 4.0, 2.0, 0.4, 8.0
"""Seconds for each collective of all ranks, for the GPUs of a host, for one pair, and for all rounds of pairs."""
MOST_ROUNDS = 15
"""Rounds of pairs: up to 16 hosts all pairs are measured, beyond that each host with 15 others."""
_JOIN_S = 60
"""Seconds in which all ranks must have found each other."""
_BURST_S = 0.02
_MOST_CALLS = 50
_MOST_REPEATS = 5
_STEP = 8
_WIDTH = 4
_NCCL_DEBUG, _NCCL_FILE = "NCCL_DEBUG", "NCCL_DEBUG_FILE"
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this rank is."""

    rank: Rank
    """Its number among all ranks."""
    slots: tuple[int, ...]
    """Ranks on each host."""

    @property
    def firsts(self) -> list[int]:
        """The first rank of each host."""
        return [sum(self.slots[:host]) for host in range(len(self.slots))]

    @property
    def host(self) -> int:
        """The number of its host."""
        return max(host for host, first in enumerate(self.firsts) if first <= self.rank.index)

    @property
    def local(self) -> int:
        """Its number on that host."""
        return self.rank.index - self.firsts[self.host]


class Bench:
    """Times collectives; all ranks of a group make the same decisions, by the slowest one's clock."""

    def __init__(self, device: torch.device) -> None:
        """`device` has the tensors."""
        self._device = device

    def slowest(self, seconds: float, group: Any = None) -> float:
        """Returns the maximum over all ranks of a group, and waits for all of them."""
        tensor = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
        return float(tensor.item())

    def ladder(self, name: str, sizes: Sequence[int], budget_s: float, group: Any = None) -> list[Timing]:
        """Returns the timings of a collective from the smallest size on, for about `budget_s` seconds."""
        began, timings = time.perf_counter(), []
        num_ranks = dist.get_world_size(group)
        for asked in sizes:
            num_bytes = max(1, asked // (_WIDTH * num_ranks)) * _WIDTH * num_ranks
            left_s = budget_s - self.slowest(time.perf_counter() - began, group)
            seconds = self._timed(self._call(name, num_bytes, group), left_s, group)
            rate = bus_bytes_per_s(name, num_bytes, seconds, num_ranks)
            timings.append(Timing(name=name, num_bytes=num_bytes, seconds=seconds, bus_bytes_per_s=rate))
            left_s = budget_s - self.slowest(time.perf_counter() - began, group)
            if left_s < 3 * _STEP * seconds:
                break
        return timings

    def latency_s(self) -> float:
        """Returns the time of the smallest all-reduce of all ranks."""
        return self._timed(self._call(ALL_REDUCE, _WIDTH, None), 1.0, None)

    def _call(self, name: str, num_bytes: int, group: Any) -> Callable[[], Any]:
        whole = torch.zeros(num_bytes // _WIDTH, dtype=torch.float32, device=self._device)
        if name == ALL_REDUCE:
            return lambda: dist.all_reduce(whole, group=group)
        part = torch.zeros(whole.numel() // dist.get_world_size(group), dtype=torch.float32, device=self._device)
        return lambda: _all_gather(whole, part, group=group)

    def _timed(self, call: Callable[[], Any], left_s: float, group: Any) -> float:
        """Returns the median time of a call; small ones are done many times in a row. The first one opens connections,
        and is not counted."""
        call()
        once = self._burst(call, 1, group)
        calls = max(1, min(_MOST_CALLS, int(_BURST_S / once)))
        repeats = max(1, min(_MOST_REPEATS, int(left_s / 2 / (once * calls))))
        return median(self._burst(call, calls, group) for _ in range(repeats))

    def _burst(self, call: Callable[[], Any], calls: int, group: Any) -> float:
        self._finish()
        self.slowest(0.0, group)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        self._finish()
        return max(1e-9, self.slowest((time.perf_counter() - began) / calls, group))

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure(place: Place, hosts: Sequence[str], say: Callable[[str], None]) -> Network | None:
    """Returns what was measured, on rank 0; None on the others. The process group must exist."""
    began = time.perf_counter()
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", place.local) if on_gpu else torch.device("cpu")
    bench = Bench(device)
    timings = []
    for name in (ALL_REDUCE, ALL_GATHER):
        say(f"{name} of all {place.rank.world_size} ranks")
        timings += bench.ladder(name, GPU_SIZES if on_gpu else CPU_SIZES, ALL_S)
    latency_s = bench.latency_s()
    inside = _inside(place, bench, say, GPU_SIZES[1:] if on_gpu else CPU_SIZES[1:])
    own = {"inside": inside, "pairs": _pairs(place, bench, say), "ways": ways_taken(os.environ)}
    gathered: list[Any] = [None] * place.rank.world_size
    dist.gather_object(own, gathered if place.rank.is_first else None, dst=0)
    bench.slowest(0.0)  # nobody leaves before everything has arrived
    if not place.rank.is_first:
        return None
    gpu = probe.local_gpus()[0] if on_gpu and probe.local_gpus() else None
    pairs = [pair for results in gathered for pair in results["pairs"]]
    return Network(
        backend=str(dist.get_backend()),
        hosts=tuple(hosts),
        slots=place.slots,
        gpu=gpu.name if gpu else None,
        gpu_memory_mib=gpu.memory_mib if gpu else 0,
        latency_s=latency_s,
        timings=tuple(timings),
        inside=tuple(results["inside"] for results in gathered if results["inside"] is not None),
        pairs=tuple(sorted(pairs, key=lambda pair: (pair.first, pair.second))),
        ways=tuple(sorted({way for results in gathered for way in results["ways"]})),
        seconds=time.perf_counter() - began,
    )


def _inside(place: Place, bench: Bench, say: Callable[[str], None], sizes: Sequence[int]) -> Inside | None:
    """Returns, on the first rank of a host, the bandwidth among its GPUs, while all hosts measure theirs."""
    if len(place.slots) == 1 or max(place.slots) == 1:
        return None
    say("all_gather inside each host")
    first, count = place.firsts[place.host], place.slots[place.host]
    timing = None
    if count > 1:
        group = dist.new_group(list(range(first, first + count)), use_local_synchronization=True)
        timing = bench.ladder(ALL_GATHER, sizes, INSIDE_S, group)[-1]
        dist.destroy_process_group(group)
    bench.slowest(0.0)
    if timing is None or place.local > 0:
        return None
    return Inside(host=place.host, bus_bytes_per_s=timing.bus_bytes_per_s)


def _pairs(place: Place, bench: Bench, say: Callable[[str], None]) -> list[Pair]:
    """Returns, on the first rank of a host, the pairs of which it is the first one.

    All pairs of a round are measured at the same time, so that a switch has as much to do as in training.
    """
    began, measured = time.perf_counter(), []
    games = rounds(len(place.slots)) if len(place.slots) > 1 else []
    for number, games_now in enumerate(games[:MOST_ROUNDS], start=1):
        say(f"pairs of hosts, round {number} of {min(len(games), MOST_ROUNDS)}")
        own = next((pair for pair in games_now if place.host in pair), None)
        if own is not None and place.local == 0:
            rate = _pair_bytes_per_s([place.firsts[host] for host in own], bench)
            measured += [Pair(first=own[0], second=own[1], bytes_per_s=rate)] if place.host == own[0] else []
        if bench.slowest(time.perf_counter() - began) > PAIRS_S:
            break
    return measured


def _pair_bytes_per_s(ranks: list[int], bench: Bench) -> float:
    """Returns what two ranks send each other, in each direction: of an all-gather of two that is the bus bandwidth."""
    group = dist.new_group(ranks, use_local_synchronization=True)
    timing = bench.ladder(ALL_GATHER, PAIR_SIZES, PAIR_S, group)[-1]
    dist.destroy_process_group(group)
    return timing.bus_bytes_per_s


def let_nccl_tell(environment: MutableMapping[str, str]) -> None:
    """Has NCCL log the transports that it takes, unless the user has configured its log."""
    if environment.get(_NCCL_DEBUG, "VERSION").upper() in {"VERSION", "WARN"}:
        environment[_NCCL_DEBUG] = "INFO"
        environment[_NCCL_FILE] = str(Path(tempfile.gettempdir()) / f"dstrain-nccl-{os.getpid()}.log")


def ways_taken(environment: Mapping[str, str]) -> list[str]:
    """Returns the transports in NCCL's log, and removes the log."""
    path = Path(environment.get(_NCCL_FILE, ""))
    if path.name != f"dstrain-nccl-{os.getpid()}.log":
        return []
    with suppress(OSError):
        text = path.read_text(encoding="utf-8", errors="replace")
        path.unlink()
        return nccl_ways(text)
    return []


def main(words: Sequence[str]) -> int:
    """Runs one rank."""
    hosts: dict[str, int] = json.loads(words[0])
    place = Place(rank=from_environment(os.environ), slots=tuple(hosts.values()))

    def write(**line: Any) -> None:
        if place.rank.is_first:
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()

    on_gpu = os.environ.get("DS_ACCELERATOR") != "cpu"
    if on_gpu and not torch.cuda.is_available():
        raise EnvironmentProblem(f"torch {torch.__version__} finds no GPU; DS_ACCELERATOR=cpu measures on the CPU")
    if on_gpu:
        let_nccl_tell(os.environ)
        torch.cuda.set_device(place.local)
    write(doing="waiting for all ranks")
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=_JOIN_S))
    network = measure(place, list(hosts), lambda text: write(doing=text))
    if network is not None:
        write(network=to_data(network))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
