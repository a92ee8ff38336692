"""The specification of one launch, and the stop and save requests it accepts while it runs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dstrain.heartbeat import mark_on
from dstrain.launch.nodes.connection import Channel
from dstrain.launch.nodes.layout import Node
from dstrain.launch.timeouts import TIMEOUTS, Timeouts
from dstrain.rundir import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """The specification of one launch."""

    nodes: tuple[Node, ...]
    """The nodes and their commands."""
    run_dir: RunDir
    mark: str
    open: Callable[[Sequence[Node]], list[Channel]]
    environment: Mapping[str, str]
    """Variables of launchers on other machines, in addition to those of their agent."""
    unset: tuple[str, ...]
    """Variables that launchers on other machines must not have."""
    exports: Mapping[str, str]
    """Further variables: name → text between a shell's double quotes."""
    master_port: int
    takes_another_port: bool = False
    """Whether rank 0 may listen on another port if that one is in use."""
    master: str | None = None
    """The host of rank 0 as the ranks get it; None if all ranks are on one node."""
    ops: tuple[str, ...] = ()
    files: Mapping[str, int] = field(default_factory=dict)
    """Files that every rank reads → their bytes here."""
    packages: tuple[str, ...] = ()
    """Packages that this job needs, whose versions must be the same on every node."""
    request: str | None = None
    """What request.json holds, if that was decided after it was copied to other disks."""
    saved_bytes: int = 0
    """Bytes of one checkpoint; 0 if unknown."""
    timeouts: Timeouts = TIMEOUTS

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return sum(node.num_ranks for node in self.nodes)

    def mark_of(self, node: Node) -> str:
        """Returns the mark of a node's processes."""
        return mark_on(self.mark, node.number)


@dataclass
class StopRequests:
    """Requests of signal handlers and `dstrain stop` to a run."""

    stop: list[str] = field(default_factory=list)
    """Sources of stop requests; a second entry means at once."""
    save: bool = False
    """Whether to save a checkpoint and leave."""
    is_interrupt: bool = False
    """Whether the first stop request was Ctrl-C."""
    is_heeded: bool = False
    """Whether the requests are read now; before and after that a signal ends `run` directly."""


def new_mark() -> str:
    """Returns a mark that no other start has."""
    return uuid.uuid4().hex
