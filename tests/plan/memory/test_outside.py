"""Memory outside of PyTorch: by GPU, by communicator, and as measured."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.published.pytorch.sharding import with_states
from benchmarks.published.training_code import StateDtypes
from dstrain.facts.cluster import gpus
from dstrain.facts.cluster.calibration import Measured
from dstrain.plan.configuration import DEFAULTS, changed
from dstrain.plan.memory.outside import context_bytes, nccl_bytes, outside_bytes
from dstrain.units import MIB
from tests.plan.machines import cluster


def _nccl(num_gpus: int, gpu: str = "h100-sxm", **changes: Any) -> int:
    return nccl_bytes(cluster(num_gpus, gpu), changed(DEFAULTS, zero_stage=3, **changes)) // MIB


def test_a_context_on_hopper_is_that_of_an_h200_that_trained() -> None:
    assert context_bytes(gpus.gpu("h200")) == pytest.approx(1763 * MIB, rel=0.001)


def test_more_resident_threads_need_more_stack() -> None:
    sizes = [context_bytes(gpus.gpu(name)) for name in ("t4", "rtx-3090", "v100-32g", "a100-80g", "b200")]

    assert sizes == sorted(sizes)


def test_one_gpu_has_no_communicator() -> None:
    assert _nccl(1) == 0


def test_pytorch_alone_has_one_communicator_and_deepspeed_another_ones_tree() -> None:
    assert _nccl(8, code=with_states(DEFAULTS.code, StateDtypes.AUTOCAST)) == 24 * 2 * 12
    assert _nccl(8) == 24 * 3 * 12


def test_more_nodes_need_more_connections_but_not_the_more_there_are() -> None:
    assert _nccl(8) < _nccl(16) == _nccl(64)


def test_every_group_has_a_communicator_and_an_all_to_all_joins_all_pairs() -> None:
    """nccl#1685: 3.3 GB for the first all-to-all of eight H100, at most 7 × 32 connections."""
    assert _nccl(16, hpz=8) - _nccl(16) == 24 * 3 * 12
    assert _nccl(8, sp=8) - _nccl(8) == 24 * 2 * 12 + 7 * 32 * 12
    assert _nccl(16, sp=16) - _nccl(16) == 24 * 3 * 12 + 7 * 32 * 12 + 512


@pytest.mark.parametrize("gpu", ["rtx-4090", "a100-80g-pcie"])
def test_pcie_has_few_channels(gpu: str) -> None:
    assert _nccl(8, gpu) == 4 * 3 * 12


def test_what_was_measured_takes_the_place_of_both() -> None:
    measured = Measured(context_bytes=100, nccl_bytes=10)
    configuration = changed(DEFAULTS, zero_stage=2)

    assert outside_bytes(cluster(8), configuration, measured) == 110
    assert outside_bytes(cluster(1), configuration, measured) == 100
