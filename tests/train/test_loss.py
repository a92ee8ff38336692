"""Which losses take shifted targets and the token count of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dstrain.train.loss import takes_targets

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
