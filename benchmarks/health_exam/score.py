"""Replays recorded runs through the health rules, and scores what they say (pure, apart from reading the files)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.health_exam.traces import LATE, Trace
from dstrain.monitor.health.history import Facts
from dstrain.monitor.health.nonfinite import Finding, check
from dstrain.monitor.health.rules import Watch
from dstrain.monitor.metrics import current_steps, read_jsonl

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "health_traces"
FACTS = Facts(vocab_size=2048, max_grad_norm=5.0)
"""Of the runs."""
WITHIN = 3
"""Windows from the onset within which a cause is to be named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Warnings of the rules on a trace."""

    trace: Trace
    steps: int
    findings: tuple[Finding, ...]
    ends: tuple[int, ...]
    """The last step of each window."""

    def delay(self, finding: Finding) -> int:
        """Returns the windows from the onset to a finding; 1: the first window that has the cause."""
        return sum(self.trace.onset <= end <= finding.step for end in self.ends)

    @property
    def named(self) -> Finding | None:
        """The first finding that names the cause."""
        cause = self.trace.cause
        if cause is None:
            return None
        return next((one for one in self.findings if one.step >= self.trace.onset and one.rule in cause.named_by), None)

    @property
    def false(self) -> tuple[Finding, ...]:
        """Findings that are not true of the run: those before the onset, and those of rules that the cause does not
        break.
        """
        cause = self.trace.cause
        true = cause.named_by | cause.follows if cause is not None else frozenset[str]()
        return tuple(one for one in self.findings if one.rule not in true or one.step < self.trace.onset)


def replay(trace: Trace, folder: Path = FOLDER) -> Result:
    """Returns the warnings on a recorded run; each new break of a rule counts."""
    records = read_jsonl(folder / f"{trace.name}.jsonl")
    clock = partial(next, count(step=1000.0))
    facts = replace(FACTS, max_grad_norm=trace.job.get("max_grad_norm", FACTS.max_grad_norm))
    watch = Watch({}, facts, clock=clock)
    findings, ends = [], []
    for index, record in enumerate(records):
        if record.get("event") == "resume":
            watch = Watch({}, facts, clock=clock)
            watch.history.resume(current_steps(records[:index]), step=record["from_step"])
            continue
        values = {name: value for name, value in _with_nonfinite(record).items() if name != "step"}
        findings += [*check(record["step"], values), *watch.see(record["step"], values)]
        if "loss" in values and record["step"] not in ends:
            ends.append(record["step"])
    return Result(trace=trace, steps=max(ends), findings=_once(findings), ends=tuple(sorted(ends)))


def _once(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Leaves out values that are not finite again in the next window, which are not printed again either."""
    told: set[str] = set()
    kept = []
    for finding in findings:
        if finding.rule.startswith("nonfinite") and finding.rule in told:
            continue
        told.add(finding.rule)
        kept.append(finding)
    return tuple(kept)


def _with_nonfinite(record: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in record.items() if value is not None and not name.endswith("_nonfinite")}
    return values | {
        name.removesuffix("_nonfinite"): float(value) for name, value in record.items() if name.endswith("_nonfinite")
    }


def false_per_1000(results: Sequence[Result]) -> float:
    """Returns the false warnings in 1,000 steps."""
    return 1000 * sum(len(result.false) for result in results) / sum(result.steps for result in results)


def cause_table(results: Sequence[Result]) -> str:
    """Returns a row for each cause: which rule named it, and after how many windows."""
    rows = ["| cause | runs | named by | windows |", "|---|---:|---|---|"]
    by_cause: dict[str, list[Result]] = {}
    for result in results:
        if result.trace.cause is not None:
            by_cause.setdefault(result.trace.cause.name, []).append(result)
    for name, group in by_cause.items():
        named = [result.named for result in group]
        rules = sorted({f"`{one.rule}`" for one in named if one is not None})
        delays = ["never" if one is None else str(result.delay(one)) for result, one in zip(group, named, strict=True)]
        cause = group[0].trace.cause
        late = f" (waits for {LATE[name]})" if name in LATE else ""
        late += f" (grows over {cause.grows_over} steps)" if cause is not None and cause.grows_over else ""
        rows.append(f"| {name} | {len(group)} | {', '.join(rules)} | {', '.join(delays)}{late} |")
    return "\n".join(rows)


def rule_table(results: Sequence[Result]) -> str:
    """Returns precision and recall of each rule that must name a cause, or that said something."""
    rows = ["| rule | must name | named | precision | false |", "|---|---:|---:|---:|---:|"]
    for rule in sorted(set(_rules(results))):
        must = [result for result in results if result.trace.cause is not None and rule in result.trace.cause.named_by]
        named = [result for result in must if any(one.rule == rule for one in _true(result))]
        true = sum(one.rule == rule for result in results for one in _true(result))
        false = sum(one.rule == rule for result in results for one in result.false)
        precision = f"{true / (true + false):.0%}".replace("%", " %") if true + false else ""
        rows.append(f"| `{rule}` | {len(must) or ''} | {len(named) if must else ''} | {precision} | {false or ''} |")
    return "\n".join(rows)


def _true(result: Result) -> list[Finding]:
    return [one for one in result.findings if one not in result.false]


def _rules(results: Sequence[Result]) -> Iterator[str]:
    for result in results:
        yield from (finding.rule for finding in result.findings)
        yield from result.trace.cause.named_by if result.trace.cause is not None else ()
