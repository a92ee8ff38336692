"""The models and machines that published runs name, as facts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.published.rows import Publisher, Row
from dstrain.errors import DstrainError
from dstrain.facts.cluster import gpus
from dstrain.facts.cluster.cluster import Cluster, Link, Origin, describe, link
from dstrain.facts.cluster.gpus import Gpu
from dstrain.facts.model import aliases, families
from dstrain.facts.model.model_facts import ModelFacts

MODELS = Path(__file__).parents[2] / "tests" / "published" / "models.json"
"""Shapes of the published models that `dstrain.facts.model.aliases` has not: names as a pattern, config, source, and in
`stands_for` what a config only stands for."""

PRECISIONS_IN_NAMES = re.compile(r"-(fp16|fp32|bf16)$")
"""Suffixes of a name that describe a checkpoint's format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """A published model."""

    model: ModelFacts
    """Facts of the model."""
    stands_for: str | None
    """The model that the shape stands in for, in words, or None for the real model."""

    @property
    def is_for_speed_alone(self) -> bool:
        """Whether the stand-in has the arithmetic of the real model but not its memory."""
        return self.stands_for is not None and "for speed alone" in self.stands_for


def folded(name: str) -> str:
    """Returns a model's name without organisation, case and spelling: `Llama 2 7B` is `llama-2-7b`.

    >>> folded("mistralai/Mixtral-8x7B-Instruct-v0.1"), folded("Qwen3_30B_a3B"), folded("phi-1.5 1.3B")
    ('mixtral-8x7b-instruct-v0.1', 'qwen3-30b-a3b', 'phi-1.5-1.3b')
    """
    last = name.strip().rstrip("/").split("/")[-1].lower()
    return PRECISIONS_IN_NAMES.sub("", re.sub(r"[\s_]+", "-", last))


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    table: dict[str, Mapping[str, Any]] = json.loads(MODELS.read_text(encoding="utf-8"))
    return table


@cache
def find_model(name: str, *, added_tokens: int = 0) -> Shelf | None:
    """Returns the model of that name, or None if neither table has it; `added_tokens` enlarge its vocabulary."""
    plain = folded(name)
    for key, entry in _table().items():
        if re.fullmatch(entry["names"], plain):
            facts = families.from_config(_grown(entry["config"], added_tokens), name=key, source=entry["source"])
            return Shelf(model=facts, stands_for=entry.get("stands_for"))
    for candidate in (name, plain):
        resolved = aliases.resolve(candidate)
        if resolved is not None and resolved[0] in families.known():
            alias, known = resolved
            facts = families.from_config(_grown(known.config, added_tokens), name=alias, source=known.hub_id)
            return Shelf(model=facts, stands_for=None)
    return None


def _grown(config: Mapping[str, Any], added_tokens: int) -> dict[str, Any]:
    return {**config, "vocab_size": config["vocab_size"] + added_tokens} if added_tokens else dict(config)


H100_96G = replace(
    gpus.gpu("h100-sxm"),
    memory_mib=97871,
    hbm_bytes_per_s=2.4e12,
    source="torchtitan benchmarks/llama3_h100_202412_torchtitan.md: 96 GB of HBM2e, 500 W; its bandwidth from memory",
)
"""The H100 of torchtitan's tables; FLOP/s, and what is reached of them, are those of the card at 700 W."""


def find_gpu(name: str) -> Gpu | None:
    """Returns the GPU of that name, or None if the name is unknown or ambiguous.

    >>> find_gpu("8*A100").name, find_gpu("DGX-H100").name, find_gpu("V100, A10, 3090")
    ('a100-80g', 'h100-sxm', None)
    """
    if "96GB HBM2e" in name:
        return H100_96G
    plain = re.sub(r"^(\d+\*|DGX-)", "", name.strip())
    if not plain or "," in plain or "，" in plain:
        return None
    for spelling in (plain, re.sub(r"(\d+)GB?$", r"\1G", plain)):
        with suppress(DstrainError):
            return gpus.gpu(spelling)
    return None


def find_cluster(row: Row) -> Cluster:
    """Returns the machines of a run; an A100 of 80 GB stands in for an unknown GPU."""
    count = gpus_at_work(row)
    per_node = count if count <= 8 else 8
    return describe(
        gpu=find_gpu(row.gpu) or gpus.gpu("a100-80g"),
        gpu_origin=Origin.GIVEN if find_gpu(row.gpu) else Origin.ASSUMED,
        gpus=count,
        gpus_per_node=per_node if count % per_node == 0 else count,
        inter_link=_inter_link(row),
    )


def gpus_at_work(row: Row) -> int:
    """Returns how many GPUs share a run: one where LitGPT's table counts those of the machine.

    LitGPT's README: all runs are on one GPU of it unless `--devices` says otherwise.
    """
    if row.publisher is Publisher.LITGPT and row.zero_stage is None:
        return 1
    return row.num_gpus


def _inter_link(row: Row) -> Link | None:
    """Returns the link between nodes if the notes or the table name it, else None."""
    named = row.noted("link")
    if named is not None:
        return link(named)
    if "4x100Gb RoCE" in row.notes:
        return link("roce100/2")
    if "1600 Gbps" in row.source:
        return link("roce200")
    return None
