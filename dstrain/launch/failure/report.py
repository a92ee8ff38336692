"""Writes the report of a failed run: the cause in its first line, the traceback, the logs, and what to type next."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.errors import DstrainError, Interrupted, RunFailed
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.launch.failure.logs import agents_words, last_metrics, metrics_words, tail_of
from dstrain.launch.failure.outcome import (
    FULL_DISK,
    Lost,
    Outcome,
    advice,
    end_of_log,
    error_of,
    failing_order,
    hang_lines,
    is_consequence,
    message_of,
    traceback_of,
)
from dstrain.monitor.health.nonfinite import Stop, stop_of, usable_checkpoint
from dstrain.paths import shown
from dstrain.rundir import RUN, RunDir, line_of, resumed
from dstrain.units import MIB


def resumed_text(run_dir: RunDir, command: Sequence[str]) -> str:
    """Returns how to start again from the newest checkpoint, with the words of the first start."""
    newest = run_dir.newest_checkpoint(for_resume=True)
    if newest.folder:
        return f"`{resumed(command)}` continues from step {newest.step}."
    if run_dir.whole_checkpoints():
        return "Its checkpoints hold the weights alone (save_only_model): set another output_dir to start over."
    return f"No complete checkpoint exists yet: `{line_of(command)}` starts over."


def after_stop(run_dir: RunDir, stop: Stop, command: Sequence[str]) -> str:
    """Returns how to start again after a health rule ended a run: never from a state that went wrong, and with a tenth
    of the learning rate."""
    if stop.since is None:
        return resumed_text(run_dir, command)
    folder = usable_checkpoint(run_dir, stop.since)
    changed = [] if (rate := _learning_rate(run_dir)) is None else ["--set", f"learning_rate={rate / 10:.2g}"]
    slower = " with a tenth of its learning rate" if changed else "; lower its learning rate"
    if folder is not None:
        line = line_of(command, "--set", f"resume={shown(str(folder))}", *changed)
        return f"`{line}` continues from {folder.name}, from before that{slower}."
    other = shown(str(run_dir.path.with_name(f"{run_dir.path.name}-2")))
    line = line_of(command, *changed, "--set", f"output_dir={other}")
    return f"No checkpoint is from before that: `{line}` starts again{slower}."


def _learning_rate(run_dir: RunDir) -> float | None:
    with suppress(OSError, ValueError, TypeError, KeyError):
        return float(json.loads(run_dir.request.read_text(encoding="utf-8"))["learning_rate"])
    return None


_OF_SIGNALS = MappingProxyType(
    {
        signal.SIGKILL: "killed",
        signal.SIGSEGV: "segmentation fault in native code",
        signal.SIGBUS: "bus error, usually because /dev/shm is too small",
        signal.SIGABRT: "aborted by native code, often NCCL's watchdog or a failed assertion",
        signal.SIGILL: "illegal instruction: a library was built for another processor",
        signal.SIGFPE: "arithmetic fault in native code",
        signal.SIGTERM: "terminated from outside",
        signal.SIGINT: "stopped by Ctrl-C",
        signal.SIGHUP: "stopped because the terminal was closed",
        signal.SIGPIPE: "the reader of its output closed the pipe",
    }
)

_OF_CODES = MappingProxyType(
    {
        0: "ended well",
        1: "ended with an error",
        2: "wrong command line",
        126: "the interpreter cannot be executed",
        127: "the interpreter was not found",
        255: "ssh could not reach a node",
    }
)


def signal_of(code: int) -> signal.Signals | None:
    """Returns the signal that an exit code stands for, or None.

    A signal N is -N to Python, 256-N after the launcher's `sys.exit(-N)`, and 128+N to a shell.

    >>> signal_of(-9), signal_of(247), signal_of(137), signal_of(1)
    (<Signals.SIGKILL: 9>, <Signals.SIGKILL: 9>, <Signals.SIGKILL: 9>, None)
    """
    number = -code if code < 0 else 256 - code if 256 - 32 < code < 255 else code - 128 if 128 < code <= 128 + 31 else 0
    known = {member.value for member in signal.Signals}
    return signal.Signals(number) if number in known else None


def decode(code: int) -> str:
    """Returns the meaning of an exit code, in words.

    >>> decode(247)
    'code 247 (SIGKILL): killed'
    >>> decode(1)
    'code 1: ended with an error'
    """
    number = signal_of(code)
    if number is not None:
        return f"code {code} ({number.name}): {_OF_SIGNALS.get(number, 'ended by a signal')}"
    return f"code {code}: {_OF_CODES.get(code, 'ended with an error')}"


_SHOWN_LINES = 25
_LEAST_FREE_BYTES = MIB


def explain(
    outcome: Outcome,
    *,
    hosts: Hosts,
    run_dir: RunDir,
    again: str | None = None,
    command: Sequence[str] = RUN,
    evidence: Sequence[str] = (),
    remedies: Sequence[str] = (),
) -> DstrainError:
    """Returns the error to raise for a run that did not succeed, whose first line is the cause; `again` says how to try
    again, if not by a resume with the words of `command`.

    `evidence` is what else is known about the cause, and `remedies` what to type about it, in place of general advice.
    """
    if outcome.stopped_by is not None:
        problem = f"stopped ({outcome.stopped_by}); no rank is left running"
        if outcome.lost:
            problem = f"stopped ({outcome.stopped_by}); {', '.join(map(_lost_words, outcome.lost))}"
        kind = Interrupted if outcome.is_interrupt else RunFailed
        return kind(problem, hint=again or resumed_text(run_dir, command))
    texts = {rank: tail_of(path) for rank, path in outcome.rank_logs.items()}
    last = last_metrics(run_dir)
    cause = _cause(outcome, texts, hosts, last)
    stop = stop_of(run_dir, cause.lines[0]) if cause.is_said else None
    said = cause.lines if stop is None else cause.lines[:1]  # a rank's hint is for runs without `dstrain run`
    lines = [*said, *evidence]
    if last is not None:
        lines.append(f"Last metrics: step {metrics_words(last)}")
    lines.append(f"Logs: {run_dir.logs} (above: {cause.log.name})")
    words = "\n".join(remedies) or advice("\n".join(lines)) or advice(cause.text) or _full_disk(run_dir)
    again = again or (resumed_text(run_dir, command) if stop is None else after_stop(run_dir, stop, command))
    hint = f"{words}\n{again}" if words else again
    return RunFailed(
        "\n".join(lines), hint=hint, rank_exit_code=cause.code, stopped_by=None if stop is None else stop.rule
    )


def _full_disk(run_dir: RunDir) -> str | None:
    """Returns advice if the disk of the run directory is full, where a log may lack its end."""
    with suppress(OSError):
        if shutil.disk_usage(run_dir.path).free < _LEAST_FREE_BYTES:
            return FULL_DISK
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cause:
    """The cause of a failed run."""

    lines: Sequence[str]
    """The lines of the report."""
    log: Path
    text: str = ""
    """The log's text, to look for advice in."""
    code: int | None = None
    """The exit code of the rank or launcher that failed first; None for a lost node, a killed launcher or a hang."""
    is_said: bool = False
    """Whether a rank itself said it, in the words of an error of dstrain."""


