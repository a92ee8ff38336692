"""Messages between `run` and the nodes' agents: one JSON object a line, over ssh, srun or a pipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from dstrain.heartbeat import Phase

LONGEST = 16 * 2**20
"""Bytes of the longest line that is taken; messages stay far below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Order: say whether this node can take part."""

    run_dir: str
    token: str
    """The content of the run directory's token file, if this node shares it."""
    others: list[str]
    """The other nodes, to which a network interface must lead."""
    files: dict[str, int]
    """Files that ranks read → their bytes where `run` is."""
    packages: list[str]
    """Packages that this job needs besides every run's; they must be the same everywhere too."""
    exports: dict[str, str]
    """Variables of the ranks that say where kernels are cached, as in `Begin`."""
    port: int | None = None
    """Port for rank 0, to be kept until the ranks start; None on other nodes."""
    takes_another: bool = False
    """Whether any other port will do if that one is in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Order: make this node ready for its part of the run, which `Go` starts."""

    host: str
    """The node's name in the hostfile."""
    run_dir: str
    mark: str
    """Value of the variable that marks every process of this start."""
    first_rank: int
    num_ranks: int
    master_port: int
    command: list[str] | None = None
    """The launcher to start; None to end what an earlier agent left."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of the launcher, in addition to the agent's own."""
    unset: list[str] = field(default_factory=list)
    """Variables of the agent that the launcher does not get."""
    exports: dict[str, str] = field(default_factory=dict)
    """Further variables: name → text in which `$NAME` is the node's own value (`environment.expanded`)."""
    mirror: bool = False
    """Whether this node shares no file system with `run`, and sends what is written there."""
    timeouts: dict[str, float] = field(default_factory=dict)
    """The limits of this start that differ from the defaults, by their names in `Timeouts`."""
    master: str | None = None
    """The host of rank 0 as the ranks get it; None if no node has to find it."""
    ops: list[str] = field(default_factory=list)
    request: str | None = None
    """The text of request.json, for a node that has an earlier copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """Order: start this node's part; every node is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Order: nothing; a sign of life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Order: let the ranks save a checkpoint and leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """Order: let every rank write its stacks into its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Order: end everything here."""

    grace_s: float
    """Seconds between SIGTERM and SIGKILL; 0 kills at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Event: the answer to Look."""

    host: str
    """The node's own hostname."""
    versions: dict[str, str | None]
    """Versions of Python and the packages that must be the same everywhere."""
    shares_run_dir: bool
    """Whether the run directory here is the one of `run`."""
    interface: str | None
    """The network interface that reaches the other nodes; None if no single one reaches them all."""
    num_gpus: int
    """GPUs that NVML reports."""
    attention_packages: dict[str, str]
    """The FlashAttention kernels that its GPUs run (`facts.attention_kernels.AttentionKernels`)."""
    attention_cached: dict[str, str]
    attention_downloadable: list[str]
    port: int | None
    """The port that is kept for rank 0; None if the one of Look is in use, and on other nodes."""
    unlike: dict[str, int | None]
    """Files of Look that have another size here → their bytes; None if they cannot be read."""
    clock: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Event: ranks of this node will find rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Event: progress in making this node ready."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Event: this node's ranks can start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """Event: a sign of life, and how far the ranks are."""

    steps: dict[str, list[Any]]
    """Rank → step, phase and steps of the whole run (0: not known), for ranks that reported since the last one."""

    def __post_init__(self) -> None:
        """Raises ValueError for other contents."""
        for rank, (step, phase, total) in self.steps.items():
            numbers = (int(rank), step, total)
            if not (Phase(phase) and all(type(number) is int and 0 <= number < 2**63 for number in numbers)):
                raise ValueError(rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """Event: a rank ended badly, or too early."""

    rank: int
    code: int | None
    """Its exit code, negative for a signal; None if it was not observed."""
    note: str = ""
    """The cause as far as its node knows it, as a clause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphaned:
    """Event: ranks live on though the launcher that started them on this node is gone."""

    ranks: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrote:
    """Event: a file in the run directory grew."""

    name: str
    """Its path in the run directory."""
    text: str
    """The text that was added, or the whole text of a file that is not a log."""
    on_screen: bool
    """Whether it is output of rank 0 for the screen."""
    is_whole: bool = False
    """Whether `text` is the whole content of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Event: this node's part could not be started."""

    text: str
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Event, the last one: nothing of the run is left on this node."""

    code: int | None
    """The launcher's exit code; None if no launcher ran on this node."""
    num_finished: int
    """Ranks of which this node's launcher said that they ended well."""
    num_done: int
    """Ranks of this node that reported so themselves."""
    reported: int | None
    """The code of the first failure in the launcher's log."""


Order = Look | Begin | Go | Beat | Save | Stacks | End
Event = Hello | Reached | Told | Ready | Alive | Died | Orphaned | Wrote | Problem | Ended
_hints = cache(get_type_hints)
_KINDS = {kind.__name__: kind for kind in (*get_args(Order), *get_args(Event))}


def encode(message: Order | Event, node: int | None = None) -> bytes:
    """Returns the line of a message; `node` is whom it is for or from, None for everyone."""
    line = {"dstrain": type(message).__name__, "node": node, "body": asdict(message)}
    return json.dumps(line, ensure_ascii=True).encode() + b"\n"


def decode(line: bytes) -> tuple[int | None, Any] | None:
    """Returns node and message of a line, or None for anything else: a shell's greeting, srun's own words."""
    with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        data: Mapping[str, Any] = json.loads(line)
        kind, node, body = _KINDS[data["dstrain"]], data["node"], data["body"]
        if _fits(node, int | None) and all(_fits(body[name], hint) for name, hint in _hints(kind).items()):
            return node, kind(**body)
    return None


def _fits(value: object, hint: Any) -> bool:
    """Returns whether a value out of JSON is of a type."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is list:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if kind is dict:
        return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    if inner:
        return any(_fits(value, choice) for choice in inner)
    if hint in {int, float}:
        return type(value) is int or type(value) is hint
    return hint is Any or isinstance(value, hint)


class Lines:
    """Joins pieces into whole lines."""

    def __init__(self, longest: int = LONGEST) -> None:
        """Lines of more than `longest` bytes are left out."""
        self._longest = longest
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, raw: bytes) -> list[bytes]:
        """Returns the lines that `raw` completes."""
        lines = []
        first, *others = raw.split(b"\n")
        self._add(first)
        for piece in others:
            if self._size <= self._longest:
                lines.append(b"".join(self._pieces))
            self._pieces, self._size = [], 0
            self._add(piece)
        return lines

    def _add(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self._longest:
            self._pieces = []
        elif piece:
            self._pieces.append(piece)
