"""What is said of a choice, and what a GPU cannot do."""

import pytest
from cases import plan

from dstrain.choices import Attention, Precision
from dstrain.errors import InvalidConfig


@pytest.mark.parametrize("gpu", ["v100-32g", "t4"])
def test_before_ampere_fp16_is_chosen_and_said(gpu: str) -> None:
    found = plan(model="qwen3-0.6b", gpus=1, gpu=gpu, seq_len=1024)
    assert found.chosen.configuration.precision is Precision.FP16
    assert found.chosen.configuration.attn is Attention.SDPA
    assert any("neither bf16 nor FlashAttention-2" in note for note in found.notes)


def test_bf16_on_a_v100_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="no bf16"):
        plan(model="qwen3-0.6b", gpus=1, gpu="v100-32g", precision="bf16")


def test_qlora_says_what_to_install() -> None:
    assert any("dstrain[qlora]" in note for note in plan(model="qwen3-8b", gpus=1, method="qlora").notes)


def test_a_vision_tower_is_said_to_be_frozen() -> None:
    assert any("is frozen" in note for note in plan(model="qwen3-vl-8b", gpus=8).notes)


def test_reasons_carry_the_batch_identity() -> None:
    assert any("= 64 samples a step" in reason for reason in plan(model="qwen3-8b", gpus=8).reasons)


def test_a_cpu_trains_in_fp32() -> None:
    assert (
        plan(model="qwen3-0.6b", gpus=2, gpu="cpu", seq_len=512, host_memory=2**38).chosen.configuration.precision
        is Precision.FP32
    )
