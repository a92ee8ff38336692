"""What a run over real hosts does before its ranks start, and when they do not come to their first step."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.hosts import Job

pytestmark = [pytest.mark.cluster, pytest.mark.parts(2)]

LOUD_S = 40
"""In which a run must have ended on a machine that has other things to do; alone it takes half of that."""


def test_a_host_that_does_not_know_rank_0s_is_named_before_anything_starts(job: Job) -> None:
    job.network.know(1, [1, 2])
    try:
        refused = job.call("run")
    finally:
        job.network.know(1, range(3))
    assert (refused.code, refused.wall_s < LOUD_S) == (5, True), refused
    assert "node1: it cannot resolve node0, the host of rank 0: " in refused.said
    assert "Write node0 into /etc/hosts there" in refused.said
    assert not job.place.logs.exists()


def test_a_firewall_between_the_hosts_is_named_before_anything_starts(job: Job) -> None:
    with job.network.only_ssh(1, to=0):
        refused = job.call("run")
    assert (refused.code, refused.wall_s < LOUD_S) == (5, True), refused
    assert "node1: it cannot connect to node0, port 29500, where rank 0 will listen" in refused.said
    assert "(10.77.0.1: no answer within 8 s)" in refused.said
    assert "--master-port" in refused.said


def test_a_stale_lock_on_the_far_host_is_named_and_the_build_on_the_near_one_ends(job: Job) -> None:
    extensions = "/dev/shm/extensions"  # each host has its own
    lock = f"{extensions}/deepspeed_shm_comm/lock"
    touch = f"mkdir -p {extensions}/deepspeed_shm_comm && touch -d '1 hour ago' {lock}"
    subprocess.run(job.network.on(1, "sh", "-c", touch), check=True)
    try:
        refused = job.call("run", "--set", f"env.TORCH_EXTENSIONS_DIR={extensions}")
        near = subprocess.run(job.network.on(0, "ls", str(Path(lock).parent)), capture_output=True, text=True)
    finally:
        for node in (0, 1):
            subprocess.run(job.network.on(node, "rm", "-rf", extensions), check=True)
    assert (refused.code, refused.wall_s < LOUD_S) == (5, True), refused
    assert f"node1: {lock} is held by no visible process, and its folder has not changed for 1 h" in refused.said
    assert f"rm {lock}" in refused.said
    assert "lock" not in near.stdout.split()
    assert job.left_over(within_s=5) == []


_THIEF = r"""
import re, socket, sys, time
first = socket.create_server(("", 29500))
print("listening", flush=True)
while not (port := re.search(r"--master_port\W+(?!29500)(\d+)", open(sys.argv[1]).read())):
    time.sleep(0.01)
first.close()
while True:
    try:
        second = socket.create_server(("", int(port[1])))
        break
    except OSError:
        pass
sys.stdin.read()
"""
"""Has rank 0's usual port at first, and takes the one that is chosen instead as soon as it is let go for rank 0."""


def test_a_port_that_is_in_use_on_rank_0s_host_is_replaced_and_so_is_one_that_is_taken_at_the_last_moment(
    light_job: Job,
) -> None:
    script = light_job.place.start_script
    script.parent.mkdir()
    script.touch()
    line = light_job.network.on(0, sys.executable, "-c", _THIEF, str(script))
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as thief:
        assert thief.stdin is not None and thief.stdout is not None
        try:
            assert thief.stdout.readline() == "listening\n"
            done = light_job.call("run", "--set", "max_steps=2", head=2)
        finally:
            light_job.kill(0, "socket.create_server")
    assert done.code == 0, done.said
    assert "another process took the port of rank 0 before it; starting again" in done.said
    assert "step 2/2" in done.said
    assert light_job.state()["attempt"] == 1


def test_a_start_that_takes_too_long_says_where_every_rank_is(light_job: Job) -> None:
    light_job.limits = "start_word_s=2"
    process = light_job.start("--start-timeout", "20")
    until = time.monotonic() + 60
    while time.monotonic() < until and not any(" -u -m dstrain.train" in line for line in light_job.network.lines(1)):
        time.sleep(0.1)
    light_job.kill(1, " -u -m dstrain.train", number=signal.SIGSTOP)
    while "rank 1 on node1" not in (said := light_job.call("status", "output").said) and process.poll() is None:
        time.sleep(1)
    ended = light_job.end_of(process)
    assert ended.code == 1
    assert re.search(r"^start +starting for .* of 2 ranks connected; rank 1 on node1 ", said, re.MULTILINE), said
    assert "of 2 ranks connected; rank 1 on node1 " in ended.said
    assert "the start made no progress for " in ended.said
    assert "rank 0 on node0 waiting for the others" in ended.said
    assert "rank 0 on node0 in " in ended.said
    assert light_job.left_over() == []
