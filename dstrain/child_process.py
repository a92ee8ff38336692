"""Runs a long child process, reports its progress, and kills its process group if interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from dstrain.units import format_seconds

_END_S = 3.0
TELL_EVERY_S = 15.0
"""Seconds between two words about it."""


def run_reporting(
    command: Sequence[str], environment: Mapping[str, str], tell: Callable[[str], None], what: str
) -> tuple[int, str]:
    """Returns the exit code and the output; says every few seconds that it is still `what`, such as "building X".

    When this is interrupted, the child and its own children are ended first, and killed where they do not end.
    """
    begin = time.monotonic()
    child = subprocess.Popen(
        command,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        while True:
            try:
                output, _ = child.communicate(timeout=TELL_EVERY_S)
            except subprocess.TimeoutExpired:
                tell(f"  still {what} ({format_seconds(time.monotonic() - begin)})")
            else:
                return child.returncode, output or ""
    except BaseException:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(child.pid, number)
                child.wait(_END_S)
        raise
