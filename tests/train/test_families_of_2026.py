"""Families of 2026 on two CPU ranks: hybrids and gpt-oss train alike under ZeRO-2 and ZeRO-3, from MXFP4 too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from dstrain.facts.model.model_files import read
from dstrain.monitor.metrics import read_jsonl
from tests.train.engine import Engine
from tests.train.launching import make_run
from tests.train.tiny import sizes

pytestmark = pytest.mark.parts(6, at=2)

SHAPE = sizes(64, layers=2, heads=4, intermediate_size=64, max_position_embeddings=512, pad_token_id=0) | {
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
QUANTIZED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
BLOCK, SCALE = 32, 120
"""Elements of a block in MXFP4, and its exponent plus 127 here: numbers up to 6/128."""


def saved(name: str, demo: Path, folder: Path, **config: Any) -> tuple[Path, Any]:
    """Returns a folder with tokenizer and config of a tiny model, and the model."""
    shutil.copytree(demo / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name, **SHAPE | config | {"vocab_size": vocabulary}), dtype=torch.bfloat16
    )
    return folder, model


def packed_experts(model: Any) -> dict[str, Any]:
    """Returns the weights as openai/gpt-oss-20b has them: experts in blocks of MXFP4."""
    state = {}
    for name, tensor in model.state_dict().items():
        if tensor.dim() == 3:
            shape = (tensor.shape[0], tensor.shape[2], tensor.shape[1] // BLOCK)
            state[f"{name}_blocks"] = torch.randint(0, 256, (*shape, BLOCK // 2), dtype=torch.uint8)
            state[f"{name}_scales"] = torch.full(shape, SCALE, dtype=torch.uint8)
        else:
            state[name] = tensor.contiguous()
    return state


def losses(engine: Engine, model: Path, demo: Path, folder: Path, stage: int, **job: Any) -> list[float]:
    """Returns the losses of a run that ended well."""
    run = make_run(folder, demo, zero={"stage": stage}, model=str(model), **job)
    engine.train(run)
    assert Path(f"{run}.codes").read_text().strip() == "[0, 0]", Path(f"{run}.log.0").read_text()[-2000:]
    return [line["loss"] for line in read_jsonl(run / "metrics.jsonl") if "loss" in line]


def test_a_hybrid_with_gated_deltanet_trains_alike_under_zero_2_and_3(
    demo: Path, tmp_path: Path, engine: Engine
) -> None:
    folder, model = saved("qwen3_5_text", demo, tmp_path / "model", num_hidden_layers=4, **LINEAR)
    model.save_pretrained(folder)
    by_stage = [losses(engine, folder, demo, tmp_path / f"z{stage}", stage, precision="fp32") for stage in (2, 3)]
    assert by_stage[0] == pytest.approx(by_stage[1], rel=1e-5)


def test_gpt_oss_in_mxfp4_trains_and_is_saved_unpacked(demo: Path, tmp_path: Path, engine: Engine) -> None:
    folder, model = saved("gpt_oss", demo, tmp_path / "model", num_hidden_layers=2, **EXPERTS)
    save_file(packed_experts(model), folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"architectures": ["GptOssForCausalLM"], "quantization_config": QUANTIZED}
    (folder / "config.json").write_text(json.dumps(config))
    losses(engine, folder, demo, tmp_path / "run", 3, attn="eager")
    final = tmp_path / "run" / "final"
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in read(final).items()} == expected
    assert "quantization_config" not in json.loads((final / "config.json").read_text())
