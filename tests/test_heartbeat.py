"""What ranks say of themselves, and who else may say something."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dstrain.heartbeat import MARK, Heartbeat, Phase, Receiver, Sender, address, decode
from dstrain.launch.nodes.connection import new_mark

SEND = """
import os, socket, sys
if len(sys.argv) > 3:
    os.setuid(int(sys.argv[3]))
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), "\\0" + sys.argv[1])
"""
DONE = json.dumps({"rank": 3, "step": 0, "phase": "done", "total": 0})


@pytest.fixture
def mark() -> str:
    return new_mark()


@pytest.fixture
def receiver(mark: str) -> Iterator[Receiver]:
    """The receiver of a node with ranks 2 and 3."""
    found = Receiver(mark, range(2, 4))
    yield found
    found.close()


def say(mark: str, rank: int, step: int, phase: Phase, total: int = 0) -> None:
    """Sends as a rank does."""
    sender = Sender({MARK: mark}, rank)
    sender.send(step, phase, total)
    sender._socket.close()


def test_a_rank_is_heard(mark: str, receiver: Receiver) -> None:
    say(mark, 2, 7, Phase.STEP, 9)
    assert receiver.receive() == [Heartbeat(rank=2, step=7, phase=Phase.STEP, total=9)]


def test_ranks_of_other_nodes_are_not_heard(mark: str, receiver: Receiver) -> None:
    for rank in (0, 1, 4, 10**9):
        say(mark, rank, 7, Phase.DONE)
    assert receiver.receive() == []


def test_another_user_is_not_heard(mark: str, receiver: Receiver) -> None:
    name = address(mark)[1:]
    subprocess.run([sys.executable, "-c", SEND, name, DONE], check=True)
    assert [heartbeat.phase for heartbeat in receiver.receive()] == [Phase.DONE]
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    subprocess.run([sys.executable, "-c", SEND, name, DONE, "65534"], check=True)
    assert receiver.receive() == []


def test_whatever_comes_the_receiver_goes_on(mark: str, receiver: Receiver) -> None:
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with sender:
        for raw in (b"", b"7", b"[" * 4096, b'{"rank":1e999,"step":0,"total":0,"phase":"step"}', b"\xff"):
            sender.sendto(raw, address(mark))
            assert receiver.receive() == []
    say(mark, 3, 1, Phase.STEP)
    assert len(receiver.receive()) == 1


NUMBER = st.integers() | st.floats() | st.text() | st.none() | st.lists(st.integers()) | st.booleans()
HEARTBEAT = st.fixed_dictionaries(
    {"rank": NUMBER, "step": NUMBER, "phase": st.sampled_from([*Phase]) | NUMBER},
    optional={"total": NUMBER, "more": NUMBER},
)


@example(b"{}")
@example(b'{"rank": -1, "step": 0, "phase": "step", "total": 0}')
@given(st.binary() | HEARTBEAT.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_raise(raw: bytes) -> None:
    heartbeat = decode(raw)
    assert heartbeat is None or min(heartbeat.rank, heartbeat.step, heartbeat.total) >= 0
