"""The nodes of a run: their connections, their state, and the commands sent to them."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dstrain.errors import EnvironmentProblem
from dstrain.launch.failure.outcome import Lost
from dstrain.launch.nodes.connection import Channel, Heart
from dstrain.launch.nodes.layout import Node
from dstrain.launch.nodes.protocol import Beat, Begin, End, Ended, Go, Hello, Look, Problem, Save, Stacks
from dstrain.launch.nodes.spec import LaunchSpec
from dstrain.paths import write_atomic

_POLL_S = 0.1


class Unreachable(EnvironmentProblem):
    """Nodes that do not answer."""

    def __init__(self, words: Mapping[str, str]) -> None:
        """`words` is what the connection to each node said last."""
        rows = "\n".join(f"{host}: {said}" for host, said in words.items())
        super().__init__(rows, hint="`dstrain hostfile check --reach` asks every host; try `ssh HOST hostname`.")
        self.hosts = tuple(words)


@dataclass
class NodeState:
    """What is known of one node."""

    node: Node
    channel: Channel
    """The connection to it."""
    heard: float
    """When it was last heard of, by the monotonic clock."""
    heard_at: float
    """The same, in seconds since the epoch."""
    hello: Hello | None = None
    """What it said of itself."""
    ended: Ended | None = None
    """Its last words, once nothing is left there."""
    lost: Lost | None = None
    """That it went silent."""
    has_reached: bool = False
    """Whether its ranks will find rank 0."""
    is_ready: bool = False
    """Whether its ranks can start."""
    problem: Problem | None = None
    """Why its part could not be started."""
    is_orphaned: bool = False
    """Whether its launcher was killed and left its ranks."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come from it."""
        return self.ended is not None or self.lost is not None or self.problem is not None

    def lose(self, why: str) -> None:
        """Takes the node for lost, unless it has ended."""
        if not self.is_over:
            self.lost = Lost(host=self.node.host, why=why, at=self.heard_at)


class Members:
    """All nodes of one start."""

    def __init__(self, score: LaunchSpec) -> None:
        """Opens the connections. Raises EnvironmentProblem where ssh or srun cannot be started."""
        self._score = score
        write_atomic(score.run_dir.token, score.mark)
        self._channels = score.open(score.nodes)
        now, at = time.monotonic(), time.time()
        found = [
            NodeState(node=node, channel=channel, heard=now, heard_at=at)
            for channel in self._channels
            for node in score.nodes
            if node.number in channel.nodes
        ]
        self.parts = sorted(found, key=lambda part: score.nodes.index(part.node))
        """The nodes, in the order of the score."""
        self._by_number = {part.node.number: part for part in self.parts}
        self._heart = Heart(self._channels, Beat(), score.timeouts.beat_s)

    def close(self) -> None:
        """Ends the connections, and by that what agents may still have."""
        self._heart.stop()
        for channel in self._channels:
            channel.close()

    @property
    def mirrored(self) -> set[int]:
        """The nodes whose run directory is not the one here."""
        return {part.node.number for part in self.parts if part.hello is not None and not part.hello.shares_run_dir}

    def ask(self) -> None:
        """Asks every node what it is."""
        score = self._score
        for part in self.parts:
            port = score.master_port if part.node.number == 0 else None
            others = [node.host for node in score.nodes if node.num_ranks and node is not part.node]
            files = dict(score.files) if part.node.num_ranks and not part.node.is_here else {}
            look = Look(
                run_dir=str(score.run_dir.path),
                token=score.mark,
                others=others,
                files=files,
                port=port,
                takes_another=score.takes_another_port,
            )
            part.channel.send(look, part.node.number)

    def require_answers(self, until: float) -> bool:
        """Returns whether every node has answered. Raises Unreachable when the others cannot any more, or are late."""
        silent = [part for part in self.parts if part.hello is None]
        if silent and (all(part.channel.is_closed for part in silent) or time.monotonic() > until):
            raise Unreachable({part.node.host: part.channel.last_words() for part in silent})
        return not silent

    def begin(self, score: LaunchSpec, extra: Mapping[int, Mapping[str, str]]) -> None:
        """Gives every node its part, with its own additional environment by its number, and lets it make itself ready.

        `score` may have other commands than before, for another port.
        """
        self._score, mirrored = score, self.mirrored
        nodes = {node.number: node for node in score.nodes}
        for part in self.parts:
            node = nodes[part.node.number]
            begin = Begin(
                host=node.host,
                run_dir=str(score.run_dir.path),
                mark=score.mark_of(node),
                command=list(node.command) if node.command else None,
                environment={**({} if node.is_here else score.environment), **extra.get(node.number, {})},
                unset=[] if node.is_here else list(score.unset),
                exports={} if node.is_here else dict(score.exports),
                hosts=[each.host for each in score.nodes] if len(score.nodes) > 1 else [],
                first_rank=node.first_rank,
                num_ranks=node.num_ranks,
                master_port=score.master_port,
                master=score.master if node.num_ranks else None,
                ops=list(score.ops) if node.num_ranks else [],
                mirror=node.number in mirrored,
                timeouts=score.timeouts.unusual(),
            )
            part.channel.send(begin, node.number)

    def go(self) -> None:
        """Starts every node's part: those who only watch come first."""
        for part in sorted(self.parts, key=lambda part: part.node.command is not None):
            part.channel.send(Go(), part.node.number)

    def require_reached(self, until: float) -> None:
        """Takes nodes for unfit from which nothing was heard of rank 0 in time."""
        silent = [part for part in self.parts if part.problem is None and not part.has_reached]
        if self._score.master is not None and time.monotonic() > until:
            for part in silent:
                where = f"{self._score.master}, port {self._score.master_port}"
                part.problem = Problem(text=f"no word of a connection to {where}, where rank 0 will listen, in time")

    def hear(self, take: Callable[[NodeState, Any, float], None]) -> None:
        """Gives `take` what came, with the time since the epoch; waits a moment where nothing has."""
        handles = [channel.handle for channel in self._channels if not channel.is_closed]
        with suppress(InterruptedError):
            select.select(handles, [], [], _POLL_S)
        if not handles:
            time.sleep(_POLL_S)
        now, at = time.monotonic(), time.time()
        for channel in self._channels:
            for number, event in channel.receive():
                part = self._by_number[number]
                part.heard, part.heard_at = now, at
                take(part, event, at)

    def notice_silence(self) -> None:
        """Takes nodes for lost whose connection has ended, or that have said nothing for too long."""
        now = time.monotonic()
        for part in self.parts:
            if part.is_over:
                continue
            if part.channel.is_closed:
                part.lose(part.channel.last_words())
            elif now - part.heard > self._score.timeouts.silence_s:
                part.lose(f"silent for {now - part.heard:.0f} s")

    def tell(self, order: Save | Stacks | End, but_for: Collection[int] = ()) -> None:
        """Sends an order to every node that has not ended, but for some."""
        for part in self.parts:
            if not part.is_over and part.node.number not in but_for:
                part.channel.send(order, part.node.number)