def _cause(outcome: Outcome, texts: Mapping[int, str], hosts: Hosts, last: Mapping[str, Any] | None) -> _Cause:
    """Returns why a run failed, given the logs of its ranks and its last metrics."""
    # ranks of a hang were ended by signals, so that their exit codes say nothing
    if outcome.hang is not None:
        lines, odd = hang_lines(outcome.hang, texts, hosts)
        text = texts.get(odd, "") if outcome.hang.start is not None else ""
        return _Cause(lines=lines, text=text, log=outcome.rank_logs.get(odd, outcome.launcher_log))
    if outcome.orphaned:
        where = f" on {', '.join(outcome.orphaned)}" if len(hosts.hosts) > 1 else ""
        sentence = f"the launcher{where} was killed (python -m deepspeed.launcher.launch); its ranks were ended"
        return _Cause(lines=[sentence], log=outcome.launcher_log)
    rank = _first(outcome, texts)
    # before a rank's own words: agents that lost `run` end their ranks, which then look as if they failed
    if (ended := _ended_by_agents(rank, outcome, texts)) is not None:
        return ended
    if rank is not None and not _is_consequence_of_loss(rank, outcome, texts, hosts):
        text = texts.get(rank, "")
        after = [f"{_lost_words(lost)}, after that" for lost in outcome.lost]
        return _Cause(
            lines=[_rank_sentence(rank, outcome, text, hosts, last), *_evidence(text), *after],
            log=outcome.rank_logs.get(rank, outcome.launcher_log),
            text=text,
            code=_code_of(rank, outcome),
            is_said=error_of(text) is not None,
        )
    if outcome.lost:
        return _Cause(lines=_lost_lines(outcome, hosts, texts), log=outcome.launcher_log)
    launcher_text = tail_of(outcome.launcher_log)
    return _Cause(
        lines=[_launcher_sentence(outcome, started=bool(texts)), *_end_of(launcher_text)],
        log=outcome.launcher_log,
        text=launcher_text,
        code=outcome.reported[1] if outcome.reported is not None else outcome.code,
    )


