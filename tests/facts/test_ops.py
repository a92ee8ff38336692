"""DeepSpeed's extensions: what is needed, what is built, and locks of killed builds."""

from pathlib import Path
from typing import Any

import pytest

from dstrain.facts.ops import missing_ops, needed_ops, stale_locks


def test_an_offloaded_optimizer_needs_cpu_adam() -> None:
    zero = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert needed_ops(zero, on_gpu=True) == ["cpu_adam"]


def test_nvme_needs_async_io() -> None:
    zero = {"zero_optimization": {"offload_param": {"device": "nvme"}}}
    assert needed_ops(zero, on_gpu=True) == ["async_io"]


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": 3},
        {"zero_optimization": {"offload_optimizer": "cpu", "offload_param": [1]}},
        {"optimizer": "AdamW"},
        {"optimizer": {"type": None}},
    ],
)
def test_an_odd_shape_needs_nothing(config: dict[str, Any]) -> None:
    assert needed_ops(config, on_gpu=True) == []


def test_a_built_extension_is_not_missing(tmp_path: Path) -> None:
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    assert missing_ops(["cpu_adam", "async_io"], {"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == ["async_io"]


def test_a_lock_is_stale_only_when_no_process_holds_it(tmp_path: Path) -> None:
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    with lock.open("w"):
        assert stale_locks(["cpu_adam"], {"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == []
    assert stale_locks(["cpu_adam"], {"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == [lock]
