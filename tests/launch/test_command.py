"""The launcher's command line, its hostfile, and what counts as this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dstrain.errors import EnvironmentProblem
from dstrain.facts.cluster.hostfile import Host, Hosts
from dstrain.facts.this_machine import is_this_machine, visible_devices
from dstrain.launch.command import LaunchSite, launch_hostfile, local, of_node
from dstrain.launch.start_script import start_script
from dstrain.rundir import RunDir

ONE = Hosts(hosts=(Host(name="gpu01", slots=2),), name="hostfile")
TWO = Hosts(hosts=(Host(name="me@gpu01", slots=8), Host(name="gpu02", slots=8)), name="hostfile")


def line(hosts: Hosts, *, ids: tuple[int, ...] | None = None) -> list[str]:
    return local(site(hosts), ids)


def site(hosts: Hosts, folder: str = "/run") -> LaunchSite:
    return LaunchSite(hosts=hosts, run_dir=RunDir(Path(folder)), python="/venv/bin/python", master_port=29500)


def after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_a_hostfile_of_this_machine_alone_never_reaches_ssh_or_job_hostfile() -> None:
    words = line(ONE)
    assert words[:4] == ["/venv/bin/python", "-P", "-m", "deepspeed.launcher.runner"]
    assert "--no_ssh" in words
    assert after(words, "--master_addr") == "127.0.0.1"
    assert after(words, "--hostfile") == "/run/hostfile"
    assert "--include" not in words
    assert launch_hostfile(ONE, ids=None, is_local=True) == "localhost slots=2\n"


def test_visible_devices_become_include_and_slots_reach_as_far() -> None:
    assert after(line(ONE, ids=(2, 5, 7)), "--include") == "localhost:2,5"
    assert launch_hostfile(ONE, ids=(2, 5, 7), is_local=True) == "localhost slots=6\n"


def test_fewer_visible_devices_than_slots_are_refused() -> None:
    with pytest.raises(EnvironmentProblem, match="asks for 2 GPUs, but CUDA_VISIBLE_DEVICES=3 shows only 1"):
        line(ONE, ids=(3,))


def test_node_by_node_each_launcher_starts_its_own_ranks_and_knows_rank_0() -> None:
    words = of_node(site(TWO, "/my run"), 1)
    assert "--no_ssh" in words
    assert (after(words, "--node_rank"), after(words, "--master_addr")) == ("1", "gpu01")
    assert words[-3:] == ["--module", "dstrain.train", "/my run"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "::1", "GPU01", "me@gpu01.lan.", "10.0.0.7"])
def test_this_machine_goes_by_many_names(host: str) -> None:
    assert is_this_machine(host, {"gpu01", "gpu01.lan", "10.0.0.7"})


@pytest.mark.parametrize("host", ["gpu02", "gpu01.other", "10.0.0.70", "127.example.org"])
def test_other_machines_are_other_machines(host: str) -> None:
    assert not is_this_machine(host, {"gpu01", "gpu01.lan", "10.0.0.7"})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("GPU-8932f937", "not UUIDs"),
        ("MIG-GPU-1/0/0", "MIG slices"),
        ("", "hides every GPU"),
        ("-1", "hides every GPU"),
        ("0,0", "twice"),
        ("0,GPU-1", "not UUIDs"),
    ],
)
def test_devices_that_include_cannot_name_are_refused_with_what_to_type(value: str, words: str) -> None:
    with pytest.raises(EnvironmentProblem, match=words) as caught:
        visible_devices(value)
    assert caught.value.hint


def test_the_start_script_is_quoted_and_names_secrets_without_their_values() -> None:
    text = start_script(
        ["/venv/bin/python", "-m", "x", "/a b"],
        run_dir=RunDir(Path("/a b")),
        exported={"A": "$(rm -rf /)"},
        secret_names=["HF_TOKEN"],
    )
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "cd '/a b'\n" in text
    assert "export A='$(rm -rf /)'\n" in text
    assert "MASTER_PORT HF_TOKEN\n" in text
    assert text.endswith("exec \\\n  /venv/bin/python \\\n  -m \\\n  x \\\n  '/a b'\n")


def test_node_by_node_the_start_script_takes_the_nodes_number(tmp_path: Path) -> None:
    (tmp_path / "environment").write_text('A=say \\"hi\\" $HOME_OF\n')
    text = start_script(
        ["echo", "--node_rank", "0", "--home"],
        run_dir=RunDir(tmp_path),
        exported={},
        secret_names=[],
        is_node_by_node=True,
    )
    (tmp_path / "start.sh").write_text(text.replace("exec ", 'echo "$A"; exec '))
    for words, env, number in ((["2"], {}, 2), ([], {"SLURM_NODEID": "5"}, 5)):
        line = ["bash", str(tmp_path / "start.sh"), *words]
        done = subprocess.run(line, env={**env, "HOME_OF": "me"}, capture_output=True, text=True)
        assert done.stdout == f'say "hi" me\n--node_rank {number} --home\n', done.stderr
