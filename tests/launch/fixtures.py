"""Real hosts, made once for all tests that need them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch import hosts
from tests.launch import slurm as slurms
from tests.launch.hosts import Job
from tests.launch.network import MISSING, Network, is_possible
from tests.launch.slurm import Slurm


@pytest.fixture(scope="session")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 96 MiB that all hosts see; to be mounted before they start."""
    folder = tmp_path_factory.mktemp("small")
    if not is_possible():
        yield folder
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="session")
def demo(made_demo: Path) -> Path:
    """The demo's model and data."""
    return made_demo


@pytest.fixture(scope="session")
def light_checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose ranks are light."""
    return hosts.light_checkout(tmp_path_factory.mktemp("light"))


@pytest.fixture(scope="session")
def network(
    tmp_path_factory: pytest.TempPathFactory, need: Callable[[object, str], None], small_disk: Path
) -> Iterator[Network]:
    """Three hosts with addresses, names, processes and an sshd of their own."""
    need(is_possible(), MISSING)
    found = Network(tmp_path_factory.mktemp("net"), 3)
    try:
        found.up()
        yield found
    finally:
        found.down()


@pytest.fixture
def job(network: Network, demo: Path, tmp_path: Path) -> Iterator[Job]:
    """A job whose hosts are clean before and after, whatever the test did."""
    made = Job(network, demo, tmp_path)
    yield made
    assert made.clear(within_s=5) == []


@pytest.fixture
def light_job(network: Network, demo: Path, light_checkout: Path, tmp_path: Path) -> Iterator[Job]:
    """The same with ranks that train nothing."""
    made = Job(network, demo, tmp_path, checkout=light_checkout)
    yield made
    assert made.clear(within_s=5) == []


@pytest.fixture(scope="session")
def usual(network: Network, demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job as it is run by hand, on two hosts that share a file system, with a checkpoint at its end."""
    made = Job(network, demo, tmp_path_factory.mktemp("usual"), is_light=False)
    done = made.call("run", "--set", "max_steps=32", "--set", "save_total_limit=1")
    assert done.code == 0, done.said
    return made


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory, need: Callable[[object, str], None]) -> Iterator[Slurm]:
    """A SLURM of two nodes, whose low partition gives its jobs a minute when they are preempted."""
    need(slurms.is_possible(), slurms.MISSING)
    found = Slurm(tmp_path_factory.mktemp("slurm"), grace_s=60)
    try:
        found.up()
        yield found
    finally:
        found.down()
