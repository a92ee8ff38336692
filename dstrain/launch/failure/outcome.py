"""The outcome of a run as its nodes reported it: the rank that failed first, or the hang."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.kernel_messages import OUT_OF_MEMORY
from dstrain.heartbeat import Phase
from dstrain.units import counted, format_seconds

_START = "Traceback (most recent call last):"
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_NEAR_END = 40
_MESSAGE_LINES = 12
_LAST_LINES = 8
"""Lines of a log that are shown if none of them names a cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A rank that failed."""

    rank: int
    code: int | None
    """Its exit code, negative for a signal; None if it was not observed."""
    at: float
    """When it was noticed, in seconds since the epoch."""
    note: str = ""
    """Cause as far as its node knows, as a clause."""


def traceback_of(text: str) -> str | None:
    """Returns the traceback at the end of a log, preceded by its chained causes, or None if the log ends otherwise.

    A traceback that the program printed and survived lies far above the end and does not count.
    """
    lines = [_RANK_PREFIX.sub("", line.rstrip()) for line in re.split(r"\r\n|\n|\r", text.rstrip())]
    blocks = _blocks(lines)
    if not blocks or len(lines) - blocks[-1][1] > _NEAR_END:
        return None
    first = len(blocks) - 1
    while first > 0 and blocks[first][0] - blocks[first - 1][1] <= _NEAR_END:
        first -= 1
    last = first
    while last + 1 < len(blocks) and _is_chained(lines[blocks[last][1] : blocks[last + 1][0]]):
        last += 1
    return "\n".join(lines[blocks[first][0] : blocks[last][1]])


def _blocks(lines: Sequence[str]) -> list[tuple[int, int]]:
    """Returns begin and end of every traceback: its header, indented frames, and the exception's message."""
    blocks = []
    index = 0
    while index < len(lines):
        if not lines[index].endswith(_START):
            index += 1
            continue
        begin, index = index, index + 1
        while index < len(lines) and (lines[index].startswith(" ") or not lines[index]):
            index += 1
        stop = min(len(lines), index + _MESSAGE_LINES)
        while index < stop and lines[index] and not lines[index].endswith(_START):
            index += 1
        blocks.append((begin, index))
    return blocks


def _is_chained(between: Sequence[str]) -> bool:
    words = [line for line in between if line]
    return bool(words) and all(line.startswith(_CHAIN) for line in words)


_LOST_PEER = re.compile(r"Connection (closed|reset) by peer|Broken pipe|ncclRemoteError|remote process exited")


def message_of(traceback: str) -> str:
    """Returns the first line of the message of the exception with which a traceback ends.

    >>> message_of('Traceback (most recent call last):\\n  File "a.py", line 1\\n    f()\\nValueError: no\\n  at all')
    'ValueError: no'
    """
    lines = traceback.split("\n")
    begin, end = _blocks(lines)[-1]
    return next((line for line in lines[begin + 1 : end] if line and not line.startswith(" ")), lines[-1])


_SAID = re.compile(r"^Error(?: on rank \d+)?: (?=.)")


def error_of(text: str) -> str | None:
    """Returns the error of dstrain, with its hint, that a rank's log ends with; None if it does not.

    >>> error_of("step 3\\nError: the loss is nan\\nLower learning_rate.\\n")
    'the loss is nan\\nLower learning_rate.'
    """
    lines = text.rstrip().split("\n")[-_NEAR_END:]
    at = max((index for index, line in enumerate(lines) if _SAID.match(line)), default=None)
    return None if at is None else _SAID.sub("", "\n".join(lines[at:]), count=1)


_NOISE = re.compile(r"DeepSpeed .* built successfully|\[INFO\]")


def end_of_log(text: str) -> list[str]:
    """Returns the last lines of a log, without messages that extensions and DeepSpeed write in every run.

    >>> end_of_log("a\\nDeepSpeed deepspeed.ops.comm.deepspeed_shm_comm_op built successfully\\n 10 %\\r 90 %\\n\\n")
    ['a', ' 90 %']
    """
    lines = [line.rpartition("\r")[2] for line in text.rstrip().split("\n")]
    return [line for line in lines if line.strip() and not _NOISE.search(line)][-_LAST_LINES:]


def is_consequence(traceback: str) -> bool:
    """Returns whether a rank failed because another one had gone.

    >>> is_consequence("RuntimeError: gloo/transport/tcp/pair.cc:553 Connection closed by peer [10.77.0.2]:18068.")
    True
    """
    return _LOST_PEER.search(traceback.rstrip().rpartition("\n")[2]) is not None


def failing_order(
    deaths: Sequence[Death], traceback_times: Mapping[int, float], consequences: Collection[int] = ()
) -> list[int]:
    """Returns the ranks that failed, first one first: by when a traceback was written, or else by when they died.

    A rank that was terminated, or whose death was not observed, comes after others of the same moment; one that failed
    because another one had gone (`consequences`) comes after all that did not.
    """
    events = {death.rank: (death.at, death.code in {None, -15}) for death in deaths}
    for rank, at in traceback_times.items():
        events[rank] = min((at, False), events.get(rank, (at, False)))
    return sorted(events, key=lambda rank: (rank in consequences, *events[rank], rank))


