"""The chunked loss, and which losses take shifted targets and the token count of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime import chunked_cross_entropy
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.loss.loss_utils import ForCausalLMLoss

from dstrain.errors import InvalidConfig
from dstrain.train.data.tokenize import IGNORED
from dstrain.train.loss import chunked_loss, compute_in_chunks, takes_targets

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
}
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32}
TOKENS: dict[str, Any] = {
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}


def qwen3() -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**TEXT))


def qwen2_5_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "fullatt_block_indexes": [0]}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=TEXT | {"rope_parameters": rope}, vision_config=vision, **TOKENS)
    )


class OwnLoss(Qwen3ForCausalLM):
    """A model of someone who computes a mean."""

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any, **_: Any) -> Any:
        outputs = super().forward(input_ids=input_ids, attention_mask=attention_mask)
        assert outputs.logits is not None
        outputs.loss = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return outputs


class FewArguments(Qwen3ForCausalLM):
    """A model that takes nothing more than it names."""

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any) -> Any:
        return super().forward(input_ids=input_ids, labels=labels, attention_mask=attention_mask)


def own_loss() -> Any:
    return OwnLoss(Qwen3Config(**TEXT))


def few_arguments() -> Any:
    return FewArguments(Qwen3Config(**TEXT))


@pytest.mark.parametrize(
    ("make", "takes"), [(qwen3, True), (qwen2_5_vl, True), (own_loss, False), (few_arguments, False)]
)
def test_a_loss_that_takes_them_is_known_by_what_it_computes(make: Any, takes: bool) -> None:
    torch.manual_seed(0)
    model = make().train()
    ids = torch.randint(10, 60, (2, 16))
    state = torch.get_rng_state()
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    assert takes_targets(model, inputs) is takes
    assert model.training
    assert state.equal(torch.get_rng_state())


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("num_items", [None, 5, torch.tensor(5)])
def test_the_chunked_loss_is_transformers_own(num_items: Any, shifted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_cross_entropy, "_BLOCK_ELEMENTS", 3 * 64)  # three rows of the vocabulary at a time
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 8, 64), torch.randint(0, 64, (2, 8))
    labels[0, :4] = IGNORED
    targets: dict[str, Any] = {"shift_labels": labels} if shifted else {}
    values = []
    for loss_of in (ForCausalLMLoss, chunked_loss):
        given = logits.clone().requires_grad_()
        loss = loss_of(given, labels, 64, num_items_in_batch=num_items, **targets)
        loss.backward()
        values.append((loss.detach(), given.grad))
    (expected, gradient), (loss, given_gradient) = values
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(given_gradient, gradient, rtol=1e-5, atol=1e-7)


def test_a_model_computes_its_loss_in_chunks() -> None:
    model, tokens = qwen3(), torch.arange(12).unsqueeze(0)
    whole = model(input_ids=tokens, labels=tokens).loss
    compute_in_chunks(model)
    loss = model(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=1e-6)
    (total, _), _ = loss.grad_fn.next_functions
    assert "ChunkedCrossEntropy" in str(total.next_functions)


def test_a_model_with_its_own_code_is_refused() -> None:
    class Own(torch.nn.Module):
        pass

    with pytest.raises(InvalidConfig, match="needs a model of Transformers"):
        compute_in_chunks(Own())
