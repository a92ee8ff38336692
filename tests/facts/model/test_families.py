"""The facts of a model: against the model that Transformers itself builds, without its weights."""

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from dstrain.errors import InvalidConfig
from dstrain.facts.model import aliases
from dstrain.facts.model.families import FAMILIES, from_config, known
from dstrain.facts.model.model_facts import Kind, ModelFacts

Counts = Counter[tuple[str, tuple[int, ...], bool]]

_HUB_CONFIGS = {alias: dict(entry[1].config) for alias in known() if (entry := aliases.resolve(alias))}

_SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
_SMALL_TOWER = {"depth": 3, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 64}
_SMALL_SIGLIP = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}

_UNUSUAL = {
    "llama with every bias": {"model_type": "llama", **_SMALL, "attention_bias": True, "mlp_bias": True},
    "llama without grouped heads": {"model_type": "llama", **_SMALL, "num_key_value_heads": None},
    "llama with wide heads": {"model_type": "llama", **_SMALL, "head_dim": 48},
    "granite": {"model_type": "granite", **_SMALL, "attention_bias": True},
    "smollm3, tied by default": {"model_type": "smollm3", **_SMALL},
    "ministral": {"model_type": "ministral", **_SMALL, "head_dim": 16},
    "mistral untied heads": {"model_type": "mistral", **_SMALL, "head_dim": 8},
    "qwen3 with biases": {"model_type": "qwen3", **_SMALL, "attention_bias": True},
    "qwen2 tied": {"model_type": "qwen2", **_SMALL, "tie_word_embeddings": True},
    "gemma3_text by default": {"model_type": "gemma3_text", "num_hidden_layers": 1},
    "glm4 without bias": {"model_type": "glm4", **_SMALL, "attention_bias": False},
    "phi3": {"model_type": "phi3", **_SMALL},
    "qwen2_moe": {"model_type": "qwen2_moe", **_SMALL, "num_experts": 6, "mlp_only_layers": [1]},
    "qwen3_moe, every second layer": {"model_type": "qwen3_moe", **_SMALL, "num_experts": 8, "decoder_sparse_step": 2},
    "qwen3_moe, some layers dense": {"model_type": "qwen3_moe", **_SMALL, "num_experts": 8, "mlp_only_layers": [0, 3]},
    "mixtral": {"model_type": "mixtral", **_SMALL, "num_local_experts": 4},
    "deepseek_v2 with biases": {
        "model_type": "deepseek_v2",
        **_SMALL,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "deepseek_v3, all layers sparse": {
        "model_type": "deepseek_v3",
        **_SMALL,
        "num_key_value_heads": 4,
        "n_routed_experts": 16,
        "first_k_dense_replace": 0,
        "attention_bias": True,
    },
    "qwen3_vl, tied in the text only": {
        "model_type": "qwen3_vl",
        "text_config": {**_SMALL, "tie_word_embeddings": True},
        "vision_config": _SMALL_TOWER,
    },
    "qwen3_vl, tied": {
        "model_type": "qwen3_vl",
        "text_config": _SMALL,
        "vision_config": {**_SMALL_TOWER, "deepstack_visual_indexes": [1]},
        "tie_word_embeddings": True,
    },
    "qwen3_vl without deepstack": {
        "model_type": "qwen3_vl",
        "text_config": _SMALL,
        "vision_config": {**_SMALL_TOWER, "deepstack_visual_indexes": []},
    },
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe",
        "text_config": {**_SMALL, "num_experts": 8},
        "vision_config": _SMALL_TOWER,
    },
    "gemma3 with the head of SigLIP": {
        "model_type": "gemma3",
        "text_config": {**_SMALL, "tie_word_embeddings": False},
        "vision_config": {**_SMALL_SIGLIP, "model_type": "siglip_vision_model", "patch_size": 14},
    },
    "gemma3 untied": {
        "model_type": "gemma3",
        "text_config": _SMALL,
        "mm_tokens_per_image": 49,
        "vision_config": {**_SMALL_SIGLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
        "tie_word_embeddings": False,
    },
}

_ALL = {**_HUB_CONFIGS, **_UNUSUAL}


@cache
def build(name: str) -> PreTrainedModel:
    """Returns the model that Transformers builds, on the meta device."""
    fields = json.loads(json.dumps(_ALL[name]))
    auto = AutoModelForImageTextToText if "vision_config" in fields else AutoModelForCausalLM
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model: PreTrainedModel = auto.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.for_model(fields.pop("model_type"), **fields)
        )
    return model


