"""Models and ways to train them, drawn at random from a fixed seed: what tape and trace are both asked about."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import lcm
from types import MappingProxyType
from typing import Any

from dstrain.choices import Attention, LossKernel, Method
from dstrain.facts.model import families
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.model.traces import Question, Subject
from dstrain.job.model_changes import Lora
from dstrain.job.schema import Job
from dstrain.plan.configuration import DEFAULTS, Configuration, changed
from dstrain.plan.named_parts import frozen_parts, with_frozen
from dstrain.plan.training_code import TrainingCode

SEED = 20260101
_ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
_LATENT_LINEARS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


class Rows(StrEnum):
    """What rows of a micro-batch look like."""

    ALONE = "alone"
    PADDED = "padded"
    PACKED = "packed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to train, as far as it is not a number."""

    method: Method
    """What is trained."""
    has_dropout: bool
    """Whether adapters drop inputs."""
    attn: Attention
    """Attention implementation."""
    rows: tuple[Rows, ...]
    """What rows may look like: one sample, several of which the shorter are padded, or several samples in each."""
    grad_ckpt: bool
    """Whether activations are recomputed."""


WAYS = tuple(
    Way(method=method, has_dropout=has_dropout, attn=attn, rows=rows, grad_ckpt=grad_ckpt)
    for method, has_dropout in ((Method.FULL, False), (Method.LORA, False), (Method.LORA, True))
    for attn, rows in (
        (Attention.FLASH_ATTENTION_2, (Rows.ALONE, Rows.PADDED, Rows.PACKED)),
        (Attention.SDPA, (Rows.ALONE,)),
        (Attention.SDPA, (Rows.PADDED,)),
        (Attention.SDPA, (Rows.PACKED,)),
        (Attention.EAGER, (Rows.ALONE, Rows.PADDED)),
    )
    for grad_ckpt in (False, True)
)
"""Every combination."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model trained in one way: as a question to the tracer, and as the plan has it."""

    family: str
    """Row of the table."""
    way: Way
    """How it is trained."""
    question: Question
    """What the tracer is asked."""
    model: ModelFacts
    """The model, as the plan knows it."""
    configuration: Configuration
    """The way, as the plan knows it."""

    @property
    def bar_ratio(self) -> float:
        """Returns the error that the tape may have."""
        is_hard = self.model.moe is not None or self.model.vision is not None or self.way.has_dropout
        return 0.01 if is_hard else 0.005


