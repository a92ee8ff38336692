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
from dstrain.launch.failure.outcome import Death, Lost, Outcome, advice, failing_order, traceback_of
from dstrain.launch.failure.report import decode, explain, signal_of
from dstrain.rundir import COMPLETE, RunDir, words_of

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


@pytest.mark.parametrize(
    ("deaths", "tracebacks", "lost_peer", "order"),
    [
        ([(0, -6, 10.0), (2, -15, 11.0)], {1: 9.0}, [], [1, 0, 2]),  # a traceback counts from when it was written
        ([(0, -15, 5.0), (1, -11, 5.0)], {}, [], [1, 0]),  # a terminated rank comes after one that died
        ([(0, 1, 5.0), (1, None, 9.0)], {0: 4.0}, [0], [1, 0]),  # it lost the peer that went without a word
    ],
)
def test_the_first_failure_is_what_the_others_follow_from(
    deaths: list[tuple[int, int | None, float]], tracebacks: dict[int, float], lost_peer: list[int], order: list[int]
) -> None:
    died = [Death(rank=rank, code=code, at=at) for rank, code, at in deaths]
    assert failing_order(died, tracebacks, lost_peer) == order


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


NOISE = "DeepSpeed deepspeed.ops.comm.deepspeed_shm_comm_op built successfully\n"
LOST_PEER = "Traceback (most recent call last):\n  File\nRuntimeError: gloo/pair.cc:553 Connection closed by peer\n"
NOT_MEMORY = "the kernel's log has no process that it killed because memory ran out, so somebody else sent it"
LOST = (Lost(host="gpu02", why="silent for 31 s", at=1.0),)
LEFT = "it left after step 20 of 60, and the others wait for it"


def died(rank: int, code: int = 1, note: str = "") -> tuple[Death, ...]:
    return (Death(rank=rank, code=code, at=2.0, note=note),)


def explained(folder: Path, logs: dict[int, str], **outcome_of: Any) -> str:
    return str(explain(outcome(folder, logs, **outcome_of), hosts=HOSTS, run_dir=RunDir(folder)))


@pytest.mark.parametrize(
    ("logs", "found", "begins", "says"),
    [
        # a rank of another node by its log and the launcher's code
        ({0: "waiting", 3: TRACEBACK}, {"reported": ("gpu02", 1)}, "rank 3 on gpu02 failed first: code 1", ""),
        ({}, {}, "the launcher failed before any rank started: code 1", "ValueError: bad entry"),
        ({}, {"orphaned": ("gpu02",)}, "the launcher on gpu02 was killed", ""),
        (
            {0: LOST_PEER},
            {"deaths": died(0), "lost": LOST},
            "gpu02 was lost (silent for 31 s), with ranks 2, 3; last heard from at ",
            "after that: rank 0 on gpu01 failed first",
        ),
        (
            {3: ""},
            {"deaths": died(3, -9), "lost": LOST},
            "rank 3 on gpu02 failed first: code -9 (SIGKILL)",
            "gpu02 was lost (silent for 31 s), after that",
        ),
        ({3: LOST_PEER}, {"deaths": died(3), "lost": LOST}, "gpu02 was lost (silent for 31 s)", ""),
        ({0: NOISE + TRACEBACK}, {"deaths": died(0)}, "rank 0 on gpu01 failed first: code 1: ValueError: no\nTra", ""),
        ({1: NOISE}, {"deaths": died(1, 0, LEFT)}, f"rank 1 on gpu01 failed first: code 0: {LEFT}\n", ""),
    ],
)
def test_the_cause_is_named_before_what_followed_from_it(
    tmp_path: Path, logs: dict[int, str], found: dict[str, Any], begins: str, says: str
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "loss": 2.5, "tokens_per_s": 1234.5}\n{"event": "x"}\n{"ste')
    message = explained(tmp_path, logs, **found)
    assert message.startswith(begins)
    assert says in message
    assert "Last metrics: step 7, loss 2.5000, 1,234 tokens/s" in message


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


@pytest.mark.parametrize("first", [0, 1])
def test_an_error_that_one_rank_prints_for_all_is_the_cause_whichever_ends_first(tmp_path: Path, first: int) -> None:
    deaths = (Death(rank=first, code=1, at=2.0), Death(rank=1 - first, code=1, at=2.5))
    logs = {0: "step 20/60\nError: the gradients of 20 steps in a row are not finite\nUse bf16.\n", 1: NOISE}
    message = explained(tmp_path, logs, deaths=deaths)
    assert message.startswith("the gradients of 20 steps in a row are not finite\nUse bf16.\n")
    assert "failed first" not in message


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
