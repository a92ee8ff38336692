"""What of a published run cannot be asked of the planner, and why: rules over its columns and notes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.published.rows import Publisher, Row
from benchmarks.published.shelf import find_gpu, find_model, folded
from benchmarks.published.variants import Checkpointing, checkpointing, compiles, method, packs, parallel, tune_step
from dstrain.plan.memory.layers.activations import has_layer_code

Rule = tuple[Callable[[Row], object], str]
"""Condition that excludes a row, and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Exclusions of one row; None for the parts in scope."""

    memory: str | None
    """Why its memory is out of scope."""
    speed: str | None
    """Why its speed is out of scope."""


SIZE_TOLERANCE = 0.03
"""How far a published number of parameters may be from the counted one: a name such as `gemma-2b` means two models. Of
rows of quality C, whose numbers are whole billions, it is not asked."""

_QUANTIZED = re.compile(r"gptq|awq|aqlm|prequantized|int8|hqq|[-_](int4|4bits?)\b")
_OTHER_ADAPTERS = re.compile(r"adapter|adalora|llamapro|boft|bone|dora|longlora|qalora")
_PARTIAL = re.compile(r"galore|lisa|badam", re.IGNORECASE)
_SENSES = re.compile(
    r"[-_.]vl\b|[-_]vl[-_2]|omni|audio|ocr|ovis|internvl|cogagent|xcomposer|emu3|keye|minicpm-v|diffusion"
)
_TASKS = re.compile(r"embedding|reranker|seq_cls|regression|/emb|_emb\b", re.IGNORECASE)


def _method_reason(pattern: re.Pattern[str]) -> Callable[[Row], object]:
    return lambda row: pattern.search(f"{row.method} {folded(row.model)}")


def _unknown_model(row: Row) -> bool:
    shelf = find_model(row.model)
    return shelf is None or not has_layer_code(shelf.model)


def _has_other_size(row: Row) -> bool:
    """Returns whether the published number of parameters differs from that of the name's shape."""
    shelf = find_model(row.model)
    if shelf is None or row.params is None or row.quality == "C" or shelf.is_for_speed_alone:
        return False
    return abs(shelf.model.num_params / row.params - 1) > SIZE_TOLERANCE


_BOTH: tuple[Rule, ...] = (
    (_method_reason(_QUANTIZED), "weights quantised by GPTQ, AWQ, AQLM or HQQ"),
    (lambda row: "unsloth" in row.method, "Unsloth's own training code"),
    (lambda row: re.search(r"dpo|simpo", row.method) or row.says("rlhf_type"), "preference training"),
    (_method_reason(_OTHER_ADAPTERS), "an adapter other than LoRA"),
    (_method_reason(_PARTIAL), "GaLore, LISA or BAdam: only a part of the parameters has optimizer states"),
    (lambda row: "lora_llm" in row.method, "a vision tower trained beside an adapter"),
    (lambda row: not row.method, "what was trained is not stated"),
    (lambda row: method(row) is None, "a method that the planner has not"),
    (lambda row: _TASKS.search(f"{row.model} {row.source}"), "no language-modelling head"),
    (lambda row: _SENSES.search(folded(row.model)), "images or sound of a size that is not stated"),
    (lambda row: row.says("device_map") or "_mp" in row.source, "layers spread over GPUs by device_map"),
    (lambda row: row.says("Megatron"), "Megatron-LM's own parallelism"),
    (lambda row: row.says("pipeline") or parallel(row, "pp") > 1, "pipeline parallelism"),
    (lambda row: parallel(row, "cp") > 1, "context parallelism other than Ulysses"),
    (
        lambda row: row.publisher is Publisher.TORCHTITAN and parallel(row, "tp") > 1,
        "tensor parallelism that also divides the residual stream",
    ),
    (lambda row: row.says("scattermoe"), "ScatterMoE's expert parallelism"),
    (lambda row: row.says("Transformer Engine"), "kernels of Transformer Engine and DeepEP"),
    (lambda row: row.says("ZenFlow"), "ZenFlow"),
    (lambda row: row.says("float8") or re.search("fp8", row.precision, re.IGNORECASE), "FP8 arithmetic"),
    (lambda row: "Ascend" in row.gpu, "an NPU"),
    (_unknown_model, "a model whose family is not listed or whose shape is not known"),
    (_has_other_size, "the number of parameters is not that of the model of this name"),
    (lambda row: row.seq_len is None and not row.says("default SEQ_LEN"), "the length of samples is not stated"),
    (lambda row: row.micro_batch is None, "the micro-batch is not stated"),
)
"""Rules that exclude whole rows; the first that applies gives the reason."""


def _model_is_for_speed(row: Row) -> bool:
    shelf = find_model(row.model)
    return shelf is not None and shelf.is_for_speed_alone