def _text(draw: random.Random) -> dict[str, Any]:
    """Returns the sizes that all decoders have."""
    heads = draw.choice((4, 6, 8, 12, 16, 24, 32))
    step = lcm(64, heads)
    return {
        "vocab_size": draw.choice((4001, 8192, 32000, 49155, 100352, 151936)),
        "hidden_size": step * draw.randint(256 // step + 1, 4096 // step),
        "intermediate_size": 64 * draw.randint(6, 200),
        "num_hidden_layers": draw.randint(2, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([kv for kv in (1, 2, 4, 8, heads) if heads % kv == 0]),
        "head_dim": draw.choice((32, 64, 80, 96, 128)),
        "max_position_embeddings": 32768,
        "tie_word_embeddings": draw.random() < 0.5,
        "dtype": "bfloat16",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _with_biases(draw: random.Random) -> dict[str, Any]:
    return _text(draw) | {"attention_bias": draw.random() < 0.3}


def _gemma3(draw: random.Random) -> dict[str, Any]:
    return _text(draw) | {"sliding_window": 8192, "tie_word_embeddings": True}


def _gemma3_window(draw: random.Random) -> dict[str, Any]:
    """Rows longer than the window, so that it needs a mask where the kernel knows no window."""
    return _text(draw) | {"sliding_window": 64, "tie_word_embeddings": True}


def _mistral_window(draw: random.Random) -> dict[str, Any]:
    return _text(draw) | {"sliding_window": 64}


def _mistral(draw: random.Random) -> dict[str, Any]:
    return _text(draw) | {"sliding_window": None}


def _phi3(draw: random.Random) -> dict[str, Any]:
    return _text(draw) | {"head_dim": None, **_divided_heads(draw), "sliding_window": None}


def _divided_heads(draw: random.Random) -> dict[str, Any]:
    """Returns a hidden size that heads share among them."""
    heads, width = draw.choice((4, 8, 16, 32)), draw.choice((32, 64, 96, 128))
    kv_heads = draw.choice([kv for kv in (2, 4, 8, heads) if heads % kv == 0])
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * width}


def _experts(draw: random.Random) -> dict[str, Any]:
    experts = draw.choice((4, 8, 16, 60, 128))
    return {
        "num_experts": experts,
        "num_experts_per_tok": draw.choice([k for k in (1, 2, 4, 8) if k < experts]),
        "moe_intermediate_size": 32 * draw.randint(2, 48),
    }


def _mixtral(draw: random.Random) -> dict[str, Any]:
    experts = _experts(draw)
    sizes = {"num_local_experts": experts["num_experts"], "num_experts_per_tok": experts["num_experts_per_tok"]}
    return _text(draw) | sizes | {"intermediate_size": experts["moe_intermediate_size"], "sliding_window": None}


def _qwen3_moe(draw: random.Random) -> dict[str, Any]:
    return _text(draw) | _experts(draw)


def _qwen2_moe(draw: random.Random) -> dict[str, Any]:
    heads = _divided_heads(draw)
    shared = {"shared_expert_intermediate_size": 64 * draw.randint(2, 40)}
    sizes = _text(draw) | {"head_dim": None} | heads | _experts(draw) | shared
    return {key: value for key, value in sizes.items() if key != "head_dim"}


def _deepseek(draw: random.Random) -> dict[str, Any]:
    sizes = {key: value for key, value in _text(draw).items() if key != "head_dim"}
    experts = _experts(draw)
    width = draw.choice((64, 128))
    return sizes | {
        "n_routed_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "moe_intermediate_size": experts["moe_intermediate_size"],
        "n_shared_experts": draw.randint(1, 2),
        "first_k_dense_replace": draw.randint(0, 2),
        "num_hidden_layers": draw.randint(3, 5),
        "num_key_value_heads": sizes["num_attention_heads"],
        "kv_lora_rank": 32 * draw.randint(2, 16),
        "q_lora_rank": 32 * draw.randint(2, 48),
        "qk_rope_head_dim": draw.choice((32, 64)),
        "qk_nope_head_dim": width,
        "v_head_dim": draw.choice((64, width)),  # flash attention cannot have values wider than keys
    }


def _deepseek_v3(draw: random.Random) -> dict[str, Any]:
    return _deepseek(draw) | {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}


def _tower(draw: random.Random, text: Mapping[str, Any]) -> dict[str, Any]:
    heads = draw.choice((4, 8, 16))
    return {
        "depth": draw.randint(3, 5),
        "hidden_size": heads * draw.choice((32, 64, 72)),
        "intermediate_size": 32 * draw.randint(4, 128),
        "num_heads": heads,
        "out_hidden_size": text["hidden_size"],
        "deepstack_visual_indexes": [0, 1],
    }


def _qwen3_vl(draw: random.Random) -> dict[str, Any]:
    return _with_tower(draw, _text(draw), "qwen3_vl")


def _qwen3_vl_moe(draw: random.Random) -> dict[str, Any]:
    return _with_tower(draw, _qwen3_moe(draw), "qwen3_vl_moe")


def _with_tower(draw: random.Random, text: dict[str, Any], model_type: str) -> dict[str, Any]:
    width = 128  # M-RoPE shares this many elements among time, height and width
    tied = text.pop("tie_word_embeddings")
    return {
        "text_config": text | {"head_dim": width, "model_type": f"{model_type}_text"},
        "vision_config": _tower(draw, text) | {"model_type": model_type},
        "tie_word_embeddings": tied,
        "image_token_id": 3,
        "video_token_id": 4,
        "vision_start_token_id": 5,
        "vision_end_token_id": 6,
    }


_FAMILIES: Mapping[str, tuple[str, Callable[[random.Random], dict[str, Any]]]] = MappingProxyType(
    {
        "qwen3": ("qwen3", _with_biases),
        "qwen2": ("qwen2", lambda draw: {**_text(draw), "head_dim": None, **_divided_heads(draw)}),
        "llama": ("llama", _with_biases),
        "mistral": ("mistral", _mistral),
        "mistral, windowed": ("mistral", _mistral_window),
        "gemma3_text": ("gemma3_text", _gemma3),
        "gemma3_text, windowed": ("gemma3_text", _gemma3_window),
        "glm": ("glm", _with_biases),
        "glm4": ("glm4", _with_biases),
        "phi3": ("phi3", _phi3),
        "granite": ("granite", _with_biases),
        "qwen3_moe": ("qwen3_moe", _qwen3_moe),
        "mixtral": ("mixtral", _mixtral),
        "qwen2_moe": ("qwen2_moe", _qwen2_moe),
        "deepseek_v2": ("deepseek_v2", _deepseek),
        "deepseek_v3": ("deepseek_v3", _deepseek_v3),
        "qwen3_vl": ("qwen3_vl", _qwen3_vl),
        "qwen3_vl_moe": ("qwen3_vl_moe", _qwen3_vl_moe),
        "qwen3_vl, trained tower": ("qwen3_vl", _qwen3_vl),
        "qwen3_vl, trained aligner": ("qwen3_vl", _qwen3_vl),
        "qwen3_vl, trained aligner alone": ("qwen3_vl", _qwen3_vl),
    }
)
"""Row of the table → `model_type`, and how a config is drawn."""
_TRAINED: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "qwen3_vl, trained tower": {"freeze_vision_tower": False, "freeze_multi_modal_projector": False},
        "qwen3_vl, trained aligner": {"freeze_multi_modal_projector": False},
        "qwen3_vl, trained aligner alone": {"freeze_multi_modal_projector": False, "freeze_language_model": True},
    }
)
"""Row of the table → the keys of a job for other parts than the language model."""

