"""What is said of a measured network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dstrain.cli.output.doctor import grouped
from dstrain.doctor.network_measure import Expected, expected, findings, gpu_of, table
from dstrain.facts.cluster.cluster import Origin, describe, link
from dstrain.facts.cluster.measured_links import Network, Timing
from dstrain.wrapping import COLUMNS
from tests.doctor.samples import said
from tests.facts.cluster.test_measured_links import network

H100: dict[str, Any] = {"backend": "nccl", "gpu": "NVIDIA H100 80GB HBM3", "gpu_memory_mib": 81559}
IB400 = Expected(link=link("ib400"), is_assumed=False)
NVLINK = Expected(link=link("nvlink4"), is_assumed=False)


def dgx(rate: float = 340e9, count: int = 2) -> Network:
    """Returns a measurement of hosts with eight H100 each."""
    measured = network(count, 8)
    timing = Timing(num_bytes=2**28, seconds=1e-3, bus_bytes_per_s=rate)
    return replace(measured, timings=(*measured.timings, timing), **H100)


def test_a_sound_network_is_reported_with_its_share_of_the_links_figure() -> None:
    assert said(findings(dgx(), IB400)) == [
        "✓ 2 hosts of 8 GPUs, NCCL: all-reduce",
        "✓ between hosts 42.5 GB/s for each GPU, 85 % of ib400 (50.0 GB/s)",
    ]
    assert said(findings(dgx(360e9, count=1), NVLINK)) == [
        "✓ 8 GPUs of node0, NCCL: all-reduce",
        "✓ inside the host 360 GB/s, 80 % of nvlink4 (450 GB/s)",
    ]


def test_a_slow_link_comes_with_commands() -> None:
    slow = said(findings(dgx(12e9), IB400))[1]
    assert slow.startswith("! between hosts 1.50 GB/s for each GPU, 3.0 % of ib400 (50.0 GB/s) → unset NCCL_IB_DISABLE")
    assert "NCCL_DEBUG=INFO" in slow
    inside = said(findings(dgx(9e9, count=1), NVLINK))[1]
    assert inside.startswith("! inside the host 9.00 GB/s, 2.0 % of nvlink4 (450 GB/s) → nvidia-smi topo")
    assert "NCCL_P2P_DISABLE" in inside


def test_an_assumed_link_may_be_named() -> None:
    text = said(findings(dgx(100e9), replace(IB400, is_assumed=True)))[1]
    assert "25 % of assumed ib400" in text
    assert "dstrain gen-config --interconnect NAME" in text


def test_the_table_has_a_line_for_each_size() -> None:
    lines = table(dgx())
    assert lines[0].split() == ["size", "time", "bus", "bandwidth"]
    assert lines[1].split() == ["64.0", "KiB", "1.00", "ms", "100", "MB/s"]
    assert lines[3].split() == ["256.0", "MiB", "1.00", "ms", "340", "GB/s"]
    assert lines[4] == "the smallest one takes 0.100 ms"


def test_all_but_commands_fits_80_columns() -> None:
    lines = grouped(findings(dgx(12e9), replace(IB400, is_assumed=True)), verbose=True)
    assert [line for line in lines if len(line) > COLUMNS and not line.startswith("    → ")] == []


def test_the_link_between_hosts_is_the_one_that_the_plan_was_given() -> None:
    h100 = gpu_of(dgx())
    given = describe(gpu=h100, gpu_origin=Origin.GIVEN, gpus=16, inter_link=link("roce100"))
    assert expected(dgx(), given) == Expected(link=link("roce100"), is_assumed=False)
    assumed = describe(gpu=h100, gpu_origin=Origin.GIVEN, gpus=16)
    assert expected(dgx(), assumed) == expected(dgx(), None) == replace(IB400, is_assumed=True)
    assert expected(dgx(count=1), given) == NVLINK
    assert expected(network(), given).link.name == "eth10"


def test_a_gpu_that_is_not_in_the_table_has_a_link_all_the_same() -> None:
    other = replace(dgx(count=1), gpu="NVIDIA Something 9000")
    assert expected(other, None).link.name == "pcie4"
