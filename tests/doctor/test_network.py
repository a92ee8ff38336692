"""What is said of a measured network."""

from __future__ import annotations

from dataclasses import replace

from dstrain.cli.output.doctor import grouped
from dstrain.doctor.network_judge import Figures, figures, findings, gpu_of, table
from dstrain.facts.cluster import gpus, links
from dstrain.facts.cluster.cluster import Origin, describe
from dstrain.facts.cluster.network_measurement import Network, Timing, rounds
from dstrain.wrapping import COLUMNS
from tests.doctor.samples import said
from tests.facts.cluster.test_network_measurement import network

H100 = {"backend": "nccl", "gpu": "NVIDIA H100 80GB HBM3", "gpu_memory_mib": 81559}
FIGURES = Figures(between=links.link("ib400"), is_assumed=False, inside=links.link("nvlink4"))


def at_rate(found: Network, bus_bytes_per_s: float) -> Network:
    timing = Timing(name="all_gather", num_bytes=2**28, seconds=1e-3, bus_bytes_per_s=bus_bytes_per_s)
    return replace(found, timings=(*found.timings, timing))


def dgx(rate: float = 340e9, **changes: object) -> Network:
    found = replace(network(2, 8, pairs={(0, 1): 46e9}), **H100, ways=("NET/IB/GDRDMA", "P2P"))  # type: ignore[arg-type]
    fast = tuple(replace(each, bus_bytes_per_s=360e9) for each in found.inside)
    return replace(at_rate(found, rate), inside=fast, **changes)  # type: ignore[arg-type]


def test_a_sound_network_is_said_with_its_share_of_the_links_figures() -> None:
    found = said(findings(dgx(), FIGURES, {}))
    assert found == [
        "✓ 2 hosts of 8 GPUs, NCCL: time and bus bandwidth",
        "✓ between hosts 42.5 GB/s for each GPU, 85 % of ib400 (50.0 GB/s)",
        "✓ inside node0, the slowest, 360 GB/s, 80 % of nvlink4 (450 GB/s)",
        "✓ NCCL went over NET/IB/GDRDMA, P2P",
        "✓ the only pair: node0 and node1, 46.0 GB/s with one GPU",
    ]


def test_tcp_in_place_of_rdma_is_told_with_what_to_type() -> None:
    slow = said(findings(dgx(12e9, ways=("NET/Socket", "P2P")), FIGURES, {"node0": "eth0", "node1": "eth0"}))[1]
    assert slow.startswith("! between hosts 1.50 GB/s for each GPU, 3.0 % of ib400 (50.0 GB/s) → NCCL went over TCP")
    assert "through eth0" in slow
    assert "NCCL_IB_HCA" in slow
    assert "NCCL_DEBUG=INFO" in slow


def test_a_link_that_nobody_named_is_assumed_and_may_be_named() -> None:
    found = said(findings(dgx(100e9), replace(FIGURES, is_assumed=True), {}))[1]
    assert "25 % of assumed ib400" in found
    assert "dstrain gen-config --interconnect NAME" in found


def test_hosts_whose_inside_is_as_slow_are_not_the_networks_fault() -> None:
    slow = dgx(20e9)
    slow = replace(slow, inside=tuple(replace(each, bus_bytes_per_s=21e9) for each in slow.inside))
    found = said(findings(slow, FIGURES, {}))
    assert found[1].startswith("✓ between hosts 2.50 GB/s")
    assert found[1].endswith("the links inside the hosts are as slow (21.0 GB/s)")
    assert found[2].startswith("! inside node0, the slowest, 21.0 GB/s, 4.7 % of nvlink4 (450 GB/s) → nvidia-smi topo")


def test_gpus_that_meet_in_ram_are_told_of_acs() -> None:
    found = dgx(ways=("SHM",))
    found = replace(found, inside=tuple(replace(each, bus_bytes_per_s=9e9) for each in found.inside))
    assert "NCCL_P2P_DISABLE" in said(findings(found, FIGURES, {}))[2]


