"""Shows the labels of a few samples in the log, as `dstrain data show` does, around the first text that has loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dstrain.facts.data.shown import marked
from dstrain.train.data.packing import PackedRows
from dstrain.train.data.show import pieces
from dstrain.train.data.tokenize import IGNORED
from dstrain.train.preferences.pairs import PairData

_TOKENS_BEFORE, _TOKENS = 40, 120
"""Tokens that are decoded before the first one with loss, and in all."""
_SHOWN = 160
"""Characters of a sample in the log."""


def examples(data: Any, tokenizer: Any, count: int) -> Iterator[tuple[str, bool]]:
    """Yields the first samples of a data set around their first text with loss, each sequence in one line, and whether
    any of its tokens has loss."""
    samples = data.samples.with_format(None) if isinstance(data, PackedRows) else data
    for number in range(min(count, len(samples))):
        for sequence in samples.sequences(number) if isinstance(samples, PairData) else [samples[number]]:
            labels = sequence["labels"]
            yield _example(tokenizer, sequence["input_ids"], labels), any(label != IGNORED for label in labels)


def _example(tokenizer: Any, input_ids: Sequence[int], labels: Sequence[int]) -> str:
    first = next((index for index, label in enumerate(labels) if label != IGNORED), 0)
    start = max(0, first - _TOKENS_BEFORE)
    part = slice(start, start + _TOKENS)
    text = marked(list(pieces(tokenizer, input_ids[part], labels[part]))).replace("\n", "⏎")
    begin = max(0, text.find("⟦") - _SHOWN // 3)
    end = begin + _SHOWN
    has_more = end < len(text) or part.stop < len(input_ids)
    return ("…" if start or begin else "") + text[begin:end] + ("…" if has_more else "")
