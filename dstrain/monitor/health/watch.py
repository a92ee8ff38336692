"""Watches a run: rules over its windows, each trouble told once (pure, with a clock that tests give)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from dstrain.job.monitor import HealthAction, HealthLimits, HealthRule
from dstrain.monitor.health.history import Facts, History
from dstrain.monitor.health.nonfinite import Finding
from dstrain.monitor.health.rules import RULES, Rule

_QUIET_S = 600.0
"""Seconds between two messages of a rule, unless it gets worse than what was told."""
_LEAVES_AT = 0.8
"""Share of the way from normal to a limit below which a rule is no longer broken: a signal around it is told once."""


class Level(IntEnum):
    """How bad it is."""

    FINE = 0
    WARNING = 1
    CRITICAL = 2


@dataclass(slots=True)
class _State:
    level: Level = Level.FINE
    told: float = float("-inf")
    """When the last message was."""
    told_level: Level = Level.FINE


@dataclass(slots=True)
class Watch:
    """The rules of one run."""

    limits: Mapping[HealthRule, HealthLimits]
    """Of the job: rules that are disabled or have other limits."""
    facts: Facts
    clock: Callable[[], float] = time.monotonic
    """Returns seconds."""
    history: History = field(init=False)
    _states: dict[HealthRule, _State] = field(init=False)

    def __post_init__(self) -> None:
        """Begins with an empty history."""
        self.history = History(self.facts)
        self._states = {name: _State() for name in RULES if self._limits(name).enabled}

    def see(self, step: int, values: Mapping[str, Any]) -> list[Finding]:
        """Returns what is to be told after a logged window or an evaluation."""
        self.history.add({**values, "step": step})
        found = (self._judge(name, RULES[name], state, step) for name, state in self._states.items())
        return [finding for finding in found if finding is not None]

    def _limits(self, name: HealthRule) -> HealthLimits:
        return self.limits.get(name, HealthLimits())

    def _judge(self, name: HealthRule, rule: Rule, state: _State, step: int) -> Finding | None:
        value = rule.signal(self.history)
        if value is None:
            return None
        asked = self._limits(name)
        warn = rule.warn if asked.warn is None else asked.warn
        critical = rule.critical if asked.critical is None else asked.critical
        level = _level(value, warn, critical, is_low=rule.is_low)
        if level is Level.FINE:
            if _has_left(value, warn, rule):
                state.level = Level.FINE
            return None
        is_worse, state.level = level > state.level, max(level, state.level)
        now = self.clock()
        if not is_worse or (level <= state.told_level and now - state.told < _QUIET_S):
            return None
        state.told, state.told_level = now, level
        is_highest = level is Level.CRITICAL or critical is None
        rank = rule.rank(self.history) if rule.rank is not None else None
        outlook = rule.outlook(self.history, value) if rule.outlook is not None else ""
        problem = "; ".join(filter(None, (rule.problem.format(value=value, rank=rank), outlook)))
        return Finding(
            rule=name.value,
            step=step,
            value=f"{value:.6g}",
            message=f"step {step}: {problem}. {rule.advice}",
            severity=level.name.lower(),
            rank=rank,
            since=self.history.last_good_step if rule.harms_weights else None,
            action=asked.action if is_highest else HealthAction.TELL,
        )


def _level(value: float, warn: float, critical: float | None, *, is_low: bool) -> Level:
    def is_reached(limit: float) -> bool:
        return value <= limit if is_low else value >= limit

    if critical is not None and is_reached(critical):
        return Level.CRITICAL
    return Level.WARNING if is_reached(warn) else Level.FINE


def _has_left(value: float, warn: float, rule: Rule) -> bool:
    sign = -1 if rule.is_low else 1
    return sign * (value - rule.normal) < _LEAVES_AT * sign * (warn - rule.normal)
