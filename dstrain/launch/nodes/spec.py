"""The specification of one launch, and the stop and save requests it accepts while it runs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dstrain.launch.nodes.connection import Channel
from dstrain.launch.nodes.layout import Node
from dstrain.launch.timeouts import TIMEOUTS, Timeouts
from dstrain.rundir import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """What is to be run."""

    nodes: tuple[Node, ...]
    """Who does what."""
    run_dir: RunDir
    """Where."""
    mark: str
    """The mark of this start."""
    open: Callable[[Sequence[Node]], list[Channel]]
    """Opens the connections to nodes."""
    environment: Mapping[str, str]
    """What the environment of launchers on other machines has beside that of their agent."""
    unset: tuple[str, ...]
    """What it does not have."""
    exports: Mapping[str, str]
    """What they get beside that: name → text as it stands between a shell's double quotes."""
    master_port: int
    """The port of rank 0."""
    takes_another_port: bool = False
    """Whether rank 0 may listen on another one where that is in use."""
    master: str | None = None
    """The host of rank 0, as ranks are told it; None where all ranks are on one node."""
    ops: tuple[str, ...] = ()
    """DeepSpeed's extensions that ranks load."""
    files: Mapping[str, int] = field(default_factory=dict)
    """Files that every rank reads → their bytes here."""
    timeouts: Timeouts = TIMEOUTS
    """Time limits."""

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return sum(node.num_ranks for node in self.nodes)

    def mark_of(self, node: Node) -> str:
        """Returns the mark of a node's processes; one launcher can give the ranks of all nodes the same one only."""
        is_shared = sum(other.command is not None for other in self.nodes) == 1
        return self.mark if is_shared else f"{self.mark}-{node.number}"


@dataclass
class StopRequests:
    """What somebody outside wants of a run, as signal handlers and `dstrain stop` put it down."""

    stop: list[str] = field(default_factory=list)
    """Who wants it to stop; a second entry means at once."""
    save: bool = False
    """Whether it shall save a checkpoint and leave."""
    is_interrupt: bool = False
    """Whether the first to stop it was Ctrl-C."""
    is_heeded: bool = False
    """Whether somebody looks here now; before and after that a signal ends what is being done."""


def new_mark() -> str:
    """Returns a mark that no other start has."""
    return uuid.uuid4().hex
