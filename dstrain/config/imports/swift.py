"""ms-swift's keys, which are options of `swift sft` and `swift pt`. Source: ms-swift 4.4, swift/arguments/*.py and
swift/trainers/arguments.py."""

from __future__ import annotations

import re
from typing import Any

from dstrain.config.imports import converters as convert
from dstrain.config.imports.source import (
    ABSENT,
    Converted,
    OtherTraining,
    Source,
    Tool,
    Unmatched,
)
from dstrain.config.imports.tables import RANKS, TRAINING_ARGUMENTS, rows_of

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_LEARNING_RATE = {"full": 1e-5}
_ADAPTER_LEARNING_RATE = 1e-4
_SAMPLES_PER_STEP = 16
"""Samples of a step from which ms-swift computes an absent gradient_accumulation_steps."""


def _method(value: Any, source: Source) -> Any:
    bits = source.value("quant_bits") if source.value("quant_method") in (None, "bnb") else "other than bitsandbytes'"
    return convert.method(str(value), bits=bits, source=source)


def _learning_rate(value: Any, source: Source) -> Any:
    if value is None:
        return _LEARNING_RATE.get(str(source.value("tuner_type")), _ADAPTER_LEARNING_RATE)
    return convert.number(value, source)


def _accumulation(value: Any, source: Source) -> Any:
    if value is None:
        return Converted(values={"plan.global_batch": _SAMPLES_PER_STEP})
    return convert.count(value, source)


def _length(value: Any, source: Source) -> Any:
    if value is None:
        raise Unmatched("without it ms-swift takes rows as long as the model can; set seq_len to your longest sample")
    return convert.count(value, source)


_LOSS_ON = {"default": "answer", "last_round": "last", "all": "all"}
_EMPTY_THINK = "ignore_empty_think"


def _loss_scale(value: Any, _: Source) -> Any:
    parts = str(value).split("+")
    base = next((part for part in parts if part in _LOSS_ON), "default")
    if others := set(parts) - {base, _EMPTY_THINK}:
        raise Unmatched(f"`{'+'.join(sorted(others))}`: the loss is on every answer, each token with weight 1")
    note = "an empty block of thoughts that the template writes carries loss; `thinking: off` moves it into the prompt"
    return Converted(values={"loss_on": _LOSS_ON[base]}, note=note if _EMPTY_THINK in parts else "")


def _hub(value: Any, source: Source) -> str:
    return "hf" if convert.flag(value, source) else "modelscope"


def _pixels(value: Any, source: Source) -> int:
    """Returns the pixels of an image or a frame of so many tokens of Qwen3-VL, of 32 × 32 pixels each."""
    return convert.count(value, source) * 32**2


def _frozen(_: Any, source: Source) -> Any:
    """Returns the patterns of frozen parameters, of which ms-swift has prefixes and one regular expression."""
    prefixes, pattern = source.value("freeze_parameters") or [], source.value("freeze_parameters_regex")
    patterns = [f"^{re.escape(prefix)}" for prefix in convert.names(prefixes, source)]
    return [*patterns, *([str(pattern)] if pattern else [])] or ABSENT


@convert.of_dpo
def _sft_weight(value: Any, source: Source) -> Any:
    note = "the mean per token of each answer; ms-swift's is over all tokens of a micro-batch"
    return ABSENT if value is None else Converted(values={"dpo.sft_weight": convert.number(value, source)}, note=note)


def _loss(value: Any, source: Source) -> Any:
    if convert.is_dpo(source):
        return convert.dpo_loss(value, source)
    if value not in ("causal_lm", None):
        raise OtherTraining("not a causal language model's loss")
    return ABSENT


_dtype = convert.one_of(_DTYPES, "bf16 is written")
_mode = convert.one_of({"cloud": "online", "local": "local"}, "its modes are cloud and local")

ROWS = rows_of("swift", globals(), base=TRAINING_ARGUMENTS)
"""Its own keys, and the keys of Transformers, which it passes on."""

_MEDIA = rows_of("swift_variables", globals())
"""Variables that its templates read, for qwen-vl-utils. They have no defaults of ms-swift's own: in qwen-vl-utils
these are the limits of the models' processors. Source: ms-swift 4.4 swift/model/models/qwen.py: patch_qwen_vl_utils."""

TOOL = Tool(name="swift", title="ms-swift", rows=ROWS, environment={**RANKS, **_MEDIA})
