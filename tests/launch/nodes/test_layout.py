"""Which ranks a node has, and which hosts cannot be one of several."""

from __future__ import annotations

import pytest

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.hostfile import Host, Hosts
from dstrain.launch.nodes.layout import check_hosts, per_node


def test_the_ranks_of_each_host_follow_those_of_the_one_before() -> None:
    hosts = Hosts(hosts=(Host(name="gpu01", slots=8), Host(name="gpu02", slots=4)), name="hostfile")
    first, second = per_node(hosts, [["a"], ["b"]], [True, False])
    assert (list(first.ranks), list(second.ranks)) == (list(range(8)), [8, 9, 10, 11])
    assert (first.command, second.command) == (("a",), ("b",))
    check_hosts(hosts)


def test_localhost_first_of_several_hosts_is_refused() -> None:
    hosts = Hosts(hosts=(Host(name="localhost", slots=8), Host(name="gpu02", slots=8)), name="hostfile")
    with pytest.raises(InvalidConfig, match="rank 0 is on localhost, which every node resolves to itself"):
        check_hosts(hosts)
