"""Keeps the samples of a packed row apart: attention by sample, and trials of the model before the first step."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dstrain.errors import InvalidConfig
from dstrain.plan.memory.layers.attention import AT_ONCE_TOKENS, MOST_APART, WIDEST_AT_ONCE
from dstrain.train.data.collate import Row, row_of, text_positions, without_adapter
from dstrain.train.loss import trial

Attend = Callable[..., tuple[torch.Tensor, Any]]
"""Attention as Transformers calls it: queries, keys and values (batch, heads, seq, width) become (batch, seq, heads,
width)."""

_NAME = "sdpa_by_sample"
_KINDS = {"full_attention", "sliding_attention", "linear_attention"}
"""Kinds of layers whose attention reaches back to the beginning of a sample, or as far as a window; linear attention
has no masks."""


class NoPositions(TypeError):
    """Raised by attention that is not told where samples begin."""


def attend_by_sample(model: Any, *, is_on: bool = True, attention: Attend | None = None) -> bool:
    """Lets a model's text layers call PyTorch's attention for each sample, or for whole rows again.

    `attention` stands for it if it keeps samples apart already. Returns False, and changes nothing, if layers have
    another kind of attention, such as one in chunks. Transformers makes no mask for attention that it does not know.
    Source: transformers 5.23 masking_utils.py: _preprocess_mask_arguments.
    """
    config = without_adapter(model).config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds <= _KINDS or getattr(config, "attention_chunk_size", None):
        return False
    ALL_ATTENTION_FUNCTIONS.register(_NAME, attention or by_sample(_sdpa))
    config._attn_implementation = _NAME if is_on else "sdpa"
    return True


@contextmanager
def attending_whole_rows(model: Any) -> Iterator[None]:
    """Lets a model's text layers attend whole rows for a while, as generation with a cache of keys needs it."""
    config = without_adapter(model).config.get_text_config()
    is_by_sample = config._attn_implementation == _NAME
    if is_by_sample:
        config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        if is_by_sample:
            config._attn_implementation = _NAME


def by_sample(attention: Attend) -> Attend:
    """Returns causal attention that calls `attention` for each sample of packed rows, with a mask only for a window.

    It takes queries, keys and values as (batch, heads, seq, width) and `position_ids` as (batch or 1, seq), which count
    from 0 in each sample, and returns (batch, seq, heads, width) and None. One kernel attends all of them if
    `is_at_once`. Raises NoPositions without `position_ids`.
    """
    lengths_of = _Remembered(lambda position_ids: [sample_lengths(row) for row in position_ids])

    def attended(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **options: Any
    ) -> tuple[torch.Tensor, None]:
        if options.get("position_ids") is None:
            raise NoPositions(f"{type(module).__name__} passes no position_ids to its attention")
        if is_at_once(query, value, options):
            return _at_once(query, key, value, **options), None
        # one sample after the other: kernels that are called with a mask of all of them cost the square of the row
        window = options.get("sliding_window")
        rows = []
        row_lengths = lengths_of(options["position_ids"])
        for index, row in enumerate(zip(query, key, value, strict=True)):
            lengths = row_lengths[index % len(row_lengths)]
            samples = zip(*(tensor.unsqueeze(0).split(lengths, dim=2) for tensor in row), strict=True)
            outputs = [
                attention(module, *sample, _banded(length, window, query.device), **options)[0]
                for length, sample in zip(lengths, samples, strict=True)
            ]
            rows.append(torch.cat(outputs, dim=1))
        return torch.cat(rows), None

    eager: Attend = torch.compiler.disable(attended)  # type: ignore[no-untyped-call]  # the lengths of samples decide its shapes
    return eager


def is_at_once(query: torch.Tensor, value: torch.Tensor, options: Mapping[str, Any]) -> bool:
    """Returns whether one kernel attends all samples: if there is one, and the collator's borders come along.

    Long rows of few samples keep PyTorch's choice, which on Hopper is cuDNN: for 8 rows of 4,096 tokens an H200 takes
    57 ms one by one and 1.9 ms at once with 64 samples a row, 6.5 and 3.0 ms with 4, 6.3 and 7.4 ms with one.
    Source: benchmarks/results/gpu_kernels-h200.json.
    """
    borders = options.get("cu_seq_lens_q")
    if borders is None or options.get("dropout") or not has_kernel(query, value):
        return False
    return query.shape[2] <= AT_ONCE_TOKENS or len(borders) - 1 > MOST_APART * len(query)


