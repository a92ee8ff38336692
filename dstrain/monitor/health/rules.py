"""All rules of a healthy run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dstrain.job.monitor import HealthRule
from dstrain.monitor.health.learning_rules import LEARNING_RULES
from dstrain.monitor.health.memory_rules import MEMORY_RULES
from dstrain.monitor.health.rule import Rule
from dstrain.monitor.health.speed_rules import SPEED_RULES

RULES: Mapping[HealthRule, Rule] = MappingProxyType({**LEARNING_RULES, **SPEED_RULES, **MEMORY_RULES})
