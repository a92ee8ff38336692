"""Results of a measurement of the network."""

from __future__ import annotations

import pytest

from dstrain.facts.cluster.network_measurement import Network, Timing, bus_bytes_per_s


def network(count: int = 2, slots: int = 1) -> Network:
    """Returns a measurement over gloo."""
    timings = (
        Timing(num_bytes=2**16, seconds=1e-3, bus_bytes_per_s=1e8),
        Timing(num_bytes=2**25, seconds=1e-2, bus_bytes_per_s=2e9),
    )
    return Network(
        backend="gloo",
        hosts=tuple(f"node{number}" for number in range(count)),
        slots=(slots,) * count,
        gpu=None,
        gpu_memory_mib=0,
        latency_s=1e-4,
        timings=timings,
        seconds=5.0,
    )


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    # nccl-tests on 8 GPUs: 8589934592 B, 41012 us: 209.45 GB/s algorithm, 366.54 GB/s bus
    assert bus_bytes_per_s(8589934592, 41012e-6, 8) == pytest.approx(366.54e9, rel=1e-4)


def test_the_figure_for_a_plan_is_that_of_the_largest_all_reduce() -> None:
    assert network().bus_bytes_per_s == 2e9
