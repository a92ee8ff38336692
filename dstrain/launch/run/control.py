"""Stop and save requests: signals, and the marker file that `dstrain stop` writes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from dstrain.errors import Interrupted, RunFailed
from dstrain.launch.nodes.spec import StopRequests

SAVE_SIGNAL = signal.SIGUSR1
"""The signal that makes a run save a checkpoint and leave."""


@contextlib.contextmanager
def noting_signals(screen_log: Path, *, saves_on_term: bool = False) -> Iterator[StopRequests]:
    """Yields the requests of signals; outside the main thread signals are left alone.

    SIGINT and SIGTERM stop it, a second one at once; while no rank runs they raise Interrupted or RunFailed. With
    `saves_on_term` the first SIGTERM saves and leaves instead, as SIGUSR1 always does. SIGHUP, a login that dropped,
    ends nothing: from then on output goes to `screen_log`. Ctrl-Z is ignored, since agents end their ranks if `run` is
    silent.
    """
    stop_requests = StopRequests()
    if threading.current_thread() is not threading.main_thread():
        yield stop_requests
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and saves_on_term and not stop_requests.save:
            stop_requests.save = True
            return
        if not stop_requests.is_heeded:
            kind = Interrupted if number == signal.SIGINT else RunFailed
            raise kind(f"stopped ({signal.Signals(number).name}); no rank is running")
        stop_requests.is_interrupt = stop_requests.is_interrupt or (not stop_requests.stop and number == signal.SIGINT)
        stop_requests.stop.append(signal.Signals(number).name)

    def save(number: int, frame: FrameType | None) -> None:
        stop_requests.save = True

    def leave_terminal(number: int, frame: FrameType | None) -> None:
        _write_to(screen_log)

    handlers = {signal.SIGINT: stop, signal.SIGTERM: stop, SAVE_SIGNAL: save, signal.SIGHUP: leave_terminal}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        yield stop_requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_to(path: Path) -> None:
    """Redirects the output of this process to a file."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(handle, stream.fileno())
    os.close(handle)
