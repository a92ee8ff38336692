"""What an agent still has to say when it ends."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from dstrain.launch.failure.logs import MOST_BYTES, Tail
from dstrain.launch.nodes import agent
from dstrain.launch.nodes.agent import Outbox
from dstrain.launch.nodes.connection import Inbox
from dstrain.launch.nodes.protocol import Ended, Wrote
from dstrain.launch.timeouts import Timeouts

LOG = "logs/1_rank0.log"


def heard(handle: int) -> list[object]:
    """Reads a pipe to its end."""
    inbox, events = Inbox(handle), list[object]()
    while not inbox.is_closed:
        events += [event for _, event in inbox.receive()]
        time.sleep(0.001)
    os.close(handle)
    return events


@pytest.mark.parametrize("is_slow", [False, True])
def test_the_last_word_does_not_stand_behind_output(monkeypatch: pytest.MonkeyPatch, *, is_slow: bool) -> None:
    monkeypatch.setattr(agent, "TIMEOUTS", Timeouts(flush_s=1.0 if is_slow else 60.0))
    source, target = os.pipe()
    outbox = Outbox(target, 0)
    for number in range(32):
        outbox.put(Wrote(name=LOG, text=f"{number:03}" + "x" * 2**20, on_screen=True))
    outbox.put(Wrote(name="metrics.jsonl", text="{}", on_screen=False))
    outbox.put(Ended(code=0, num_finished=1, num_done=1, reported=None))
    assert not outbox.has_room

    def flush() -> None:
        outbox.flush()
        os.close(target)

    thread = threading.Thread(target=flush)
    thread.start()
    time.sleep(1.3 if is_slow else 0)  # nobody reads
    *events, metrics, last = heard(source)
    thread.join()
    assert isinstance(last, Ended)
    assert isinstance(metrics, Wrote) and metrics.name == "metrics.jsonl"
    if is_slow:
        begun, note = events
        assert isinstance(begun, Wrote) and begun.text.startswith("000")
        assert isinstance(note, Wrote) and note.on_screen and note.name == LOG
        assert "dstrain: 31.0 MiB of output left out here; all of it is in logs/1_rank0.log" in note.text
    else:
        assert [event.text[:3] for event in events if isinstance(event, Wrote)] == [f"{i:03}" for i in range(32)]


def test_a_log_that_grows_faster_than_it_is_read_continues_with_its_last_piece(tmp_path: Path) -> None:
    path = tmp_path / "rank0.log"
    path.write_text("first\n")
    tail = Tail(path)
    assert tail.read(most_behind=8 * MOST_BYTES) == "first\n"
    with path.open("a") as file:
        file.writelines(f"{number:063}\n" for number in range(16 * MOST_BYTES // 64))
    text = tail.read(most_behind=8 * MOST_BYTES)
    assert "dstrain: 15.0 MiB of output left out here" in text.splitlines()[1]
    assert text.endswith(f"{16 * MOST_BYTES // 64 - 1:063}\n")
    assert len(text) < MOST_BYTES + 300
    assert tail.read(most_behind=8 * MOST_BYTES) == ""
