"""Handles SIGTERM in a rank: it exits within seconds, even when blocked in a collective, with its metrics on disk.

Python runs signal handlers between bytecodes of the main thread, so not while a rank waits in NCCL or gloo. The C-level
handler does run, and writes the signal's number to the wake-up descriptor, on which a thread waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable

EXIT_CODE = 128 + signal.SIGTERM
FINISH_S = 4.0
"""Time limit of `finish` before the process exits anyway."""


def leave_on_sigterm(finish: Callable[[], None]) -> None:
    """Makes SIGTERM call `finish` from another thread and then exit with code 143.

    Must be called from the main thread. Processes forked later (data loaders) are killed by SIGTERM as usual.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget)
    threading.Thread(target=_watch, args=(read_end, finish), name="sigterm", daemon=True).start()


def _forget() -> None:
    """Restores SIGTERM in a forked child, which would otherwise end its parent through the shared pipe."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _watch(read_end: int, finish: Callable[[], None]) -> None:
    while True:
        received = os.read(read_end, 64)
        if signal.SIGTERM in received:
            break
    worker = threading.Thread(target=_quietly, args=(finish,), daemon=True)
    worker.start()
    worker.join(FINISH_S)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(EXIT_CODE)


def _quietly(finish: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        finish()
