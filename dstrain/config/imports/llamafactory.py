"""LLaMA-Factory's keys. Source: LLaMA-Factory of August 2026, hparams/*.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dstrain.config.imports import converters as convert
from dstrain.config.imports.source import (
    ABSENT,
    READ,
    Converted,
    OtherTraining,
    Source,
    Tool,
    Unmatched,
)
from dstrain.config.imports.tables import RANKS, TRAINING_ARGUMENTS, rows_of


def _stage(value: Any, source: Source) -> Any:
    if value == "pt":
        return Converted(values={"loss_on": "all", "data_format": "text"})
    return ABSENT if value == "sft" else convert.task(value, source)


def _method(value: Any, source: Source) -> Any:
    if (
        value == "lora"
        and source.value("quantization_bit") == 4
        and source.value("quantization_method", "bnb") != "bnb"
    ):
        raise OtherTraining(f"`{source.value('quantization_method')}`: dstrain quantizes with bitsandbytes")
    return convert.method(str(value), bits=source.value("quantization_bit"), source=source)


def _precision(value: Any, source: Source) -> Any:
    """Source: model/adapter.py: init_adapter, which casts what trains to fp32, whatever computes."""
    halves = any(source.value(key) not in (None, False, "false") for key in ("bf16", "fp16", "pure_bf16"))
    if halves or source.value("finetuning_type", "lora") in ("lora", "qlora"):
        return convert.precision(value, source)
    note = (
        "neither bf16 nor fp16 is on, so LLaMA-Factory trains all weights in fp32, as this job does; `precision: bf16`"
        " halves activations and what GPUs exchange, and computes faster"
    )
    return Converted(values={"precision": "fp32"}, note=note)


def _resized(value: Any, source: Source) -> Any:
    if not convert.flag(value, source) or source.given("add_tokens") is not ABSENT:
        return READ
    raise Unmatched("it adds rows for tokens that the checkpoint lacks: name these in new_tokens")


def _alpha(value: Any, source: Source) -> Any:
    return value if value is not None else 2 * convert.count(source.value("lora_rank"), source)


def _neat_packing(value: Any, source: Source) -> Any:
    return convert.flag(value, source) or convert.flag(source.value("packing", False), source)


def _packing(value: Any, source: Source) -> Any:
    if not convert.flag(value, source) or source.value("neat_packing") is True:
        return READ
    note = "`packing` lets samples of a row see each other; dstrain keeps them apart, as `neat_packing` does"
    return Converted(values={"packing": True}, note=note)


def _template(value: Any, _: Source) -> Any:
    note = f"the model's own chat template is used, not LLaMA-Factory's `{value}`; chat_template takes another one"
    return Converted(values={}, note=note)


def _pixels(value: Any, source: Source) -> Any:
    return READ if convert.count(value, source) == NO_LIMIT else value


def _least_pixels(value: Any, source: Source) -> Any:
    return READ if convert.count(value, source) == 1 else value


def _sinks(value: Any, source: Source) -> Any:
    """Returns the sinks of `report_to`, and SwanLab, which has a switch of its own."""
    converted = convert.sinks(value, source)
    if str(source.value("use_swanlab")).lower() != "true":
        return converted
    names = [*converted.values["monitor.sinks"], "swanlab"]
    return replace(converted, values={"monitor.sinks": list(dict.fromkeys(names))})


def _history(value: Any, source: Source) -> Any:
    """Returns that the last answer is learned; LLaMA-Factory then drops the thoughts of earlier ones, too."""
    if not convert.flag(value, source):
        return ABSENT
    keeps = convert.flag(source.value("preserve_thinking", False), source)
    thinks = convert.flag(source.value("enable_thinking", True), source)
    return Converted(values={"loss_on": "last"} | ({"thinking": "last"} if thinks and not keeps else {}))


NO_LIMIT = 2**63 - 1
"""As LLaMA-Factory itself leaves the size of an image to the processor. Source: data/mm_plugin.py."""

_nothing = convert.always(READ)

ROWS = rows_of("llamafactory", globals(), base=TRAINING_ARGUMENTS)
"""Its own keys, and the keys of Transformers, which it passes on."""

TOOL = Tool(name="llamafactory", title="LLaMA-Factory", rows=ROWS, environment=RANKS)
