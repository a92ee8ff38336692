"""Runs one node's part: starts its launcher, watches its ranks, and leaves no process or buffer behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from dstrain.child_process import open_files
from dstrain.facts.deepspeed_ops import OPS, held_locks
from dstrain.facts.kernel_messages import MemoryKills
from dstrain.heartbeat import MARK, SAVE_ON_TERM, STARTING, Heartbeat, Phase, Receiver
from dstrain.launch.environment import SAFE_PATH, expanded
from dstrain.launch.failure.logs import Output, Piece, Tail
from dstrain.launch.failure.outcome import Death
from dstrain.launch.nodes.process_tree import ProcessTree, RankWatch
from dstrain.launch.nodes.protocol import Alive, Begin, Died, Ended, Event, Orphaned, Wrote
from dstrain.launch.timeouts import Timeouts
from dstrain.paths import prefer_own_programs
from dstrain.rundir import PART, RunDir

_FOLDER = Path("/dev/shm")
_STARTED_S = 10.0
"""Age of a buffer at which all ranks of its run have opened it: they do so right after they met."""


def remove_buffers(master_port: int | None = None, folder: Path = _FOLDER) -> None:
    """Removes this user's buffers that no process holds: the port's, and leftovers of earlier runs.

    A buffer that looks unused may belong to a process of another container, unless it has the port: it stays until
    that run has started.
    """
    held = set(open_files())
    for buffer in _buffers(folder):
        if buffer not in held and (_is_of(buffer, master_port) or _age_s(buffer) > _STARTED_S):
            buffer.unlink(missing_ok=True)


def claim_buffers(master_port: int, folder: Path = _FOLDER, wait: Callable[[float], None] = time.sleep) -> None:
    """Removes every buffer of the port, once the ranks of a run elsewhere that holds it have opened them.

    Two runs share a port if they have networks of their own and one `/dev/shm`: containers with `--ipc=host`.
    """
    remove_buffers(master_port, folder)
    for buffer in _buffers(folder):
        while _is_of(buffer, master_port) and 0 <= _age_s(buffer) < _STARTED_S and buffer in open_files():
            wait(0.2)
        if _is_of(buffer, master_port):
            buffer.unlink(missing_ok=True)


def _buffers(folder: Path) -> list[Path]:
    return list(folder.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*"))


def _is_of(buffer: Path, port: int | None) -> bool:
    return buffer.name.split("_")[-2] == str(port)


def _age_s(buffer: Path) -> float:
    """Returns the seconds since the buffer was made; a negative number if it is gone."""
    with suppress(OSError):
        return max(time.time() - buffer.stat().st_ctime, 0.0)
    return -1.0


_COPY_S = 2.0
"""Seconds between two looks for checkpoints."""


class Mirror:
    """Files of rank 0; the logs of ranks and launcher are sent anyway. Files of earlier starts are already there."""

    def __init__(self, run_dir: RunDir, start: str, *, has_first: bool) -> None:
        """`start` is the mark of this start on this node, `has_first` whether rank 0 writes here."""
        self._run_dir = run_dir
        self._start = start.partition("-")[0]
        self._has_first = has_first
        self._marked: set[str] = set()
        self._next_look = 0.0
        self._tails = [Tail(run_dir.metrics), Tail(run_dir.health)]
        for tail in self._tails:
            while tail.read():
                pass

    def poll(self) -> list[Event]:
        """Returns the new lines of metrics and health, and the marks of checkpoints that every rank has written."""
        added = [(tail.path.name, tail.read()) for tail in self._tails]
        events: list[Event] = [Wrote(name=name, text=text, on_screen=False) for name, text in added if text]
        now = time.monotonic()
        if self._has_first and now >= self._next_look:
            self._next_look = now + _COPY_S
            events += self._new_marks()
        return events

    def _new_marks(self) -> Iterator[Event]:
        for path in self._run_dir.path.glob(f"checkpoint-*/{PART}"):
            name = str(path.relative_to(self._run_dir.path))
            with suppress(OSError, ValueError, AttributeError):
                text = path.read_text(encoding="utf-8")
                if name not in self._marked and json.loads(text).get("start") == self._start:
                    self._marked.add(name)
                    yield Wrote(name=name, text=text, on_screen=False, is_whole=True)

    def last(self) -> Iterator[Event]:
        """Yields the files that are written at the end."""
        if self._has_first:
            yield from self._new_marks()
        for path in (self._run_dir.states, self._run_dir.summary, self._run_dir.oom, self._run_dir.unusable):
            with suppress(OSError):
                yield Wrote(name=path.name, text=path.read_text(encoding="utf-8"), on_screen=False, is_whole=True)


_LOOK_S = 0.5
_LAST_WORD_S = 3.0
"""How long after the end of a rank with code 0 the last message of it and of the other ranks may take."""
_ENDING = frozenset({Phase.BUSY, Phase.DONE, Phase.LEFT})
"""The phases after the last step."""


class NodeRunner:
    """Runs the ranks of one node from start to end; `tick` is called several times a second."""

    def __init__(self, begin: Begin) -> None:
        """Starts the launcher, if this node has one. Raises OSError if that fails."""
        self._begin = begin
        self._timeouts = Timeouts(**begin.timeouts)
        self._run_dir = RunDir(Path(begin.run_dir))
        stamp = time.strftime("%Y%m%d%H%M%S")
        self._log = self._run_dir.logs / f"{stamp}_launcher_{begin.host}_{begin.mark[:6]}.log"
        ranks = range(begin.first_rank, begin.first_rank + begin.num_ranks)
        # before the launcher starts: ranks write to it at once
        self._heartbeats = Receiver(begin.mark, ranks)
        self._run_dir.logs.mkdir(parents=True, exist_ok=True)
        self._output = Output(self._run_dir.logs, self._log, ranks)
        self._mirror = Mirror(self._run_dir, begin.mark, has_first=0 in ranks) if begin.mirror else None
        claim_buffers(begin.master_port)
        self._launcher = self._start() if begin.command is not None else None
        self._family = ProcessTree(begin.mark, self._launcher.pid if self._launcher else -1)
        self._watch = RankWatch(self._family, begin.num_ranks)
        self._steps: dict[str, list[object]] = {}
        self._listening: set[int] = set()
        self._stepping: set[int] = set()
        self._wanted: list[signal.Signals] = []
        self._done: set[int] = set()
        self._last: dict[int, Heartbeat] = {}
        self._kills = MemoryKills()
        self._told: set[int] = set()
        self._locks: set[Path] = set()
        self._next_look = 0.0
        self._deadline: float | None = None
        self._give_up: float | None = None
        self._is_ending = False
        self.is_over = False
        """Whether nothing of the run is left on this node."""

    def _start(self) -> subprocess.Popen[bytes]:
        assert self._begin.command is not None
        with self._log.open("wb") as file, _launchers_deaf_to_sigterm(self._begin):
            return subprocess.Popen(
                self._begin.command,
                env=environment_of_ranks(self._begin, os.environ),
                cwd=self._run_dir.path,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def tick(self, *, reads_logs: bool) -> list[Event]:
        """Checks ranks and, if `reads_logs`, their logs once and returns events for `run`."""
        self._watch.poll()
        self._look_for_locks()
        events: list[Event] = []
        self._hear_ranks()
        # logs before deaths: the launcher's says which ranks ended well
        events += [self._wrote(piece) for piece in self._output.poll(reads_ranks=reads_logs) if self._is_wanted(piece)]
        events += self._mirror.poll() if self._mirror is not None else []
        self._watch.clear(self._output.finished)
        self._note_early_ends()
        events += self._deaths(with_unseen=False)
        if self._watch.orphans and not self._is_ending:
            events.append(Orphaned(ranks=sorted(self._watch.orphans)))
            self._watch.orphans.clear()
            self.end(self._timeouts.grace_s)
        if not self.is_over:
            self._go_on()
        if self.is_over:
            events += self._last_words()
        return events

    def _look_for_locks(self) -> None:
        """Notes the locks of extensions that starting ranks hold, since a killed rank leaves its lock."""
        now = time.monotonic()
        if now >= self._next_look and len(self._stepping) < self._begin.num_ranks:
            self._next_look = now + _LOOK_S
            self._note_locks(self._watch.processes)

    def _note_locks(self, processes: Iterable[int]) -> None:
        self._locks |= {lock for lock in held_locks(processes) if lock.parent.name in OPS}

    def _hear_ranks(self) -> None:
        for heartbeat in self._heartbeats.receive():
            if heartbeat.rank not in self._listening:
                for number in self._wanted:
                    self._signal(number, {heartbeat.rank})
            self._steps[str(heartbeat.rank)] = [heartbeat.step, heartbeat.phase.value, heartbeat.total]
            self._listening.add(heartbeat.rank)
            self._last[heartbeat.rank] = heartbeat
            if heartbeat.phase not in STARTING:
                self._stepping.add(heartbeat.rank)
            if heartbeat.phase in {Phase.DONE, Phase.LEFT}:
                self._done.add(heartbeat.rank)

    def alive(self) -> Alive:
        """Returns a heartbeat with the steps since the last one."""
        steps, self._steps = self._steps, {}
        return Alive(steps=steps)

    def wait(self, seconds: float) -> None:
        """Sleeps, but wakes when a rank ends."""
        self._watch.wait(seconds)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to every rank on this node, to a starting one as soon as it handles signals."""
        self._wanted.append(number)
        self._signal(number, self._listening)

    def _signal(self, number: signal.Signals, listening: Collection[int]) -> None:
        for rank, process in self._family.ranks().items():
            if rank in listening:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, number)

    def ranks(self) -> list[int]:
        """Returns the ranks that live on this node."""
        return sorted(self._family.ranks())

    def end(self, grace_s: float) -> None:
        """Asks everything to end; after `grace_s` seconds it is killed."""
        deadline = time.monotonic() + grace_s
        self._deadline = deadline if self._deadline is None or not self._is_ending else min(deadline, self._deadline)
        if not self._is_ending:
            self._is_ending = True
            self._note_locks(self._family.alive())
            self._watch.stop()
            self._family.send(signal.SIGTERM)

    def _go_on(self) -> None:
        now = time.monotonic()
        if self._give_up is not None:
            self._kill(now)
        elif self._deadline is not None and now >= self._deadline:
            self._watch.stop()
            self._give_up = now + self._timeouts.kill_s
            self._kill(now)
        elif self._launcher is not None and self._launcher.poll() is None:
            if self._deadline is None and self._has_failure():
                self._deadline = now + self._timeouts.grace_s  # the launcher ends the others of this node itself
        elif (self._launcher is not None or self._is_ending) and not self._family.alive():
            self._finish()
        elif self._deadline is None and self._launcher is not None:
            went_well = self._launcher.returncode == 0 and not self._has_failure()
            if went_well and not self._family.ranks():
                self._deadline = now + self._timeouts.grace_s  # leftover processes may end by themselves
            else:
                self.end(self._timeouts.grace_s)

    def _kill(self, now: float) -> None:
        """Kills repeatedly until no process is left, since a process may fork in between."""
        assert self._give_up is not None
        if self._family.alive() and now < self._give_up:
            self._family.send(signal.SIGKILL)
        else:
            self._finish()

    def _finish(self) -> None:
        if self._launcher is not None:
            self._launcher.wait()
        self._family.collect()
        self._hear_ranks()
        self._heartbeats.close()
        remove_buffers(self._begin.master_port)
        for lock in self._locks - held_locks() if self._locks else ():
            lock.unlink(missing_ok=True)
        self.is_over = True

    def _last_words(self) -> Iterator[Event]:
        while pieces := self._output.poll(is_last=True):
            yield from (self._wrote(piece) for piece in pieces if self._is_wanted(piece))
        if self._mirror is not None:
            while events := self._mirror.poll():
                yield from events
            yield from self._mirror.last()
        self._watch.clear(self._output.finished)
        for rank in self._done & set(self._watch.deaths):
            if self._watch.deaths[rank].code is None:
                del self._watch.deaths[rank]
        yield from self._deaths(with_unseen=True)
        yield self.alive()  # a rank that has left reports it just now
        yield Ended(
            code=self._launcher.returncode if self._launcher is not None else None,
            num_finished=self._output.num_finished,
            num_done=len(self._done),
            reported=self._output.failed,
        )

    def _deaths(self, *, with_unseen: bool) -> list[Event]:
        """Returns new deaths; unobserved ones only `with_unseen`, since the launcher may still report success."""
        events: list[Event] = []
        for rank, death in sorted(self._watch.deaths.items(), key=lambda item: item[1].at):
            if rank not in self._told and (with_unseen or death.code is not None):
                self._told.add(rank)
                events.append(Died(rank=rank, code=death.code, note=self._cause_of(rank, death.code)))
        return events

    def _note_early_ends(self) -> None:
        """Counts ranks as dead that ended with code 0 in the midst of training: the others wait for them."""
        for rank, at in self._watch.ended.items():
            last = self._last.get(rank)
            is_early = last is not None and last.phase not in _ENDING and not 0 < last.total <= last.step
            if is_early and not self._is_ending and time.time() - at > _LAST_WORD_S:
                self._watch.deaths.setdefault(rank, Death(rank=rank, code=0, at=at))

    def _cause_of(self, rank: int, code: int | None) -> str:
        """Returns the cause of a death as far as this node knows it, as a clause; empty if it is unknown."""
        if code == -signal.SIGKILL:
            return self._kills.verdict(self._watch.pid(rank) or 0)
        if code != 0:
            return ""
        last = self._last[rank]
        where = "before its first step" if last.phase in STARTING else f"after step {last.step}"
        total = f" of {last.total}" if last.phase is Phase.STEP and last.total else ""
        return f"it left {where}{total}, and the others wait for it"

    def _is_wanted(self, piece: Piece) -> bool:
        return piece.rank == 0 or self._begin.mirror

    def _wrote(self, piece: Piece) -> Wrote:
        name = str(piece.path.relative_to(self._run_dir.path))
        return Wrote(name=name, text=piece.text, on_screen=piece.rank == 0)

    def _has_failure(self) -> bool:
        return self._output.failed is not None or any(death.code is not None for death in self._watch.deaths.values())


def environment_of_ranks(begin: Begin, own: Mapping[str, str]) -> dict[str, str]:
    """Returns the launcher's environment; the tools beside this Python, such as ninja, are found in it."""
    env = {name: value for name, value in own.items() if name not in begin.unset}
    prefer_own_programs(env)
    env |= {**SAFE_PATH, **begin.environment, MARK: begin.mark}
    return {**env, **expanded(begin.exports, env)}


def saves_on_term(begin: Begin, environment: Mapping[str, str]) -> bool:
    """Returns whether SIGTERM makes the ranks save and leave."""
    return SAVE_ON_TERM in begin.environment or SAVE_ON_TERM in begin.exports or SAVE_ON_TERM in environment


@contextlib.contextmanager
def _launchers_deaf_to_sigterm(begin: Begin) -> Iterator[None]:
    """Blocks SIGTERM in what is started meanwhile, where the ranks, which unblock it, save a checkpoint then.

    A scheduler sends it to every process of the job, and DeepSpeed's `launch` would kill ranks that save for over 30 s.
    Source: deepspeed 0.19.8 launcher/launch.py: terminate_process_tree
    """
    blocked = {signal.SIGTERM} if saves_on_term(begin, os.environ) else set()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
