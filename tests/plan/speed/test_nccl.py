"""NCCL's model of a collective, by hand."""

from __future__ import annotations

import pytest

from dstrain.plan.speed.collectives import START_S, Wire, collective_s


def _seconds(nbytes: float, *, ranks: int = 8, nodes: int = 1, passes: int = 1, wire: Wire = Wire.NVLINK) -> float:
    return collective_s(nbytes, 100e9, ranks=ranks, nodes=nodes, passes=passes, wire=wire) - START_S


def test_a_small_gather_takes_the_hops_of_the_low_latency_protocol() -> None:
    assert _seconds(0) == pytest.approx(7 * 0.47e-6)
    assert _seconds(0, wire=Wire.PCIE) == pytest.approx(7 * 1.0e-6)


def test_a_large_gather_takes_its_bytes() -> None:
    assert _seconds(1e9) == pytest.approx(7 / 8 * 1e-2 + 7 * 3.4e-6)


def test_a_gather_over_many_nodes_takes_hops_between_them() -> None:
    assert _seconds(0, ranks=512, nodes=64) == pytest.approx(448 * 0.47e-6 + 63 * 2.7e-6)


def test_a_small_all_reduce_over_many_nodes_goes_by_trees() -> None:
    assert _seconds(0, ranks=512, nodes=64, passes=2) == pytest.approx(2 * (7 * 0.52e-6 + 6 * 5.0e-6))


def test_a_medium_message_over_nvlink_goes_in_lines_of_128_bytes() -> None:
    assert _seconds(1e6) == pytest.approx(7 * 1.9e-6 + 7 / 8 * 1e-5 / 0.92)
    assert _seconds(1e6, wire=Wire.PCIE) > _seconds(1e6)
