"""Which rank failed first, its traceback, and what codes and messages mean."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dstrain.errors import RunFailed
from dstrain.facts.cluster.hostfile import Host, Hosts
from dstrain.facts.kernel_messages import OUT_OF_MEMORY
from dstrain.launch.again import words_of
from dstrain.launch.failure.exit_codes import decode, signal_of
from dstrain.launch.failure.first_failure import Death, advice, failing_order, traceback_of
from dstrain.launch.failure.outcome import Lost, Outcome
from dstrain.launch.failure.report import explain
from dstrain.rundir import COMPLETE, RunDir

TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\nValueError: no'


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (247, "(SIGKILL): killed"), (-9, "(SIGKILL): killed"), (137, "(SIGKILL): killed"),
        (245, "segmentation fault"), (-11, "segmentation fault"), (139, "segmentation fault"),
        (249, "/dev/shm"), (-7, "/dev/shm"), (135, "/dev/shm"),
        (250, "aborted"), (134, "aborted"), (241, "terminated"), (143, "terminated"), (-15, "terminated"),
        (130, "Ctrl-C"), (1, "ended with an error"), (3, "ended with an error"), (127, "not found"),
    ],
)  # fmt: skip
def test_codes_are_decoded_in_all_three_ways_of_writing_a_signal(code: int, words: str) -> None:
    assert words in decode(code)


@pytest.mark.parametrize("code", [0, 1, 2, 126, 127, 128, 255])
def test_ordinary_codes_are_no_signals(code: int) -> None:
    assert signal_of(code) is None


def test_a_traceback_loses_torchs_rank_prefix_and_keeps_its_message() -> None:
    text = "step 1\n" + "\n".join(f"[rank1]: {line}" for line in TRACEBACK.split("\n")) + "\n[rank1]: more words\n"
    assert traceback_of(text) == TRACEBACK + "\nmore words"


def test_the_cause_comes_along_and_a_later_unrelated_traceback_does_not() -> None:
    chain = f"{TRACEBACK}\n\nThe above exception was the direct cause of the following exception:\n\n{TRACEBACK}"
    assert traceback_of(f"{chain}\n\nException ignored in atexit\n{TRACEBACK}") == chain


def test_a_traceback_that_the_program_survived_is_not_it() -> None:
    assert traceback_of(TRACEBACK + "\n" + "\nstep" * 50) is None


def test_a_written_traceback_counts_from_when_it_was_written() -> None:
    deaths = [Death(rank=0, code=-6, at=10.0), Death(rank=2, code=-15, at=11.0)]
    assert failing_order(deaths, {1: 9.0}) == [1, 0, 2]


def test_a_terminated_rank_comes_after_one_that_died_in_the_same_moment() -> None:
    deaths = [Death(rank=0, code=-15, at=5.0), Death(rank=1, code=-11, at=5.0)]
    assert failing_order(deaths, {}) == [1, 0]


def test_a_rank_that_lost_its_peer_comes_after_the_one_that_went_without_a_word() -> None:
    deaths = [Death(rank=0, code=1, at=5.0), Death(rank=1, code=None, at=9.0)]
    assert failing_order(deaths, {0: 4.0}, [0]) == [1, 0]


def test_known_messages_have_an_advice() -> None:
    assert "micro_batch" in (advice("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate") or "")
    assert advice("ValueError: no") is None


def outcome(folder: Path, logs: dict[int, str], *, deaths: tuple[Death, ...] = (), **changes: object) -> Outcome:
    paths = {rank: folder / f"20260101000000_rank{rank}.log" for rank in logs}
    for rank, text in logs.items():
        paths[rank].write_text(text)
    launcher = folder / "launcher.log"
    launcher.write_text("ValueError: bad entry\n")
    values: dict[str, object] = {"code": 1, "stopped_by": None, "reported": None, **changes}
    return Outcome(
        succeeded=False,
        deaths=deaths,
        rank_logs=paths,
        launcher_logs=(launcher,),
        **values,  # type: ignore[arg-type]
    )


HOSTS = Hosts(hosts=(Host(name="gpu01", slots=2), Host(name="gpu02", slots=2)), name="hostfile")


def test_a_failure_names_rank_host_code_evidence_logs_and_the_next_step(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    whole = tmp_path / "checkpoint-20"
    whole.mkdir()
    (whole / COMPLETE).write_text('{"step": 20, "world_size": 4, "zero_stage": 2}')
    found = outcome(tmp_path, {2: "hello\nOSError: No space left on device"}, deaths=(Death(rank=2, code=-9, at=1),))
    command = words_of(["run", "--set", "seed=3", "--set", "resume=auto"], Path("my job.yaml"))
    error = explain(found, hosts=HOSTS, run_dir=run_dir, command=command)
    assert error.problem.startswith("rank 2 on gpu02 failed first: code -9 (SIGKILL): killed\n")
    assert "hello" in error.problem
    assert f"Logs: {run_dir.logs} (above: 20260101000000_rank2.log)" in error.problem
    assert error.hint is not None
    assert "A disk is full" in error.hint
    assert "`dstrain run 'my job.yaml' --set seed=3 --set resume=auto` continues from step 20." in error.hint
    assert isinstance(error, RunFailed)
    assert error.rank_exit_code == -9


@pytest.mark.parametrize(
    ("log", "free_bytes", "is_full"),
    [
        ("RuntimeError: basic_ios::clear: iostream error", 2**30, True),
        ("Traceback (most recent call last):\n  File", 4096, True),
        ("Traceback (most recent call last):\n  File", 2**30, False),
    ],
)
def test_a_full_disk_is_named_even_if_it_cut_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, free_bytes: int, is_full: bool
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free_bytes))
    found = outcome(tmp_path, {2: log}, deaths=(Death(rank=2, code=1, at=1),))
    error = explain(found, hosts=HOSTS, run_dir=RunDir(tmp_path))
    assert ("A disk is full" in (error.hint or "")) == is_full


@pytest.mark.parametrize("code", [1, 3, 5, -9])
def test_the_exit_code_that_decides_about_a_restart_is_data(tmp_path: Path, code: int) -> None:
    error = explain(outcome(tmp_path, {}, reported=("gpu02", code)), hosts=HOSTS, run_dir=RunDir(tmp_path))
    assert isinstance(error, RunFailed)
    assert error.rank_exit_code == code


def test_a_rank_of_another_node_is_found_by_its_log_and_the_launchers_code(tmp_path: Path) -> None:
    found = outcome(tmp_path, {0: "waiting", 3: TRACEBACK}, reported=("gpu02", 1))
    assert explain(found, hosts=HOSTS, run_dir=RunDir(tmp_path)).problem.startswith(
        "rank 3 on gpu02 failed first: code 1"
    )


def test_a_launcher_that_failed_before_any_rank_shows_its_own_words(tmp_path: Path) -> None:
    problem = explain(outcome(tmp_path, {}), hosts=HOSTS, run_dir=RunDir(tmp_path)).problem
    assert problem.startswith("the launcher failed before any rank started: code 1")
    assert "ValueError: bad entry" in problem


def test_ranks_are_numbered_by_host() -> None:
    assert [HOSTS.of_rank(rank) for rank in range(4)] == ["gpu01", "gpu01", "gpu02", "gpu02"]


def test_a_lost_node_is_named_before_the_ranks_that_failed_because_of_it(tmp_path: Path) -> None:
    lost = (Lost(host="gpu02", why="silent for 31 s", at=1.0),)
    logs = {0: "Traceback (most recent call last):\nRuntimeError: Connection closed by peer\n"}
    deaths = (Death(rank=0, code=1, at=2.0),)
    message = str(explain(outcome(tmp_path, logs, deaths=deaths, lost=lost), hosts=HOSTS, run_dir=RunDir(tmp_path)))
    assert message.startswith("gpu02 was lost (silent for 31 s), with ranks 2, 3; last heard from at ")
    assert "after that: rank 0 on gpu01 failed first" in message


def test_a_rank_that_died_on_its_node_comes_before_the_nodes_loss(tmp_path: Path) -> None:
    lost = (Lost(host="gpu02", why="silent for 31 s", at=1.0),)
    deaths = (Death(rank=3, code=-9, at=2.0),)
    message = str(explain(outcome(tmp_path, {3: ""}, deaths=deaths, lost=lost), hosts=HOSTS, run_dir=RunDir(tmp_path)))
    assert message.startswith("rank 3 on gpu02 failed first: code -9 (SIGKILL)")
    assert "gpu02 was lost (silent for 31 s), after that" in message


def test_a_killed_launcher_is_named_with_its_node(tmp_path: Path) -> None:
    found = outcome(tmp_path, {}, orphaned=("gpu02",))
    message = str(explain(found, hosts=HOSTS, run_dir=RunDir(tmp_path)))
    assert message.startswith("the launcher on gpu02 was killed")


def test_the_last_metrics_are_in_the_report(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "loss": 2.5, "tokens_per_s": 1234.5}\n{"event": "x"}\n{"ste')
    found = outcome(tmp_path, {0: ""}, deaths=(Death(rank=0, code=-9, at=2.0),))
    assert "Last metrics: step 7, loss 2.5000, 1,234 tokens/s" in str(
        explain(found, hosts=HOSTS, run_dir=RunDir(tmp_path))
    )


NOISE = "DeepSpeed deepspeed.ops.comm.deepspeed_shm_comm_op built successfully\n"
LOST_PEER = "Traceback (most recent call last):\n  File\nRuntimeError: gloo/pair.cc:553 Connection closed by peer\n"
NOT_MEMORY = "the kernel's log has no process that it killed because memory ran out, so somebody else sent it"


def explained(folder: Path, logs: dict[int, str], **outcome_of: Any) -> str:
    return str(explain(outcome(folder, logs, **outcome_of), hosts=HOSTS, run_dir=RunDir(folder)))


def test_a_killed_rank_says_what_the_kernel_says_and_how_full_the_memory_was(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 30, "loss": 2.5, "host_used_share": 0.29}\n')
    deaths = (Death(rank=3, code=-9, at=2.0, note=NOT_MEMORY), Death(rank=0, code=1, at=2.1))
    message = explained(tmp_path, {0: LOST_PEER, 3: NOISE}, deaths=deaths)
    assert message.split("\n")[0] == (
        f"rank 3 on gpu02 failed first (1 more ended after it): code -9 (SIGKILL): {NOT_MEMORY}; "
        "29% of the host memory was in use at step 30"
    )
    assert "out of memory" not in message
    assert NOISE.strip() not in message
    assert "Connection closed" not in message


def test_memory_is_the_cause_only_if_the_kernel_says_so(tmp_path: Path) -> None:
    note = f"{OUT_OF_MEMORY} (the kernel's log: Memory cgroup out of memory: Killed process 7 (python))"
    message = explained(tmp_path, {0: NOISE}, deaths=(Death(rank=0, code=-9, at=2.0, note=note),))
    assert note in message.split("\n")[0]
    assert "The host ran out of memory: offload less, or use more nodes." in message


def test_the_first_line_has_the_exceptions_message(tmp_path: Path) -> None:
    deaths = (Death(rank=0, code=1, at=2.0),)
    assert explained(tmp_path, {0: NOISE + TRACEBACK}, deaths=deaths).startswith(
        "rank 0 on gpu01 failed first: code 1: ValueError: no\nTraceback"
    )


@pytest.mark.parametrize("first", [0, 1])
def test_an_error_that_one_rank_prints_for_all_is_the_cause_whichever_ends_first(tmp_path: Path, first: int) -> None:
    deaths = (Death(rank=first, code=1, at=2.0), Death(rank=1 - first, code=1, at=2.5))
    logs = {0: "step 20/60\nError: the gradients of 20 steps in a row are not finite\nUse bf16.\n", 1: NOISE}
    message = explained(tmp_path, logs, deaths=deaths)
    assert message.startswith("the gradients of 20 steps in a row are not finite\nUse bf16.\n")
    assert "failed first" not in message


def test_a_rank_that_left_early_is_named(tmp_path: Path) -> None:
    note = "it left after step 20 of 60, and the others wait for it"
    message = explained(tmp_path, {1: NOISE}, deaths=(Death(rank=1, code=0, at=2.0, note=note),))
    assert message.startswith(f"rank 1 on gpu01 failed first: code 0: {note}\n")


def test_a_rank_that_lost_its_peer_does_not_lead_over_the_lost_node(tmp_path: Path) -> None:
    lost, deaths = (Lost(host="gpu02", why="silent for 31 s", at=1.0),), (Death(rank=3, code=1, at=2.0),)
    assert explained(tmp_path, {3: LOST_PEER}, deaths=deaths, lost=lost).startswith("gpu02 was lost (silent for 31 s)")


def test_ranks_that_agents_ended_are_no_cause(tmp_path: Path) -> None:
    found = outcome(tmp_path, {0: LOST_PEER}, deaths=(Death(rank=0, code=1, at=2.0),))
    launcher = tmp_path / f"{time.strftime('%Y%m%d%H%M%S')}_launcher_gpu01_abc.log"
    launcher.touch()
    RunDir(tmp_path).logs.mkdir()
    words = "gpu02: no word from dstrain run for 30 s; ended 2, 3"
    (tmp_path / "watch_gpu02.log").write_text(f"2026-11-28 09:00:00 {words}\n")
    message = str(explain(replace(found, launcher_logs=(launcher,)), hosts=HOSTS, run_dir=RunDir(tmp_path)))
    assert message.startswith(f"{words}\n")


def stopped(folder: Path, *, since: int | None) -> str:
    line = {"rule": "divergence", "step": 60, "action": "stop", "since": since, "message": "step 60: it diverges."}
    (folder / "health.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "request.json").write_text('{"learning_rate": 3.0}')
    for step in (40, 60):
        whole = folder / f"checkpoint-{step}"
        whole.mkdir()
        (whole / COMPLETE).write_text(f'{{"step": {step}, "world_size": 4, "zero_stage": 2}}')
    log = "Error: the health rule divergence ended the run: step 60: it diverges.\nResume from there.\n"
    found = outcome(folder, {0: log}, deaths=(Death(rank=0, code=1, at=2.0),))
    error = explain(found, hosts=HOSTS, run_dir=RunDir(folder), command=words_of(["run"], Path("job.yaml")))
    assert isinstance(error, RunFailed)
    assert error.stopped_by == "divergence"
    return str(error)


@pytest.mark.parametrize(
    ("since", "advice_line"),
    [
        (None, "resume=auto` continues from step 60."),
        (50, "/checkpoint-40 --set learning_rate=0.3` continues from checkpoint-40, from before that with a tenth of "),
        (30, "No checkpoint is from before that: `dstrain run job.yaml --set learning_rate=0.3 --set output_dir="),
    ],
)
def test_a_state_that_diverged_is_not_resumed_at_the_same_rate(
    tmp_path: Path, since: int | None, advice_line: str
) -> None:
    message = stopped(tmp_path, since=since)
    assert advice_line in message
    assert ("resume=auto" in message) == (since is None)
    assert "Resume from there." not in message
