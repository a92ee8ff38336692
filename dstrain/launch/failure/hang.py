"""Locates the ranks of a hanging run from the stacks in their logs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from dstrain.facts.cluster.hostfile import Hosts
from dstrain.heartbeat import Phase
from dstrain.launch.failure.outcome import Hang, Start
from dstrain.units import counted, format_seconds

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
    odd = min(places.values(), key=len)[0] if places else 0
    shown = slow[0] if slow and len(slow) < len(hang.steps) else odd
    if hang.start is not None:
        phases = hang.start.phases
        shown = min(phases, key=lambda rank: (_order(phases[rank]), rank))
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
