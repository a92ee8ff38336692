"""A published run as a question to the planner: model, machines, and the one configuration that it was."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from benchmarks.published import variants
from benchmarks.published.rows import Publisher, Row
from benchmarks.published.shelf import find_cluster, find_model, folded, gpus_at_work
from benchmarks.published.training_code import PLANNED, StateDtypes
from benchmarks.published.variants import Checkpointing, method, parallel
from dstrain.choices import Attention, Method, Offload, Precision
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.job.model_changes import Lora
from dstrain.plan.configuration import DEFAULTS, Configuration, changed
from dstrain.plan.memory.layers.activations import has_layer_code
from dstrain.plan.memory.params import linear_names

DEFAULT_SEQ_LEN = 2048
"""InternEvo's configs/7B_sft.py: SEQ_LEN, where the notes refer to it."""

ALL_LINEAR = ("all-linear",)
QUERY_VALUE = ("q_proj", "v_proj")
ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The question of one row."""

    row: Row
    """The row."""
    model: ModelFacts
    """The model."""
    cluster: Cluster
    """The machines."""
    configuration: Configuration
    """The configuration."""
    stands_for: str | None
    """The model that the shape stands in for, or None for the real model."""


def ask(row: Row) -> Question:
    """Returns the question for a row in scope. Raises ValueError for an unknown model."""
    shelf = find_model(row.model, added_tokens=variants.added_tokens(row))
    kind = method(row)
    if shelf is None or kind is None or row.micro_batch is None:
        raise ValueError(f"{row.id} cannot be asked")
    model = shelf.model
    liger, _, loss = variants.kernels(row)
    configuration = changed(
        DEFAULTS,
        method=kind,
        lora=_lora(row, model),
        seq_len=row.seq_len or DEFAULT_SEQ_LEN,
        micro_batch=row.micro_batch,
        grad_accum=row.grad_accum or 1,
        grad_ckpt=variants.checkpointing(row) is Checkpointing.FULL,
        precision=_precision(row),
        attn=_attention(row),
        packing=variants.packs(row),
        zero_stage=_stage(row),
        offload=_offload(row),
        optimizer=variants.optimizer(row),
        sp=int(row.noted("sequence_parallel_size") or 1),
        tp=parallel(row, "tp"),
        overlap_comm=row.publisher is Publisher.INTERNEVO or DEFAULTS.zero.overlap_comm,
        liger=liger,
        loss=PLANNED[loss],
        activation_offload=row.offload == "activations",
        expandable_segments=variants.grows_segments(row),
    )
    return Question(
        row=row,
        model=model,
        cluster=find_cluster(row),
        configuration=replace(_like_the_trainer(configuration, row, model), code=variants.code(row)),
        stands_for=shelf.stands_for,
    )


def is_traced(row: Row) -> bool:
    """Returns whether a run is of a family without layer code, whose layers are traced."""
    shelf = find_model(row.model)
    return shelf is not None and not has_layer_code(shelf.model)


def runs_deepspeed(row: Row) -> bool:
    """Returns whether DeepSpeed's ZeRO shards a run; what is sharded by FSDP and by InternEvo is not."""
    is_mixed = variants.state_dtypes(row) is StateDtypes.MIXED
    return is_mixed and _stage(row) > 0 and row.publisher is not Publisher.INTERNEVO


def _like_the_trainer(configuration: Configuration, row: Row, model: ModelFacts) -> Configuration:
    """Returns the configuration with the buckets that Transformers fills in for DeepSpeed, under its Trainer.

    Source: Transformers integrations/deepspeed.py: trainer_config_process; swift's and LLaMA-Factory's ds_config files
    leave these `auto`, with overlap_comm on.
    """
    trainers = (Publisher.SWIFT, Publisher.OTHER)
    if row.publisher not in trainers or variants.state_dtypes(row) is not StateDtypes.MIXED:
        return configuration
    h = model.hidden_size
    return changed(
        configuration,
        overlap_comm=True,
        reduce_bucket_size=h * h if configuration.zero.stage == 3 else 200_000_000,
        prefetch_bucket_size=round(0.9 * h * h),
        param_persistence_threshold=10 * h,
    )


