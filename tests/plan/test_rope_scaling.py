"""Positions beyond a model's own length: chosen, refused, and said."""

from __future__ import annotations

import pytest

from dstrain.choices import RopeType
from dstrain.errors import InvalidConfig
from dstrain.facts.probe import read_model
from dstrain.job.model_changes import RopeScaling
from dstrain.plan.rope_scaling import chosen, fault, notes


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b", "Qwen/Qwen3-8B-Base"])
@pytest.mark.parametrize(("seq_len", "factor"), [(65536, 2), (65537, 3), (131072, 4)])
def test_qwen3_gets_yarn_with_the_factor_of_its_model_card(name: str, seq_len: int, factor: int) -> None:
    scaling = chosen(read_model(name), None, seq_len)
    assert scaling == RopeScaling(rope_type=RopeType.YARN, factor=factor, original_max_position_embeddings=32768)
    said = notes(read_model(name), None, scaling)
    assert ("as Qwen documents it" in said[0], "short texts may get slightly worse" in said[1]) == (True, True)


@pytest.mark.parametrize(("name", "seq_len"), [("qwen3-8b", 40960), ("llama-3.1-8b", 131072)])
def test_within_its_own_length_a_model_is_left_alone(name: str, seq_len: int) -> None:
    assert chosen(read_model(name), None, seq_len) is None


@pytest.mark.parametrize(
    ("name", "seq_len", "hint"),
    [
        ("mistral-7b", 65536, "--seq-len 32768 or less, or add --rope-scaling yarn, .* (factor 2)."),
        ("qwen3-8b", 131073, "--seq-len 131072 or less, which YaRN was validated for, or add --rope-scaling yarn, .* "),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 262145, "--seq-len 262144 or less, or add --rope-scaling yarn"),
        ("llama-3.1-8b", 262144, "--seq-len 131072 or less.$"),
        ("phi-4", 32768, "--seq-len 16384 or less.$"),
    ],
)
def test_a_length_that_nobody_documents_is_refused_with_what_to_type(name: str, seq_len: int, hint: str) -> None:
    with pytest.raises(InvalidConfig, match=hint.replace("(", r"\(").replace(")", r"\)")):
        chosen(read_model(name), None, seq_len)


@pytest.mark.parametrize(
    ("name", "seq_len", "problem"),
    [
        ("qwen3-8b", 4096, "reaches --seq-len 4096 without it"),
        ("llama-3.1-8b", 262144, "already has rope_type llama3"),
        ("gemma-3-4b", 262144, "already has rope_type linear"),
        ("phi-4", 32768, "takes no rope_type but longrope"),
    ],
)
def test_a_type_that_a_model_cannot_have_or_does_not_need_is_refused(name: str, seq_len: int, problem: str) -> None:
    with pytest.raises(InvalidConfig, match=problem):
        chosen(read_model(name), RopeType.LINEAR, seq_len)


def test_a_factor_reaches_its_multiple_of_the_original_positions_and_no_more() -> None:
    scaling = RopeScaling(rope_type=RopeType.LINEAR, factor=1.5)
    assert fault(read_model("mistral-7b"), scaling, 49152) is None
    expected = "linear × 1.5 of 32768 positions reaches 49152 tokens, and seq_len is 49153"
    assert fault(read_model("mistral-7b"), scaling, 49153) == expected


def test_dynamic_scaling_says_that_the_order_matters() -> None:
    scaling = chosen(read_model("mistral-7b"), RopeType.DYNAMIC, 65536)
    assert scaling is not None
    assert "order of the samples" in notes(read_model("mistral-7b"), RopeType.DYNAMIC, scaling)[0]
