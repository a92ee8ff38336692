"""What a saved model must be: whole, and as its base was where training has no say."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dstrain.errors import RunFailed
from dstrain.train.checkpoints.saved_model import (
    base_config,
    base_dtype,
    converted,
    require_whole_model,
    restore_config,
)
from tests.train.tiny import sizes

WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    config = Qwen3Config(**sizes(layers=1, kv_heads=1, tie_word_embeddings=True))
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def changed(saved: Path, to: Path, change: Any) -> Path:
    """Returns a copy of the model whose tensors are what `change` makes of them."""
    shutil.copytree(saved, to)
    state = load_file(to / "model.safetensors")
    change(state)
    save_file(state, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_a_whole_model_is_accepted(saved: Path) -> None:
    require_whole_model(saved)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop(WEIGHT), f"{WEIGHT} is missing"),
        (lambda state: state.update({WEIGHT: torch.empty(0)}), f"{WEIGHT} has another shape"),
        (lambda state: state.update({WEIGHT: state[WEIGHT][:1].clone()}), f"{WEIGHT} has another shape"),
        (lambda state: state.update({WEIGHT: state[WEIGHT].half()}), f"{WEIGHT} is F16, but config.json says"),
        (lambda state: state.update({name: state[name].float() for name in state}), " is F32, but config.json says"),
    ],
)
def test_a_model_from_which_something_cannot_be_loaded_is_refused(
    saved: Path, tmp_path: Path, change: Any, said: str
) -> None:
    with pytest.raises(RunFailed) as caught:
        require_whole_model(changed(saved, tmp_path / "model", change))
    assert said in caught.value.problem
    assert caught.value.exit_code == 1


def test_a_folder_without_weights_or_with_half_of_them_is_refused(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(RunFailed, match="in its header"):
        require_whole_model(folder)
    weights.unlink()
    with pytest.raises(RunFailed, match=r"does not hold the trained model: .*model\.safetensors"):
        require_whole_model(folder)


def test_a_saved_model_has_dtype_and_cache_of_its_base(saved: Path, tmp_path: Path) -> None:
    base = base_config(str(saved), trust_remote_code=False)
    assert base_dtype(base) is torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    model.config.use_cache = False
    state = converted(model.state_dict(), model, torch.float32, torch.bfloat16)
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]  # tied ones stay one tensor
    model.save_pretrained(tmp_path, state_dict=state)
    restore_config(tmp_path, base)
    require_whole_model(tmp_path)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (saved, tmp_path))
    assert (after["dtype"], after.get("use_cache", True)) == (before["dtype"], True)
    loaded, original = load_file(tmp_path / "model.safetensors"), load_file(saved / "model.safetensors")
    assert all(loaded[name].equal(original[name]) for name in original)


def test_what_a_family_keeps_in_fp32_is_not_converted() -> None:
    class Family(torch.nn.Linear):
        def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
            return {"bias": torch.float32}

    model = Family(2, 2)
    state = converted(model.state_dict(), model, torch.float32, torch.bfloat16)
    assert (state["weight"].dtype, state["bias"].dtype) == (torch.bfloat16, torch.float32)


def test_parts_of_a_configuration_are_restored_too(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"text_config": {"dtype": "float32", "use_cache": False, "n": 1}, "use_cache": False}))
    restore_config(tmp_path, {"text_config": {"dtype": "bfloat16"}, "use_cache": True})
    assert json.loads(path.read_text()) == {"text_config": {"dtype": "bfloat16", "n": 1}, "use_cache": True}
