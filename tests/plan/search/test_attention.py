"""What a better attention kernel would bring, said beside a plan with the one that every machine has."""

from __future__ import annotations

from typing import Any

import pytest
from cases import plan

from dstrain.choices import Attention

pytestmark = pytest.mark.commands


def notes(**asked: Any) -> list[str]:
    found = plan(**({"model": "qwen3-8b", "gpus": 8, "seq_len": 32768} | asked))
    assert found.chosen.configuration.kernels.attn is (asked.get("attn") or Attention.SDPA).planned
    return [note for note in found.notes if "planned with sdpa" in note]


@pytest.mark.parametrize("attn", [None, Attention.AUTO])
def test_a_plan_names_the_kernel_that_would_be_faster(attn: Attention | None) -> None:
    (note,) = notes(gpu="h100", attn=attn)
    assert note == "planned with sdpa, which all machines have; a step with flash_attention_3 takes 18 % less time"


@pytest.mark.parametrize("asked", [{"gpu": "a100"}, {"gpu": "h100", "attn": Attention.SDPA}])
def test_nothing_is_said_where_no_kernel_is_faster_or_one_is_named(asked: dict[str, Any]) -> None:
    assert notes(**asked) == []
