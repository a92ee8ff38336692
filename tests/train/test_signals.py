"""SIGTERM in a process whose main thread never comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

START = """
import os, sys, threading, time
from dstrain.train import rank
rank.leave_on_sigterm(lambda: print("finished", flush=True))
"""
BLOCKED = START + "print('ready', flush=True)\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()\n"
SLOW = (
    "import time\nfrom dstrain.train import rank\nrank.FINISH_S = 0.5\n"
    "rank.leave_on_sigterm(lambda: time.sleep(60))\nprint('ready', flush=True)\ntime.sleep(60)\n"
)
FORKS = START + (
    "child = os.fork()\n"
    "if child == 0: time.sleep(60)\n"
    "time.sleep(0.3); os.kill(child, 15)\n"
    "print('child', os.waitpid(child, 0)[1], flush=True)\ntime.sleep(0.5); print('alive', flush=True)\n"
)


def start(program: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("program", "expected"), [(BLOCKED, "finished\n"), (SLOW, "")])
def test_a_blocked_process_finishes_its_curves_and_leaves_with_143(program: str, expected: str) -> None:
    process = start(program)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert time.monotonic() - began < 5
    assert (process.returncode, output) == (143, expected)


def test_a_forked_child_dies_of_sigterm_and_leaves_its_parent_alone() -> None:
    output, _ = start(FORKS).communicate(timeout=20)
    assert output == f"child {signal.SIGTERM:d}\nalive\n"
