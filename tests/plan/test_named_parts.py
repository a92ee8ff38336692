"""What a job names is in a name of its model, or is reported with the closest names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstrain.choices import Method
from dstrain.facts import probe
from dstrain.facts.model.model_files import names_of
from dstrain.job.model_changes import Lora
from dstrain.job.schema import Job
from dstrain.plan.named_parts import RENAMED_BY_PEFT, Unknown, unknown, untargeted


def of(model: str, **keys: Any) -> list[Unknown]:
    """Returns what a job names in a model that it does not have."""
    facts = probe.read_model(model)
    names = names_of(facts, facts.source)
    assert names is not None
    return list(unknown(Job(model=model, output_dir="o", **keys), names, facts))


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ("qwen3-8b", {"freeze": (r"layers\.3[0-5]\.", "embed_tokens$|lm_head", "^model")}),
        ("qwen3-8b", {"train_only": ("norm", r"\.mlp\.up_proj\.weight$")}),
        ("qwen3-30b-a3b", {"freeze": (r"mlp\.experts\.gate_up_proj$", r"mlp\.gate\.")}),
        ("qwen3-vl-8b", {"freeze": (r"^model\.language_model\.layers\.0\.", r"visual\.blocks\.26\.")}),
    ],
)
def test_patterns_in_a_name_are_known(model: str, keys: dict[str, Any]) -> None:
    assert of(model, **keys) == []


@pytest.mark.parametrize(
    ("model", "key", "pattern", "closest"),
    [
        ("qwen3-8b", "freeze", "embed_token_", "model.embed_tokens.weight"),
        ("qwen3-8b", "freeze", r"layers\.36\.", "model.layers.0."),
        ("qwen3-8b", "train_only", r"mlp\.upproj", "model.layers.0.mlp.up_proj.weight"),
        ("qwen3-vl-8b", "freeze", r"^visual\.blocks", "model.visual.blocks.0."),
        ("qwen3-vl-8b", "freeze", r"^model\.layers", "model.language_model.layers.0."),
        ("qwen3-30b-a3b", "freeze", r"experts\.0\.up_proj", "model.layers.0.mlp.experts."),
    ],
)
def test_a_pattern_in_no_name_is_found_with_the_closest_names(model: str, key: str, pattern: str, closest: str) -> None:
    (missing,) = of(model, **{key: ("norm", pattern)})
    assert missing.keys == (key, 1)
    assert missing.problem == f'{key} has "{pattern}", which is in no name of a parameter'
    assert closest in missing.fix


@pytest.mark.parametrize(
    ("lora", "problems"),
    [
        (Lora(targets=("q_proj", "self_attn.k_proj", "lm_head"), modules_to_save=("embed_tokens", "norm")), []),
        (
            Lora(targets=("q_proj", "vproj")),
            [('lora: targets has "vproj", but no module of the model is named so', "write v_proj")],
        ),
        (
            Lora(targets=("roj",)),  # PEFT compares targets from a dot on, and whole modules by their ends
            [('lora: targets has "roj", but no module of the model is named so', "write ")],
        ),
        (
            Lora(targets=("all-linear", "lm_head")),
            [("lora: targets has all-linear beside other names, which PEFT takes alone", "write [q_proj, k_proj, ")],
        ),
        (
            Lora(targets=("dense",)),
            [('lora: targets has "dense", but no module of the model is named so', "write the end of a module's")],
        ),
        (
            Lora(modules_to_save=("embed_token",)),
            [('lora: modules_to_save has "embed_token", but no module of the model is named so', "write embed_tokens")],
        ),
    ],
)
def test_modules_of_an_adapter_are_compared_as_peft_does(lora: Lora, problems: list[tuple[str, str]]) -> None:
    missing = of("qwen3-8b", method=Method.LORA, lora=lora)
    assert [found.problem for found in missing] == [problem for problem, _ in problems]
    assert all(found.fix.startswith(fix) for found, (_, fix) in zip(missing, problems, strict=True))


def test_a_tied_head_is_a_module_too() -> None:
    assert of("qwen3-4b", method=Method.LORA, lora=Lora(modules_to_save=("lm_head", "embed_tokens"))) == []


def test_a_tied_head_has_no_adapter_beside_an_embedding_that_trains_whole() -> None:
    # PEFT 0.21 ends in a TypeError
    lora = Lora(targets=("q_proj", "lm_head"), modules_to_save=("embed_tokens",))
    missing = untargeted(probe.read_model("qwen3-4b"), lora)
    assert missing is not None
    assert "whose weight is the embedding" in missing.problem
    assert untargeted(probe.read_model("qwen3-8b"), lora) is None


def test_an_adapter_has_no_targets_in_a_vision_tower() -> None:
    (missing,) = of("qwen3-vl-8b", method=Method.LORA, lora=Lora(targets=("qkv", "q_proj")))
    assert missing.keys == ("lora", "targets", 0)


def test_names_of_a_model_without_facts_are_those_of_its_files(tmp_path: Path) -> None:
    assert names_of(None, str(tmp_path)) is None
    assert names_of(None, "some/model") is None
    header = json.dumps({"wte.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert names_of(None, str(tmp_path)) == ("wte.weight",)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert names_of(None, str(tmp_path)) is None


def test_targets_that_peft_takes_for_experts_are_those_of_the_installed_peft() -> None:
    conversion = pytest.importorskip("peft.utils.transformers_weight_conversion")
    renamed = conversion._MOE_TARGET_MODULE_MAPPING
    patterns = {family: base for family, base in conversion._MODEL_TO_CONVERSION_PATTERN.items() if base in renamed}
    assert {family: frozenset(renamed[base]) for family, base in patterns.items()} == RENAMED_BY_PEFT
