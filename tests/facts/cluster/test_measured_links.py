"""The file in which a measurement of the network waits for the next plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dstrain.facts.cluster.calibration import Calibration, Measured
from dstrain.facts.cluster.cluster import Cluster, Origin, describe, link
from dstrain.facts.cluster.gpus import gpu
from dstrain.facts.cluster.measured_links import (
    MeasuredLinks,
    Network,
    Timing,
    bus_bytes_per_s,
    find,
    names,
    nominal_name,
    of_network,
    parse,
    read,
    save,
    with_links,
    with_rates,
)
from dstrain.plan.speed.efficiency import efficiency


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


ENTRY = MeasuredLinks(
    hosts=("gpu01", "gpu02"),
    gpu="h100-sxm",
    gpus_per_node=8,
    backend="nccl",
    date="2026-11-22",
    inter_bus_bytes_per_s=240e9,
    intra_bus_bytes_per_s=330e9,
)


def cluster(name: str | None = None) -> Cluster:
    given = link(name) if name else None
    return describe(gpu=gpu("h100"), gpu_origin=Origin.GIVEN, gpus=16, inter_link=given)


def test_what_is_kept_is_found_again_for_the_same_hosts_in_any_order(tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "links.json")
    assert save(ENTRY, path) == Path(path)
    entries, problem = read(path)
    assert problem is None
    hosts = names(["me@gpu02", "GPU01"], "elsewhere")
    assert find(entries, hosts, gpu="h100-sxm", gpus_per_node=8) == ENTRY


@pytest.mark.parametrize(
    "other",
    [
        {"hosts": ["gpu01"]},
        {"hosts": ["gpu01", "gpu02", "gpu03"]},
        {"gpu": "cpu"},
        {"gpus_per_node": 4},
    ],
)
def test_other_hosts_or_gpus_find_nothing(other: dict[str, object]) -> None:
    asked = {"hosts": ["gpu01", "gpu02"], "gpu": "h100-sxm", "gpus_per_node": 8} | other
    assert find([ENTRY], asked.pop("hosts"), **asked) is None  # type: ignore[arg-type]


def test_a_new_measurement_replaces_the_old_one_and_leaves_the_others(tmp_path: Path) -> None:
    path = str(tmp_path / "links.json")
    for entry in (ENTRY, replace(ENTRY, hosts=("gpu03",)), replace(ENTRY, hosts=("gpu02", "gpu01"), date="2026-11-23")):
        save(entry, path)
    assert [(each.hosts, each.date) for each in read(path)[0]] == [
        (("gpu03",), "2026-11-22"),
        (("gpu02", "gpu01"), "2026-11-23"),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[]", "not written by dstrain doctor --network"),
        ('{"schema": 1, "measured": 3}', "not written by dstrain doctor --network"),
        ('{"schema": 2, "measured": []}', "schema is 2; this version reads 1"),
        ("{}", "schema is null; this version reads 1"),
        ('{"schema": 1, "measured": [{}]}', '/measured/0/hosts: "hosts" is missing'),
        ('{"schema": 1, "measured": [7]}', "/measured/0"),
    ],
)
def test_a_file_that_cannot_be_read_is_said_and_never_raises(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_text(text)
    entries, told = read(str(path))
    assert entries == []
    assert told is not None
    assert problem in told
    assert str(path) in told


def test_a_damaged_entry_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    save(ENTRY, str(path))
    data = json.loads(path.read_text())
    data["measured"].append(data["measured"][0] | {"inter_bus_bytes_per_s": -1})
    found, problem = parse(json.dumps(data))
    assert found == [ENTRY]
    assert problem is not None
    assert "/measured/1/inter_bus_bytes_per_s" in problem


def test_without_a_file_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert read(str(tmp_path / "links.json")) == ([], None)
    (tmp_path / "folder").mkdir()
    assert read(str(tmp_path / "folder"))[1] is not None


def test_hosts_that_differ_in_their_slots_are_not_kept() -> None:
    uneven = replace(network(), slots=(1, 2))
    assert of_network(uneven, "cpu", date="2026-11-22", own="a") is None


def test_this_machine_goes_by_its_name() -> None:
    found = of_network(
        replace(network(count=1, slots=2), hosts=("localhost",)), "cpu", date="2026-11-22", own="Box.lan"
    )
    assert found is not None
    assert (found.hosts, found.intra_bus_bytes_per_s, found.inter_bus_bytes_per_s) == (("box",), 2e9, None)


def test_links_are_as_measured_for_each_gpu() -> None:
    found = with_links(cluster(), ENTRY)
    assert (found.inter_link.bytes_per_s, found.inter_link_origin) == (30e9, Origin.MEASURED)
    assert (found.inter_link.name, nominal_name(found.inter_link)) == ("ib400 (measured)", "ib400")
    assert found.inter_link.source == "measured on 2026-11-22 by dstrain doctor --network"
    assert (found.intra_link.bytes_per_s, found.intra_link_origin) == (330e9, Origin.MEASURED)


def test_the_latency_of_all_ranks_belongs_to_the_link_between_the_farthest() -> None:
    measured = replace(ENTRY, latency_s=4e-5)
    nodes = with_links(cluster(), measured)
    assert (nodes.inter_link.latency_s, nodes.intra_link.latency_s) == (4e-5, None)
    one_node = with_links(cluster(), replace(measured, inter_bus_bytes_per_s=None))
    assert one_node.intra_link.latency_s == 4e-5


def test_a_link_that_was_given_stays() -> None:
    found = with_links(cluster("roce100"), ENTRY)
    assert (found.inter_link.name, found.inter_link_origin) == ("roce100", Origin.GIVEN)


def test_the_planner_counts_with_what_was_measured_and_takes_no_share_of_it() -> None:
    measured = with_links(cluster(), ENTRY)
    rates = efficiency(measured, with_rates(Calibration(), measured).of(measured.gpu.name))
    assert (rates.inter_bus_bytes_per_s * 8, rates.intra_bus_bytes_per_s) == (240e9, 330e9)
    assert {"inter_bus_bytes_per_s", "intra_bus_bytes_per_s"} <= rates.calibrated


def test_what_else_was_calibrated_stays() -> None:
    before = Calibration(gpus={"h100-sxm": Measured(gemm_ratio=0.6, inter_bus_bytes_per_s=1e9)})
    measured = with_links(cluster(), ENTRY)
    assert with_rates(before, measured).of("h100-sxm").gemm_ratio == 0.6
    assert with_rates(before, measured).of("h100-sxm").inter_bus_bytes_per_s == 240e9
    assert with_rates(before, cluster()) is before


@pytest.mark.parametrize("text", ['{"schema": 9, "measured": [{"hosts": ["a"]}]}', "{", "\udcff"])
def test_a_file_that_cannot_be_read_is_kept_beside_the_new_one(text: str, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    save(ENTRY, str(path))
    assert (tmp_path / "links.json.bak").read_text(encoding="utf-8", errors="surrogateescape") == text
    assert read(str(path)) == ([ENTRY], None)
