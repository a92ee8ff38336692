"""A combination of choices that does not work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.plan.configuration import DEGREES, Configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A combination that is refused, has no effect, or has another effect than its options say."""

    name: str
    """Short name."""
    says: str
    """The rule, in words."""
    options: tuple[str, ...]
    """The fields of a request that the rule concerns."""
    breaks: Callable[[ModelFacts, Cluster, Configuration], bool]
    """Whether a configuration breaks it."""
    source: str
    """Where the limit is documented or implemented."""

    cure: str | None = None
    """What a job says instead, if its plain value is not the only way."""

    @property
    def is_of_parallelism(self) -> bool:
        """Whether it limits groups of ranks, whatever the stage of ZeRO."""
        return not set(DEGREES).isdisjoint(self.options) and "zero_stage" not in self.options


def adapts_experts(configuration: Configuration) -> bool:
    """Returns whether experts have adapters, which are added to their weights."""
    return not configuration.model.is_full and bool(configuration.model.lora.target_parameters)
