"""The workload of a plan: the model, the machines, and what was measured on machines like them."""

from __future__ import annotations

from dataclasses import dataclass, field

from dstrain.facts.cluster.calibration import Calibration, Measured
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.model.model_facts import ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, and the machines that train it."""

    model: ModelFacts
    cluster: Cluster
    calibration: Calibration = field(default_factory=Calibration)
    """Measurements that replace the planner's priors; empty by default."""

    @property
    def measured(self) -> Measured:
        """The measurements of the cluster's GPU."""
        return self.calibration.of(self.cluster.gpu.name)
