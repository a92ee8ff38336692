"""Which interface NCCL and Gloo should use."""

from __future__ import annotations

import pytest

from dstrain.facts import network_interface
from dstrain.facts.network_interface import Interface, agreed, choose_interface, disagreement, environment_of


def interface(name: str, *addresses: str, is_up: bool = True) -> Interface:
    return Interface(name=name, is_up=is_up, addresses=addresses, mtu=1500, mbits_per_s=0)


MANY = [
    interface("lo", "127.0.0.1"),
    interface("docker0", "172.17.0.1"),
    interface("eth0", "192.168.1.5", "fd00::5"),
    interface("ib0", "10.0.0.5"),
    interface("eth1", "10.1.0.5", is_up=False),
    interface("br-1f2e", "172.18.0.1"),
]


def test_the_interface_through_which_the_others_are_reached_is_chosen() -> None:
    assert choose_interface(MANY, {"b": "10.0.0.5", "c": "10.0.0.5"}, "192.168.1.5") == "ib0"
    assert choose_interface(MANY, {"b": "fd00::5"}) == "eth0"


def test_without_a_host_that_is_known_the_default_routes_is() -> None:
    assert choose_interface(MANY, {}, "192.168.1.5") == "eth0"
    assert choose_interface(MANY, {"b": None}, "192.168.1.5") == "eth0"


def test_a_host_that_is_this_machine_says_nothing() -> None:
    assert choose_interface(MANY, {"alias": "127.0.1.1", "b": "10.0.0.5"}) == "ib0"


@pytest.mark.parametrize(
    "routes",
    [
        {"b": "10.0.0.5", "c": "192.168.1.5"},  # two of them
        {"b": "172.17.0.1"},  # a bridge of containers
        {"b": "10.1.0.5"},  # down
        {"b": "8.8.8.8"},  # nobody's
        {},
    ],
)
def test_where_there_is_not_one_none_is_chosen(routes: dict[str, str | None]) -> None:
    assert choose_interface(MANY, routes) is None


def test_nccl_gets_a_whole_name_and_not_a_beginning() -> None:
    assert environment_of({"a": "eth1", "b": "eth1"}, {}) == {
        "NCCL_SOCKET_IFNAME": "=eth1",
        "GLOO_SOCKET_IFNAME": "eth1",
    }


def test_what_the_user_says_is_left_alone() -> None:
    same = {"a": "eth1", "b": "eth1"}
    assert environment_of(same, {"NCCL_SOCKET_IFNAME": "bond0"}) == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert environment_of(same, {"NCCL_SOCKET_IFNAME": "x", "GLOO_SOCKET_IFNAME": "y"}) == {}


def test_one_host_or_hosts_that_differ_get_nothing() -> None:
    assert environment_of({"a": "eth0"}, {}) == {}
    assert environment_of({"a": "eth0", "b": "ens3"}, {}) == {}
    assert environment_of({"a": "eth0", "b": None}, {}) == {}


def test_hosts_that_differ_are_told_with_what_to_type() -> None:
    told = disagreement({"a": "eth0", "b": "eth0", "c": "ens3"})
    assert told is not None
    assert told[0].startswith("the hosts use different interfaces: mostly eth0, but ens3 on c")
    assert told[1].endswith("export NCCL_SOCKET_IFNAME==eth0,ens3")
    assert disagreement({"a": "eth0", "b": "eth0"}) is None
    assert disagreement({"a": "eth0"}) is None


def test_a_host_without_an_interface_is_named() -> None:
    told = disagreement({"a": "eth0", "b": None})
    assert told is not None
    assert told[0].startswith("b: ")
    assert agreed({"a": "eth0", "b": None}) is None


def test_this_machine_knows_its_interfaces_and_the_way_to_itself() -> None:
    names = [each.name for each in network_interface.interfaces()]
    assert "lo" in names
    assert network_interface.source_address("localhost") in {"127.0.0.1", "::1"}
    assert network_interface.source_address("me@127.0.0.1") == "127.0.0.1"


def test_a_name_that_nobody_has_leads_nowhere() -> None:
    assert network_interface.source_address("no-such-host.invalid") is None
