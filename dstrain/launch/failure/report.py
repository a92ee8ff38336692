"""Writes the report of a failed run: the rank, the cause, the first traceback, the logs, and what to type."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dstrain.errors import DstrainError, Interrupted, RunFailed
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.launch.again import RUN, line_of, resumed
from dstrain.launch.failure.exit_codes import decode, signal_of
from dstrain.launch.failure.first_failure import (
    FULL_DISK,
    Death,
    advice,
    failing_order,
    is_consequence,
    traceback_of,
)
from dstrain.launch.failure.hang import hang_lines
from dstrain.launch.failure.last_metrics import last_metrics, metrics_words
from dstrain.launch.failure.logs import tail_of
from dstrain.launch.failure.outcome import Lost, Outcome
from dstrain.rundir import RunDir
from dstrain.units import MIB

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
    """Returns the error to raise for a run that did not succeed; `again` says how to try again, if not by a resume with
    the words of `command`.

    `evidence` is what else is known about the cause, and `remedies` what to type about it, in place of general advice.
    """
    again = again or _resumed(run_dir, command)
    if outcome.stopped_by is not None:
        problem = f"stopped ({outcome.stopped_by}); no rank is left running"
        if outcome.lost:
            problem = f"stopped ({outcome.stopped_by}); {', '.join(map(_lost_words, outcome.lost))}"
        kind = Interrupted if outcome.is_interrupt else RunFailed
        return kind(problem, hint=again)
    texts = {rank: tail_of(path) for rank, path in outcome.rank_logs.items()}
    cause = _cause(outcome, texts, hosts)
    lines = [*cause.lines, *evidence]
    last = last_metrics(run_dir)
    if last is not None:
        lines.append(f"Last metrics: step {metrics_words(last)}")
    lines.append(f"Logs: {run_dir.logs} (above: {cause.log.name})")
    words = "\n".join(remedies) or advice("\n".join(lines)) or advice(cause.text) or _full_disk(run_dir)
    return RunFailed("\n".join(lines), hint=f"{words}\n{again}" if words else again, rank_exit_code=cause.code)


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


def _cause(outcome: Outcome, texts: Mapping[int, str], hosts: Hosts) -> _Cause:
    """Returns why a run failed, given the logs of its ranks."""
    if outcome.hang is not None:
        lines, odd = hang_lines(outcome.hang, texts, hosts)
        text = texts.get(odd, "") if outcome.hang.start is not None else ""
        return _Cause(lines=lines, text=text, log=outcome.rank_logs.get(odd, outcome.launcher_log))
    if outcome.orphaned:
        where = f" on {', '.join(outcome.orphaned)}" if len(hosts.hosts) > 1 else ""
        sentence = f"the launcher{where} was killed (python -m deepspeed.launcher.launch); its ranks were ended"
        return _Cause(lines=[sentence], log=outcome.launcher_log)
    rank = _first(outcome, texts)
    if rank is not None and not _is_consequence_of_loss(rank, outcome, hosts):
        after = [f"{_lost_words(lost)}, after that" for lost in outcome.lost]
        return _Cause(
            lines=[_rank_sentence(rank, outcome, hosts), *_evidence(rank, outcome, texts), *after],
            log=outcome.rank_logs.get(rank, outcome.launcher_log),
            text=texts.get(rank, ""),
            code=_code_of(rank, outcome),
        )
    if outcome.lost:
        return _Cause(lines=_lost_lines(outcome, hosts, texts), log=outcome.launcher_log)
    launcher_text = tail_of(outcome.launcher_log)
    return _Cause(
        lines=[_launcher_sentence(outcome, started=bool(texts)), *_last_lines(launcher_text)],
        log=outcome.launcher_log,
        text=launcher_text,
        code=outcome.reported[1] if outcome.reported is not None else outcome.code,
    )


def _is_consequence_of_loss(rank: int, outcome: Outcome, hosts: Hosts) -> bool:
    """Returns whether a rank failed because a node was lost: the node's own ranks were not heard to fail."""
    if not outcome.lost:
        return False
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
        lines.append(f"after that: {_rank_sentence(rank, outcome, hosts)}")
    return lines


def _first(outcome: Outcome, texts: Mapping[int, str]) -> int | None:
    """Returns the rank that failed first, or None where no rank is known to have failed."""
    tracebacks = {rank: traceback for rank, text in texts.items() if (traceback := traceback_of(text)) is not None}
    times = {rank: _mtime(outcome.rank_logs[rank]) for rank in tracebacks}
    order = failing_order(outcome.deaths, times, [rank for rank, text in tracebacks.items() if is_consequence(text)])
    return order[0] if order else None


def _rank_sentence(rank: int, outcome: Outcome, hosts: Hosts) -> str:
    code = _code_of(rank, outcome)
    where = f" on {hosts.of_rank(rank)}" if len(hosts.hosts) > 1 else ""
    others = len([death for death in outcome.deaths if death.rank != rank])
    after = f" ({others} more ended after it)" if others else ""
    how = "ended for an unknown reason" if code is None else decode(code)
    return f"rank {rank}{where} failed first{after}: {how}"


def _code_of(rank: int, outcome: Outcome) -> int | None:
    """Returns a rank's exit code: as it was seen, or what the launcher reported, which is the first failure's."""
    seen = next((death.code for death in outcome.deaths if death.rank == rank), None)
    is_consequence = seen is not None and signal_of(seen) is not None and outcome.reported is not None
    if seen is None or (is_consequence and _is_traceback_first(rank, outcome.deaths)):
        return outcome.reported[1] if outcome.reported is not None else seen
    return seen


def _is_traceback_first(rank: int, deaths: tuple[Death, ...]) -> bool:
    """Returns whether another rank died before this one, which failed first by its traceback."""
    return bool(deaths) and deaths[0].rank != rank


def _evidence(rank: int, outcome: Outcome, texts: Mapping[int, str]) -> list[str]:
    text = texts.get(rank, "")
    traceback = traceback_of(text)
    if traceback is not None:
        lines = traceback.split("\n")
        return lines if len(lines) <= _SHOWN_LINES else ["…", *lines[-_SHOWN_LINES:]]
    return _last_lines(text) or ["Its log is empty."]


def _last_lines(text: str) -> list[str]:
    lines = [line.rpartition("\r")[2] for line in text.rstrip().split("\n")]
    return [line for line in lines if line.strip()][-_SHOWN_LINES:]


def _launcher_sentence(outcome: Outcome, *, started: bool) -> str:
    if outcome.code == 0:
        return "the launcher ended without reporting that every rank finished; it was probably killed"
    if outcome.reported is not None:
        host, code = outcome.reported
        return f"a rank{f' on {host}' if host else ''} failed: {decode(code)}"
    when = "" if started else " before any rank started"
    return f"the launcher failed{when}: {decode(outcome.code)}"


def _resumed(run_dir: RunDir, command: Sequence[str]) -> str:
    """Returns how to start again from the newest checkpoint."""
    newest = run_dir.newest_checkpoint(for_resume=True)
    if newest.folder:
        return f"`{resumed(command)}` continues from step {newest.step}."
    if run_dir.whole_checkpoints():
        return "Its checkpoints hold the weights alone (save_only_model): set another output_dir to start over."
    return f"No complete checkpoint exists yet: `{line_of(command)}` starts over."


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return float("inf")