_MEMORY: tuple[Rule, ...] = (
    (_model_is_for_speed, "the model's shape is a stand-in for speed alone"),
    (lambda row: checkpointing(row) is Checkpointing.SELECTIVE, "selective checkpointing"),
    (
        lambda row: compiles(row) and checkpointing(row) is not Checkpointing.FULL,
        "torch.compile decides what is kept",
    ),
    (lambda row: row.says("in_bwd") or "in bwd" in row.optimizer, "the optimizer steps inside the backward pass"),
    (lambda row: row.says("optimizer not stated"), "the optimizer is not stated"),
    (lambda row: tune_step(row) == 0, "samples of varying length, not padded to what is stated"),
    (
        lambda row: row.publisher is Publisher.LITGPT and row.is_fsdp,
        "FSDP under Lightning's no_sync keeps whole gradients, of frozen weights too",
    ),
    (lambda row: row.publisher is Publisher.LITGPT and row.zero_stage, "LitGPT on several GPUs"),
    (
        lambda row: (
            row.basis is None
            and row.allocated_bytes is None
            and row.nvidia_smi_bytes is None
            and not re.search("OUTCOME=", row.notes)
        ),
        "no memory is published",
    ),
)
"""Rules that exclude the memory of a row."""


_NOT_STATED = "of one GPU or of all: not stated"


def _unit(row: Row) -> str:
    return row.throughput_unit


def _attends_to_unstated_lengths(row: Row) -> bool:
    """Returns whether the attention of packed rows takes less than that of whole rows, by an unstated factor.

    Of InternEvo's rows this is not asked: it publishes the same throughput with `pack_sample_into_one` and without.
    Source: torchtune data/_collate.py: padded_collate_packed; swift's packing is padding-free.
    """
    masks = (Publisher.TORCHTUNE, Publisher.SWIFT, Publisher.H2O, Publisher.OTHER)
    return row.publisher in masks and packs(row)


_SPEED: tuple[Rule, ...] = (
    (lambda row: row.throughput is None, "no throughput is published"),
    (lambda row: find_gpu(row.gpu) is None, "the GPU is not stated, or not known"),
    (
        lambda row: compiles(row) and checkpointing(row) is not Checkpointing.FULL,
        "torch.compile decides what is kept",
    ),
    (
        lambda row: row.publisher is Publisher.TORCHTUNE and "A6000" in row.gpu,
        "more than the card can do: 4,699 tokens/s of LoRA with recomputation are 210 TFLOP/s of 155",
    ),
    (lambda row: "Paged" in row.optimizer, "an optimizer whose states are paged between GPU and RAM"),
    (_attends_to_unstated_lengths, "samples of unstated length in packed rows, each attended to by itself"),
    (lambda row: row.says("same run as"), "the same measurement as a row of another table"),
    (lambda row: checkpointing(row) is Checkpointing.SELECTIVE, "selective checkpointing"),
    (lambda row: _unit(row).startswith("train time"), "a time for an unstated number of samples"),
    (
        lambda row: _unit(row) == "iter/s" or (_unit(row) == "s/it" and row.grad_accum is None),
        "a step of unstated size",
    ),
    (
        lambda row: row.says("scope per-GPU vs total not stated") and row.num_gpus > 1,
        "of one GPU or of all: not stated",
    ),
    (lambda row: row.says("single-GPU experiments") and row.zero_stage, _NOT_STATED),
    (lambda row: tune_step(row) == 0, "samples of varying length, not padded to what is stated"),
)
"""Rules that exclude the speed of a row."""


def scope(row: Row) -> Scope:
    """Returns the exclusions of a row, each with the first reason that applies."""
    both = _first(_BOTH, row)
    if both is not None:
        return Scope(memory=both, speed=both)
    return Scope(memory=_first(_MEMORY, row), speed=_first(_SPEED, row))


def _first(rules: tuple[Rule, ...], row: Row) -> str | None:
    return next((reason for holds, reason in rules if holds(row)), None)


def has_memory(row: Row) -> bool:
    """Returns whether a row publishes anything about memory: a peak, or the outcome of the run."""
    return row.basis is not None or row.nvidia_smi_bytes is not None or "OUTCOME=" in row.notes


def has_speed(row: Row) -> bool:
    """Returns whether a row publishes a speed."""
    return row.throughput is not None


def is_asked(row: Row) -> bool:
    """Returns whether memory or speed is published and in scope."""
    row_scope = scope(row)
    return (has_memory(row) and row_scope.memory is None) or (has_speed(row) and row_scope.speed is None)


def excluded(row: Row) -> tuple[str, str] | None:
    """Returns the excluded part of a row (`memory`, `speed` or `all`) and the reason; None if all of it is in scope.

    A part that a row does not publish does not count as excluded.
    """
    row_scope = scope(row)
    memory = row_scope.memory if has_memory(row) else None
    speed = row_scope.speed if has_speed(row) else None
    if memory is not None and speed is not None and memory == speed:
        return "all", memory
    if memory is not None and (speed is not None or not has_speed(row)):
        return "all", memory if speed is None else f"memory: {memory}; speed: {speed}"
    if speed is not None and not has_memory(row):
        return "all", speed
    if memory is not None:
        return "memory", memory
    return ("speed", speed) if speed is not None else None


BOUND = "only an upper bound of the samples' length is published: a prediction can be wrong on one side alone"
"""Why a row in scope counts in no figure of a half."""