@cache
def facts(name: str) -> ModelFacts:
    return from_config(_ALL[name], name=name, source=name)


def named(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Parameter, torch.nn.Module]]:
    """Yields every parameter with its name, numbers of layers taken out, and the module that owns it."""
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        name = re.sub(r"^model\.(language_model\.)?layers\.\d+\.", "", name)
        yield re.sub(r"\.\d+\.", ".*.", name), parameter, owner


def kind_of(name: str) -> Kind:
    """Returns the kind that the words of a parameter's name tell."""
    rules = [
        (r"\.visual\.|vision_tower|multi_modal_projector", Kind.VISION),
        (r"embed_tokens", Kind.EMBEDDING),
        (r"lm_head", Kind.HEAD),
        (r"norm", Kind.NORM),
        (r"mlp\.experts\.", Kind.EXPERT),
        (r"mlp\.gate\.|shared_expert_gate", Kind.ROUTER),
        (r"self_attn", Kind.ATTENTION),
        (r"mlp\.", Kind.MLP),
    ]
    return next(kind for pattern, kind in rules if re.search(pattern, name))


@pytest.mark.sweep
@pytest.mark.parametrize("name", _ALL)
def test_every_tensor_is_the_one_that_transformers_builds(name: str) -> None:
    built: Counts = Counter()
    for parameter_name, parameter, owner in named(build(name)):
        is_weight = parameter_name.endswith("weight")
        built[parameter_name, tuple(parameter.shape), is_weight and isinstance(owner, torch.nn.Linear)] += 1
    counted: Counts = Counter()
    for group in facts(name).tensors:
        counted[group.name, group.shape, group.is_linear] += group.count
    assert counted == built


@pytest.mark.parametrize("name", _ALL)
def test_every_kind_has_the_parameters_that_transformers_builds(name: str) -> None:
    built: Counter[Kind] = Counter()
    for parameter_name, parameter, _ in named(build(name)):
        built[kind_of(parameter_name)] += parameter.numel()
    assert {kind: facts(name).num_params_of(kind) for kind in Kind} == {kind: built[kind] for kind in Kind}


@pytest.mark.parametrize("name", [name for name in _ALL if FAMILIES[_ALL[name]["model_type"]].moe_block])
def test_the_moe_block_is_a_class_of_the_built_model_and_stands_in_each_moe_layer(name: str) -> None:
    classes = Counter(type(module).__name__ for module in build(name).modules())
    moe = facts(name).moe
    assert moe is not None
    assert classes[moe.block_class] == moe.num_moe_layers


@pytest.mark.parametrize("name", _ALL)
def test_shape_facts_are_those_of_the_transformers_config(name: str) -> None:
    config, got = build(name).config.get_text_config(), facts(name)
    expected = {key: getattr(config, key) for key in _SMALL if key not in {"pad_token_id", "num_key_value_heads"}}
    assert {key: getattr(got, key) for key in expected} == expected


def test_every_family_is_compared_with_transformers() -> None:
    assert set(FAMILIES) <= {config["model_type"] for config in _ALL.values()}


@pytest.mark.parametrize("name", ["qwen3-8b", "mixtral-8x7b", "deepseek-v3", "gemma-3-4b", "qwen3-vl-30b-a3b"])
def test_a_config_saved_by_transformers_5_gives_the_same_facts(name: str) -> None:
    saved = json.loads(build(name).config.to_json_string(use_diff=False))
    saved["dtype"] = "bfloat16"
    assert from_config(saved, name=name, source=name) == facts(name)