FAMILIES = tuple(_FAMILIES)
"""Rows of the table."""


def cases(*, shapes: int, families: tuple[str, ...] = FAMILIES) -> Iterator[Case]:
    """Yields so many cases of each family and way; a family's cases do not depend on which others are asked."""
    for family in families:
        draw = random.Random(f"{SEED} {family}")
        for way in WAYS:
            for _ in range(shapes):
                yield _case(family, way, draw)


def config_of(family: str, draw: random.Random) -> dict[str, Any]:
    """Returns a config.json, drawn at random."""
    model_type, sizes = _FAMILIES[family]
    return {"model_type": model_type} | {key: value for key, value in sizes(draw).items() if value is not None}


def _case(family: str, way: Way, draw: random.Random) -> Case:
    config = config_of(family, draw)
    model = families.from_config(config, name=family, source=family)
    rows = draw.choice(way.rows)
    micro_batch = 1 if rows is Rows.ALONE else draw.randint(1 if rows is Rows.PACKED else 2, 4)
    seq_len = 8 * draw.randint(16, 256)
    if way.attn is Attention.EAGER:
        seq_len = 8 * draw.randint(16, 96)
    image_patches = 4 * draw.randint(4, seq_len // 16) if model.vision is not None else 0
    losses = (LossKernel.FULL, LossKernel.CHUNKED, LossKernel.FUSED)[: 2 if family == "granite" else 3]
    configuration = changed(
        DEFAULTS,
        loss=draw.choice(losses),
        method=way.method,
        lora=_lora(family, model, way, draw),
        seq_len=seq_len,
        micro_batch=micro_batch,
        grad_ckpt=way.grad_ckpt,
        attn=way.attn,
        packing=rows is Rows.PACKED,
        image_patches=image_patches,
        code=TrainingCode(masks_padding=draw.random() < 0.5),
    )
    trains_parts = image_patches > 0 and way.method is Method.FULL  # an adapter trains alone
    job = Job(model="", output_dir="", **(_TRAINED.get(family, {}) if trains_parts else {}))
    parts = tuple(sorted(frozen_parts(job)))
    question = replace(question_of(config, configuration), frozen_parts=parts)
    model = with_frozen(model, job)
    return Case(family=family, way=way, question=question, model=model, configuration=configuration)


def _lora(family: str, model: ModelFacts, way: Way, draw: random.Random) -> Lora:
    """Returns an adapter; experts have some too where nothing is dropped, in half of the cases."""
    targets: tuple[str, ...] = ("all-linear",)
    experts: tuple[str, ...] = ()
    if model.moe is not None:
        targets = _LATENT_LINEARS if family.startswith("deepseek") else _ATTENTION_LINEARS
        experts = draw.choice(((), ("experts",))) if not way.has_dropout else ()
    elif draw.random() < 0.3 and family != "phi3":
        targets = ("q_proj", "v_proj")
    dropout = 0.1 if way.has_dropout else 0.0
    return Lora(rank=draw.choice((4, 8, 16, 64)), dropout=dropout, targets=targets, target_parameters=experts)


def question_of(config: Mapping[str, Any], configuration: Configuration) -> Question:
    """Returns the question that a configuration of the plan stands for."""
    return Question(
        subject=Subject(config=config),
        micro_batch=configuration.batch.micro_batch,
        seq_len=configuration.batch.seq_len,
        method=configuration.model.method,
        lora=configuration.model.lora,
        attn=configuration.kernels.attn,
        has_padding=configuration.code.masks_padding and configuration.batch.is_padded,
        is_packed=configuration.batch.packing,
        grad_ckpt=configuration.checkpointing.enabled,
        precision=configuration.model.precision,
        loss=configuration.kernels.loss,
        image_patches=configuration.batch.image_patches,
    )
