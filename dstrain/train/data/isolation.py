"""Tests, before the first step, whether a model isolates the samples of a packed row, and what precedes padding."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers.masking_utils import create_masks_for_generate

from dstrain.errors import InvalidConfig
from dstrain.train.data.by_sample import attend_by_sample
from dstrain.train.data.collate import text_positions, without_adapter
from dstrain.train.data.packing import Row, row_of
from dstrain.train.loss import trial

_SEEN = "mixes the samples of a packed row"
_SEEN_PADDING = 0.05
"""Logits that a mask of padding moves by less, of their spread, are those of another kernel in bf16."""


def packed_masks(model: Any, position_ids: torch.Tensor) -> Any:
    """Returns masks that separate the samples of packed rows, for models that do not derive them from positions.

    `position_ids`: (batch, seq), or (4, batch, seq) with images. A family with several kinds of attention gets a dict
    with one mask per kind.
    """
    position_ids = text_positions(position_ids)
    shape_and_dtype = torch.empty((*position_ids.shape, 0), dtype=model.dtype, device=position_ids.device)
    return create_masks_for_generate(
        config=model.config,
        inputs_embeds=shape_and_dtype,
        attention_mask=None,
        past_key_values=None,
        position_ids=position_ids,
    )


def sees_padding(engine: Any, inputs: Mapping[str, Any], group: Any) -> bool:
    """Returns whether logits depend on the mask of the padding at the end of rows; those of causal models do not.

    All ranks run it together. `inputs`: a padded micro-batch, whose `attention_mask` is (batch, seq). `group`: a gloo
    group of all ranks; None with one.
    """
    others = {name: value for name, value in inputs.items() if name not in ("labels", "attention_mask")}
    mask = inputs["attention_mask"]
    with trial(engine):
        reference = _known(engine(**others, attention_mask=mask).logits, mask)
        try:
            logits = _known(engine(**others).logits, mask)
        except (TypeError, ValueError):
            return True
    return _moved(reference, logits, group) > _SEEN_PADDING


def _known(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the logits of the tokens that are no padding: (tokens, vocab)."""
    return logits[mask.bool()].double().nan_to_num()


def _moved(reference: torch.Tensor, other: torch.Tensor, group: Any) -> float:
    """Returns the difference of two logits relative to their spread, the largest of all ranks."""
    spread = (reference - reference.mean(dim=-1, keepdim=True)).norm().clamp_min(1e-30)
    moved = ((other - reference).norm() / spread).cpu()
    if group is not None:
        dist.all_reduce(moved, op=dist.ReduceOp.MAX, group=group)
    return float(moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Compares the second sample's logits in rows of three short samples; all ranks run it together.

    It consumes no random numbers, and each forward has the same ones.
    """

    model: Any
    """The model, with or without an adapter."""
    engine: Any
    """DeepSpeed's engine around the model."""
    inputs_of: Callable[[Row], dict[str, Any]]
    """Returns the engine's inputs for a row, as in training."""
    tokens: Any
    """Token ids of the data: (tokens,)."""
    whole: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits
    """Returns the logits of whole rows, if the engine has slices of them."""
    group: Any
    """A gloo group of all ranks; None with one."""

    def needs_masks(self) -> bool:
        """Returns whether packed rows need `packed_masks`; most models derive them from positions.

        Raises InvalidConfig for a model that mixes samples either way, or that does not support packed rows.
        """
        for has_masks in (False, True):
            if self._is_apart(has_masks):
                return has_masks
        raise self._refused(_SEEN)

    def works_by_sample(self) -> bool:
        """Returns whether attention works sample by sample, and lets it; else it is left as it is."""
        if not attend_by_sample(self.model):
            return False
        try:
            is_apart = self._is_apart(has_masks=False)
        except InvalidConfig:
            is_apart = False
        return attend_by_sample(self.model, is_on=is_apart) and is_apart

    def _is_apart(self, has_masks: bool) -> bool:
        """Returns whether the samples of a row do not see each other, in a step and in an evaluation."""
        was_training = self.engine.training
        self.engine.train()  # as in a step: kernels are others than in an evaluation, and layers are checkpointed
        is_unseen = self._is_unseen(has_masks)
        self.engine.eval()
        is_apart = is_unseen and self._is_unseen(has_masks) and self._counts_from_its_beginning(has_masks)
        self.engine.train(was_training)
        return is_apart

    def _is_unseen(self, has_masks: bool) -> bool:
        """Returns whether the second sample's logits stay as they are, to the last bit, when the first sample changes.

        Where experts take the tokens of all samples together, rounding moves them: not further than a change of the
        third sample does, which comes later and so is seen by no causal model, or than some units in the last place.
        """
        first, second, third, other = self._samples(5, 6, 5, 5)
        reference = self._logits(first, second, third, has_masks=has_masks)
        by_first = _moved(reference, self._logits(other, second, third, has_masks=has_masks), self.group)
        if not by_first:
            return True
        by_rounding = _moved(reference, self._logits(first, second, other, has_masks=has_masks), self.group)
        has_experts = any(".experts." in name for name, _ in self.model.named_parameters())
        bound = min(max(8 * by_rounding, 4 * self._eps), 0.05) if by_rounding or has_experts else 0.0
        return by_first <= bound

    def _counts_from_its_beginning(self, has_masks: bool) -> bool:
        """Returns whether the second sample's logits stay about as they are when the first sample is shorter."""
        first, second, third, longer = self._samples(5, 6, 5, 8)
        reference = self._logits(first, second, third, has_masks=has_masks)
        moved = _moved(reference, self._logits(first[:2], second, longer, has_masks=has_masks), self.group)
        return moved < min(0.05, 2**13 * self._eps)

    @property
    def _eps(self) -> float:
        return float(torch.finfo(self.model.dtype).eps)

    def _samples(self, *lengths: int) -> list[Any]:
        """Returns samples of these lengths; no two of them have the same token at the same place."""
        distinct = np.unique(self.tokens)[:64]
        tokens = distinct if len(distinct) >= len(lengths) else np.arange(len(lengths))
        return [np.resize(np.roll(tokens, number), length) for number, length in enumerate(lengths)]

    def _logits(self, *samples: Any, has_masks: bool) -> torch.Tensor:
        tokens = np.concatenate(samples)
        inputs = self.inputs_of(row_of(tokens, tokens, np.array([len(sample) for sample in samples])))
        for name in ("labels", "shift_labels"):
            inputs.pop(name, None)
        if has_masks:
            inputs["attention_mask"] = packed_masks(self.model, inputs["position_ids"])
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        refusals: tuple[type[Exception], ...] = (Exception,) if has_masks else (TypeError, ValueError)
        eagerly = torch.compiler.set_stance("force_eager")
        with torch.random.fork_rng(devices), torch.no_grad(), eagerly, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # checkpointing says that there will be no gradients
            try:
                logits = self.whole(self.engine(**inputs).logits)[-1]
            except refusals as error:
                raise self._refused(_SEEN if has_masks else f"does not support packed rows: {error}") from error
        second = slice(len(samples[0]), len(samples[0]) + len(samples[1]))
        kept: torch.Tensor = logits[second].double().nan_to_num()  # what is not finite shows in the loss
        return kept

    def _refused(self, reason: str) -> InvalidConfig:
        base = without_adapter(self.model)
        attn = base.config._attn_implementation
        return InvalidConfig(f"packing: {type(base).__name__} with attn: {attn} {reason}", hint="packing: false")
