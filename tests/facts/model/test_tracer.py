"""The tracer as the rest of dstrain asks it: facts equal those of known families, answers are remembered."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dstrain.choices import Attention, Method
from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.cluster.cluster import Origin, describe
from dstrain.facts.cluster.gpus import gpu
from dstrain.facts.model import tracer
from dstrain.facts.model.families import from_config
from dstrain.facts.model.model_files import names_of
from dstrain.facts.model.tracer import Answer, ask, from_description, trace_model
from dstrain.facts.model.traces import ActivationProfile, Description, Question, Subject, Trace, Wanted
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import DEFAULTS, changed
from dstrain.plan.request import Request
from dstrain.plan.search.rules import broken
from dstrain.plan.search.search_space import with_defaults
from dstrain.plan.speed.flops import flops_per_token
from tests.conftest import asked_for, asked_together
from tests.plan.memory.layers.shapes import FAMILIES, config_of

pytestmark = pytest.mark.sweep

LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 1000, "n_embd": 64, "n_layer": 7, "n_head": 4}
GEMMA3 = LLAMA | {"model_type": "gemma3_text", "sliding_window": 64, "num_hidden_layers": 14}
GLM4_MOE = LLAMA | {
    "model_type": "glm4_moe",
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 2,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
QWEN3_5 = (
    LLAMA | LINEAR | {"model_type": "qwen3_5_text", "num_key_value_heads": 2, "head_dim": 256, "num_hidden_layers": 12}
)
GPT_OSS = LLAMA | {
    "model_type": "gpt_oss",
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 8,
}
IRREGULAR = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "gemma3_text": GEMMA3,
    "glm4_moe": GLM4_MOE,
    "qwen3_5_text": QWEN3_5,
    "gpt_oss": GPT_OSS,
}
"""Layers that are alike, go by other names, come in periods of six, four and two, and begin with two others."""


def drawn(family: str) -> dict[str, object]:
    return config_of(family, random.Random(family))


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> dict[tuple[str, int, bool], Answer]:
    """Descriptions of known families and of `DESCRIBED`, and of irregular ones a profile (0 samples) and its trace."""
    families, wanted = asked_for(request, "family"), asked_together(request, "name", "samples", "grad_ckpt")
    asked = {
        (family, 0, False): Question(subject=Subject(config=drawn(family)), wanted=Wanted.DESCRIPTION)
        for family in families
    }
    for name, config in DESCRIBED.items():
        asked[f"{name} described", 0, False] = Question(subject=Subject(config=config), wanted=Wanted.DESCRIPTION)
    for name, samples, grad_ckpt in wanted:
        way = Question(subject=Subject(config=IRREGULAR[name]), seq_len=128, has_padding=True)
        asked[f"{name} profile", 0, False] = replace(way, wanted=Wanted.PROFILE)
        asked[f"{name} profile", samples, grad_ckpt] = replace(way, micro_batch=samples, grad_ckpt=grad_ckpt)
    return dict(zip(asked, ask(list(asked.values())), strict=True))


@pytest.mark.parts(12)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_known_family_is_described_as_it_is_known(answers: dict[tuple[str, int, bool], Answer], family: str) -> None:
    description = answers[family, 0, False]
    assert isinstance(description, Description)
    known = from_config(drawn(family), name=family, source=family)
    described = from_description(description, name=family, source=family)
    assert set(described.tensors) == set(known.tensors)
    # of windows only the tape needs to know, which a traced model does without
    windows: dict[str, Any] = {"sliding_window": known.sliding_window, "num_windowed_layers": known.num_windowed_layers}
    assert replace(described, tensors=(), **windows) == replace(known, tensors=())
    assert {parameter.name for parameter in description.parameters} <= set(names_of(known, "") or ())


@pytest.mark.parts(12)
@pytest.mark.parametrize("name", IRREGULAR)
@pytest.mark.parametrize("samples", [1, 5])
@pytest.mark.parametrize("grad_ckpt", [False, True])
def test_a_profile_equals_the_trace_of_the_whole_model(
    answers: dict[tuple[str, int, bool], Answer], name: str, samples: int, grad_ckpt: bool
) -> None:
    profile, trace = answers[f"{name} profile", 0, False], answers[f"{name} profile", samples, grad_ckpt]
    assert isinstance(profile, ActivationProfile)
    assert isinstance(trace, Trace)
    layers = IRREGULAR[name].get("num_hidden_layers", 7)
    assert isinstance(layers, int)
    assert layers > profile.num_layers
    peaks = profile.peaks(num_layers=layers, micro_batch=samples, grad_ckpt=grad_ckpt)
    highest = max(peaks, key=lambda peak: peak.total)
    assert highest.name == trace.peak_instant
    assert highest.total == pytest.approx(trace.peak_bytes, rel=1e-4)


def test_a_model_is_traced_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    subject = Subject(config=GPT2)
    way = Question(subject=subject, seq_len=64)
    first = trace_model(subject, way, name="small", source="some/small")
    assert first.traced is not None
    assert 'layers of model_type "gpt2" are not written in dstrain' in first.traced.note
    assert {"transformer.h.6.attn.c_attn.weight", "transformer.ln_f.bias"} <= set(names_of(first, "") or ())
    assert len(list((tmp_path / "dstrain" / "traces").glob("*.json"))) == 2
    assert trace_model(subject, way, name="small", source="some/small", timeout_s=0.01) == first


def test_answers_depend_on_all_code_of_the_tracer() -> None:
    names = {path.name for path in tracer._sources()}
    assert {"__main__.py", "model.py", "passes.py", "kernels.py", "traces.py"} <= names


def test_a_damaged_answer_is_asked_again_and_those_on_code_of_strangers_are_not_remembered(tmp_path: Path) -> None:
    question = Question(subject=Subject(config=GPT2), wanted=Wanted.DESCRIPTION)
    file = tracer._file(question, tmp_path)
    assert file is not None
    file.write_text("{")
    strange = Question(subject=Subject(config={"model_type": "nobody"}, trust_remote_code=True))
    answer, failure = ask([question, strange], folder=tmp_path)
    assert isinstance(answer, Description)
    assert ask([question], folder=tmp_path, timeout_s=0.01) == (answer,)
    assert "has no code for model_type" in getattr(failure, "problem", "")
    assert list(tmp_path.iterdir()) == [file]


def test_failures_are_not_remembered_and_are_the_models_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    subject = Subject(config={"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100})
    way = Question(subject=subject, seq_len=64, attn=Attention.FLASH_ATTENTION_2)
    with pytest.raises(InvalidConfig, match="small: Transformers' MambaForCausalLM does not support flash_attention_2"):
        trace_model(subject, way, name="small", source="some/small")
    assert len(list((tmp_path / "dstrain" / "traces").glob("*.json"))) == 1


def test_a_model_that_brings_its_own_code_is_traced_where_it_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    folder.mkdir()
    config = LLAMA | {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig):\n    model_type = 'own'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    subject = Subject(config=config, source=str(folder), trust_remote_code=True)
    model = trace_model(subject, Question(subject=subject, seq_len=64), name="own", source=str(folder))
    assert model.model_type == "own"
    assert model.num_params == from_config(LLAMA | {"max_position_embeddings": 64}, name="", source="").num_params
    assert model.traced is not None
    assert model.traced.profile.num_layers == 2


def test_a_tracer_that_takes_too_long_is_the_environments_fault() -> None:
    with pytest.raises(EnvironmentProblem, match="took more than 0 s"):
        ask([Question(subject=Subject(config=GPT2))], timeout_s=0.01)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EnvironmentProblem, match="the tracer needs torch, which is not installed") as problem:
        ask([Question(subject=Subject(config=GPT2))])
    assert problem.value.hint == "pip install torch"


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}
DESCRIBED: dict[str, dict[str, Any]] = {
    "qwen3.5": QWEN3_5,
    "gpt-oss": GPT_OSS,
    "heads of 256": {"model_type": "gemma2", **SMALL, "head_dim": 256},
    "heads of 512": {"model_type": "gemma2", **SMALL, "head_dim": 512},
    "no attention": {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64},
}


@pytest.fixture(scope="module")
def descriptions(answers: dict[tuple[str, int, bool], Answer]) -> dict[str, Description]:
    """The descriptions of `DESCRIBED` that the tracer has."""
    found = {name: answers[f"{name} described", 0, False] for name in DESCRIBED}
    return {name: answer for name, answer in found.items() if isinstance(answer, Description)}


def test_three_of_four_layers_of_qwen3_5_have_states_in_place_of_scores(descriptions: dict[str, Description]) -> None:
    model = from_description(descriptions["qwen3.5"], name="small", source="small")
    assert (model.num_attention_layers, model.has_linear_layers, model.has_sdpa) == (3, True, True)
    assert model.linear_state_numel == 9 * 4 * 16 * 32
    by_length = [flops_per_token(model, method=Method.FULL, seq_len=length) for length in (0, 1)]
    assert by_length[1] - by_length[0] == 6 * 3 * 4 * 256  # the default width of heads
    matrices = flops_per_token(replace(model, linear_state_numel=0), method=Method.FULL, seq_len=0)
    assert by_length[0] - matrices == 18 * model.linear_state_numel


def test_flash_attention_needs_every_part_of_a_model_and_narrow_heads(descriptions: dict[str, Description]) -> None:
    names = ("heads of 256", "heads of 512", "no attention")
    assert [descriptions[name].has_flash for name in names] == [True, False, False]


def test_gpt_oss_has_no_sdpa_and_is_planned_with_eager_attention(descriptions: dict[str, Description]) -> None:
    model = from_description(descriptions["gpt-oss"], name="small", source="small")
    assert (model.num_attention_layers, model.has_linear_layers, model.has_sdpa) == (8, False, False)
    assert model.moe is not None
    assert (model.moe.num_experts, model.moe.experts_per_token, model.moe.num_moe_layers) == (4, 2, 8)
    workload = Workload(model=model, cluster=describe(gpu=gpu("h100"), gpus=1, gpu_origin=Origin.GIVEN))
    assert with_defaults(workload, Request()).kernels.attn is Attention.EAGER
    assert [rule.name for rule in broken(workload, changed(DEFAULTS, attn=Attention.SDPA))] == ["sdpa and sinks"]
