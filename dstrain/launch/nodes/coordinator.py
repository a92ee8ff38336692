"""Runs a launch over its nodes: listens to every agent, and stops all of them if one fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dstrain.errors import EnvironmentProblem
from dstrain.heartbeat import COUNTED, Phase
from dstrain.launch.failure.first_failure import Death
from dstrain.launch.failure.logs import files, rank_logs
from dstrain.launch.failure.outcome import Hang, Outcome, Start
from dstrain.launch.nodes.cleanup import sweep
from dstrain.launch.nodes.hang_detector import HangDetector
from dstrain.launch.nodes.layout import Node
from dstrain.launch.nodes.members import Members, NodeState
from dstrain.launch.nodes.protocol import (
    Alive,
    Died,
    End,
    Ended,
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
from dstrain.launch.nodes.spec import LaunchSpec, StopRequests

Check = Callable[[Mapping[Node, Hello]], tuple[LaunchSpec, Mapping[int, Mapping[str, str]]]]
"""Is shown what every node says of itself, and returns what is played, with the port that rank 0 gets, and what each
node's environment gets beside the rest; raises where they cannot run together."""
COUNTS = tuple(COUNTED)
"""The phases that count something before the first step, in their order."""


class Coordinator:
    """One start, from the first connection to the last process."""

    def __init__(
        self,
        score: LaunchSpec,
        stop_requests: StopRequests,
        on_output: Callable[[str], None],
        on_tick: Callable[[Phase, int | None, int], None] = lambda phase, done, total: None,
        say: Callable[[str], None] = lambda text: None,
        on_start: Callable[[Start], None] = lambda start: None,
    ) -> None:
        """`on_output` gets what rank 0 writes; `on_tick` is called several times a second, with `Phase.STEP`, the steps
        done and those of the whole run (0: not known), or with a phase that counts something else and how far it is.
        `say` is told what is done before ranks start, and `on_start`, every few seconds, how far they are up to then.

        `wishes` may change at any time.
        """
        self._score = score
        self._timeouts = score.timeouts
        self._wishes = stop_requests
        self._on_output = on_output
        self._on_tick = on_tick
        self._say = say
        self._on_start = on_start
        self._told: dict[str, list[str]] = {}
        self._deaths: dict[int, Death] = {}
        self._pace = HangDetector(score.num_ranks, score.timeouts.hang_s, score.timeouts.start_s)
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

        Raises EnvironmentProblem when a node does not answer or cannot start its part.
        """
        earlier = files(self._score.run_dir.logs)
        self._wishes.is_heeded = True
        self._party = Members(self._score)
        try:
            if self._meet():
                self._score, extra = check({part.node: part.hello for part in self._party.parts if part.hello})
                self._party.begin(self._score, extra)
                if self._make_ready():
                    self._party.go()
                    self._begin_start()
                    self._follow()
        finally:
            self._party.close()
            self._wishes.is_heeded = False
        sweep(self._score, [part.node for part in self._party.parts if part.lost is not None])
        return self._outcome(earlier)

    def _meet(self) -> bool:
        """Returns when every node has answered, or False where somebody stopped the run first."""
        self._party.ask()
        until = time.monotonic() + self._timeouts.hello_s
        while not self._party.require_answers(until):
            if self._wishes.stop:
                return False
            self._hear()
        return True

    def _make_ready(self) -> bool:
        """Returns whether every node is ready for its ranks; False where one cannot be, or somebody stopped the run."""
        parts, until, give_up = self._party.parts, time.monotonic() + self._timeouts.reached_s, float("inf")
        while not all(part.is_ready for part in parts):
            self._hear()
            self._tell()
            self._party.notice_silence()
            self._party.require_reached(until)
            if any(part.is_over for part in parts):
                # most often others have the same to say
                give_up = min(give_up, time.monotonic() + self._timeouts.others_s)
            if self._wishes.stop or all(part.is_over for part in parts) or time.monotonic() > give_up:
                return False
        self._tell()
        return True

    def _begin_start(self) -> None:
        now = time.monotonic()
        self._pace.begin(now)
        self._next_word = now + self._timeouts.start_word_s

    def _tell(self) -> None:
        """Says what nodes do to become ready, once for all that do the same."""
        told, self._told = self._told, {}
        for text, hosts in told.items():
            self._say(f"{', '.join(hosts)}: {text}" if len(self._party.parts) > 1 else text)

    def _follow(self) -> None:
        """Returns when every node has ended or is lost."""
        parts = self._party.parts
        while not all(part.is_over for part in parts):
            self._hear()
            self._heed()
            self._party.notice_silence()
            self._notice_hang()
            if self._give_up is None and self._is_failing():
                self._end(self._timeouts.grace_s, but_for=self._ending_themselves())
            elif self._give_up is None and all(part.is_over for part in parts if part.node.command is not None):
                self._end(self._timeouts.grace_s)  # those who only watched
            if self._give_up is not None and time.monotonic() > self._give_up:
                for part in parts:
                    part.lose(f"did not end within {self._timeouts.grace_s + self._timeouts.ending_s:.0f} s")

    def _hear(self) -> None:
        steps = Phase.STEP, min(self._pace.steps.values(), default=None), self._total
        self._on_tick(*min(self._counting.values(), key=lambda each: (COUNTS.index(each[0]), each[1]), default=steps))
        self._party.hear(self._take)

    def _take(self, part: NodeState, event: Any, at: float) -> None:
        match event:
            case Hello():
                part.hello = event
            case Alive():
                self._note_steps(event)
            case Died():
                if event.rank not in self._deaths or self._deaths[event.rank].code is None:
                    self._deaths[event.rank] = Death(rank=event.rank, code=event.code, at=at)
            case Orphaned():
                part.is_orphaned = True
            case Wrote():
                self._note_text(part, event)
            case Told():
                self._told.setdefault(event.text, []).append(part.node.host)
            case Reached():
                part.has_reached = True
            case Ready():
                part.has_reached = part.is_ready = True
            case Problem():
                part.problem = event
            case Ended():
                part.ended = event

    def _note_steps(self, event: Alive) -> None:
        now = time.monotonic()
        for rank, (step, phase, total) in event.steps.items():
            self._counting.pop(int(rank), None)
            count = 0
            if phase in COUNTED:
                self._counting[int(rank)] = (Phase(phase), int(step), int(total))
                count, step, total = int(step), 0, 0
            self._total = int(total) or self._total
            self._pace.note(int(rank), int(step), Phase(phase), now, count=count)
            self._is_port_taken = self._is_port_taken or phase == Phase.PORT_TAKEN
            if phase == Phase.LEFT:
                self._left_at = int(step)

    def _note_text(self, part: NodeState, event: Wrote) -> None:
        """Writes what a node without our run directory wrote, and passes on what rank 0 says."""
        if part.node.number in self._party.mirrored:
            path = self._score.run_dir.sent(event.name)
            if path is None:
                part.problem = Problem(text=f"sent {event.name[:80]!r}, which is no file of a run")
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w" if event.is_whole else "a", encoding="utf-8", newline="") as file:
                file.write(event.text)
        if event.on_screen:
            self._on_output(event.text)

    def _heed(self) -> None:
        """Does what somebody outside wishes."""
        stop_requests = self._wishes
        if stop_requests.save and not self._has_saved and not stop_requests.stop:
            self._has_saved = True
            self._party.tell(Save())
        if len(stop_requests.stop) > 1 and not self._is_killing:
            self._is_killing = True
            self._end(0)
        elif stop_requests.stop and self._give_up is None:
            self._end(self._timeouts.grace_s)

    def _notice_hang(self) -> None:
        """Says how far a start is; asks for stacks and ends the run when it has stood still for too long."""
        now = time.monotonic()
        start = self._pace.start(now)
        if start is not None and now >= self._next_word and not self._counting:
            self._next_word = now + self._timeouts.start_word_s
            self._on_start(start)
        seconds = self._pace.stood_still_s(now)
        if seconds is None or self._give_up is not None:
            return
        median_s, steps = self._pace.median_s or 0.0, dict(self._pace.steps)
        self._hang = Hang(seconds=seconds, median_s=median_s, steps=steps, start=start)
        self._party.tell(Stacks())
        until = time.monotonic() + self._timeouts.stacks_s
        while time.monotonic() < until:
            self._hear()

    def _is_failing(self) -> bool:
        return (
            self._hang is not None
            or any(death.code is not None for death in self._deaths.values())
            or any(part.is_orphaned or part.lost or part.problem for part in self._party.parts)
            or any(part.ended and (part.ended.code or part.ended.reported) for part in self._party.parts)
        )

    def _ending_themselves(self) -> set[int]:
        """Returns the nodes whose own launcher ends what is left there, with time for the other ranks' last words."""
        ranks = {rank for rank, death in self._deaths.items() if death.code is not None}
        return {
            part.node.number
            for part in self._party.parts
            if part.node.command is not None and ranks & set(part.node.ranks) and self._hang is None
        }

    def _end(self, grace_s: float, but_for: set[int] | None = None) -> None:
        self._give_up = time.monotonic() + grace_s + self._timeouts.ending_s
        self._party.tell(End(grace_s=grace_s), but_for or ())

    def _outcome(self, earlier: frozenset[Path]) -> Outcome:
        parts, stop = self._party.parts, self._wishes.stop
        problems = [(part.node.host, part.problem) for part in parts if part.problem is not None]
        if problems:
            hints = dict.fromkeys(problem.hint for _, problem in problems if problem.hint)
            rows = [f"{host}: {problem.text}" if len(parts) > 1 else problem.text for host, problem in problems]
            raise EnvironmentProblem("\n".join(rows), hint="\n".join(hints) or None)
        ended = [part.ended for part in parts if part.ended is not None]
        finished = max(sum(each.num_finished for each in ended), sum(each.num_done for each in ended))
        if finished >= self._score.num_ranks and all(death.code is None for death in self._deaths.values()):
            self._deaths.clear()
        bad = [each.code for each in ended if each.code]
        lost = sorted((part.lost for part in parts if part.lost is not None), key=lambda each: each.at)
        orphaned = tuple(part.node.host for part in parts if part.is_orphaned)
        logs = [path for path in files(self._score.run_dir.logs) - earlier if self._score.mark[:6] in path.name]
        has_failed = bool(bad or lost or orphaned or self._deaths or self._hang or stop)
        return Outcome(
            succeeded=not has_failed and finished >= self._score.num_ranks,
            code=bad[0] if bad else 0,
            stopped_by=stop[0] if stop else None,
            is_interrupt=self._wishes.is_interrupt,
            deaths=tuple(sorted(self._deaths.values(), key=lambda death: (death.at, death.code is None))),
            reported=next(((each.reported[0], int(each.reported[1])) for each in ended if each.reported), None),
            lost=tuple(lost),
            orphaned=orphaned,
            hang=self._hang,
            is_port_taken=self._is_port_taken,
            left_at=self._left_at,
            rank_logs=rank_logs(self._score.run_dir.logs, earlier),
            launcher_logs=tuple(sorted(logs)) or (self._score.run_dir.logs,),
        )
