"""Expert parallelism's corrections of DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from deepspeed.runtime.zero.partitioned_param_coordinator import (  # type: ignore[import-untyped]
    PartitionedParameterCoordinator,
)

from dstrain.train.parts.expert_parallel import gather_in_one_order

GATHER = "_PartitionedParameterCoordinator__all_gather_params"


@dataclass(frozen=True)
class Parameter:
    """One of ZeRO-3's, as far as a coordinator that gathers it is concerned."""

    ds_id: int

    def __hash__(self) -> int:
        return -self.ds_id


def test_parameters_are_gathered_by_their_ids_whatever_the_order_of_the_set(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[list[int]] = []

    def gather(_: object, params: list[Parameter], forward: bool) -> None:
        assert forward
        gathered.append([param.ds_id for param in params])

    monkeypatch.setattr(PartitionedParameterCoordinator, GATHER, gather)
    gather_in_one_order()
    gather_in_one_order()
    params = {Parameter(number) for number in (3, 1, 2, 7)}
    getattr(PartitionedParameterCoordinator, GATHER)(None, params, True)
    assert [param.ds_id for param in params] != [1, 2, 3, 7]
    assert gathered == [[1, 2, 3, 7]]
