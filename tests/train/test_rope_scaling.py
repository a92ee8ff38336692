"""Positions beyond a model's own length: in its configuration, in training, and in what a run leaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dstrain.choices import RopeType
from dstrain.errors import InvalidConfig
from dstrain.job.model_changes import RopeScaling
from dstrain.train.adapters import stretch
from dstrain.train.checkpoints.export import export
from tests.train.engine import Engine
from tests.train.launching import codes, losses, make_run, said
from tests.train.tiny import sizes

# of PEFT, which calls Transformers by a name that will change
pytestmark = [
    pytest.mark.parts(6, at=3),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]

OWN = 32
YARN: Mapping[str, Any] = MappingProxyType(
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": OWN}
)
SIZES = sizes(64, heads=4, kv_heads=4, max_position_embeddings=OWN, pad_token_id=0)


def config(model_type: str, **values: Any) -> Any:
    return AutoConfig.for_model(model_type, **(SIZES | values))


def scaled(model_type: str, rope_type: RopeType = RopeType.YARN, **values: Any) -> Any:
    """Returns a configuration after it was stretched, saved and read again."""
    made = config(model_type, **values)
    stretch(made, RopeScaling(rope_type=rope_type, factor=4.0))
    return type(made).from_dict(made.to_dict()).get_text_config()


@pytest.mark.parametrize(("rope_type", "length"), [("yarn", 4 * OWN), ("linear", 4 * OWN), ("dynamic", OWN)])
def test_a_configuration_tells_its_new_length_except_where_transformers_computes_from_the_old(
    rope_type: str, length: int
) -> None:
    made = scaled("qwen3", RopeType(rope_type))
    assert (made.rope_parameters["rope_type"], made.rope_parameters["factor"]) == (rope_type, 4.0)
    assert made.max_position_embeddings == length
    assert made.rope_parameters.get("original_max_position_embeddings") == (OWN if rope_type == "yarn" else None)


def test_full_attention_alone_is_stretched_where_layer_types_have_their_own_positions() -> None:
    parameters = scaled("gemma3_text").rope_parameters
    assert [parameters[kind]["rope_type"] for kind in ("full_attention", "sliding_attention")] == ["yarn", "default"]


def test_the_text_of_a_multimodal_model_is_stretched_and_keeps_its_sections() -> None:
    own = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    made = scaled("qwen3_vl", text_config=SIZES | {"rope_parameters": own})
    assert (made.rope_parameters["rope_type"], made.rope_parameters["mrope_section"]) == ("yarn", [4, 2, 2])
    assert made.max_position_embeddings == 4 * OWN


@pytest.mark.parametrize(
    ("model_type", "values", "problem"),
    [
        ("qwen3", {"rope_scaling": dict(YARN)}, "already has rope_type yarn"),
        ("qwen3", {"rope_parameters": {**YARN, "rope_theta": 1e4}}, "already has rope_type yarn"),
        ("bloom", {}, "has no rotary positions"),
        ("phi3", {}, "Phi3Config takes no rope_type yarn"),
    ],
)
def test_a_model_that_cannot_be_stretched_is_refused(model_type: str, values: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidConfig, match=problem):
        scaled(model_type, **values)


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, engine: Engine) -> Path:
    """Runs on a model with few positions: stretched by the job, by hand as its model card says, not at all."""
    folder = root / "stretched"
    models = {"short": {}, "by-hand": {"rope_scaling": dict(YARN), "max_position_embeddings": 4 * OWN}}
    for name, values in models.items():
        shutil.copytree(demo / "model", folder / name)
        path = folder / name / "config.json"
        own = json.loads(path.read_text()) | {"attention_dropout": 0.0, "max_position_embeddings": OWN}
        if values:
            del own["rope_parameters"]  # Transformers 5 writes it; model cards add the older name
        path.write_text(json.dumps(own | values))
    jobs: dict[str, dict[str, Any]] = {
        "yarn": {"model": str(folder / "short"), "rope_scaling": dict(YARN)},
        "hand": {"model": str(folder / "by-hand")},
        "none": {"model": str(folder / "short")},
        "lora": {"model": str(folder / "short"), "rope_scaling": dict(YARN), "method": "lora", "save_steps": 2},
    }
    for name, job in jobs.items():
        engine.train(make_run(folder / "run" / name, demo, seq_len=4 * OWN, precision="fp32", **job))
        assert codes(folder / "run" / name) == [[0, 0]], said(folder / "run" / name)[-3000:]
    return folder


def logits(folder: Path, **values: Any) -> torch.Tensor:
    """Returns what the model in a folder says to a text longer than its own length."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **values)
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(4 * OWN)[None] % 100).logits
    return result


def test_a_stretched_run_is_that_of_a_config_that_was_edited_as_the_model_card_says(runs: Path) -> None:
    yarn, hand, none = (losses(runs / "run" / name) for name in ("yarn", "hand", "none"))
    assert yarn == hand
    assert yarn != none


def test_the_final_model_has_the_positions_that_it_was_trained_with(runs: Path) -> None:
    final = runs / "run" / "yarn" / "final"
    own = {"rope_type": "default", "rope_theta": 1e4}
    assert torch.equal(logits(final), logits(runs / "run" / "hand" / "final"))
    assert not torch.equal(logits(final), logits(final, rope_parameters=own, max_position_embeddings=OWN))


def test_an_adapter_tells_the_positions_of_its_base_and_is_merged_with_them(runs: Path, tmp_path: Path) -> None:
    run = runs / "run" / "lora"
    assert json.loads((run / "final" / "rope_scaling.json").read_text()) == YARN
    assert "the adapter needs its base model with the rope_scaling" in said(run)
    for source in (run / "final", run / "checkpoint-2"):
        merged = tmp_path / source.name
        export(source, merged)
        parameters = json.loads((merged / "config.json").read_text())["rope_parameters"]
        assert {key: parameters[key] for key in YARN} == YARN
