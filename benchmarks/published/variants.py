"""Reads from the words of a published run how it was trained, each rule with its source."""

from __future__ import annotations

import re
from dataclasses import replace
from enum import StrEnum

from benchmarks.published.pytorch.sharding import Broadcast, with_states
from benchmarks.published.rows import Publisher, Row
from benchmarks.published.training_code import (
    COMPILED,
    COMPILED_ADAPTER_COSTS,
    INTERNEVO,
    LITGPT,
    LLM_FOUNDRY,
    TORCHTUNE,
    TRANSFORMERS_4,
    TRANSFORMERS_4_45,
    TRANSFORMERS_5,
    UNSLOTH,
    UNSLOTH_ADAPTER_COSTS,
    Loss,
    StateDtypes,
    published,
    with_loss,
)
from dstrain.choices import Method, Optimizer
from dstrain.plan.memory.params import NF4_BYTES_PER_PARAM
from dstrain.plan.training_code import TrainingCode

TUNE_STEPS = (
    "Baseline", "Packed Dataset", "Compile", "Chunked Cross Entropy", "Activation Checkpointing",
    "Fuse optimizer step into backward", "Activation Offloading", "8-bit AdamW", "LoRA", "QLoRA",
)  # fmt: skip
"""Rows of torchtune's table of optimization flags, each on top of those before it."""


class Checkpointing(StrEnum):
    """Extent of recomputation."""

    NONE = "none"
    FULL = "full"
    SELECTIVE = "selective"


def method(row: Row) -> Method | None:
    """Returns the training method, or None if the planner does not support it (`scope` lists these)."""
    word = row.method.split(" (")[0]
    if word in ("full", "pretrain"):
        return Method.FULL
    if word == "lora":
        return Method.LORA
    if re.fullmatch(r"(qlora|lora-4|lora-bnb4|qlora-(nf4|bnb4)(-bnb|-dq)?)", word):
        return Method.QLORA
    return None


def checkpointing(row: Row) -> Checkpointing:
    """Returns the extent of recomputation; a row that does not state it gets the publisher's default.

    Source: each one's default. LitGPT finetune/lora.py checkpoints under FSDP alone; torchtune's single-device recipes
    checkpoint; swift's and FMS's Trainer arguments have gradient_checkpointing on.
    """
    word = row.grad_ckpt
    if word.startswith("selective"):
        return Checkpointing.SELECTIVE
    if word.startswith("true") or word == "full":
        return Checkpointing.FULL
    if word in ("false", "no"):
        return Checkpointing.NONE
    return Checkpointing.FULL if row.publisher in (Publisher.SWIFT, Publisher.TORCHTUNE) else Checkpointing.NONE


def tune_step(row: Row) -> int | None:
    """Returns the place of a row in torchtune's table of flags, or None for another table."""
    match = re.search(r"this row: (?:\+ )?([^;]+)", row.notes)
    return TUNE_STEPS.index(match.group(1)) if match and match.group(1) in TUNE_STEPS else None


def compiles(row: Row) -> bool:
    """Returns whether torch.compile rewrites the model."""
    step = tune_step(row)
    if step is not None:
        return step >= TUNE_STEPS.index("Compile")
    return row.says("compile")


def kernels(row: Row) -> tuple[bool, bool, Loss]:
    """Returns whether Liger's and whether Unsloth's kernels run, and the loss.

    Source: fms-acceleration plugins/fused-ops-and-kernels: FILTER_MAP (`fast_loss: true` is Unsloth's loss,
    `fused_ce_liger` Liger's; norms and rotary embedding are Unsloth's in both); torchtune recipes/configs.
    llm-foundry's `loss_fn: fused_crossentropy` and InternEvo's FlashGPTLMLoss are flash-attn's, in place.
    """
    if row.publisher is Publisher.FMS:
        if row.says("foak-liger", "kernels-liger"):
            return False, True, Loss.LIGER
        if row.says("fused ops and kernels", "fused kernels", "-foak"):
            return False, True, Loss.IN_PLACE
        return False, False, Loss.FULL
    if row.publisher is Publisher.TORCHTUNE:
        step = tune_step(row)
        chunked = row.says("chunked loss") or (step is not None and step >= TUNE_STEPS.index("Chunked Cross Entropy"))
        return False, False, Loss.TILED if chunked else Loss.FULL
    if row.publisher in (Publisher.LLM_FOUNDRY, Publisher.INTERNEVO):
        return False, False, Loss.IN_PLACE
    if row.publisher is Publisher.LITGPT:
        return False, False, Loss.TILED
    if row.says("use_liger_kernel=true") and not row.says("not using use_liger_kernel"):
        return True, False, Loss.LIGER
    return False, False, Loss.FULL


