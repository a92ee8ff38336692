"""Notices of `dstrain run` over the real launcher, and the test notice of `dstrain doctor --notify`."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dstrain.errors import Interrupted, RunFailed
from dstrain.heartbeat import Phase
from dstrain.job.monitor import NotifyService
from dstrain.monitor.notices import Notifier, Target
from dstrain.monitor.run_notices import RunNotices
from dstrain.rundir import RunDir
from tests.cli.test_run import change, job
from tests.monitor.test_notices import Receiver, receiver

Type = Callable[..., Any]

__all__ = ["job", "receiver"]


def events(receiver: Receiver) -> list[tuple[str, str]]:
    """Returns event and end of the title of each notice that arrived."""
    return [(body["event"], body["title"].rpartition(": ")[2]) for _, body in receiver.got]


def test_a_run_tells_its_start_and_its_end_and_writes_no_address(
    dstrain: Type, job: Path, light_checkout: Path, receiver: Receiver
) -> None:
    change(job, "sinks: [swanlab]", "sinks: []\n  notify: [webhook]")
    light = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(light_checkout)}
    done = dstrain("run", "--no-doctor", "--set", "max_steps=40", NOTIFY_WEBHOOK=receiver.url, **light)
    assert done.returncode == 0, done.stderr
    assert events(receiver) == [("start", "first step done"), ("end", "trained to its end")]
    assert receiver.got[-1][1]["text"] == "step 40, loss 1"
    written = [path.read_text(errors="replace") for path in (job.parent / "output").rglob("*") if path.is_file()]
    assert not any("private" in text for text in (*written, done.stdout, done.stderr))


def test_a_missing_address_is_named_before_anything_starts(dstrain: Type, job: Path) -> None:
    change(job, "sinks: [swanlab]", "sinks: []\n  notify: [dingtalk]")
    done = dstrain("run", "--no-doctor", DINGTALK_WEBHOOK="")
    assert (done.returncode, "DINGTALK_WEBHOOK is not set" in done.stderr) == (5, True)
    assert not (job.parent / "output").exists()


def test_a_service_is_one_of_those(dstrain: Type, job: Path) -> None:
    change(job, "sinks: [swanlab]", "sinks: []\n  notify: [feishuu]")
    done = dstrain("run", "-n")
    assert (done.returncode, 'did you mean "feishu"' in done.stderr) == (3, True), done.stderr


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run directory in which an earlier run has warned."""
    made = RunDir(tmp_path)
    made.health.write_text('{"rule": "plateau", "message": "earlier"}\n')
    return made


def watched(run_dir: RunDir, receiver: Receiver) -> RunNotices:
    """Returns the notices of a run that go to the receiver; one that is not sent fails the test."""
    service = Target(service=NotifyService.WEBHOOK, url=receiver.url)
    return RunNotices(run_dir, "training of tiny", Notifier([service], pytest.fail, time.monotonic))


def append(path: Path, **record: object) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def test_troubles_are_told_once_and_those_of_an_earlier_run_never(run_dir: RunDir, receiver: Receiver) -> None:
    notices = watched(run_dir, receiver)
    notices.look(Phase.LOADING, 1)
    for step in (7, 8):
        append(run_dir.health, rule="loss_spike", message=f"step {step}: it jumped")
        notices.look(Phase.STEP, step)
    append(run_dir.restarts, cause="node gpu2 was lost", from_step=4)
    append(run_dir.health, rule="nonfinite", message="the last word")
    notices.end(RunFailed("rank 1 died"))
    assert events(receiver) == [
        ("start", "first step done"),
        ("trouble", "health rule loss_spike"),
        ("trouble", "health rule nonfinite"),
        ("trouble", "starting again from step 4"),
        ("failure", "failed"),
    ]
    texts = [body["text"] for _, body in receiver.got]
    assert texts == ["training of tiny", "step 7: it jumped", "the last word", "node gpu2 was lost", "rank 1 died"]


def test_a_run_that_somebody_ended_has_not_failed(run_dir: RunDir, receiver: Receiver) -> None:
    watched(run_dir, receiver).end(Interrupted("stopped (SIGINT)"))
    assert events(receiver) == [("end", "ended before its last step")]


def test_doctor_sends_a_test_notice(dstrain: Type, receiver: Receiver) -> None:
    addresses = {"NOTIFY_WEBHOOK": receiver.url, "WECOM_WEBHOOK": receiver.url}
    done = dstrain("doctor", "--notify", "webhook", "--notify", "wecom", **addresses)
    assert (done.returncode, done.stdout) == (0, "✓ webhook: sent\n✓ wecom: sent\n"), done.stderr
    assert receiver.got[0][1]["title"] == f"dstrain: a test notice from {socket.gethostname()}"


def test_doctor_says_why_a_notice_was_not_taken_and_hides_the_address(dstrain: Type, receiver: Receiver) -> None:
    receiver.answer = '{"code": 19021, "msg": "sign match fail"}'
    done = dstrain("doctor", "--notify", "feishu", "--json", FEISHU_WEBHOOK=receiver.url, FEISHU_SECRET="wrong")
    assert json.loads(done.stdout)[0]["problem"] == "ValueError: code 19021: sign match fail"
    assert (done.returncode, "Correct FEISHU_WEBHOOK" in done.stderr, "private" in done.stderr) == (5, True, False)


def test_doctor_sends_a_notice_or_looks_but_not_both(dstrain: Type) -> None:
    done = dstrain("doctor", "--notify", "slack", "--network")
    assert (done.returncode, "leave out the other options" in done.stderr) == (2, True)