def _stage(row: Row) -> int:
    """Returns the ZeRO stage; one GPU shards nothing."""
    if row.zero_stage is None or gpus_at_work(row) == 1:
        return 0
    return row.zero_stage


def _precision(row: Row) -> Precision:
    words = row.precision.lower()
    return Precision.FP16 if re.search(r"fp16|float16", words) and "bfloat16" not in words else Precision.BF16


def _attention(row: Row) -> Attention:
    """Returns the implementation; `eager/sdpa` is Transformers' choice of 2024 where flash attention was off."""
    if row.attn.startswith(("flash", "te ")):
        return Attention.FLASH_ATTENTION_2
    return Attention.EAGER if row.attn == "eager" else Attention.SDPA


def _offload(row: Row) -> Offload:
    if "params" in row.offload:
        return Offload.PARAMS
    return Offload.OPTIMIZER if row.offload.startswith("cpu") else Offload.NONE


def _lora(row: Row, model: ModelFacts) -> Lora:
    """Returns the adapter that the notes name, completed by the publisher's defaults."""
    if method(row) is Method.FULL:
        return Lora()
    rank, targets, dropout = _publisher_lora(row)
    noted = row.noted("lora_rank") or row.noted("r") or row.noted("rank")
    if noted is not None and re.fullmatch(r"\d+(\.0)?", noted):
        rank = int(float(noted))
    named = _named_targets(row)
    known = set(linear_names(model))
    chosen = targets if named is None else named
    if chosen != ALL_LINEAR:
        chosen = tuple(name for name in chosen if name in known) or _fused_targets(known)
    return Lora(rank=rank, alpha=2 * rank, dropout=dropout, targets=chosen)


def _fused_targets(known: set[str]) -> tuple[str, ...]:
    """Returns the one projection of queries, keys and values where a family has it, else every linear layer."""
    return ("qkv_proj",) if "qkv_proj" in known else ALL_LINEAR


def _named_targets(row: Row) -> tuple[str, ...] | None:
    """Returns the targets in the notes, or None if the notes name none."""
    match = re.search(r"(?:targets|target_modules=|target=)\s*([\w\- ]+)", row.notes)
    words = match.group(1).split() if match else []
    if not words:
        if row.says("all layers"):
            return ALL_LINEAR
        return QUERY_VALUE if row.says("q,v only", "Q and V only") else None
    if words[0] in ("ALL", "all-linear"):
        return ALL_LINEAR
    if words[0] in ("DEFAULT", "W_pack", "c_attn", "query_key_value"):
        return ATTENTION_INPUTS
    return tuple(word for word in words if word.endswith("_proj") or word == "c_attn")


def _publisher_lora(row: Row) -> tuple[int, tuple[str, ...], float]:
    """Returns the publisher's default rank, targets and dropout.

    Source: fms-acceleration scripts/benchmarks/scenarios*.yaml; LitGPT config_hub/finetune and finetune/lora.py;
    torchtune recipes/configs/llama3*/*lora*.yaml; swift's arguments of release 2.6 and 3; H2O LLM Studio's
    ConfigNLPCausalLMTraining.
    """
    name = folded(row.model)
    if row.publisher is Publisher.FMS:
        return 16, ("q_proj", "k_proj", "v_proj", "o_proj"), 0.1
    if row.publisher is Publisher.LITGPT:
        if row.says("config "):
            everywhere = re.match("gemma|phi|tiny-llama", name) is not None
            return 32, ALL_LINEAR if everywhere else QUERY_VALUE, 0.1 if name.startswith("gemma") else 0.05
        return 8, QUERY_VALUE, 0.05
    if row.publisher is Publisher.TORCHTUNE:
        return 64 if "3.2" in name else 8, ALL_LINEAR, 0.0
    if row.publisher is Publisher.H2O:
        return 4, ALL_LINEAR, 0.05
    if row.publisher is Publisher.SWIFT:
        return 8, ATTENTION_INPUTS if "release/2" in row.source else ALL_LINEAR, 0.05
    return 16, ALL_LINEAR, 0.05
