"""Training over real hosts, and everything that goes wrong there: killed, unplugged, full, different."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from dstrain.launch.timeouts import TIMEOUTS, VARIABLE
from tests.draws import Draw
from tests.launch.hosts import Job
from tests.launch.network import Network

pytestmark = [pytest.mark.cluster, pytest.mark.parts(3)]


def test_a_run_saves_at_sigusr1_leaves_with_75_and_goes_on_started_from_a_third_host(light_job: Job) -> None:
    process = light_job.start("--set", "save_steps=100000")
    light_job.wait_for_step(process, 1)
    light_job.kill(0, "dstrain.cli run", number=signal.SIGUSR1)
    ended = light_job.end_of(process)
    assert ended.code == 75, ended.said
    step = light_job.place.checkpoints()[-1][0]
    assert f"checkpoint-{step} and left, as asked" in ended.said
    done = light_job.goes_on(head=2)
    assert done.code == 0, done.said
    assert f"resuming from checkpoint-{step}" in done.said
    assert f"step {step + 3}/{step + 3}" in done.said


def test_a_killed_rank_is_named_with_its_host_and_the_run_goes_on_from_its_checkpoint(light_job: Job) -> None:
    process = light_job.start()
    step = light_job.wait_for_checkpoint(process)
    light_job.kill(1, " -u -m dstrain.train")
    ended = light_job.end_of(process)
    assert (ended.code, ended.wall_s < 30) == (1, True), ended
    assert "rank 1 on node1 failed first" in ended.said
    assert "SIGKILL): the kernel's log " in ended.said
    assert "Last metrics: step" in ended.said
    assert f" --set resume=auto` continues from step {step}" in ended.said or step % 4 == 0
    assert light_job.place.failure.read_text().startswith("rank 1 on node1 failed first")
    assert light_job.left_over() == []
    assert light_job.goes_on().code == 0


def test_a_killed_launcher_on_the_far_node_ends_everything(light_job: Job) -> None:
    process = light_job.start()
    light_job.wait_for_checkpoint(process)
    light_job.kill(1, " -u -m deepspeed.launcher.launch")
    ended = light_job.end_of(process)
    assert (ended.code, ended.wall_s < 60) == (1, True), ended
    assert light_job.left_over() == []


def test_launchers_that_bind_ranks_say_why_not_on_every_node(light_job: Job) -> None:
    config = light_job.folder / "ds_config.json"
    zero = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    config.write_text(json.dumps(json.loads(config.read_text()) | zero))
    ended = light_job.call("run", "--set", "max_steps=4")
    assert ended.code == 0, ended.said
    logs = [path.read_text() for path in light_job.place.logs.glob("*_launcher_node*.log")]
    assert ["OMP_NUM_THREADS set: ranks are not bound" in text for text in logs] == [True, True]


@pytest.fixture
def limits(draw: Draw) -> str:
    """Short time limits for nodes that are lost; the usual ones where a sweep tries everything."""
    return "" if draw.part is None else "silence_s=6,sweep_s=2,pause_s=1"


@pytest.mark.sweep
def test_an_unplugged_node_is_lost_and_ends_its_own_ranks(light_job: Job, limits: str) -> None:
    light_job.limits = limits
    silence_s = TIMEOUTS.changed({VARIABLE: limits}).silence_s
    process = light_job.start()
    light_job.wait_for_checkpoint(process)
    light_job.network.unplug(1)
    try:
        ended = light_job.end_of(process)
        left = light_job.left_over(within_s=max(0.0, 60 - ended.wall_s))
    finally:
        light_job.network.plug(1)
    assert (ended.code, ended.wall_s < 60) == (1, True), ended
    assert "node1 was lost" in ended.said
    assert left == []
    watched = (light_job.place.logs / "watch_node1.log").read_text()
    assert f"no word from dstrain run for {silence_s:.0f} s; ended ranks 1" in watched
    assert light_job.goes_on().code == 0


@pytest.mark.sweep
def test_a_node_without_power_is_replaced_by_a_spare(light_job: Job, limits: str) -> None:
    light_job.limits = limits
    process = light_job.start("--max-restarts", "1", "--spare", "node2", "--set", "max_steps=150")
    light_job.wait_for_checkpoint(process)
    light_job.network.cut_power(1)
    try:
        ended = light_job.end_of(process)
    finally:
        light_job.network.restore_power(1)
    assert ended.code == 0, ended.said
    assert "node1 was lost" in ended.said
    assert "starting again from step" in ended.said
    assert "node1 → node2" in ended.said
    assert max(light_job.losses()) == 150


def test_an_ssh_session_that_ends_takes_its_node_along(light_job: Job) -> None:
    process = light_job.start()
    light_job.wait_for_checkpoint(process)
    light_job.network.sshds[1].end_sessions()
    ended = light_job.end_of(process)
    assert (ended.code, ended.wall_s < 60) == (1, True), ended
    assert "node1" in ended.said
    assert light_job.left_over(within_s=15) == []


def test_a_stopped_sshd_does_not_end_a_run_and_is_named_at_the_next_one(light_job: Job) -> None:
    process = light_job.start()
    step = light_job.wait_for_checkpoint(process)
    light_job.network.stop_sshd(1)
    try:
        light_job.wait_for_checkpoint(process, after=step)
        light_job.kill(0, "dstrain.cli run", number=signal.SIGTERM)
        assert "stopped (SIGTERM)" in light_job.end_of(process).said
        refused = light_job.call("run", "--set", "resume=auto")
        detached = light_job.call("run", "--set", "resume=auto", "--detach")
    finally:
        light_job.network.start_sshd(1)
    for ended in (refused, detached):
        assert ended.code == 5, ended.said
        assert "node1: ssh: connect to host node1 port 22: Connection refused" in ended.said


def test_a_killed_run_leaves_no_rank_on_any_host(light_job: Job) -> None:
    process = light_job.start()
    light_job.wait_for_checkpoint(process)
    began = time.monotonic()
    light_job.kill(0, "dstrain.cli run")
    assert light_job.end_of(process).code != 0
    assert light_job.left_over(within_s=60) == []
    assert time.monotonic() - began < 60
    words = light_job.call("status", "output")
    assert words.code == 1
    assert "gone: `dstrain run` was killed" in words.said
    ending = "ended ranks 1|no rank was running"  # the rank may have missed the other one before
    assert re.search(f"node1: the connection to dstrain run has ended; ({ending})", words.said), words.said


def test_ctrl_c_twice_ends_everything_at_once(light_job: Job) -> None:
    process = light_job.start()
    light_job.wait_for_checkpoint(process)
    run = light_job.find(0, "dstrain.cli run")
    light_job.kill(1, " -u -m dstrain.train", number=signal.SIGSTOP)  # a rank that does not listen
    for _ in range(2):
        os.kill(run, signal.SIGINT)
        time.sleep(1)
    ended = light_job.end_of(process)
    assert (ended.code, ended.wall_s < 15) == (130, True), ended
    assert "stopped (SIGINT); no rank is left running" in ended.said
    assert light_job.left_over() == []


def test_a_rank_that_stands_still_is_a_hang_and_the_others_say_where_they_wait(light_job: Job) -> None:
    process = light_job.start("--hang-after", "4", "--set", "save_steps=100000")
    light_job.wait_for_step(process, 100)  # several signs of life
    light_job.kill(1, " -u -m dstrain.train", number=signal.SIGSTOP)
    ended = light_job.end_of(process)
    assert (ended.code, ended.wall_s < 60) == (1, True), ended
    assert "the run hangs" in ended.said
    assert "rank 0 on node0 in " in ended.said
    assert "rank 1 on node1 in an unknown place: it wrote no stack" in ended.said
    assert light_job.left_over() == []


@pytest.mark.parametrize(
    ("where", "limits", "says"),
    [
        ("step-2", (10, 20), r"no step for 2\d s.*: the run hangs"),
        ("step-3", (10, 20), r"no step for 2\d s.*: the run hangs"),
        ("saving", (2, 20), r"no progress while saving for 2\d s: the run hangs"),
    ],
)
def test_a_rank_that_blocks_before_the_pace_is_known_is_a_hang_too(
    light_job: Job, where: str, limits: tuple[int, int], says: str
) -> None:
    hang, start = map(str, limits)
    process = light_job.start("--hang-after", hang, "--start-timeout", start, "--set", f"env.LIGHT_BLOCKS={where}")
    light_job.wait_for_step(process, 2)
    ended = light_job.end_of(process)
    assert (ended.code, ended.wall_s < 60) == (1, True), ended
    assert re.search(says, ended.said), ended.said
    assert "may_block" in ended.said  # the rank that blocks, not those that wait for it
    assert light_job.left_over() == []


@pytest.mark.parametrize("kind", ["lines", "one-line"])
def test_a_run_that_prints_200_mb_at_its_end_is_finished_and_the_memory_of_its_agent_is_bounded(
    light_job: Job, kind: str
) -> None:
    process = light_job.start("--set", "max_steps=200", "--set", f"env.LIGHT_FLOOD={kind}")
    light_job.wait_for_step(process, 1)
    status, peak = Path(f"/proc/{light_job.find(0, 'nodes.agent')}/status"), "0"
    reader = ThreadPoolExecutor(1).submit(light_job.end_of, process)
    while not reader.done():
        with suppress(OSError):
            peak = next((line.split()[1] for line in status.read_text().splitlines() if "VmHWM" in line), peak)
        time.sleep(0.02)
    ended = reader.result()
    assert ended.code == 0, ended.said[-2000:]
    assert max(light_job.losses()) == 200
    assert re.search(r"dstrain: \d+\.\d MiB of output left out here; all of it is in .*_rank0\.log", ended.said)
    assert 0 < int(peak) < 100 * 1024, peak  # KiB
    assert sum(path.stat().st_size for path in light_job.place.logs.glob("*_rank*.log")) > 400e6


def test_edits_in_mid_run_neither_change_nor_end_it_at_a_restart(light_job: Job) -> None:
    folder, place = light_job.folder, light_job.place
    (folder / ".deepspeed_env").write_text("OMP_PLACES=cores\n")
    process = light_job.start("--max-restarts", "1", "--set", "max_steps=400")
    light_job.wait_for_checkpoint(process)
    before = {path.name: path.read_text() for path in (place.request, place.ds_config, place.hostfile)}
    job = folder / "job.yaml"
    job.write_text(job.read_text().replace("0.001", "0.5")[:-40])  # half saved
    (folder / "ds_config.json").write_text('{"zero_optimization": {"stage": 3')
    (folder / "hostfile").unlink()
    (folder / ".deepspeed_env").write_text("this is no variable\n")
    light_job.kill(1, " -u -m dstrain.train")
    ended = light_job.end_of(process)
    assert ended.code == 0, ended.said
    files = "job.yaml, ds_config.json, hostfile and 1 more"
    assert ended.said.count(f"{files} changed since the run began: the edit is for the next run") == 1, ended.said
    assert "starting again from step" in ended.said
    resumed = before["request.json"].replace('"resume": "never"', '"resume": "auto"')
    assert place.request.read_text() == resumed
    assert place.ds_config.read_text() == before[place.ds_config.name]
    assert place.hostfile.read_text() == before[place.hostfile.name]
    assert "OMP_PLACES=cores" in place.environment.read_text()


def test_a_disk_that_fills_up_is_named_and_the_older_checkpoint_stays(
    network: Network, demo: Path, small_disk: Path
) -> None:
    job = Job(network, demo, small_disk / "job")
    process = job.start()
    job.wait_for_checkpoint(process)
    with (small_disk / "filling").open("wb") as file, suppress(OSError):
        while process.poll() is None:
            file.write(bytes(2**20))
            file.flush()
    ended = job.end_of(process)
    assert ended.code == 1
    assert "A disk is full" in ended.said, ended.said
    assert "continues from step" in ended.said
    assert job.left_over() == []


def test_a_missing_package_is_told_before_anything_starts(job: Job, tmp_path: Path) -> None:
    from importlib import metadata

    folder = str(metadata.distribution("transformers")._path)  # type: ignore[attr-defined]
    (tmp_path / "nothing").mkdir()
    network = job.network
    subprocess.run(network.on(1, "mount", "--bind", str(tmp_path / "nothing"), folder), check=True)
    network.restart_sshd(1)
    try:
        refused = job.call("run")
    finally:
        subprocess.run(network.on(1, "umount", folder), check=True)
    assert refused.code == 5
    assert "node1: transformers is missing" in refused.said


def test_a_run_directory_that_is_not_shared_is_told(job: Job) -> None:
    network = job.network
    job.place.path.mkdir()
    subprocess.run(network.on(1, "mount", "-t", "tmpfs", "tmpfs", str(job.place.path)), check=True)
    try:
        refused = job.call("run")
    finally:
        subprocess.run(network.on(1, "umount", str(job.place.path)), check=True)
    assert refused.code == 5
    assert "on node1 is not the run directory of this machine" in refused.said
    assert "--sync" in refused.said


def test_more_slots_than_gpus_are_told(job: Job) -> None:
    refused = job.call("run", "--no-doctor", "--set", "env.DS_ACCELERATOR=cuda")
    assert refused.code == 5
    assert "node1: 1 slot in the hostfile, but 0 GPUs there" in refused.said


def test_a_run_in_the_background_survives_its_login_and_is_stopped_by_name(light_job: Job) -> None:
    started = light_job.call("run", "--detach")
    assert started.code == 0, started.said
    assert "dstrain stop output" in started.said
    again = light_job.call("run")
    assert again.code == 6
    assert "a run is active there" in again.said
    light_job.wait_for_step(None, 1)
    assert "running, for" in light_job.call("status", "output").said
    assert "step 1/" in light_job.call("logs", "output").said
    stopped = light_job.call("stop", "output")
    assert (stopped.code, stopped.said) == (0, "output: stopped\n")
    assert light_job.left_over() == []
