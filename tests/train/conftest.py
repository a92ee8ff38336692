"""The demo's model and data, made once for all tests that launch ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def demo(root: Path, made_demo: Path) -> Path:
    """The demo's model, with dropout so that random states matter, and with few enough data for several epochs."""
    folder = root / "demo"
    shutil.copytree(made_demo, folder)
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": 0.1}))
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(lines[:17]))
    (folder / "some.jsonl").write_text("".join(lines[:40]))
    (folder / "eval.jsonl").write_text("".join(lines[40:52]))
    return folder
