"""Which interface NCCL and Gloo should use, and which port rank 0."""

from __future__ import annotations

import socket

import pytest

from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts import network
from dstrain.facts.network import (
    DEFAULT_PORT,
    Interface,
    agreed,
    choose_interface,
    disagreement,
    environment_of,
    local_port,
)


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


@pytest.mark.parametrize(
    ("routes", "default", "chosen"),
    [
        ({"b": "10.0.0.5", "c": "10.0.0.5"}, "192.168.1.5", "ib0"),  # through which the others are reached
        ({"b": "fd00::5"}, None, "eth0"),
        ({"b": None}, "192.168.1.5", "eth0"),  # without a host that is known, the default route's
        ({}, "192.168.1.5", "eth0"),
        ({"alias": "127.0.1.1", "b": "10.0.0.5"}, None, "ib0"),  # this machine says nothing
        ({"b": "10.0.0.5", "c": "192.168.1.5"}, None, None),  # two of them
        ({"b": "172.17.0.1"}, None, None),  # a bridge of containers
        ({"b": "10.1.0.5"}, None, None),  # down
        ({"b": "8.8.8.8"}, None, None),  # nobody's
        ({}, None, None),
    ],
)
def test_the_interface_that_leads_to_the_others_is_chosen(
    routes: dict[str, str | None], default: str | None, chosen: str | None
) -> None:
    assert choose_interface(MANY, routes, default) == chosen


SAME = {"a": "eth1", "b": "eth1"}


@pytest.mark.parametrize(
    ("found", "said", "variables"),
    [
        (SAME, {}, {"NCCL_SOCKET_IFNAME": "=eth1", "GLOO_SOCKET_IFNAME": "eth1"}),  # NCCL would take a beginning
        (SAME, {"NCCL_SOCKET_IFNAME": "bond0"}, {"GLOO_SOCKET_IFNAME": "eth1"}),
        (SAME, {"NCCL_SOCKET_IFNAME": "x", "GLOO_SOCKET_IFNAME": "y"}, {}),
        ({"a": "eth0"}, {}, {}),
        ({"a": "eth0", "b": "ens3"}, {}, {}),
        ({"a": "eth0", "b": None}, {}, {}),
    ],
)
def test_hosts_that_agree_get_what_the_user_did_not_say(
    found: dict[str, str | None], said: dict[str, str], variables: dict[str, str]
) -> None:
    assert environment_of(found, said) == variables


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
    names = [each.name for each in network.interfaces()]
    assert "lo" in names
    assert network.source_address("localhost") in {"127.0.0.1", "::1"}
    assert network.source_address("me@127.0.0.1") == "127.0.0.1"


def test_a_name_that_nobody_has_leads_nowhere() -> None:
    assert network.source_address("no-such-host.invalid") is None


def test_a_named_port_in_use_is_refused_and_an_unnamed_one_is_replaced() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        number = int(taken.getsockname()[1])
        with pytest.raises(EnvironmentProblem, match=f"--master-port: port {number} is in use"):
            local_port(number, {})
        with pytest.raises(EnvironmentProblem, match=f"MASTER_PORT: port {number} is in use"):
            local_port(None, {"MASTER_PORT": str(number)})
        assert local_port(None, {})[0] != number
    assert local_port(number, {}) == (number, "--master-port")


def test_runs_that_start_at_the_same_time_without_a_named_port_get_different_ones() -> None:
    ports = [local_port(None, {}) for _ in range(4)]  # each is free again when the next one is chosen
    assert {where for _, where in ports} == {None}
    assert len({number for number, _ in ports} - {DEFAULT_PORT}) > 1


def test_a_master_port_that_is_no_port_is_quoted() -> None:
    with pytest.raises(InvalidConfig, match='MASTER_PORT is "http"'):
        local_port(None, {"MASTER_PORT": "http"})
