"""The chunked and the fused loss."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from deepspeed.runtime import chunked_cross_entropy
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.loss.loss_utils import ForCausalLMLoss

from dstrain.choices import LossKernel
from dstrain.errors import InvalidConfig
from dstrain.job.model_changes import Lora
from dstrain.train import loss as losses
from dstrain.train.adapters import with_adapter
from dstrain.train.data.collate import shift
from dstrain.train.data.rendering import IGNORED
from dstrain.train.loss import chunked_loss, is_that_of_logits, loss_of, replace_loss, sums_of
from tests.train.tiny import VISION_IDS, experts, sizes

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

TEXT = sizes(layers=1, kv_heads=1, vocab_size=64)
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32}


def qwen3() -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**TEXT))


def qwen2_5_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "fullatt_block_indexes": [0]}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=TEXT | {"rope_parameters": rope}, vision_config=vision, **VISION_IDS)
    )


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("num_items", [None, 5, torch.tensor(5)])
def test_the_chunked_loss_is_transformers_own(num_items: Any, shifted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_cross_entropy, "_BLOCK_ELEMENTS", 3 * 64)  # three rows of the vocabulary at a time
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 8, 64), torch.randint(0, 64, (2, 8))
    labels[0, :4] = IGNORED
    targets: dict[str, Any] = {"shift_labels": labels} if shifted else {}
    values = []
    for function in (ForCausalLMLoss, chunked_loss):
        given = logits.clone().requires_grad_()
        loss = function(given, labels, 64, num_items_in_batch=num_items, **targets)
        loss.backward()
        values.append((loss.detach(), given.grad))
    (expected, gradient), (loss, given_gradient) = values
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(given_gradient, gradient, rtol=1e-5, atol=1e-7)


def test_a_model_computes_its_loss_in_chunks() -> None:
    model, tokens = qwen3(), torch.arange(12).unsqueeze(0)
    whole = model(input_ids=tokens, labels=tokens).loss
    replace_loss(model, LossKernel.CHUNKED)
    loss = model(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=1e-6)
    (total, _), _ = loss.grad_fn.next_functions
    assert "ChunkedCrossEntropy" in str(total.next_functions)


def tied() -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**TEXT, tie_word_embeddings=True))


def qwen3_moe() -> Any:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TEXT, **experts(4), output_router_logits=True))


def with_lora() -> Any:
    return with_adapter(qwen3(), Lora(rank=2), grad_ckpt=False, dtype=torch.float32)


@pytest.mark.parametrize("make", [qwen3, qwen3_moe, qwen2_5_vl, tied, with_lora])
@pytest.mark.parametrize("num_items", [None, torch.tensor(5)])
@pytest.mark.parametrize("shifted", [False, True])
def test_the_fused_loss_is_transformers_own(
    make: Any, num_items: Any, shifted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "LOGITS_PER_TILE", 5 * 64)  # 24 tokens are five tiles, the last one of four
    torch.manual_seed(0)
    model, tokens = make(), torch.randint(10, 60, (2, 12))
    labels = tokens.masked_fill(torch.arange(12) < 4, IGNORED)
    inputs = {"input_ids": tokens, "labels": labels, **({"shift_labels": shift(labels)} if shifted else {})}
    values = []
    for loss in (None, LossKernel.FUSED):
        if loss:
            replace_loss(model, loss)
        model.zero_grad()
        result = model(**inputs, num_items_in_batch=num_items)
        (3 * result.loss).backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        values.append((result.loss.detach(), gradients))
    (expected, theirs), (loss_of_ours, ours) = values
    assert result.logits.numel() == 1  # there were no others
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(loss_of_ours, expected, rtol=1e-6, atol=1e-6)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6)


def test_a_fused_model_without_targets_has_its_logits() -> None:
    model, tokens = qwen3(), torch.arange(12).unsqueeze(0)
    whole = model(input_ids=tokens).logits
    replace_loss(model, LossKernel.FUSED)
    with torch.no_grad():
        assert model(input_ids=tokens, labels=tokens).loss > 0
    torch.testing.assert_close(model(input_ids=tokens).logits, whole)
    assert "num_items_in_batch" not in inspect.signature(model.forward).parameters
    assert "labels" in inspect.signature(model.forward).parameters


def test_the_fused_loss_is_cast_as_other_layers_are() -> None:
    model, tokens = qwen3(), torch.randint(0, 64, (2, 12))
    values = []
    for loss in (None, LossKernel.FUSED):
        if loss:
            replace_loss(model, loss)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            result = model(input_ids=tokens, labels=tokens).loss
        result.backward()
        values.append((result.detach(), model.lm_head.weight.grad))
    for theirs, ours in zip(*values, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


def test_an_evaluation_makes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, asked = qwen3(), torch.arange(12).unsqueeze(0), []

    def tile(*tensors: torch.Tensor, differentiates: bool) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(differentiates)
        return made(*tensors, differentiates=differentiates)

    made = losses._tile
    monkeypatch.setattr(losses, "_tile", tile)
    replace_loss(model, LossKernel.FUSED)
    with torch.no_grad():
        model(input_ids=tokens, labels=tokens)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert asked == [False, True]


def test_only_tokens_with_a_target_have_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, asked = qwen3(), torch.arange(24).reshape(2, 12), []

    def tile(hidden: torch.Tensor, *tensors: torch.Tensor, differentiates: bool) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(len(hidden))
        return made(hidden, *tensors, differentiates=differentiates)

    made = losses._tile
    monkeypatch.setattr(losses, "_tile", tile)
    replace_loss(model, LossKernel.FUSED)
    model(input_ids=tokens, labels=tokens.masked_fill(torch.arange(12) < 9, IGNORED)).loss.backward()
    assert asked == [2 * 3]
    assert model(input_ids=tokens, labels=torch.full_like(tokens, IGNORED), num_items_in_batch=1).loss == 0
    assert asked == [2 * 3]


@pytest.mark.parametrize("make", [qwen3, qwen3_moe, with_lora])
def test_the_fused_loss_knows_the_sums_of_a_micro_batch(make: Any) -> None:
    model, tokens = make().eval(), torch.arange(12).unsqueeze(0)
    inputs = {"input_ids": tokens, "labels": tokens}
    expected = loss_of(model(input_ids=tokens).logits, shift(tokens))
    replace_loss(model, LossKernel.FUSED)
    torch.testing.assert_close(sums_of(model, inputs), expected, rtol=1e-6, atol=1e-6)
    assert is_that_of_logits(model, inputs)


@pytest.mark.parametrize("loss", [LossKernel.CHUNKED, LossKernel.FUSED])
def test_a_model_with_its_own_code_is_refused(loss: LossKernel) -> None:
    class Own(torch.nn.Module):
        pass

    with pytest.raises(InvalidConfig, match=f"loss: {loss} needs a model of Transformers"):
        replace_loss(Own(), loss)


def granite() -> Any:
    return GraniteForCausalLM(GraniteConfig(**TEXT, logits_scaling=8.0))


def with_adapted_head() -> Any:
    return with_adapter(qwen3(), Lora(targets=("lm_head", "q_proj")), grad_ckpt=False, dtype=torch.float32)


@pytest.mark.parametrize(("make", "problem"), [(granite, "logits_scaling"), (with_adapted_head, "bias or adapter")])
def test_a_head_that_does_not_make_the_logits_alone_is_refused(make: Any, problem: str) -> None:
    with pytest.raises(InvalidConfig, match=problem):
        replace_loss(make(), LossKernel.FUSED)


def test_a_model_that_changes_its_logits_unforeseen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_AFTER_THE_HEAD", ())
    model, tokens = granite(), torch.arange(12).unsqueeze(0)
    replace_loss(model, LossKernel.FUSED)
    assert not is_that_of_logits(model, {"input_ids": tokens, "labels": tokens})
