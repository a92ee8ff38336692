"""Builds model inputs without data: tokens, masks and positions."""

from __future__ import annotations

from typing import Any

import torch

from dstrain.choices import Attention
from dstrain.facts.model.trace_records import Question
from dstrain.train.tracing import images


def make_inputs(question: Question, model: Any) -> dict[str, Any]:
    """Returns the arguments of the model's forward pass. Call it under the tracker, so that they are counted.

    A mask of ones is left out, as Transformers drops it before the first layer.
    """
    shape = (question.micro_batch, question.seq_len)
    inputs: dict[str, Any] = {
        "input_ids": images.whole_numbers(shape),
        "labels": images.whole_numbers(shape),
    }
    if question.is_packed:
        inputs["position_ids"] = images.whole_numbers(shape)
        if question.attn in (Attention.FLASH_ATTENTION_2, Attention.SDPA):
            inputs |= _borders(question)
    elif question.has_padding:
        inputs["attention_mask"] = images.whole_numbers(shape)
    if question.image_patches:
        inputs |= images.inputs(question, model)
    return inputs


def _borders(question: Question) -> dict[str, Any]:
    """Returns the borders of packed samples as `train.data.collate` gives them to flash attention; one sample a row."""
    borders = torch.empty(question.micro_batch + 1, dtype=torch.int32, device="meta")
    length = question.seq_len
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": length, "max_length_k": length}
