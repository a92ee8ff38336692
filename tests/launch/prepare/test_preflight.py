"""What is refused before anything is launched."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from dstrain.errors import Conflict, EnvironmentProblem, InvalidConfig
from dstrain.facts.ports import DEFAULT_PORT, local_port
from dstrain.facts.this_machine import names
from dstrain.launch.prepare.preflight import check
from dstrain.rundir import RunDir


def test_earlier_checkpoints_are_a_conflict_unless_the_run_goes_on_from_them(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-40").mkdir()
    with pytest.raises(Conflict, match="checkpoints up to step 40") as caught:
        check(RunDir(tmp_path), resume="never", needed_bytes=0)
    assert "--set resume=auto" in str(caught.value)
    check(RunDir(tmp_path), resume="auto", needed_bytes=0)


def test_an_output_dir_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem, match="file/run cannot be written"):
        check(RunDir(tmp_path / "file" / "run"), resume="never", needed_bytes=0)


def test_a_checkpoint_that_does_not_fit_the_disk_is_refused_in_numbers(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"one checkpoint needs 1048576 TiB"):
        check(RunDir(tmp_path), resume="never", needed_bytes=2**60)


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


def test_this_machine_knows_its_name_and_loopback_address() -> None:
    assert {socket.gethostname(), "127.0.0.1"} <= names()