def _ended_by_agents(rank: int | None, outcome: Outcome, texts: Mapping[int, str]) -> _Cause | None:
    """Returns the words of agents that ended their ranks because `run` was silent, if no rank failed before that."""
    words = agents_words(outcome.launcher_log.parent, _began(outcome))
    if not words or outcome.lost:
        return None
    code = None if rank is None else _code_of(rank, outcome)
    traceback = traceback_of(texts.get(rank, "")) if rank is not None else None
    if code not in {None, -signal.SIGTERM, -signal.SIGKILL} and not is_consequence(traceback or ""):
        return None
    return _Cause(lines=[word.split(" ", 2)[2] for word in words], log=outcome.launcher_log, code=code)


def _began(outcome: Outcome) -> float:
    """Returns when the start began, by the name of its log."""
    with suppress(ValueError):
        return time.mktime(time.strptime(outcome.launcher_log.name[:14], "%Y%m%d%H%M%S"))
    return time.time()


def _is_consequence_of_loss(rank: int, outcome: Outcome, texts: Mapping[int, str], hosts: Hosts) -> bool:
    """Returns whether a rank failed because a node was lost: it lost another one, or the node's own ranks were not
    heard to fail."""
    if not outcome.lost:
        return False
    if is_consequence(traceback_of(texts.get(rank, "")) or ""):
        return True
    lost = outcome.lost[0]
    own = [death for death in outcome.deaths if hosts.of_rank(death.rank) == lost.host and death.code is not None]
    return hosts.of_rank(rank) != lost.host and not own


def _lost_words(lost: Lost) -> str:
    return f"{lost.host} was lost ({lost.why})"


def _lost_lines(outcome: Outcome, hosts: Hosts, texts: Mapping[int, str]) -> list[str]:
    lost = outcome.lost[0]
    ranks = [str(rank) for rank in range(hosts.num_slots) if hosts.of_rank(rank) == lost.host]
    last = time.strftime("%H:%M:%S", time.localtime(lost.at))
    lines = [
        f"{_lost_words(lost)}, with {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks) or 'none'};"
        f" last heard from at {last}",
        "It lost power or network, or its connection was closed. Anything still running there ends by itself within"
        " 45 s.",
    ]
    lines += [f"{_lost_words(other)} too" for other in outcome.lost[1:]]
    rank = _first(outcome, texts)
    if rank is not None:
        lines.append(f"after that: {_rank_sentence(rank, outcome, texts.get(rank, ''), hosts, None)}")
    return lines


