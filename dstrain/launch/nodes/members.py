"""The nodes of a run: their connections, their state, and the commands sent to them."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dstrain.errors import EnvironmentProblem
from dstrain.facts.attention_kernels import VARIABLES
from dstrain.launch.failure.outcome import Lost
from dstrain.launch.nodes.connection import Channel, Heart, LaunchSpec, Node
from dstrain.launch.nodes.protocol import Beat, Begin, End, Ended, Go, Hello, Look, Problem, Save, Stacks
from dstrain.paths import write_atomic

_POLL_S = 0.1


class Unreachable(EnvironmentProblem):
    """Nodes that do not answer."""

    def __init__(self, words: Mapping[str, str]) -> None:
        """`words` holds the last message of the connection to each node."""
        rows = "\n".join(f"{host}: {said}" for host, said in words.items())
        super().__init__(rows, hint="`dstrain hostfile check --reach` asks every host; try `ssh HOST hostname`.")
        self.hosts = tuple(words)


@dataclass
class NodeState:
    """The state of one node, as far as it is known."""

    node: Node
    channel: Channel
    heard: float
    """When its last message arrived, by the monotonic clock."""
    heard_at: float
    """The same, in seconds since the epoch."""
    hello: Hello | None = None
    ended: Ended | None = None
    """Its last message, once nothing is left there."""
    lost: Lost | None = None
    """Set if it stopped responding."""
    has_reached: bool = False
    """Whether its ranks will find rank 0."""
    is_ready: bool = False
    """Whether its ranks can start."""
    problem: Problem | None = None
    """Why its ranks could not be started."""
    is_orphaned: bool = False
    """Whether its launcher was killed and left its ranks."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come from it."""
        return self.ended is not None or self.lost is not None or self.problem is not None

    def lose(self, why: str) -> None:
        """Marks the node as lost, unless it has ended."""
        if not self.is_over:
            self.lost = Lost(host=self.node.host, why=why, at=self.heard_at)


class Members:
    """All nodes of one start."""

    def __init__(self, spec: LaunchSpec) -> None:
        """Opens the connections. Raises EnvironmentProblem if ssh or srun cannot be started."""
        self._spec = spec
        write_atomic(spec.run_dir.token, spec.mark)
        self._channels = spec.open(spec.nodes)
        now, at = time.monotonic(), time.time()
        states = [
            NodeState(node=node, channel=channel, heard=now, heard_at=at)
            for channel in self._channels
            for node in spec.nodes
            if node.number in channel.nodes
        ]
        self.states = sorted(states, key=lambda state: spec.nodes.index(state.node))
        """The nodes, in the order of the specification."""
        self._by_number = {state.node.number: state for state in self.states}
        self._heart = Heart(self._channels, Beat(), spec.timeouts.beat_s)

    def close(self) -> None:
        """Closes the connections, which makes agents end their ranks."""
        self._heart.stop()
        for channel in self._channels:
            channel.close()

    @property
    def mirrored(self) -> set[int]:
        """The nodes whose run directory is not the one here."""
        return {
            state.node.number for state in self.states if state.hello is not None and not state.hello.shares_run_dir
        }

    @property
    def have_left(self) -> bool:
        """Whether every agent has ended or is lost."""
        return all(state.channel.is_closed or state.lost is not None for state in self.states)

    def dismiss(self) -> None:
        """Asks every agent to end, also those that have reported a problem."""
        for state in self.states:
            state.channel.send(End(grace_s=0), state.node.number)

    def ask(self) -> None:
        """Asks every node whether it can take part."""
        spec = self._spec
        for state in self.states:
            port = spec.master_port if state.node.number == 0 else None
            others = [node.host for node in spec.nodes if node is not state.node]
            files = {} if state.node.is_here else dict(spec.files)
            look = Look(
                run_dir=str(spec.run_dir.path),
                token=spec.mark,
                others=others,
                files=files,
                packages=list(spec.packages),
                exports={name: text for name, text in spec.exports.items() if name in VARIABLES},
                port=port,
                takes_another=spec.takes_another_port,
            )
            state.channel.send(look, state.node.number)

    def require_answers(self, until: float) -> bool:
        """Returns whether every node has answered. Raises Unreachable if the others are late or disconnected."""
        silent = [state for state in self.states if state.hello is None]
        if silent and (all(state.channel.is_closed for state in silent) or time.monotonic() > until):
            raise Unreachable({state.node.host: state.channel.last_words() for state in silent})
        return not silent

    def begin(self, spec: LaunchSpec, extra: Mapping[int, Mapping[str, str]]) -> None:
        """Sends every node its orders, with additional variables by its number, and makes it prepare itself.

        `spec` may have other commands than before, for another port.
        """
        self._spec, mirrored = spec, self.mirrored
        nodes = {node.number: node for node in spec.nodes}
        for state in self.states:
            node = nodes[state.node.number]
            begin = Begin(
                host=node.host,
                run_dir=str(spec.run_dir.path),
                mark=spec.mark_of(node),
                command=list(node.command),
                # the agent of this machine inherits its environment, and secrets with it
                environment={**({} if node.is_here else spec.environment), **extra.get(node.number, {})},
                unset=[] if node.is_here else list(spec.unset),
                exports={} if node.is_here else dict(spec.exports),
                first_rank=node.first_rank,
                num_ranks=node.num_ranks,
                master_port=spec.master_port,
                master=spec.master,
                ops=list(spec.ops),
                mirror=node.number in mirrored,
                request=spec.request if node.number in mirrored else None,
                timeouts=spec.timeouts.unusual(),
            )
            state.channel.send(begin, node.number)

    def go(self) -> None:
        """Starts the ranks of every node."""
        for state in self.states:
            state.channel.send(Go(), state.node.number)

    def require_reached(self, until: float) -> None:
        """Marks nodes as unfit that have not reported a connection to rank 0 in time."""
        silent = [state for state in self.states if state.problem is None and not state.has_reached]
        if self._spec.master is not None and time.monotonic() > until:
            for state in silent:
                where = f"{self._spec.master}, port {self._spec.master_port}"
                state.problem = Problem(
                    text=f"no connection to {where}, where rank 0 will listen, was reported in time"
                )

    def hear(self, take: Callable[[NodeState, Any, float], None]) -> None:
        """Passes new messages to `take`, with the time since the epoch; waits a moment if there are none."""
        handles = [channel.handle for channel in self._channels if not channel.is_closed]
        with suppress(InterruptedError):
            select.select(handles, [], [], _POLL_S)
        if not handles:
            time.sleep(_POLL_S)
        now, at = time.monotonic(), time.time()
        for channel in self._channels:
            for number, event in channel.receive():
                state = self._by_number[number]
                state.heard, state.heard_at = now, at
                take(state, event, at)

    def notice_silence(self) -> None:
        """Marks nodes as lost whose connection has ended, or that have been silent for too long."""
        now = time.monotonic()
        for state in self.states:
            if state.is_over:
                continue
            if state.channel.is_closed:
                state.lose(state.channel.last_words())
            elif now - state.heard > self._spec.timeouts.silence_s:
                state.lose(f"silent for {now - state.heard:.0f} s")

    def tell(self, order: Save | Stacks | End, but_for: Collection[int] = ()) -> None:
        """Sends an order to every running node except `but_for`."""
        for state in self.states:
            if not state.is_over and state.node.number not in but_for:
                state.channel.send(order, state.node.number)