def code(row: Row) -> TrainingCode:
    """Returns the training code, with its loss, Unsloth's kernels where they run, TRL's fp32 norms, and what of the
    weights and the optimizer is unlike dstrain's."""
    _, unsloth, loss = kernels(row)
    own = published(with_loss(_code(row), loss))
    base: TrainingCode = replace(own, fuses_step=fuses_step(row), scale_bytes=_scale_bytes(row))
    if unsloth:
        costs = UNSLOTH_ADAPTER_COSTS if method(row) is Method.QLORA else None
        base = replace(base, fused=UNSLOTH, adapter_costs=costs)
    if compiles(row):
        adapters = None if method(row) is Method.FULL else COMPILED_ADAPTER_COSTS
        base = replace(base, fused=COMPILED, adapter_costs=adapters)
    return with_states(replace(base, has_fp32_residual=has_fp32_norms(row)), state_dtypes(row))


def _code(row: Row) -> TrainingCode:
    """Returns whose layer code runs.

    Source: fms-acceleration scripts/benchmarks/refs: requirements.txt (4.48.1 for a100_80gb.csv), requirements_granite
    and requirements_liger.txt (4.45.2); swift's release 2.6 is of October 2024.
    """
    if row.publisher is Publisher.FMS:
        return TRANSFORMERS_4_45 if re.search(r"_(granite|liger)\.csv", row.source) else TRANSFORMERS_4
    if row.publisher is Publisher.SWIFT:
        if "release/2" in row.source:
            return TRANSFORMERS_4_45
        return TRANSFORMERS_4 if row.says("Transformers 4") else TRANSFORMERS_5
    if row.publisher in (Publisher.H2O, Publisher.OTHER):
        return TRANSFORMERS_4_45
    if row.publisher in (Publisher.TORCHTUNE, Publisher.TORCHTITAN):
        return TORCHTUNE
    if row.publisher is Publisher.LLM_FOUNDRY:
        return LLM_FOUNDRY
    if row.publisher is Publisher.INTERNEVO:
        return _internevo(row)
    return LITGPT if row.publisher is Publisher.LITGPT else TRANSFORMERS_5


