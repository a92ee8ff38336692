"""The model of a job, in one process without DeepSpeed."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dstrain.choices import Hub, Method
from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.model.families import from_config
from dstrain.facts.probe import read_model
from dstrain.job.model_changes import Lora
from dstrain.job.schema import Job
from dstrain.plan.memory.params import lora_params
from dstrain.plan.memory.params import trained as planned
from dstrain.train import model as models
from dstrain.train.adapters import with_adapter
from dstrain.train.model import load_model
from dstrain.train.tokenizer import load_tokenizer, source_of
from tests.train.engine_cases import LLAMA, SEEING, TIED
from tests.train.tiny import VISION_IDS, experts, sizes

# of PEFT, which calls Transformers by a name that will change
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

TEXT = sizes(layers=1, vocab_size=64) | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    config = Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION | {"fullatt_block_indexes": [0]}, **VISION_IDS)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    return folder


def job(model: Path | str, **fields: Any) -> Job:
    return Job(model=str(model), output_dir="o", **fields)


def trained(model: Any) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_the_vision_tower_is_frozen_and_the_rest_is_trained(vision_model: Path) -> None:
    model = load_model(job(vision_model), str(vision_model), {})
    assert any("visual" in name for name, _ in model.named_parameters())
    assert not any("visual" in name for name in trained(model))
    assert any("mlp.down_proj" in name for name in trained(model))
    assert model.dtype == torch.bfloat16
    assert model.config.use_cache is False


def test_progress_of_loading_is_reported(vision_model: Path) -> None:
    counts: list[tuple[int, int]] = []
    load_model(job(vision_model), str(vision_model), {}, report=lambda *count: counts.append(count))
    assert [done for done, _ in counts] == list(range(counts[0][1]))


def test_the_vision_tower_gets_no_adapter(vision_model: Path) -> None:
    model = load_model(job(vision_model, method=Method.LORA), str(vision_model), {})
    assert len(trained(model)) == 7 * 2
    assert not any("visual" in name for name in trained(model))


def test_a_target_that_is_no_module_is_a_fault_of_the_job(vision_model: Path) -> None:
    wrong = job(vision_model, method=Method.LORA, lora=Lora(targets=("q_prj",)))
    with pytest.raises(InvalidConfig, match='lora: targets has "q_prj", but no module'):
        load_model(wrong, str(vision_model), {})


def test_a_folder_without_a_model_names_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=f'model: the model of "{tmp_path}" cannot be loaded'):
        load_model(job(tmp_path), str(tmp_path), {})


def test_a_folder_without_a_tokenizer_names_it(vision_model: Path, tmp_path: Path) -> None:
    shutil.copy(vision_model / "config.json", tmp_path)
    with pytest.raises(InvalidConfig, match="has no tokenizer"):
        load_tokenizer(job(tmp_path), str(tmp_path))


def test_a_missing_package_is_named_with_how_to_install_it(vision_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> object:
        return None if name in {"bitsandbytes", "modelscope"} else importlib.util.find_spec(name)

    monkeypatch.setattr(models, "find_spec", find)
    with pytest.raises(EnvironmentProblem, match="bitsandbytes"):
        load_model(job(vision_model, method=Method.QLORA), str(vision_model), {})
    with pytest.raises(EnvironmentProblem, match="modelscope needs modelscope"):
        source_of(job("Qwen/Qwen3-0.6B", hub=Hub.MODELSCOPE))


def test_a_local_folder_needs_no_hub(vision_model: Path) -> None:
    assert source_of(job(vision_model, hub=Hub.MODELSCOPE)) == str(vision_model)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(
    "config", [LLAMA, TIED, {**TIED, "model_type": "gemma3_text"}, SEEING], ids=lambda c: c["model_type"]
)
@pytest.mark.parametrize(
    "lora",
    [
        Lora(rank=4, targets=("q_proj", "embed_tokens", "lm_head")),
        Lora(rank=4, targets=("q_proj", "embed_tokens"), modules_to_save=("lm_head",)),
        Lora(rank=4, targets=("lm_head",)),
    ],
    ids=["both", "one whole", "head"],
)
def test_adapters_of_embedding_and_head_have_the_parameters_that_are_planned(
    config: Mapping[str, Any], lora: Lora
) -> None:
    family = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        model = family.from_config(AutoConfig.for_model(**config))
        model.tie_weights()
        adapted = with_adapter(model, lora, grad_ckpt=False, dtype=None)
    facts = from_config(config, name="model", source="model")
    assert planned(facts, Method.LORA, lora).trainable == sum(
        p.numel() for p in adapted.parameters() if p.requires_grad
    )


def test_all_linear_of_a_mixture_of_experts_is_attention(tmp_path: Path) -> None:
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes(layers=1), **experts(4))).save_pretrained(tmp_path)
    asked = job(tmp_path, method=Method.LORA, lora=Lora(rank=2, dropout=0.1))
    adapters = trained(load_model(asked, str(tmp_path), {}))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in adapters} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    facts = read_model(str(tmp_path))
    assert lora_params(facts, asked.lora) == 2 * 4 * (32 + 32)