FULL_DISK = "A disk is full: free some space, or lower `save_total_limit`."
_ADVICE = (
    (r"CUDA out of memory|torch\.OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY",
     "A GPU ran out of memory: lower `micro_batch` or `seq_len`, or let `dstrain gen-config` choose more offload."),
    # all but the first are what PyTorch makes of it
    (r"No space left on device|PytorchStreamWriter failed writing|inline_container\.cc.*unexpected pos|"
     r"basic_ios::clear: iostream error", FULL_DISK),
    (r"DataLoader worker .* Bus error|insufficient shared memory",
     "/dev/shm is too small: set `dataloader_num_workers: 0`, or start the container with `--shm-size=16g`."),
    (r"Address already in use|EADDRINUSE", "The port is taken: run again, or name another one with `--master-port`."),
    (r"Watchdog caught collective operation timeout|collective operation timeout",
     "A rank waited for another one that never arrived: look at the logs of the silent ranks."),
    (r"ncclSystemError|ncclUnhandledCudaError|ncclRemoteError|NCCL error",
     "NCCL failed: run again with NCCL_DEBUG=INFO; on several networks name one with NCCL_SOCKET_IFNAME."),
    (r"device-side assert triggered",
     "A kernel's assertion failed, often a token id beyond the vocabulary: run again with CUDA_LAUNCH_BLOCKING=1."),
    (r"no kernel image is available", "This PyTorch has no code for this GPU: install a build for its architecture."),
    (rf"Cannot allocate memory|DefaultCPUAllocator: can't allocate memory|{OUT_OF_MEMORY}",
     "The host ran out of memory: offload less, or use more nodes."),
    (r"Too many open files", "Raise the limit of open files: `ulimit -n 65536`."),
    (r"libaio|async_io.*(not compatible|requires)", "Offload to NVMe needs libaio: `apt-get install libaio-dev`."),
    (r"CUDA_HOME|MissingCUDAException|nvcc.*not found",
     "DeepSpeed builds its operators with CUDA's compiler: install the CUDA toolkit and set CUDA_HOME."),
    (r"Ninja is required", "DeepSpeed builds its operators with ninja: `pip install ninja`."),
    (r"loss scale already at minimum", "fp16 overflowed on every step: use `precision: bf16`."),
    (r"GatedRepoError|401 Client Error", "The hub refused access: set HF_TOKEN, and accept the model's terms there."),
    (r"Permission denied \(publickey|Host key verification failed|not reachable via ssh",
     "ssh must reach every node without a password: try `ssh HOST hostname` for each line of the hostfile."),
)  # fmt: skip