def _first(outcome: Outcome, texts: Mapping[int, str]) -> int | None:
    """Returns the rank that failed first, or None if no rank is known to have failed."""
    tracebacks = {rank: traceback for rank, text in texts.items() if (traceback := traceback_of(text)) is not None}
    errors = {rank for rank, text in texts.items() if error_of(text) is not None}
    times = {rank: _mtime(outcome.rank_logs[rank]) for rank in {*tracebacks, *errors}}
    consequences = [rank for rank, text in tracebacks.items() if is_consequence(text)]
    if errors:  # all ranks end with an error of dstrain, and one of them prints it
        consequences += [death.rank for death in outcome.deaths if (death.code or 0) > 0 and death.rank not in times]
    order = failing_order(outcome.deaths, times, consequences)
    return order[0] if order else None


def _rank_sentence(rank: int, outcome: Outcome, text: str, hosts: Hosts, last: Mapping[str, Any] | None) -> str:
    """Returns why a rank failed, in one line."""
    if (error := error_of(text)) is not None:
        return error.split("\n")[0]
    code, traceback = _code_of(rank, outcome), traceback_of(text)
    where = f" on {hosts.of_rank(rank)}" if len(hosts.hosts) > 1 else ""
    others = len([death for death in outcome.deaths if death.rank != rank])
    after = f" ({others} more ended after it)" if others else ""
    note = next((death.note for death in outcome.deaths if death.rank == rank), "")
    if traceback is not None:
        note = message_of(traceback)
    how = "it ended for an unknown reason" if code is None else decode(code)
    how = how.partition(": ")[0] if note else how  # a note says more than the meaning of a code
    share = (last or {}).get("host_used_share")
    if code is not None and signal_of(code) is signal.SIGKILL and isinstance(share, int | float):
        note += f"{'; ' if note else ''}{share:.0%} of the host memory was in use at step {(last or {})['step']}"
    return f"rank {rank}{where} failed first{after}: {how}{f': {note}' if note else ''}"


def _code_of(rank: int, outcome: Outcome) -> int | None:
    """Returns a rank's exit code: as it was seen, or what the launcher reported, which is the first failure's."""
    seen = next((death.code for death in outcome.deaths if death.rank == rank), None)
    is_consequence = seen is not None and signal_of(seen) is not None and outcome.reported is not None
    # another rank died before this one, which failed first by its traceback
    is_traceback_first = bool(outcome.deaths) and outcome.deaths[0].rank != rank
    if seen is None or (is_consequence and is_traceback_first):
        return outcome.reported[1] if outcome.reported is not None else seen
    return seen


def _evidence(text: str) -> list[str]:
    """Returns the lines of a rank's log about the cause, after its first line."""
    if (error := error_of(text)) is not None:
        return error.split("\n")[1:]
    if (traceback := traceback_of(text)) is not None:
        lines = traceback.split("\n")
        return lines if len(lines) <= _SHOWN_LINES else ["…", *lines[-_SHOWN_LINES:]]
    return _end_of(text)


def _end_of(text: str) -> list[str]:
    lines = end_of_log(text)
    return ["its log ends with:", *(f"  {line}" for line in lines)] if lines else ["its log says nothing"]


def _launcher_sentence(outcome: Outcome, *, started: bool) -> str:
    if outcome.code == 0:
        return "the launcher ended without reporting that every rank finished; it was probably killed"
    if outcome.reported is not None:
        host, code = outcome.reported
        return f"a rank{f' on {host}' if host else ''} failed: {decode(code)}"
    when = "" if started else " before any rank started"
    return f"the launcher failed{when}: {decode(outcome.code)}"


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return float("inf")
