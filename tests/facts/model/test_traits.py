"""The packages that families call, against Transformers' own source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dstrain.facts.model.traits import kernel_packages

transformers = pytest.importorskip("transformers")

MODULES = {"flash-linear-attention": "fla", "causal-conv1d": "causal_conv1d", "mamba-ssm": "mamba_ssm"}
CALLS = re.compile(r'use_kernel_func_from_hub_with_fallback\(\s*"\w+",\s*"(\w+)"')


def test_every_family_calls_what_its_code_names() -> None:
    models = Path(transformers.__file__).parent / "models"
    called = {path.parent.name: set(CALLS.findall(path.read_text())) for path in models.glob("*/modeling_*.py")}
    found = {family: {MODULES[name] for name in kernel_packages(family)} for family in called}
    assert found == called
    assert len([family for family in called if called[family]]) > 20
