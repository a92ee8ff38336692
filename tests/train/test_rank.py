"""What a rank knows before PyTorch is imported."""

from __future__ import annotations

import pytest

from dstrain.train.rank import prefer_expandable_segments


def test_the_allocator_may_grow_its_segments() -> None:
    environment: dict[str, str] = {}
    prefer_expandable_segments(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_own_allocator_settings_stay(name: str) -> None:
    environment = {name: "max_split_size_mb:64"}
    prefer_expandable_segments(environment)
    assert environment == {name: "max_split_size_mb:64"}