def test_the_fields_of_transformers_4_and_5_mean_the_same() -> None:
    old = {"model_type": "llama", **_SMALL, "rope_theta": 10000.0, "torch_dtype": "bfloat16"}
    new = {
        "model_type": "llama",
        **_SMALL,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "dtype": "bfloat16",
    }
    assert from_config(old, name="m", source="m") == from_config(new, name="m", source="m")


_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 300}


@pytest.mark.parametrize(
    ("config", "length", "rope_type"),
    [
        ({}, 512, "default"),
        ({"rope_scaling": _YARN}, 1200, "yarn"),
        ({"rope_parameters": {**_YARN, "rope_type": "yarn", "rope_theta": 1e4}}, 1200, "yarn"),
        ({"rope_scaling": _YARN | {"factor": 1.5}}, 512, "yarn"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 1024, "dynamic"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 512, "linear"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "many"}}, 512, "yarn"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear"}, "sliding_attention": {}}}, 512, "linear"),
    ],
)
def test_scaled_positions_make_a_model_longer(config: dict[str, Any], length: int, rope_type: str) -> None:
    found = from_config({"model_type": "llama", **_SMALL, **config}, name="m", source="m")
    assert (found.max_position_embeddings, found.rope_type) == (length, rope_type)


def test_facts_of_some_models_are_those_of_their_papers() -> None:
    assert facts("qwen3-vl-8b").dtype == "bfloat16", "it stands in the config of the text"
    assert facts("phi3").dtype == "float32", "no config says it"
    v3, lite = facts("deepseek-v3"), facts("deepseek-v2-lite").moe
    assert (v3.head_dim, v3.v_head_dim, v3.num_key_value_heads) == (192, 128, 128)
    assert v3.moe is not None and lite is not None
    assert (v3.moe.num_experts, v3.moe.experts_per_token, v3.moe.intermediate_size) == (256, 8, 2048)
    assert (v3.moe.shared_intermediate_size, v3.moe.num_moe_layers) == (2048, 58)
    assert lite.shared_intermediate_size == 2 * 1408
    assert facts("qwen3-235b-a22b").num_active_params == 22_190_763_520
    normed = {name: facts(name).has_qk_norm for name in ("qwen3-8b", "gemma-3-4b", "llama-3.1-8b")}
    assert normed == {"qwen3-8b": True, "gemma-3-4b": True, "llama-3.1-8b": False}
    merged = [vision.spatial_merge_size for name in ("gemma-3-4b", "qwen3-vl-8b") if (vision := facts(name).vision)]
    assert merged == [4, 2]


def test_what_a_model_does_not_have_is_none() -> None:
    assert (facts("qwen3-8b").moe, facts("gemma-3-1b").vision) == (None, None)
    config = {**_UNUSUAL["qwen3_moe, some layers dense"], "mlp_only_layers": [0, 1, 2, 3]}
    assert from_config(config, name="m", source="m").moe is None, "a sparse family with only dense layers"


def _problem(config: dict[str, Any]) -> InvalidConfig:
    with pytest.raises(InvalidConfig) as caught:
        from_config(config, name="mine", source="mine")
    return caught.value


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("value", [0, -1, True, "64", 64.0, [64], {}])
def test_a_size_that_cannot_be_is_named(key: str, value: object) -> None:
    error = _problem({"model_type": "qwen3", **_SMALL, key: value})
    assert error.problem.startswith(f'mine: "{key}" is ')


def test_an_empty_config_of_any_family_names_what_is_missing() -> None:
    # every size of Gemma 3 has a default, as in its own config.json
    for model_type in (name for name, family in FAMILIES.items() if "hidden_size" not in family.defaults):
        assert model_type == "gemma3" or 'hidden_size" is missing' in _problem({"model_type": model_type}).problem