def _internevo(row: Row) -> TrainingCode:
    """Returns InternEvo's code, whose optimizer states `zero1` ranks share, or all with the same weights."""
    match = re.search(r"zero1=(-?\d+)", row.notes)
    if match is None:
        return INTERNEVO
    size = int(match.group(1))
    return replace(INTERNEVO, collectives=Broadcast(size if size > 0 else row.num_gpus // parallel(row, "tp")))


def state_dtypes(row: Row) -> StateDtypes:
    """Returns the copies of a parameter that a run keeps.

    DeepSpeed and what shards as it does keep an fp32 master copy. FSDP under mixed precision keeps fp32 shards
    (accelerate 1.0 accelerator.py: prepare_model). On one GPU Transformers loads in bf16 and autocast changes nothing
    of the weights; for adapters, which PEFT keeps in fp32, it decides what their input is kept in. QLoRA always runs
    under autocast in FMS's scenarios (`bf16: True` in scripts/benchmarks/scenarios.yaml).
    """
    kind = method(row)
    autocasts = any(word in row.precision for word in ("autocast", "mixed", "amp"))
    if row.publisher is Publisher.FMS:
        if kind is Method.QLORA:
            return StateDtypes.AUTOCAST
        if kind is Method.FULL and not row.is_fsdp:
            return StateDtypes.PURE_BF16
        return StateDtypes.AUTOCAST if autocasts else StateDtypes.PURE_BF16
    if row.publisher is Publisher.INTERNEVO:
        return StateDtypes.MIXED
    if row.publisher in (Publisher.TORCHTITAN, Publisher.LLM_FOUNDRY):
        return StateDtypes.AUTOCAST if autocasts or row.publisher is Publisher.TORCHTITAN else StateDtypes.PURE_BF16
    if row.publisher in (Publisher.SWIFT, Publisher.H2O, Publisher.OTHER):
        if row.is_fsdp:
            return StateDtypes.AUTOCAST if autocasts else StateDtypes.PURE_BF16
        if row.zero_stage:
            return StateDtypes.MIXED
        return StateDtypes.PURE_BF16 if kind is Method.FULL else StateDtypes.AUTOCAST
    return StateDtypes.PURE_BF16


def has_fp32_norms(row: Row) -> bool:
    """Returns whether TRL turns norms beside a quantised base into fp32, which it does not where the base is sharded.

    Source: trl 0.11 trainer/sft_trainer.py: peft_module_casting_to_bf16, `not is_sharded_qlora`; fms-acceleration's own
    preparation leaves them (accelerated-peft framework_plugin_bnb.py: _prepare_model_for_kbit_training).
    """
    return (
        row.publisher is Publisher.FMS
        and method(row) is Method.QLORA
        and not row.is_fsdp
        and row.says("no fms accel", "baseline-peft-bnb")
    )


def optimizer(row: Row) -> Optimizer:
    """Returns the optimizer."""
    return Optimizer.ADAMW_8BIT if re.search("8.?bit", row.optimizer, re.IGNORECASE) else Optimizer.ADAMW


def fuses_step(row: Row) -> bool:
    """Returns whether AdamW is fused, as torchtune's and torchtitan's where the column is silent.

    Source: torchtune recipes/configs/llama3*/*.yaml (`fused: True`); torchtitan config/job_config.py (implementation).
    """
    return row.publisher in (Publisher.TORCHTUNE, Publisher.TORCHTITAN) or "fused" in row.optimizer


def _scale_bytes(row: Row) -> float:
    """Returns the bytes by which scales of 4-bit weights exceed those that are quantised too: FMS's plug-in and
    torchao quantise them, LitGPT where the name ends in `dq`.

    Source: fms-acceleration accelerated-peft framework_plugin_bnb.py; torchao dtypes/nf4tensor.py; swift's argument
    bnb_4bit_use_double_quant is true by default.
    """
    are_quantized = row.publisher is not Publisher.LITGPT or row.method.endswith("-dq")
    return 0.0 if are_quantized else 0.5 + 4 / 64 - NF4_BYTES_PER_PARAM


def grows_segments(row: Row) -> bool:
    """Returns whether the allocator may grow its segments: by default it may not, and torchtitan lets it.

    Source: torchtitan run_train.sh: PYTORCH_CUDA_ALLOC_CONF.
    """
    return row.publisher is Publisher.TORCHTITAN


def packs(row: Row) -> bool:
    """Returns whether rows are full, or cut at borders, so that no padding mask is needed."""
    if row.publisher in (Publisher.SWIFT, Publisher.H2O, Publisher.OTHER):
        return row.says("packing=true", "packing true", "padding_free=true") and not row.says("without padding_free")
    return tune_step(row) != 0


def parallel(row: Row, kind: str) -> int:
    """Returns the degree of `tp`, `pp`, `cp` or `ep` in the notes, or 1 without one."""
    match = re.search(rf"(?<![a-z]){kind}\s*[-=]?\s*(\d+)", row.notes, re.IGNORECASE)
    return int(match.group(1)) if match else 1


def added_tokens(row: Row) -> int:
    """Returns by how many tokens the trainer enlarged the vocabulary: odd sizes miss the allocator's size classes.

    Source: foundation-model-stack/fms-hf-tuning tuning/sft_trainer.py adds a padding token, and others where a
    tokenizer has none; torch_alloc_after_train_bytes of the published runs is that much larger.
    """
    if row.publisher is not Publisher.FMS:
        return 0
    if re.search("llama-3", row.model, re.IGNORECASE):
        return 2
    return 1 if re.search("mistral|mixtral|llama-2", row.model, re.IGNORECASE) else 0
