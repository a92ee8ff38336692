"""Which launcher is taken, what it needs, and which node starts what."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.cluster.hostfile import Host, Hosts
from dstrain.launch.command import LaunchSite
from dstrain.launch.nodes.launchers import LAUNCHERS, check_hosts, choose
from dstrain.launch.nodes.layout import HEAD
from dstrain.rundir import RunDir

TWO = Hosts(hosts=(Host(name="gpu01", slots=8), Host(name="gpu02", slots=4)), name="hostfile")


def with_programs(folder: Path, *names: str) -> dict[str, str]:
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return {"PATH": str(folder)}


def where(*, here: tuple[bool, bool]) -> LaunchSite:
    return LaunchSite(hosts=TWO, here=here, run_dir=RunDir(Path("/run")), python="/venv/bin/python", master_port=29500)


def test_pdsh_is_taken_where_it_is_installed(tmp_path: Path) -> None:
    assert choose(None, with_programs(tmp_path, "pdsh", "ssh")) == ("pdsh", None)


def test_ssh_stands_in_for_pdsh_and_says_so(tmp_path: Path) -> None:
    name, note = choose(None, with_programs(tmp_path, "ssh"))
    assert name == "ssh"
    assert "pdsh is not installed" in str(note)


def test_a_launcher_that_is_not_installed_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="--launcher pdsh: pdsh is not installed") as caught:
        choose("pdsh", with_programs(tmp_path, "ssh"))
    assert caught.value.hint == "apt-get install pdsh, or use --launcher ssh"


def test_a_launcher_that_does_not_exist_is_guessed(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match='--launcher "slrum"') as caught:
        choose("slrum", {})
    assert caught.value.hint == 'Did you mean "slurm"?'


def test_slurm_outside_of_an_allocation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="not a SLURM allocation"):
        choose("slurm", with_programs(tmp_path, "srun"))


def test_over_pdsh_one_node_starts_all_ranks_and_the_others_are_watched() -> None:
    first, second = LAUNCHERS["pdsh"].nodes(where(here=(True, False)))
    assert first.command is not None
    assert second.command is None
    assert (list(first.ranks), list(second.ranks)) == (list(range(8)), [8, 9, 10, 11])


def test_a_machine_without_ranks_that_starts_them_is_a_node_of_its_own() -> None:
    nodes = LAUNCHERS["pdsh"].nodes(where(here=(False, False)))
    assert [node.number for node in nodes] == [0, 1, HEAD]
    assert [node.command is None for node in nodes] == [True, True, False]


def test_over_ssh_every_node_starts_its_own() -> None:
    nodes = LAUNCHERS["ssh"].nodes(where(here=(False, False)))
    assert [node.command is None for node in nodes] == [False, False]


def test_mpich_needs_as_many_slots_everywhere() -> None:
    with pytest.raises(InvalidConfig, match="needs 8 slots on every host; gpu02 has 4 slots"):
        check_hosts("mpich", TWO)
    check_hosts("pdsh", TWO)


def test_localhost_first_of_several_hosts_is_refused() -> None:
    hosts = Hosts(hosts=(Host(name="localhost", slots=8), Host(name="gpu02", slots=8)), name="hostfile")
    with pytest.raises(InvalidConfig, match="rank 0 is on localhost, which every node resolves to itself"):
        check_hosts("ssh", hosts)
