"""Stops, saves and detaches runs: signals, and the marker file that `dstrain stop` writes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from dstrain.errors import DstrainError, EnvironmentProblem, Interrupted, RunFailed
from dstrain.launch.failure.logs import Tail
from dstrain.launch.nodes.connection import StopRequests
from dstrain.launch.run import state
from dstrain.launch.timeouts import TIMEOUTS
from dstrain.paths import python, shown
from dstrain.rundir import LIVING, RunDir, Stage, State

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
        # nothing waits for requests while no rank runs, such as during checks
        if not stop_requests.is_heeded:
            kind = Interrupted if number == signal.SIGINT else RunFailed
            raise kind(f"stopped ({signal.Signals(number).name}); no rank is running")
        # the first signal decides the exit code, the second only the haste
        stop_requests.is_interrupt = stop_requests.is_interrupt or (not stop_requests.stop and number == signal.SIGINT)
        stop_requests.stop.append(signal.Signals(number).name)

    def save(number: int, frame: FrameType | None) -> None:
        stop_requests.save = True

    handlers = {
        signal.SIGINT: stop,
        signal.SIGTERM: stop,
        SAVE_SIGNAL: save,
        signal.SIGHUP: lambda number, frame: _write_to(screen_log),
    }
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


_POLL_S = 0.2
_CHILD = "import json, sys; from dstrain.cli.main import main; main(json.load(sys.stdin))"
"""The program in the background: its arguments come on stdin, since everybody can see command lines."""


def detach(run_dir: RunDir, arguments: Sequence[str], say: Callable[[str], None]) -> None:
    """Starts `dstrain` with the same arguments in the background; returns once a rank trains, or after `detach_s`. Its
    messages until then are printed here. Raises RunFailed, with its own exit code, if it ends before.
    """
    log = state.run_log(run_dir)
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [*(word for word in arguments if word != "--detach"), "--no-doctor"]
    with log.open("wb") as file:
        child = subprocess.Popen(
            python("-c", _CHILD, "dstrain.cli", "run"),
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    assert child.stdin is not None
    with suppress(BrokenPipeError), child.stdin:
        child.stdin.write(json.dumps(words).encode())
    tail = Tail(log)
    until = time.monotonic() + TIMEOUTS.detach_s
    while time.monotonic() < until and child.poll() is None and _stage(run_dir, child.pid) is not Stage.RUNNING:
        time.sleep(_POLL_S)
    code = child.poll()  # asks the system each time, so it is read once
    if code == 0:
        say(tail.read().strip())
        return
    if code is not None:
        failure = RunFailed(tail.read().strip() or f"ended with code {code}")
        failure.exit_code = code
        raise failure
    folder = shown(str(run_dir.path))
    if _stage(run_dir, child.pid) in {None, Stage.STARTING} and child.poll() is None:
        say(f"still starting after {TIMEOUTS.detach_s:.0f} s; `dstrain status` reports a later failure")
    say(f"running in the background as process {child.pid}, writing to {shown(str(log))}")
    verbs = {"status --watch": "loss, speed, memory", "status": "its state", "logs -f": "its output", "stop": "stop it"}
    for verb, what in verbs.items():
        say(f"  dstrain {verb} {folder}  # {what}")
    if _is_killed_at_logout():
        say("note     systemd ends your processes at logout; `loginctl enable-linger` keeps them")
    child.returncode = 0  # it is not ours to wait for


def _stage(run_dir: RunDir, pid: int) -> Stage | None:
    """Returns the stage of the run of a process here; None before it has written one."""
    try:
        written = state.read(run_dir)
    except DstrainError:
        return None
    return written.stage if (written.pid, written.host) == (pid, socket.gethostname()) else None


def _is_killed_at_logout() -> bool:
    """Returns whether systemd's KillUserProcesses is on."""
    try:
        lines = Path("/etc/systemd/logind.conf").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    return any(line.replace(" ", "").lower() == "killuserprocesses=yes" for line in lines)


def stop(run_dir: RunDir, *, at_once: bool) -> Stage:
    """Asks a run to stop and returns how it ended; `at_once` gives its ranks no time.

    Raises RunFailed if no run is alive in the folder, or if it has not ended after `stop_s` seconds.
    """
    living = _living(run_dir)
    for _ in range(2 if at_once else 1):
        run_dir.stop_wish.touch()
        _wait(lambda: not run_dir.stop_wish.exists(), TIMEOUTS.stop_s)
    return _ended(run_dir, living, TIMEOUTS.stop_s)


def save_and_leave(run_dir: RunDir) -> Stage:
    """Asks a run on this machine to save a checkpoint and leave, and returns how it ended."""
    living = _living(run_dir)
    if living.host != socket.gethostname():
        raise EnvironmentProblem(
            f"{run_dir.path}: `dstrain run` runs on {living.host}",
            hint=f"ssh {living.host} kill -USR1 {living.pid}",
        )
    os.kill(living.pid, SAVE_SIGNAL)
    return _ended(run_dir, living, TIMEOUTS.save_s)


def _living(run_dir: RunDir) -> State:
    current = state.read(run_dir)
    if not state.is_alive(current, run_dir):
        problem = f"{run_dir.path}: no run is active there ({current.stage.value})"
        raise RunFailed(problem, hint=f"dstrain status {shown(str(run_dir.path))}")
    return current


def _ended(run_dir: RunDir, living: State, seconds: float) -> Stage:
    if _wait(lambda: state.read(run_dir).stage not in LIVING and not state.has_process(living), seconds):
        return state.read(run_dir).stage
    problem = f"{run_dir.path}: still running after {seconds:.0f} s"
    raise RunFailed(problem, hint=f"On {living.host}: kill -KILL {living.pid}; its agents end the ranks.")


def _wait(is_so: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if is_so():
            return True
        time.sleep(_POLL_S)
    return is_so()
