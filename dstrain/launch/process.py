"""Starts the launcher, owns every process that comes of it, and says how it ended."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from dstrain.errors import EnvironmentProblem
from dstrain.launch.failure import Death
from dstrain.launch.family import MARK, Family, RankWatch, adopting_orphans
from dstrain.launch.output import Output
from dstrain.launch.preflight import require_pdsh
from dstrain.rundir import RunDir

GRACE_S = 10.0
"""How long ranks have after SIGTERM, or after another rank's death, until they are killed."""
_POLL_S = 0.1
_KILL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    succeeded: bool
    """Whether the launcher ended well and said of every rank that it did."""
    code: int
    """The launcher's exit code, negative for a signal. 0 alone proves nothing: it is 0 when `launch` was killed."""
    stopped_by: signal.Signals | None
    """The signal that stopped dstrain itself, if one did."""
    deaths: tuple[Death, ...]
    """The ranks of this machine that ended badly, in the order in which it was noticed."""
    reported: tuple[str | None, int] | None
    """The first failure in the launcher's own log: the node (None: this machine) and the rank's code."""
    rank_logs: Mapping[int, Path]
    """The log file of each rank."""
    launcher_log: Path
    """What the launcher itself wrote."""
    wall_s: float
    """How long it took, in seconds."""


def supervise(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    run_dir: RunDir,
    num_ranks: int,
    is_local: bool,
    on_output: Callable[[str], None],
    grace_s: float = GRACE_S,
) -> Outcome:
    """Runs the launcher to its end in the run directory and returns how it went; no process of it is left behind.

    `on_output` gets what rank 0 writes. The first SIGINT, SIGTERM or SIGHUP asks the ranks to end; after `grace_s`
    seconds, or at a second one, they are killed. When one rank dies, the others have `grace_s` seconds as well.
    """
    if not is_local:
        require_pdsh(env)
    begin = time.time()
    mark = uuid.uuid4().hex
    launcher_log = run_dir.logs / f"{time.strftime('%Y%m%d%H%M%S')}_launcher_{mark[:6]}.log"
    with adopting_orphans(), _noting_signals() as noted:
        output = Output(run_dir.logs, launcher_log, on_output)
        launcher = _start(command, {**env, MARK: mark}, run_dir, launcher_log)
        family = Family(mark, launcher.pid)
        watch = RankWatch(family, num_ranks)
        keeper = _Keeper(launcher, family, watch, output, noted, is_local=is_local, grace_s=grace_s)
        try:
            keeper.follow()
        finally:
            keeper.end()
    return Outcome(
        succeeded=launcher.returncode == 0 and output.num_finished >= num_ranks and not watch.deaths,
        code=launcher.returncode,
        stopped_by=noted[0] if noted else None,
        deaths=tuple(sorted(watch.deaths.values(), key=lambda death: (death.at, death.code is None))),
        reported=output.failed,
        rank_logs=output.rank_logs(),
        launcher_log=launcher_log,
        wall_s=time.time() - begin,
    )


def _start(command: Sequence[str], env: Mapping[str, str], run_dir: RunDir, log: Path) -> subprocess.Popen[bytes]:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            return subprocess.Popen(
                command,
                env=env,
                cwd=run_dir.path,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise EnvironmentProblem(f"cannot start {command[0]}: {error}") from error


@contextlib.contextmanager
def _noting_signals() -> Iterator[list[signal.Signals]]:
    """Yields a list that grows by every signal to stop; outside the main thread signals are left alone."""
    noted: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(signal.Signals(number))

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Keeper:
    """Follows one launcher to its end, and ends what is left."""

    def __init__(
        self,
        launcher: subprocess.Popen[bytes],
        family: Family,
        watch: RankWatch,
        output: Output,
        noted: list[signal.Signals],
        *,
        is_local: bool,
        grace_s: float,
    ) -> None:
        self._launcher = launcher
        self._family = family
        self._watch = watch
        self._output = output
        self._noted = noted
        self._is_local = is_local
        self._grace_s = grace_s
        self._deadline: float | None = None
        self._terminated = False

    def follow(self) -> None:
        """Returns when the launcher has ended, or when the time of those who were asked to end is over."""
        while self._launcher.poll() is None:
            self._poll()
            if self._noted and not self._terminated:
                self._terminate()
            elif self._has_failure() and self._deadline is None:
                self._deadline = time.monotonic() + self._grace_s
                if not self._is_local:
                    # the launcher ends the other nodes' ranks on SIGTERM only; a dead rank alone leaves them waiting
                    self._launcher.send_signal(signal.SIGTERM)
            if self._is_over():
                return
            self._watch.wait(_POLL_S)

    def end(self) -> None:
        """Waits for what is left when all went well, asks it to end when not, and kills what stays."""
        try:
            self._poll()
            self._wait_for_the_rest()
        finally:
            # a process may fork between look and kill, so look until there is nobody
            self._watch.stop()
            give_up = time.monotonic() + _KILL_S
            while self._family.alive() and time.monotonic() < give_up:
                self._family.send(signal.SIGKILL)
                time.sleep(_POLL_S)
            self._launcher.wait()
            self._family.collect()
        self._poll()

    def _wait_for_the_rest(self) -> None:
        went_well = self._launcher.returncode == 0 and not self._has_failure()
        while self._family.alive():
            self._poll()
            if self._deadline is None and went_well and not self._is_abandoned():
                self._deadline = time.monotonic() + self._grace_s
            elif not self._terminated and (self._deadline is None or self._noted):
                self._terminate()
            if self._is_over():
                return
            self._watch.wait(_POLL_S)

    def _is_abandoned(self) -> bool:
        """Returns whether ranks are still there though nobody waits for them any more."""
        return bool(self._family.ranks())

    def _terminate(self) -> None:
        self._terminated = True
        self._watch.stop()
        self._deadline = time.monotonic() + self._grace_s
        self._family.send(signal.SIGTERM)

    def _is_over(self) -> bool:
        return len(self._noted) > 1 or (self._deadline is not None and time.monotonic() >= self._deadline)

    def _has_failure(self) -> bool:
        return self._output.failed is not None or any(death.code is not None for death in self._watch.deaths.values())

    def _poll(self) -> None:
        self._watch.poll()
        self._output.poll()
        self._watch.clear(self._output.finished)
