"""Compiled decoder layers: compiled once for all layers and lengths, and they train as others do, under ZeRO-3 too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import Qwen3Config, Qwen3ForCausalLM

from dstrain.choices import CompileBackend
from dstrain.errors import InvalidConfig
from dstrain.train.loss import trial
from dstrain.train.model import compile_layers
from tests.train.engine import Engine
from tests.train.launching import codes, losses, make_run, said, tensors, without_dropout
from tests.train.tiny import sizes

pytestmark = pytest.mark.parts(6, at=5)


def tiny() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**sizes(layers=3, heads=4, vocab_size=64)))


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which Dynamo hides itself
def test_one_graph_serves_all_layers_and_lengths_and_trials_compile_nothing() -> None:
    model, eager = tiny(), tiny()
    names = [type(layer).__name__ for layer in model.model.layers]
    compile_layers(model, zero_stage=2, backend=CompileBackend.AOT_EAGER)
    assert [type(layer).__name__ for layer in model.model.layers] == names
    counters.clear()
    with trial(model):
        model(torch.arange(9).reshape(1, -1))
    assert counters["stats"]["unique_graphs"] == 0
    for length in (7, 12, 30):
        tokens = torch.arange(length).reshape(1, -1)
        found = [each(tokens, labels=tokens, use_cache=False).loss for each in (model, eager)]
        assert torch.allclose(found[0], found[1], rtol=1e-5)
        for loss in found:
            loss.backward()
    assert counters["stats"]["unique_graphs"] == 1
    grads = [each.model.layers[0].mlp.up_proj.weight.grad for each in (model, eager)]
    assert torch.allclose(grads[0], grads[1], rtol=1e-4, atol=1e-6)


def test_layers_that_are_not_transformers_own_are_refused() -> None:
    model = tiny()
    model.model.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
    with pytest.raises(InvalidConfig, match="no forward pass of their own to compile"):
        compile_layers(model, zero_stage=2)


def test_under_zero_3_an_adapter_trains_as_without_compiling(root: Path, demo: Path, engine: Engine) -> None:
    """Its first layer has an input without gradient, and no checkpoints give it one."""
    folder = root / "compiled"
    job: dict[str, Any] = {"method": "lora", "lora": {"targets": ["q_proj"]}, "grad_ckpt": False, "precision": "fp32"}
    job |= {"model": str(without_dropout(demo / "model", folder / "model")), "max_steps": 2}
    compiled: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    runs = [
        make_run(folder / "eager", demo, zero={"stage": 3}, **job),
        make_run(folder / "compiled", demo, zero={"stage": 3}, **job, **compiled),
    ]
    for run in runs:
        engine.train(run)
        assert codes(run) == [[0, 0]], said(run)[-2000:]
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-4)
    eager, found = (tensors(run / "final") for run in runs)
    assert found.keys() == eager.keys()
    assert all(torch.allclose(found[name], eager[name], atol=1e-4) for name in eager)
