"""Priors: that every GPU has them, and what a calibration puts in their place."""

from __future__ import annotations

from dataclasses import fields

import pytest

from dstrain.facts.cluster.calibration import Measured
from dstrain.facts.cluster.cluster import Cluster
from dstrain.plan.speed.efficiency import HOST_COPY_RATIO, PCIE_LINK_RATIO, efficiency
from tests.plan.machines import cluster


def _cluster(gpu: str = "h100-sxm", inter: str = "ib400") -> Cluster:
    return cluster(16, gpu, inter, gpus_per_node=8)


@pytest.mark.parametrize(("gpu", "ratio"), [("rtx-3090", HOST_COPY_RATIO), ("rtx-a6000", PCIE_LINK_RATIO)])
def test_geforce_cards_reach_each_other_through_host_ram_alone(gpu: str, ratio: float) -> None:
    assert efficiency(_cluster(gpu)).intra_bus_bytes_per_s == ratio * 31.5e9


def test_nothing_is_calibrated_without_a_file() -> None:
    assert efficiency(_cluster()).calibrated == frozenset()


def test_every_rate_that_was_measured_replaces_its_prior() -> None:
    measured = Measured(
        gemm_ratio=0.5, attention_ratio=0.25, hbm_ratio=0.5, launch_s=5e-6, intra_bus_bytes_per_s=1e11,
        inter_bus_bytes_per_s=2e11, overlap_slowdown_ratio=0.1, pcie_bytes_per_s=2e10, cpu_adam_bytes_per_s=1e11,
        nvme_read_bytes_per_s=2e10, nvme_write_bytes_per_s=1e10,
    )  # fmt: skip

    rates = efficiency(_cluster(), measured)

    assert (rates.gemm_ratio, rates.attention_ratio, rates.launch_s, rates.overlap_slowdown) == (0.5, 0.25, 5e-6, 0.1)
    assert (rates.intra_bus_bytes_per_s, rates.pcie_bytes_per_s, rates.cpu_adam_bytes_per_s) == (1e11, 2e10, 1e11)
    assert (rates.nvme_read_bytes_per_s, rates.nvme_write_bytes_per_s) == (2e10, 1e10)
    assert rates.hbm_bytes_per_s == 0.5 * 3.35e12
    assert rates.inter_bus_bytes_per_s == 2e11 / 8  # measured with eight GPUs of each node
    assert {field.name for field in fields(Measured) if getattr(measured, field.name)} == rates.calibrated


@pytest.mark.parametrize(("link", "is_ethernet"), [("ib400", False), ("roce100", False), ("eth25/8", True)])
def test_ethernet_is_what_has_no_rdma(link: str, is_ethernet: bool) -> None:
    assert efficiency(_cluster(inter=link)).is_ethernet is is_ethernet