def test_all_missing_sizes_are_named_together() -> None:
    error = _problem({"model_type": "llama", "hidden_size": 64, "vocab_size": 96})
    assert [line.split('"')[1] for line in error.problem.split("\n")] == [
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
    ]


def test_a_nested_key_is_named_in_full() -> None:
    text = {key: value for key, value in _SMALL.items() if key != "vocab_size"}
    error = _problem({"model_type": "qwen3_vl", "text_config": text, "vision_config": _SMALL_TOWER})
    assert error.problem == 'mine: "text_config.vocab_size" is missing'


_DEEPSEEK = _UNUSUAL["deepseek_v3, all layers sparse"]
_SPARSE = _UNUSUAL["qwen3_moe, some layers dense"]
_GEMMA = _UNUSUAL["gemma3 untied"]
_VL = _UNUSUAL["qwen3_vl, tied"]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"model_type": "llama", **_SMALL, "num_attention_heads": 5}, "hidden_size"),
        ({"model_type": "llama", **_SMALL, "num_key_value_heads": 3}, "num_attention_heads"),
        ({"model_type": "llama", **_SMALL, "num_key_value_heads": 0}, "num_key_value_heads"),
        ({"model_type": "llama", **_SMALL, "head_dim": -8}, "head_dim"),
        ({"model_type": "llama", **_SMALL, "attention_bias": "yes"}, "attention_bias"),
        ({"model_type": "llama", **_SMALL, "tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"model_type": "llama", **_SMALL, "max_position_embeddings": 0}, "max_position_embeddings"),
        ({"model_type": "llama", **_SMALL, "torch_dtype": 16}, "torch_dtype"),
        ({"model_type": "llama", **_SMALL, "dtype": "int4"}, "dtype"),
        ({**_SPARSE, "decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({**_SPARSE, "mlp_only_layers": 3}, "mlp_only_layers"),
        ({**_SPARSE, "mlp_only_layers": ["0"]}, "mlp_only_layers"),
        ({**_SPARSE, "num_experts": 0}, "num_experts"),
        ({**_SPARSE, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({**_DEEPSEEK, "n_routed_experts": -1}, "n_routed_experts"),
        ({**_DEEPSEEK, "kv_lora_rank": 0}, "kv_lora_rank"),
        ({**_DEEPSEEK, "first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({**_DEEPSEEK, "first_k_dense_replace": "1"}, "first_k_dense_replace"),
        ({"model_type": "deepseek_v2", **_SMALL}, "num_experts_per_tok"),
        ({**_VL, "text_config": [1]}, "text_config"),
        ({**_VL, "vision_config": "siglip"}, "vision_config"),
        ({**_VL, "vision_config": {**_SMALL_TOWER, "num_heads": 5}}, "vision_config.hidden_size"),
        ({**_VL, "vision_config": {**_SMALL_TOWER, "depth": 0}}, "vision_config.depth"),
        ({**_GEMMA, "mm_tokens_per_image": 0}, "mm_tokens_per_image"),
        ({**_GEMMA, "mm_tokens_per_image": 10**6}, "mm_tokens_per_image"),
        ({**_GEMMA, "vision_config": {**_SMALL_SIGLIP, "patch_size": 0}}, "vision_config.patch_size"),
        ({**_GEMMA, "vision_config": {**_SMALL_SIGLIP, "patch_size": 999}}, "mm_tokens_per_image"),
        ({**_SMALL}, "model_type"),
        ({**_SMALL, "model_type": 3}, "model_type"),
    ],
)
def test_what_cannot_be_names_its_key(config: dict[str, Any], key: str) -> None:
    assert _problem(config).problem.startswith(f'mine: "{key}" ')


def test_an_unknown_family_is_named_with_the_known_ones_or_the_nearest() -> None:
    problem = _problem({"model_type": "gpt2", **_SMALL}).problem
    assert problem.startswith('mine: model_type "gpt2" is not known; known: deepseek_v2, ')
    assert _problem({"model_type": "quen3-moe", **_SMALL}).hint == 'Did you mean "qwen3_moe"?'
