"""What each rank of a measurement does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dstrain.train.network_benchmark import GPU_SIZES, Place, let_nccl_tell, ways_taken
from dstrain.train.rank import Rank


@pytest.mark.parametrize(("index", "host", "local"), [(0, 0, 0), (1, 0, 1), (2, 1, 0), (4, 1, 2), (5, 2, 0)])
def test_a_rank_knows_its_host_and_its_number_there(index: int, host: int, local: int) -> None:
    place = Place(rank=Rank(index=index, world_size=6, local_index=0), slots=(2, 3, 1))
    assert (place.host, place.local) == (host, local)


def test_sizes_reach_from_latency_to_bandwidth() -> None:
    assert (GPU_SIZES[0], GPU_SIZES[-1]) == (64 * 2**10, 256 * 2**20)


@pytest.mark.parametrize("before", [{}, {"NCCL_DEBUG": "WARN"}])
def test_nccl_writes_down_its_ways_into_a_file_that_is_removed(before: dict[str, str]) -> None:
    environment = dict(before)
    let_nccl_tell(environment)
    assert environment["NCCL_DEBUG"] == "INFO"
    path = Path(environment["NCCL_DEBUG_FILE"])
    path.write_text("h [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0\n")
    assert ways_taken(environment) == ["NET/Socket"]
    assert not path.exists()
    assert ways_taken(environment) == []


def test_a_log_of_nccl_that_the_user_wants_is_left_to_him(tmp_path: Path) -> None:
    environment = {"NCCL_DEBUG": "info", "NCCL_DEBUG_FILE": str(tmp_path / "nccl.log")}
    (tmp_path / "nccl.log").write_text("via NET/IB/0")
    let_nccl_tell(environment)
    assert ways_taken(environment) == []
    assert (tmp_path / "nccl.log").exists()
    assert environment["NCCL_DEBUG_FILE"] == str(tmp_path / "nccl.log")


def test_nothing_of_nccl_is_read_where_there_is_none() -> None:
    assert ways_taken(os.environ) == []
