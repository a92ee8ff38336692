"""Runs a launch over its nodes: listens to every agent, detects hangs, and stops all nodes if one fails."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from dstrain.errors import EnvironmentProblem
from dstrain.heartbeat import COUNTED, STARTING, Phase
from dstrain.launch.failure.logs import files, rank_logs
from dstrain.launch.failure.outcome import Death, Hang, Outcome, Start
from dstrain.launch.nodes.connection import LaunchSpec, Node, StopRequests
from dstrain.launch.nodes.members import Members, NodeState
from dstrain.launch.nodes.protocol import (
    Alive,
    Begin,
    Died,
    End,
    Ended,
    Go,
    Hello,
    Orphaned,
    Problem,
    Reached,
    Ready,
    Save,
    Stacks,
    Told,
    Wrote,
)
from dstrain.launch.timeouts import TIMEOUTS

TIMES = 5
"""A run hangs when it takes this many times its median step, or its longest evaluation or checkpoint."""
LONG_TIMES = 10
"""An evaluation or a checkpoint may take at least this many times as long: shared disks are slow at times."""
_SLOW_DISK = 20e6
"""Bytes per second that the slowest disk writes: a first checkpoint may take as long as it needs."""
_LEAST_STEPS = 3
_KEPT = 100
_LONG = frozenset({Phase.SAVING, Phase.EVALUATING})


class HangDetector:
    """The steps of a run, as its slowest rank does them."""

    def __init__(
        self, num_ranks: int, least_s: float = TIMEOUTS.hang_s, start_s: float = 0.0, saved_bytes: int = 0
    ) -> None:
        """Watches `num_ranks` ranks; a run hangs after `least_s` seconds at the earliest (0: never), since a step of
        0.1 s may well be followed by one of 2 s.

        Before their first step, ranks may take `start_s` seconds from one phase or count to the next, and as long for
        anything whose pace is unknown; 0 for any time. A checkpoint has `saved_bytes`.
        """
        self._num_ranks = num_ranks
        self._least_s = least_s
        self._start_s = start_s
        self._saving_s = saved_bytes / _SLOW_DISK
        self._began: float | None = None
        self._news_at = 0.0
        self._heard: dict[int, tuple[Phase, int]] = {}
        self._steps_s: deque[float] = deque(maxlen=_KEPT)
        self._longest_s: dict[Phase, float] = {}
        self._gap_s = 0.0
        self._phases: dict[int, Phase] = {}
        self.phase = Phase.START
        """The phase of the ranks; of several phases one that is not a step."""
        self._at = 0.0
        self.steps: dict[int, int] = {}
        """Rank → steps done."""

    def begin(self, now: float) -> None:
        """Records when ranks are started."""
        self._began = self._news_at = now

    def start(self, now: float) -> Start | None:
        """Returns the progress of the start; None before it, and once every rank has done its first step."""
        phases = {rank: self._phases.get(rank) for rank in range(self._num_ranks)}
        if self._began is None or all(phase is not None and phase not in STARTING for phase in phases.values()):
            return None
        return Start(seconds=now - self._began, phases=phases)

    def note(self, rank: int, step: int, phase: Phase, now: float, *, count: int = 0) -> None:
        """Records the report of a rank at a time in seconds; `count` is the progress of a phase that counts something
        else."""
        if self._heard.get(rank) != (phase, count):
            self._heard[rank], self._news_at = (phase, count), now
        before, was = min(self.steps.values(), default=0), self.phase
        self.steps[rank], self._phases[rank] = step, phase
        if len(self.steps) < self._num_ranks:
            return
        others = [other for other in self._phases.values() if other is not Phase.STEP]
        self.phase = others[0] if others else Phase.STEP
        gained = min(self.steps.values()) - before
        if gained <= 0 and self.phase is was and phase is not Phase.EVALUATING:  # which reports its micro-batches
            return
        if was is Phase.STEP and gained > 0:
            self._steps_s.extend([(now - self._at) / gained] * min(gained, _KEPT))
        elif was in _LONG:
            self._gap_s = max(self._gap_s, now - self._at)
            if self.phase is not was:
                self._longest_s[was] = max(self._longest_s.get(was, 0.0), self._gap_s)
                self._gap_s = 0.0
        self._at = now

    @property
    def limit_s(self) -> float | None:
        """Seconds without news after which the run hangs; None for never.

        The first steps, evaluation and checkpoint, and the end of a run, have the limit of a start, or more.
        """
        if self._least_s <= 0:
            return None
        steps_s, longest_s = self._steps_s, self._longest_s
        if self.phase is Phase.STEP and len(steps_s) >= _LEAST_STEPS:
            return max(TIMES * median(steps_s), self._least_s)
        if self.phase in longest_s:
            return max(TIMES * longest_s[self.phase], LONG_TIMES * self._least_s)
        if self._start_s <= 0:
            return None
        if self.phase is Phase.STEP:
            return max(self._start_s, self._least_s, TIMES * max(steps_s, default=0.0))
        longest = max(longest_s.values(), default=0.0)
        return max(self._start_s, self._saving_s, LONG_TIMES * self._least_s, TIMES * longest)

    @property
    def median_s(self) -> float | None:
        """Seconds of a step; None before there were any."""
        return median(self._steps_s) if self._steps_s else None

    def stood_still_s(self, now: float) -> float | None:
        """Returns the time without progress, once that is too long; None otherwise."""
        start = self.start(now)
        if start is not None:
            return now - self._news_at if 0 < self._start_s < now - self._news_at else None
        limit = self.limit_s
        return None if limit is None or now - self._at <= limit else now - self._at


Check = Callable[[Mapping[Node, Hello]], tuple[LaunchSpec, Mapping[int, Mapping[str, str]]]]
"""Gets every node's first message; returns the final specification, with rank 0's port, and each node's additional
variables. Raises if the nodes cannot run together."""
COUNTS = tuple(COUNTED)
"""The phases that count something before the first step, in order."""


_POLL_S = 0.1


class Coordinator:
    """One start, from the first connection to the last process."""

    def __init__(
        self,
        spec: LaunchSpec,
        requests: StopRequests,
        on_output: Callable[[str], None],
        on_tick: Callable[[Phase, int | None, int], None] = lambda phase, done, total: None,
        say: Callable[[str], None] = lambda text: None,
        on_start: Callable[[Start], None] = lambda start: None,
    ) -> None:
        """`on_output` gets the output of rank 0. `on_tick` is called several times a second with `Phase.STEP`, the
        steps done and steps of the whole run (0: unknown), or with another phase that counts something.
        `say` gets progress messages before ranks start, and `on_start` the state of the start every few seconds.

        `requests` may change at any time.
        """
        self._spec = spec
        self._timeouts = spec.timeouts
        self._requests = requests
        self._on_output = on_output
        self._on_tick = on_tick
        self._say = say
        self._on_start = on_start
        self._progress: dict[str, list[str]] = {}
        self._deaths: dict[int, Death] = {}
        limits = spec.timeouts
        self._detector = HangDetector(spec.num_ranks, limits.hang_s, limits.start_s, spec.saved_bytes)
        self._hang: Hang | None = None
        self._left_at: int | None = None
        self._is_port_taken = False
        self._next_word = 0.0
        self._total = 0
        self._counting: dict[int, tuple[Phase, int, int]] = {}
        self._give_up: float | None = None
        self._is_killing = False
        self._has_saved = False

    def run(self, check: Check) -> Outcome:
        """Returns how the run ended; no process of it is left on any node that can be reached.

        Raises EnvironmentProblem when a node does not answer or cannot start its state.
        """
        earlier = files(self._spec.run_dir.logs)
        self._requests.is_heeded = True
        self._members = Members(self._spec)
        try:
            if self._meet():
                self._spec, extra = check({state.node: state.hello for state in self._members.states if state.hello})
                self._members.begin(self._spec, extra)
                if self._make_ready():
                    self._members.go()
                    self._follow()
                else:
                    self._end_builds()
        finally:
            self._members.close()
            self._requests.is_heeded = False
        # the agent of a lost node may be gone while its ranks live on: a new connection ends them by their mark
        sweep(self._spec, [state.node for state in self._members.states if state.lost is not None])
        return self._outcome(earlier)

    def _meet(self) -> bool:
        """Waits until every node has answered; returns False if the run was stopped before."""
        self._members.ask()
        until = time.monotonic() + self._timeouts.hello_s
        while not self._members.require_answers(until):
            if self._requests.stop:
                return False
            self._hear()
        return True

    def _make_ready(self) -> bool:
        """Waits until every node is ready for its ranks; returns False if one cannot be, or the run was stopped."""
        states, until, give_up = self._members.states, time.monotonic() + self._timeouts.reached_s, float("inf")
        while not all(state.is_ready for state in states):
            self._hear()
            self._tell()
            self._members.notice_silence()
            self._members.require_reached(until)
            if any(state.is_over for state in states):
                # other nodes often report the same problem
                give_up = min(give_up, time.monotonic() + self._timeouts.others_s)
            if self._requests.stop or all(state.is_over for state in states) or time.monotonic() > give_up:
                return False
        self._tell()
        return True

    def _end_builds(self) -> None:
        """Waits until nodes have ended what they build, which they could not if their connection was closed first."""
        self._members.dismiss()
        until = time.monotonic() + self._timeouts.ending_s
        while not self._members.have_left and time.monotonic() < until:
            self._hear()

    def _tell(self) -> None:
        """Reports what nodes do to become ready, once for all nodes that do the same."""
        progress, self._progress = self._progress, {}
        for text, hosts in progress.items():
            self._say(f"{', '.join(hosts)}: {text}" if len(self._members.states) > 1 else text)

    def _follow(self) -> None:
        """Waits until every node has ended or is lost."""
        states, now = self._members.states, time.monotonic()
        self._detector.begin(now)
        self._next_word = now + self._timeouts.start_word_s
        while not all(state.is_over for state in states):
            self._hear()
            self._heed()
            self._members.notice_silence()
            self._notice_hang()
            # the first failure ends all nodes: the other ranks would wait in collectives for ever
            if self._give_up is None and self._is_failing():
                self._end(self._timeouts.grace_s, but_for=self._ending_themselves())
            elif self._give_up is None and all(state.is_over for state in states if state.node.command is not None):
                self._end(self._timeouts.grace_s)  # nodes that only watch
            if self._give_up is not None and time.monotonic() > self._give_up:
                for state in states:
                    state.lose(f"did not end within {self._timeouts.grace_s + self._timeouts.ending_s:.0f} s")

    def _hear(self) -> None:
        steps = Phase.STEP, min(self._detector.steps.values(), default=None), self._total
        furthest_behind = min(
            self._counting.values(), key=lambda count: (COUNTS.index(count[0]), count[1]), default=steps
        )
        self._on_tick(*furthest_behind)
        self._members.hear(self._take)

    def _take(self, state: NodeState, event: Any, at: float) -> None:
        match event:
            case Hello():
                state.hello = event
            case Alive():
                self._note_steps(event)
            case Died():
                if event.rank not in self._deaths or self._deaths[event.rank].code is None:
                    self._deaths[event.rank] = Death(rank=event.rank, code=event.code, at=at, note=event.note)
            case Orphaned():
                state.is_orphaned = True
            case Wrote():
                self._note_text(state, event)
            case Told():
                self._progress.setdefault(event.text, []).append(state.node.host)
            case Reached():
                state.has_reached = True
            case Ready():
                state.has_reached = state.is_ready = True
            case Problem():
                state.problem = event
            case Ended():
                state.ended = event

    def _note_steps(self, event: Alive) -> None:
        now = time.monotonic()
        for rank, (step, phase, total) in event.steps.items():
            self._counting.pop(int(rank), None)
            count = 0
            if phase in COUNTED:
                self._counting[int(rank)] = (Phase(phase), int(step), int(total))
                count, step, total = int(step), 0, 0
            self._total = int(total) or self._total
            self._detector.note(int(rank), int(step), Phase(phase), now, count=count)
            self._is_port_taken = self._is_port_taken or phase == Phase.PORT_TAKEN
            if phase == Phase.LEFT:
                self._left_at = int(step)

    def _note_text(self, state: NodeState, event: Wrote) -> None:
        """Writes the output of nodes that do not share the run directory, and passes on rank 0's."""
        if state.node.number in self._members.mirrored:
            path = self._spec.run_dir.sent(event.name)
            if path is None:
                state.problem = Problem(text=f"sent {event.name[:80]!r}, which is not a file of a run")
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w" if event.is_whole else "a", encoding="utf-8", newline="") as file:
                file.write(event.text)
        if event.on_screen:
            self._on_output(event.text)

    def _heed(self) -> None:
        """Handles stop and save requests."""
        requests = self._requests
        if requests.save and not self._has_saved and not requests.stop:
            self._has_saved = True
            self._members.tell(Save())
        if len(requests.stop) > 1 and not self._is_killing:
            self._is_killing = True
            self._end(0)
        elif requests.stop and self._give_up is None:
            self._end(self._timeouts.grace_s)

    def _notice_hang(self) -> None:
        """Reports how far a start is; asks for stacks and ends the run if it hangs."""
        now = time.monotonic()
        start = self._detector.start(now)
        if start is not None and now >= self._next_word and not self._counting:
            self._next_word = now + self._timeouts.start_word_s
            self._on_start(start)
        seconds = self._detector.stood_still_s(now)
        if seconds is None or self._give_up is not None:
            return
        median_s, steps = self._detector.median_s or 0.0, dict(self._detector.steps)
        self._hang = Hang(seconds=seconds, median_s=median_s, steps=steps, start=start, phase=self._detector.phase)
        self._members.tell(Stacks())  # ranks write them to their logs, which are read when the run has ended
        until = time.monotonic() + self._timeouts.stacks_s
        while time.monotonic() < until:
            self._hear()

    def _is_failing(self) -> bool:
        return (
            self._hang is not None
            or any(death.code is not None for death in self._deaths.values())
            or any(state.is_orphaned or state.lost or state.problem for state in self._members.states)
            or any(state.ended and (state.ended.code or state.ended.reported) for state in self._members.states)
        )

    def _ending_themselves(self) -> set[int]:
        """Returns nodes whose launcher is already stopping the surviving ranks, so that their logs can be flushed."""
        ranks = {rank for rank, death in self._deaths.items() if death.code}
        return {
            state.node.number for state in self._members.states if ranks & set(state.node.ranks) and self._hang is None
        }

    def _end(self, grace_s: float, but_for: set[int] | None = None) -> None:
        self._give_up = time.monotonic() + grace_s + self._timeouts.ending_s
        self._members.tell(End(grace_s=grace_s), but_for or ())

    def _outcome(self, earlier: frozenset[Path]) -> Outcome:
        states, stop = self._members.states, self._requests.stop
        # a node that did not begin explains whatever became of the others
        problems = [(state.node.host, state.problem) for state in states if state.problem is not None]
        if problems:
            hints = dict.fromkeys(problem.hint for _, problem in problems if problem.hint)
            rows = [f"{host}: {problem.text}" if len(states) > 1 else problem.text for host, problem in problems]
            raise EnvironmentProblem("\n".join(rows), hint="\n".join(hints) or None)
        ended = [state.ended for state in states if state.ended is not None]
        # once all ranks have finished, one that vanished without an exit code has not failed
        finished = max(sum(event.num_finished for event in ended), sum(event.num_done for event in ended))
        if finished >= self._spec.num_ranks and all(death.code is None for death in self._deaths.values()):
            self._deaths.clear()
        bad = [event.code for event in ended if event.code]
        lost = sorted((state.lost for state in states if state.lost is not None), key=lambda event: event.at)
        orphaned = tuple(state.node.host for state in states if state.is_orphaned)
        logs = [path for path in files(self._spec.run_dir.logs) - earlier if self._spec.mark[:6] in path.name]
        has_failed = bool(bad or lost or orphaned or self._deaths or self._hang or stop)
        return Outcome(
            succeeded=not has_failed and finished >= self._spec.num_ranks,
            code=bad[0] if bad else 0,
            stopped_by=stop[0] if stop else None,
            is_interrupt=self._requests.is_interrupt,
            deaths=tuple(sorted(self._deaths.values(), key=lambda death: (death.at, death.code is None))),
            reported=next(
                (
                    (state.node.host if len(states) > 1 else None, state.ended.reported)
                    for state in states
                    if state.ended is not None and state.ended.reported
                ),
                None,
            ),
            lost=tuple(lost),
            orphaned=orphaned,
            hang=self._hang,
            is_port_taken=self._is_port_taken,
            left_at=self._left_at,
            rank_logs=rank_logs(self._spec.run_dir.logs, earlier),
            launcher_logs=tuple(sorted(logs)) or (self._spec.run_dir.logs,),
        )


def sweep(spec: LaunchSpec, nodes: Sequence[Node]) -> None:
    """Kills whatever has a node's mark on each of the nodes; skips those that cannot be reached."""
    if nodes:
        with ThreadPoolExecutor(max_workers=min(64, len(nodes))) as pool:
            list(pool.map(lambda node: _sweep(spec, node), nodes))


def _sweep(spec: LaunchSpec, node: Node) -> None:
    with suppress(EnvironmentProblem):
        (channel,) = spec.open([node])
        begin = Begin(
            host=node.host,
            run_dir=str(spec.run_dir.path),
            mark=spec.mark_of(node),
            first_rank=node.first_rank,
            num_ranks=0,
            master_port=spec.master_port,
        )
        for order in (begin, Go(), End(grace_s=0)):
            channel.send(order, node.number)
        until = time.monotonic() + spec.timeouts.sweep_s
        while time.monotonic() < until and not channel.is_closed:
            if any(isinstance(event, Ended) for _, event in channel.receive()):
                break
            time.sleep(_POLL_S)
        channel.close()
