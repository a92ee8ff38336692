"""The state of a run: one small file that `run` writes and that status, logs and stop read."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from dstrain.errors import Conflict, EnvironmentProblem, InvalidConfig
from dstrain.launch.nodes.process_tree import look
from dstrain.launch.timeouts import TIMEOUTS
from dstrain.paths import shown, write_atomic
from dstrain.records import from_data, to_data
from dstrain.rundir import LIVING, RUN, RunDir, Stage, State


class StateWriter:
    """Keeps the state file of this process's run up to date."""

    def __init__(self, run_dir: RunDir, command: tuple[str, ...] = RUN) -> None:
        self._run_dir = run_dir
        self.step: int | None = None
        """Optimizer steps done."""
        process = look(os.getpid())
        now = time.time()
        self.state = State(
            stage=Stage.STARTING,
            host=socket.gethostname(),
            pid=os.getpid(),
            start_ticks=process.start if process else 0,
            began=now,
            beat=now,
            command=command,
        )

    def write(self, **changes: object) -> None:
        """Changes the state and writes it; a full disk ends no run because of this file."""
        self.state = replace(self.state, beat=time.time(), step=self.step, **changes)  # type: ignore[arg-type]
        with suppress(EnvironmentProblem):
            write_atomic(self._run_dir.state, json.dumps(to_data(self.state)) + "\n")

    def beat(self, step: int | None) -> None:
        """Rewrites the state when it has become old."""
        self.step = step
        if time.time() - self.state.beat > TIMEOUTS.record_s:
            self.write()


def note_restart(run_dir: RunDir, *, cause: str, from_step: int, change: str) -> None:
    """Appends a restart to `restarts.jsonl`; a full disk ends no run because of this file."""
    line = {"time_s": round(time.time(), 3), "cause": cause, "from_step": from_step, "change": change}
    with suppress(OSError), run_dir.restarts.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read(run_dir: RunDir) -> State:
    """Returns the state of a run. Raises InvalidConfig if there is none."""
    try:
        data = json.loads(run_dir.state.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidConfig(
            f"{run_dir.path} is not a run directory: it has no {run_dir.state.name}",
            hint="Name the output_dir of a job that `dstrain run` has started.",
        ) from None
    except ValueError as error:
        raise InvalidConfig(f"{run_dir.state}: {error}") from None
    state: State = from_data(State, data, locate=lambda place: f"{run_dir.state}: {'/'.join(map(str, place))}")
    return state


def is_alive(state: State, run_dir: RunDir) -> bool:
    """Returns whether the process that wrote this is alive; on another machine, whether it wrote recently."""
    if state.stage not in LIVING:
        return False
    if state.host == socket.gethostname():
        return has_process(state)
    return _age_s(state, run_dir) < TIMEOUTS.stale_s


def _age_s(state: State, run_dir: RunDir) -> float:
    """Returns the seconds since the state was written, by the clock of the file system, as machines' clocks differ."""
    try:
        with tempfile.TemporaryFile(dir=run_dir.path) as probe:
            return os.fstat(probe.fileno()).st_mtime - run_dir.state.stat().st_mtime
    except OSError:  # a folder of somebody else
        return time.time() - state.beat


@contextmanager
def only_one(run_dir: RunDir) -> Iterator[None]:
    """Keeps other runs out of a folder that exists; the lock ends with this process, whatever ends it.

    Raises Conflict if a run is active there.
    """
    refuse_living(run_dir)
    with run_dir.lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _taken(run_dir) from None
        except OSError:  # a file system without locks: rely on the state
            pass
        yield


def has_process(state: State) -> bool:
    """Returns whether the process that wrote this is there, on this machine."""
    process = look(state.pid) if state.host == socket.gethostname() else None
    return process is not None and process.start == state.start_ticks and process.state not in "ZX"


def refuse_living(run_dir: RunDir) -> None:
    """Raises Conflict if a run is active in this folder."""
    try:
        state = read(run_dir)
    except InvalidConfig:
        return
    if is_alive(state, run_dir):
        raise _taken(run_dir, f", process {state.pid} on {state.host}")


def _taken(run_dir: RunDir, by: str = "") -> Conflict:
    return Conflict(
        f"{run_dir.path}: a run is active there{by}",
        hint=f"dstrain status {shown(str(run_dir.path))}; `dstrain stop` ends it. Or name another output_dir.",
    )


def run_log(run_dir: RunDir) -> Path:
    """Returns the file that a run without a terminal writes to."""
    return run_dir.logs / f"{time.strftime('%Y%m%d%H%M%S')}_run.log"


def folder_of(path: Path) -> RunDir:
    """Returns the run directory of a path as users type it."""
    return RunDir(path.resolve())
