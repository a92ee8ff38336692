"""Clusters: how options and hosts make nodes, and what is assumed where nothing is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.cluster import ASSUMED_INTER_LINKS, Cluster, Origin, describe, link
from dstrain.facts.cluster.gpus import GPUS, gpu
from dstrain.facts.cluster.hostfile import Hosts, expand, parse
from dstrain.records import from_data, to_data
from dstrain.units import GIB


def cluster(
    *, gpus: int | None = None, gpus_per_node: int | None = None, hosts: Hosts | None = None, name: str = "a100"
) -> Cluster:
    return describe(gpu=gpu(name), gpu_origin=Origin.GIVEN, gpus=gpus, gpus_per_node=gpus_per_node, hosts=hosts)


@pytest.mark.parametrize(
    ("gpus", "gpus_per_node", "shape"),
    [
        (16, 8, (2, 8)),
        (8, 8, (1, 8)),
        (4, 8, (1, 4)),
        (1, 8, (1, 1)),
        (16, None, (2, 8)),
        (2, None, (1, 2)),
        (12, 6, (2, 6)),
        (64, 1, (64, 1)),
    ],
)
def test_a_number_of_gpus_fills_nodes(gpus: int, gpus_per_node: int | None, shape: tuple[int, int]) -> None:
    found = cluster(gpus=gpus, gpus_per_node=gpus_per_node)
    assert (found.num_nodes, found.gpus_per_node) == shape
    assert found.num_gpus == gpus


FOUR, ONE = expand("gpu[1-4]:8", None), parse("gpu1 slots=8\n", "hostfile")


@pytest.mark.parametrize(
    ("gpus", "per_node", "hosts", "problem", "hint"),
    [
        (
            *(12, 8, None, "--gpus 12 does not fill nodes of 8 GPUs"),
            "Give `--gpus 8` or `--gpus 16`, or `--gpus-per-node 6` for 2 nodes, or `--gpus-per-node 4` for 3 nodes.",
        ),
        (13, None, None, "--gpus 13 does not fill nodes of 8 GPUs (assumed)", "Give `--gpus 8` or `--gpus 16`."),
        (0, None, None, "--gpus is 0", None),
        (8, -8, None, "--gpus-per-node is -8", None),
        (None, None, None, "the number of GPUs is unknown", None),
        (
            *(16, None, ONE, "--gpus 16, but hostfile has one host with slots=8: 8 GPUs"),
            "Give `--gpus 8` or a list of 2 hosts.",
        ),
        (
            *(8, None, FOUR, "--gpus 8, but --hosts has 4 hosts with slots=8: 32 GPUs"),
            "Give `--gpus 32` or a list of 1 host.",
        ),
        (4, None, ONE, "--gpus 4, but hostfile has one host with slots=8: 8 GPUs", "Give `--gpus 8` or slots=4."),
        (None, 4, FOUR, "--gpus-per-node 4, but --hosts has 4 hosts with slots=8", None),
        (
            *(None, None, parse("# mixed\na slots=8\nb slots=4\n", "hostfile")),
            "\nhostfile:2: a has 8 slots\nhostfile:3: b has 4 slots",
            "Write slots=4 for every host, or leave out the others.",
        ),
    ],
)
def test_numbers_that_do_not_go_together_get_the_nearest_that_do(
    gpus: int | None, per_node: int | None, hosts: Hosts | None, problem: str, hint: str | None
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        cluster(gpus=gpus, gpus_per_node=per_node, hosts=hosts)
    assert caught.value.problem.split("\n")[1:] == problem.split("\n")[1:]
    assert "\n" in problem or caught.value.problem == problem
    assert hint is None or caught.value.hint == hint


def test_hosts_say_how_many_gpus_there_are_and_options_that_agree_change_nothing() -> None:
    found = cluster(hosts=FOUR)
    assert (found.num_nodes, found.gpus_per_node) == (4, 8)
    assert cluster(gpus=32, gpus_per_node=8, hosts=FOUR) == found


@pytest.mark.parametrize(
    ("name", "between_nodes"),
    [("h100", "ib400"), ("b200", "ib400"), ("a100", "ib200"), ("v100", "ib100/2"), ("l40s", "eth25")],
)
def test_the_link_between_nodes_is_assumed_by_the_gpu(name: str, between_nodes: str) -> None:
    found = cluster(gpus=16, name=name)
    assert found.inter_link == link(between_nodes)
    assert found.inter_link_origin is Origin.ASSUMED


def test_every_gpu_has_a_link_between_nodes() -> None:
    assert {row.link for row in GPUS.values()} <= set(ASSUMED_INTER_LINKS)


def test_the_link_inside_the_node_is_the_gpus() -> None:
    assert cluster(gpus=8, name="h800").intra_link.bytes_per_s == 200e9


@pytest.mark.parametrize(
    ("name", "gpus", "gibibytes"), [("a100", 8, 1024), ("h100", 8, 1024), ("a100", 2, 256), ("a30", 4, 96)]
)
def test_ram_is_assumed_by_the_gpus_of_a_node(name: str, gpus: int, gibibytes: int) -> None:
    found = cluster(gpus=gpus, name=name)
    assert (found.host_memory_bytes, found.host_memory_origin) == (gibibytes * GIB, Origin.ASSUMED)
    large = cluster(gpus=8, name="b200")
    assert large.host_memory_bytes == 8 * large.gpu.memory_bytes, "never less than the memory of the GPUs"


def test_what_is_given_is_kept_and_marked() -> None:
    found = describe(
        gpu=gpu("a100"),
        gpu_origin=Origin.MEASURED,
        gpus=8,
        inter_link=link("roce100"),
        host_memory_bytes=2**39,
        host_memory_origin=Origin.MEASURED,
        nvme_path="/mnt/nvme",
    )
    assert (found.gpu_origin, found.host_memory_bytes, found.host_memory_origin) == (
        Origin.MEASURED,
        2**39,
        Origin.MEASURED,
    )
    assert (found.inter_link.name, found.inter_link_origin) == ("roce100", Origin.GIVEN)
    assert found.nvme_path == "/mnt/nvme"


def test_ranks_on_a_cpu_share_the_ram() -> None:
    found = describe(gpu=gpu("cpu"), gpu_origin=Origin.GIVEN, gpus=2, host_memory_bytes=32 * GIB)
    assert found.gpu == replace(gpu("cpu"), memory_mib=16 * 1024)


def test_a_cluster_survives_its_file() -> None:
    found = cluster(gpus=16)
    assert from_data(Cluster, to_data(found), locate=lambda place: "facts.json") == found