def advice(text: str) -> str | None:
    """Returns advice about an error that a log's text names, or None.

    >>> advice("OSError: [Errno 28] No space left on device")
    'A disk is full: free some space, or lower `save_total_limit`.'
    """
    return next((words for pattern, words in _ADVICE if re.search(pattern, text)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A node that stopped responding."""

    host: str
    """Its name in the hostfile."""
    why: str
    """The last message of the connection, or how long it was silent."""
    at: float
    """When it was last heard of, in seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The progress of a start before every rank has done its first step."""

    seconds: float
    """Duration so far."""
    phases: Mapping[int, Phase | None]
    """Rank → its phase; None if it has not reported yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A run that made no progress."""

    seconds: float
    """How long it has made no progress."""
    median_s: float
    """The median step time before; 0 if it is unknown."""
    steps: Mapping[int, int]
    start: Start | None = None
    """The progress of the start, if the first step was not reached."""
    phase: Phase = Phase.STEP
    """Outcome of the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    succeeded: bool
    """Whether every launcher ended well and every rank is known to have done so."""
    code: int
    """The launcher's exit code, negative for a signal; of several the first bad one. 0 alone proves nothing: it is 0
    when `launch` was killed."""
    stopped_by: str | None = None
    """Signal or `dstrain stop` that stopped dstrain; None if nothing did."""
    is_interrupt: bool = False
    """Whether it was Ctrl-C."""
    deaths: tuple[Death, ...] = ()
    """The ranks that failed, in the order in which it was noticed."""
    reported: tuple[str | None, int] | None = None
    """The first failure in a launcher's own log: the node (None: the only one) and the rank's code."""
    lost: tuple[Lost, ...] = ()
    """The nodes that stopped responding, first one first."""
    orphaned: tuple[str, ...] = ()
    """The nodes on which the launcher was killed while its ranks lived on."""
    hang: Hang | None = None
    """The hang, if one was detected."""
    is_port_taken: bool = False
    """Whether rank 0 could not listen on its port."""
    left_at: int | None = None
    """The step after which it saved a checkpoint and left as requested; None if it did not."""
    rank_logs: Mapping[int, Path]
    launcher_logs: tuple[Path, ...]
    """The logs of the launchers themselves."""

    @property
    def launcher_log(self) -> Path:
        """The launcher's log of the node that failed, or the first."""
        return self.launcher_logs[0]


_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')
_SHOWN_FRAMES = 8


def stacks(text: str) -> list[list[str]]:
    """Returns the last stacks that a rank's log holds: one list of frames for each thread, innermost first.

    Source: the format of Python's faulthandler.
    """
    threads: list[list[str]] = []
    inside = False
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
            inside = True
        elif inside and _FRAME.match(line):
            threads[-1].append(line)
        else:
            inside = False
    return threads


def main_stack(text: str) -> list[str]:
    """Returns the stack of a rank's main thread, innermost frame first; empty if its log has none."""
    runs = [stack for stack in stacks(text) if any("<module>" in frame for frame in stack)]
    return runs[-1] if runs else []


def hang_lines(hang: Hang, texts: Mapping[int, str], hosts: Hosts) -> tuple[list[str], int]:
    """Returns the report of a hang, and the rank whose stack it shows: one that is behind or in another place."""
    waited = format_seconds(hang.seconds)
    if hang.start is None:
        what = "step" if hang.phase is Phase.STEP else f"progress while {_DOING.get(hang.phase, hang.phase.value)}"
        usual = f" (median {hang.median_s:.2g} s)" if hang.phase is Phase.STEP and hang.median_s else ""
        lines = [f"no {what} for {waited}{usual}: the run hangs"]
    else:
        lines = [f"the start made no progress for {waited} (--start-timeout)"]
        lines.append(start_line(hang.start, hosts))
    stacks_of = {rank: main_stack(text) for rank, text in texts.items()}
    places: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks_of.items()):
        places.setdefault(_place(stack), []).append(rank)
    behind = min(hang.steps.values(), default=0)
    slow = [rank for rank, step in sorted(hang.steps.items()) if step == behind]
    if len(slow) < len(hang.steps) and hang.start is None:
        lines.append(f"{_ranks(slow, hosts)} did {counted(behind, 'step')}, the others {max(hang.steps.values())}")
    for place, ranks in sorted(places.items(), key=lambda item: len(item[1])):
        lines.append(f"{_ranks(ranks, hosts)} in {place}")
    # most ranks wait in the collective that the odd one never entered
    odd = min(places.values(), key=len)[0] if places else 0
    shown = slow[0] if slow and len(slow) < len(hang.steps) else odd
    if hang.start is not None:
        phases = hang.start.phases
        # before the first step the others wait for the rank that is least far
        shown = min(phases, key=lambda rank: (_order(phases[rank]), rank))
    # a rank that is stuck in native code may dump no stack: its last lines are the next best
    said = stacks_of.get(shown) or texts.get(shown, "").strip().splitlines()[-_SHOWN_FRAMES:] or ["It wrote nothing."]
    lines += [f"rank {shown}:", *said[:_SHOWN_FRAMES], "The stacks of each rank are in its log."]
    return lines, shown


_DOING = MappingProxyType({Phase.BUSY: "evaluating and saving for the last time", Phase.DONE: "ending"})
"""Activity of ranks after their last step, in words."""
_WORDS: Mapping[Phase | None, str] = MappingProxyType(
    {
        None: "not reporting",
        Phase.START: "importing",
        Phase.CONNECTING: "waiting for the others",
        Phase.PORT_TAKEN: "without a port",
        Phase.TOKENIZING: "tokenizing",
        Phase.VERIFYING: "verifying the checkpoint",
        Phase.WEIGHTS: "loading weights",
        Phase.REFERENCE: "computing the reference",
        Phase.LOADING: "connected, loading or in the first step",
    }
)


def _order(phase: Phase | None) -> int:
    """Returns the progress of a rank by its last phase: 0 if it has not reported."""
    return list(_WORDS).index(phase) if phase in _WORDS else len(_WORDS)


def start_line(start: Start, hosts: Hosts) -> str:
    """Returns the progress of a start in words, the ranks that are behind first."""
    doing: dict[Phase | None, list[int]] = {}
    for rank, phase in sorted(start.phases.items()):
        doing.setdefault(phase, []).append(rank)
    rows = [f"{_ranks(doing[phase], hosts)} {words}" for phase, words in _WORDS.items() if phase in doing]
    behind = {None, Phase.START, Phase.CONNECTING, Phase.PORT_TAKEN}
    connected = sum(len(ranks) for phase, ranks in doing.items() if phase not in behind)
    head = f"starting for {format_seconds(start.seconds)}: {connected} of {len(start.phases)} ranks connected"
    return f"{head}; {'; '.join(rows)}" if rows else head


def _ranks(ranks: list[int], hosts: Hosts) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    nodes = list(dict.fromkeys(hosts.of_rank(rank) for rank in ranks))
    where = f" on {nodes[0]}" if len(nodes) == 1 and len(hosts.hosts) > 1 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{where}"


def _place(stack: list[str]) -> str:
    """Returns the innermost frame in words."""
    match = _FRAME.match(stack[0]) if stack else None
    return f"{match['name']} ({match['file']}:{match['line']})" if match else "an unknown place: it wrote no stack"
