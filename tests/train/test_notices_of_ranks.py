"""Notices of runs that ranks start without `dstrain run`, as start.sh and the scripts of clusters do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.monitor.test_notices import Receiver, receiver
from tests.train.engine import Engine
from tests.train.launching import codes, lines, make_run, said

__all__ = ["receiver"]


def notified(root: Path, demo: Path, engine: Engine, receiver: Receiver, name: str, **job: object) -> Path:
    """Returns a run of two ranks that has ended; the address is among the secrets that ranks read."""
    monitor = {"sinks": [], "notify": ["webhook", "slack"]}
    run = make_run(root / f"notified_{name}", demo, monitor=monitor, max_steps=2, **job)  # type: ignore[arg-type]
    (run / ".secrets").write_text(f"NOTIFY_WEBHOOK={receiver.url}\n")
    engine.train(run)
    return run


def events(receiver: Receiver) -> list[tuple[str, str]]:
    return [(body["event"], body["title"].rpartition(": ")[2]) for _, body in receiver.got]


def test_rank_0_tells_start_and_end_once_and_names_a_service_without_an_address(
    root: Path, demo: Path, engine: Engine, receiver: Receiver
) -> None:
    run = notified(root, demo, engine, receiver, "run", logging_steps=3)
    assert codes(run) == [[0, 0]], said(run)[-3000:]
    assert events(receiver) == [("start", "first step done"), ("end", "trained to its end")]
    assert receiver.got[0][1]["text"] == "full training of model, 2 ranks"
    assert receiver.got[1][1]["text"].startswith("step 2, loss 7.")
    assert said(run).count("notices to slack: SLACK_WEBHOOK is not set: not sent; training continues") == 1
    assert "private" not in said(run)
    logged = lines(run)
    assert [line["step"] for line in logged] == [1, 2], "the last step is logged, whatever logging_steps is"
    summary = json.loads((run / "summary.json").read_text())
    seconds = sum(line["tokens"] / line["tokens_per_s"] for line in logged)
    assert summary["tokens"] == sum(line["tokens"] for line in logged)
    assert (summary["train_s"], summary["last_loss"]) == (pytest.approx(seconds), logged[-1]["loss"])
    assert summary["tokens_per_s"] == pytest.approx(summary["tokens"] / seconds)


def test_rank_0_tells_what_ended_a_run(root: Path, demo: Path, engine: Engine, receiver: Receiver) -> None:
    run = notified(root, demo, engine, receiver, "failed", seq_len=8)
    assert codes(run) == [[3, 3]]
    assert events(receiver) == [("failure", "failed")]
    assert "has a token of an answer among its first 8" in receiver.got[0][1]["text"]


@pytest.mark.parametrize("name", ["DSTRAIN_RUN_ID"])
def test_dstrain_run_sends_them_itself(root: Path, demo: Path, engine: Engine, receiver: Receiver, name: str) -> None:
    run = make_run(root / "notified_by_run", demo, monitor={"sinks": [], "notify": ["webhook"]}, seq_len=8)
    (run / ".secrets").write_text(f"NOTIFY_WEBHOOK={receiver.url}\n{name}=0f3c-1\n")
    engine.train(run)
    assert codes(run) == [[3, 3]]
    assert receiver.got == []
