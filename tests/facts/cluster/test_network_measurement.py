"""What a measurement of the network says."""

from __future__ import annotations

import pytest

from dstrain.facts.cluster.network_measurement import (
    Inside,
    Network,
    Pair,
    Timing,
    bus_bytes_per_s,
    nccl_ways,
    rounds,
    slow_hosts,
)


def network(count: int = 2, slots: int = 1, pairs: dict[tuple[int, int], float] | None = None) -> Network:
    found = pairs or {}
    timings = (
        Timing(name="all_reduce", num_bytes=2**16, seconds=1e-3, bus_bytes_per_s=1e8),
        Timing(name="all_reduce", num_bytes=2**25, seconds=1e-2, bus_bytes_per_s=3e9),
        Timing(name="all_gather", num_bytes=2**16, seconds=1e-3, bus_bytes_per_s=1e8),
        Timing(name="all_gather", num_bytes=2**25, seconds=1e-2, bus_bytes_per_s=2e9),
    )
    return Network(
        backend="gloo",
        hosts=tuple(f"node{number}" for number in range(count)),
        slots=(slots,) * count,
        gpu=None,
        gpu_memory_mib=0,
        latency_s=1e-4,
        timings=timings,
        inside=(Inside(host=0, bus_bytes_per_s=5e9), Inside(host=1, bus_bytes_per_s=4e9)) if slots > 1 else (),
        pairs=tuple(Pair(first=first, second=second, bytes_per_s=rate) for (first, second), rate in found.items()),
        ways=(),
        seconds=5.0,
    )


@pytest.mark.parametrize("count", range(2, 18))
def test_in_a_tournament_everybody_meets_everybody_once_and_one_at_a_time(count: int) -> None:
    games = rounds(count)
    met = [pair for game in games for pair in game]
    assert sorted(met) == [(first, second) for first in range(count) for second in range(first + 1, count)]
    assert all(len({host for pair in game for host in pair}) == 2 * len(game) for game in games)
    assert len(games) == (count if count % 2 else count - 1)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    # nccl-tests on 8 GPUs: 8589934592 B, 41012 us: 209.45 GB/s algorithm, 366.54 GB/s bus
    assert bus_bytes_per_s("all_reduce", 8589934592, 41012e-6, 8) == pytest.approx(366.54e9, rel=1e-4)


def test_the_figures_for_a_plan_are_those_of_the_largest_all_gather_and_the_slowest_host() -> None:
    found = network(slots=2)
    assert (found.between_bus_bytes_per_s, found.inside_bus_bytes_per_s) == (2e9, 4e9)


def test_one_host_has_links_inside_only() -> None:
    found = network(count=1, slots=8)
    assert (found.between_bus_bytes_per_s, found.inside_bus_bytes_per_s) == (None, 2e9)


def test_of_three_hosts_the_one_with_slow_pairs_is_found_though_most_pairs_are_slow() -> None:
    found = network(3, pairs={(0, 1): 1e9, (0, 2): 1e7, (1, 2): 2e7})
    assert (found.usual_pair_bytes_per_s, slow_hosts(found, 0.7)) == (1e9, [2])


def test_of_many_hosts_the_median_pair_is_the_usual_one() -> None:
    rates = {pair: 1e9 for game in rounds(6) for pair in game} | {(0, 1): 5e9, (2, 3): 1e8}
    found = network(6, pairs=rates)
    assert (found.usual_pair_bytes_per_s, slow_hosts(found, 0.7)) == (1e9, [])


def test_ways_are_read_from_ncclogs_of_several_versions() -> None:
    log = """
    h:1:2 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0(3)/GDRDMA/Shared
    h:1:2 [7] NCCL INFO Channel 03/0 : 47[7] -> 39[7] [receive] via NET/IBext_v8/2
    h:1:2 [2] NCCL INFO Channel 00/0 : 10[2] -> 9[1] via P2P/IPC/read
    h:1:2 [2] NCCL INFO Channel 02 : 2[0] -> 3[1] via SHM/direct/direct
    h:1:2 [7] NCCL INFO Channel 03/0 : 15[7] -> 6[6] [send] via NET/Socket/3
    """
    assert nccl_ways(log) == ["NET/IB/GDRDMA", "NET/IBext_v8", "NET/Socket", "P2P", "SHM"]