def has_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Returns whether PyTorch's FlashAttention takes tensors (batch, heads, seq, width), and has their gradients.

    On AMD's GPUs the operator has another implementation, which was not tried.

    Source: torch 2.13 ATen/native/transformers/cuda/flash_attn/flash_api.cpp: mha_varlen_fwd; cuda/sdp_utils.cpp:
    check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120.
    """
    if query.device.type != "cuda" or torch.version.hip or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    width, capability = query.shape[-1], torch.cuda.get_device_capability(query.device)
    widest = 256 if capability in ((8, 0), (9, 0), (10, 0)) else WIDEST_AT_ONCE
    return capability >= (8, 0) and width == value.shape[-1] and width % 8 == 0 and width <= widest


def _at_once(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> torch.Tensor:
    """Returns the attention of all samples, (batch, seq, heads, width), by PyTorch's FlashAttention.

    `cu_seq_lens_q`: the borders of the samples of all rows together, (samples + 1,). The operator belongs to
    `torch.nn.attention.varlen`, which PyTorch 2.9 lacks, and 2.10 for fewer keys than queries.
    """
    rows = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    borders, longest = (cu_seq_lens_q, cu_seq_lens_q), (max_length_q, max_length_q)
    left = None if sliding_window is None else sliding_window - 1
    output: torch.Tensor = torch.ops.aten._flash_attention_forward(
        *rows, *borders, *longest, 0.0, True, False, scale=scaling, window_size_left=left
    )[0]
    return output.view(query.shape[0], query.shape[2], *output.shape[1:])


def _sdpa(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, Any]:
    """Returns PyTorch's attention; in bf16 on a CPU it computes in fp32, and keeps its tensors in bf16.

    PyTorch 2.13 takes a third of the CPU time of bf16 for samples of 64 tokens, and 0.93 of it for 512.
    """
    if query.device.type != "cpu" or query.dtype != torch.bfloat16:
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    def narrow(tensor: torch.Tensor) -> torch.Tensor:
        is_sum = tensor.dim() < 4  # of exponentials
        return tensor if is_sum or not tensor.is_floating_point() else tensor.bfloat16()

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.is_floating_point() else tensor

    with torch.autograd.graph.saved_tensors_hooks(narrow, wide):
        output, weights = sdpa_attention_forward(module, query.float(), key.float(), value.float(), mask, **options)
    return output.bfloat16(), weights


class _Remembered:
    """A function of a tensor that every layer asks for the same one, and that waits for the GPU: asked once."""

    def __init__(self, function: Callable[[torch.Tensor], list[list[int]]]) -> None:
        self._function = function
        self._tensor: Callable[[], torch.Tensor | None] = lambda: None
        self._version = 0
        self._value: list[list[int]] = []

    def __call__(self, tensor: torch.Tensor) -> list[list[int]]:
        if self._tensor() is not tensor or self._version != tensor._version:
            self._value = self._function(tensor)
            self._tensor, self._version = weakref.ref(tensor), tensor._version
        return self._value


def sample_lengths(positions: torch.Tensor) -> list[int]:
    """Returns the tokens of each sample of a packed row; `positions` count from 0 in each: (seq,).

    >>> sample_lengths(torch.tensor([0, 1, 2, 0, 1]))
    [3, 2]
    """
    begins = [0, *(positions[1:] == 0).nonzero().flatten().add(1).tolist(), len(positions)]
    return [end - begin for begin, end in itertools.pairwise(begins)]


def _banded(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Returns the mask of a window over a sample that is longer than it, (1, 1, length, length); else None.

    Source: transformers 5.23 masking_utils.py: sliding_window_overlay.
    """
    if window is None or length <= window:
        return None
    return torch.ones((1, 1, length, length), dtype=torch.bool, device=device).tril_().triu_(1 - window)


_SEEN = "mixes the samples of a packed row"
_SEEN_PADDING = 0.05
"""A mask of padding that moves logits by less, of their spread, only selects another kernel in bf16."""


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
    """Returns whether logits depend on the mask of the padding at the end of rows; they do not in causal models.

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