def test_rdma_without_gpudirect_is_told() -> None:
    found = said(findings(dgx(ways=("NET/IB", "P2P")), FIGURES, {}))[3]
    assert found.startswith("! NCCL went over NET/IB, P2P: without GPUDirect RDMA")
    assert "modprobe nvidia_peermem" in found


def test_the_slowest_pair_is_named_with_the_host_that_makes_it_slow() -> None:
    found = network(3, pairs={(0, 1): 1e9, (0, 2): 1e7, (1, 2): 2e7})
    assert said(findings(found, FIGURES, {"node2": "eth0"}))[-1] == (
        "! slowest pair: node0 and node2, 10.0 MB/s, 1.0 % of the fastest one (1.00 GB/s); every pair of node2 is slow"
        " → ssh node2 'ethtool eth0; ip -s link show eth0'  (speed, errors, MTU, cable)"
    )


def test_a_pair_that_alone_is_slow_is_the_switchs_fault() -> None:
    rates = {pair: 45e9 for game in rounds(6) for pair in game} | {(1, 4): 20e9}
    found = said(findings(network(6, pairs=rates), FIGURES, {}))[-1]
    assert found.startswith("! slowest pair: node1 and node4, 20.0 GB/s, 44 % of the median one (45.0 GB/s) → check")


def test_pairs_that_are_alike_are_as_they_should_be() -> None:
    rates = {pair: 45e9 for game in rounds(20)[:15] for pair in game}
    found = said(findings(network(20, pairs=rates), FIGURES, {}))[-1]
    assert found == (
        "✓ slowest pair: node0 and node19, 45.0 GB/s, 100 % of the median one (45.0 GB/s) (150 of 190 measured)"
    )


def test_the_table_has_a_line_for_each_size_and_leaves_out_what_was_not_measured() -> None:
    lines = table(at_rate(network(), 2e9))
    assert lines[0].split() == ["size", "all-reduce", "all-gather"]
    assert lines[1].split() == ["64.0", "KiB", "1.00", "ms", "100", "MB/s", "1.00", "ms", "100", "MB/s"]
    assert lines[3].split() == ["256.0", "MiB", "1.00", "ms", "2.00", "GB/s"]
    assert lines[3].index("1.00") > lines[1].rindex("1.00") - 3


def test_all_but_what_is_to_be_typed_fits_80_columns() -> None:
    rates = {pair: 45e9 for game in rounds(6) for pair in game} | {(1, 4): 20e9}
    pairs, hosts = network(6, pairs=rates).pairs, tuple(f"node{number}" for number in range(6))
    measured = replace(dgx(12e9, ways=("NET/IB",)), pairs=pairs, hosts=hosts)
    lines = grouped(findings(measured, FIGURES, {}), verbose=True)
    assert [line for line in lines if len(line) > COLUMNS and not line.startswith("    → ")] == []


def test_the_link_between_hosts_is_the_one_that_the_plan_was_given() -> None:
    h100 = gpu_of(dgx())
    given = describe(gpu=h100, gpu_origin=Origin.GIVEN, gpus=16, inter_link=links.link("roce100"))
    assert figures(h100, given) == Figures(
        between=links.link("roce100"), is_assumed=False, inside=links.link("nvlink4")
    )
    assumed = describe(gpu=h100, gpu_origin=Origin.GIVEN, gpus=16)
    assert figures(h100, assumed) == figures(h100, None) == replace(FIGURES, is_assumed=True)
    assert figures(gpus.gpu("cpu"), given).between.name == "eth10"


def test_a_gpu_that_is_not_in_the_table_has_a_link_all_the_same() -> None:
    other = gpu_of(dgx(gpu="NVIDIA Something 9000"))
    assert figures(other, None).inside.name == "pcie4"
