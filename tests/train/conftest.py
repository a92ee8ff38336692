"""The demo's model and data, made once for all tests that launch ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from dstrain.train.demo import make_model


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def demo(root: Path, made_demo: Path) -> Path:
    """The demo's tokenizer and some of its data, few enough for several epochs, and a smaller model.

    The model has dropout so that random states matter."""
    folder = root / "demo"
    shutil.copytree(made_demo, folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    make_model(tokenizer, hidden_size=64, num_hidden_layers=2).save_pretrained(folder / "model")
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": 0.1}))
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(lines[:400]))
    (folder / "few.jsonl").write_text("".join(lines[:17]))
    (folder / "some.jsonl").write_text("".join(lines[:40]))
    (folder / "eval.jsonl").write_text("".join(sorted(lines[40:60], key=len)[:11]))
    return folder
