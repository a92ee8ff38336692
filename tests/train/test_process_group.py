"""How ranks of a run meet."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.distributed_c10d import Store

from dstrain.facts.network import is_free
from dstrain.heartbeat import MARK, mark_on
from dstrain.train.setup import PortTaken, meet
from tests.train.launching import free_port


def test_a_rank_that_meets_the_first_of_another_run_says_so_and_leaves_that_run_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port := free_port()))

    def meets(rank: int) -> tuple[Store, int, int]:
        return next(meet(f"dstrain://?rank={rank}&world_size=2"))

    with ThreadPoolExecutor(1) as other:
        monkeypatch.setenv(MARK, mark_on("first", 0))
        first = other.submit(meets, 0)
        while is_free(port):
            time.sleep(0.01)
        monkeypatch.setenv(MARK, mark_on("second", 0))
        with pytest.raises(PortTaken, match=f"another run uses 127.0.0.1, port {port}"):
            meets(1)
        monkeypatch.setenv(MARK, mark_on("first", 1))
        store, rank, world_size = meets(1)
        assert (rank, world_size) == (1, 2)
        first.result()[0].set("key", "of rank 0")
        assert store.get("key") == b"of rank 0"
