"""Liger's kernels: what they replace is what is planned, and ranks train with them as without.

The kernels run on two CPU ranks by Triton's interpreter. liger-kernel and triton are installed by a person who wants
that: `pip install liger-kernel triton`; elsewhere these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dstrain.config.resolve_auto import GATHERS
from dstrain.errors import InvalidConfig
from dstrain.facts.model.families import LIGER
from dstrain.train.model import replace_kernels
from tests.train.engine import Engine
from tests.train.launching import CHECKOUT, EXACT, codes, lines, losses, make_run, said, tensors

HAS_LIGER = find_spec("liger_kernel") is not None and find_spec("triton") is not None
needs_liger = pytest.mark.skipif(not HAS_LIGER, reason="liger-kernel or triton is not installed")

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
_SIGLIP = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 48}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "num_key_value_heads": 4}
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, "n_group": 2, "topk_group": 1},
    "gemma3": {"text_config": SIZES, "vision_config": {**_SIGLIP, "model_type": "siglip_vision_model"}},
    "ministral": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4},
}


def config_of(family: str) -> dict[str, Any]:
    """Returns the config of a tiny model."""
    own = _OF_FAMILY.get(family, {})
    return {"model_type": family, **({} if "text_config" in own else SIZES), **own}


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """For each family that is planned, what Liger replaces in a model of it, and what that changes."""
    folder = tmp_path_factory.mktemp("configs")
    for family in LIGER:
        (folder / f"{family}.json").write_text(json.dumps(config_of(family)))
    line = [sys.executable, "-m", "tests.train.liger_parts", *(str(folder / f"{family}.json") for family in LIGER)]
    interpreted = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(line, cwd=CHECKOUT, env=interpreted, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    return dict(zip(LIGER, found, strict=True))


@needs_liger
@pytest.mark.parametrize("family", LIGER)
def test_the_parts_that_are_planned_are_those_that_are_replaced_and_run(changes: dict[str, Any], family: str) -> None:
    planned, change = asdict(LIGER[family]), changes[family]
    assert change["parts"] == {part: planned[part] for part in change["parts"]}
    ran = " ".join(change["kernels"])
    for part, kernel in (("norm", "_rms_norm_backward"), ("rotary", "_triton_rope"), ("experts", "_fused_up_proj")):
        assert (kernel in ran) is planned[part], change["kernels"]
    assert "glu_" in ran or planned["experts"]


@needs_liger
@pytest.mark.parametrize("family", LIGER)
def test_loss_and_gradients_are_those_of_the_model(changes: dict[str, Any], family: str) -> None:
    assert changes[family]["loss_error"] < 1e-6
    assert changes[family]["gradient_error"] < 1e-5


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES)), "for qwen2_moe of transformers.models.qwen2_moe"),
        (lambda: OwnCode(Qwen3Config(**SIZES)), "for qwen3 of tests.train.test_liger"),
    ],
)
def test_a_model_that_is_not_planned_with_them_is_refused(model: Any, said: str) -> None:
    with torch.device("meta"):
        built = model()
    with pytest.raises(
        InvalidConfig, match=f"liger is true, but Liger has no kernels that are planned {said}"
    ) as error:
        replace_kernels(built)
    assert error.value.hint == "liger: false"


class OwnCode(Qwen3ForCausalLM):
    """A model with code of its own."""


@pytest.fixture(scope="module")
def interpreting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Starts ranks whose Triton kernels are interpreted."""
    home = tmp_path_factory.mktemp("interpreting")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with Engine(home) as engine:
            yield engine


def trained(engine: Engine, demo: Path, folder: Path, family: str, *, stage: int, **job: Any) -> Path:
    """Trains a tiny model of a family for three steps, and returns its run directory."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo / "model")
    model = demo.parent / f"liger-{family}"
    if not model.exists():
        from tests.train.liger_parts import built

        built(config_of(family) | {"vocab_size": len(tokenizer)}).save_pretrained(model)
        tokenizer.save_pretrained(model)
    settings = {**EXACT, "model": str(model), "grad_accum": 1, "seq_len": 24, "micro_batch": 1, "loss_on": "all"}
    shared = {"tensor_parallel": {"autotp_size": job["tp"]}} if "tp" in job else {}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, GATHERS: True}
    make_run(folder, demo, zero=zero, engine=shared, **{**settings, **job})
    program = "tests.train.interpreting" if job.get("liger") else "dstrain.train"
    found = engine.run(program, folder, log=Path(f"{folder}.log"), timeout_s=1500)
    Path(f"{folder}.codes").write_text(f"{found}\n")
    assert codes(folder) == [[0, 0]], said(folder)[-3000:]
    assert ("_rms_norm_backward_kernel" in said(folder)) is bool(job.get("liger"))
    return folder


LORA = {"method": "lora", "lora": {"rank": 4, "targets": ["q_proj", "v_proj", "gate_proj", "down_proj"]}}


@needs_liger
@pytest.mark.parametrize(
    ("family", "stage", "job"),
    [
        ("llama", 2, {"loss": "fused"}),
        ("llama", 3, {"loss": "fused", "grad_ckpt": True, "packing": True, "grad_accum": 2}),
        ("qwen3", 2, {"tiled_mlp": True}),
        ("qwen3", 3, {"loss": "fused", **LORA}),
        ("gemma3_text", 3, {"loss": "chunked"}),
        ("qwen3_moe", 3, {"loss": "fused", "seq_len": 8, "max_steps": 2}),
        ("qwen3", 2, {"loss": "fused", "sp": 2, "seq_len": 32}),
        ("qwen3", 1, {"tp": 2, "seq_len": 16, "max_steps": 2}),
    ],
    ids=str,
)
def test_ranks_train_as_without_them(
    interpreting: Engine, demo: Path, tmp_path: Path, family: str, stage: int, job: dict[str, Any]
) -> None:
    plain, liger = (
        trained(interpreting, demo, tmp_path / f"{is_on}", family, stage=stage, liger=is_on, **job)
        for is_on in (False, True)
    )
    assert list(losses(liger).values()) == pytest.approx(list(losses(plain).values()), rel=1e-5)
    norms = [[line["grad_norm"] for line in lines(folder)] for folder in (liger, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    now, then = tensors(liger / "final"), tensors(plain / "final")
    assert all(torch.allclose(now[name], then[name], atol=1e-4) for name in then)
