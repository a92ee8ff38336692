"""The pages that say how to add something name files and symbols that exist, and their examples work."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from dstrain.config.lint import engine
from dstrain.config.lint.rule import Rule
from dstrain.config.lint.rules import no_effect
from dstrain.config.lint.subject import Subject
from dstrain.facts.cluster import gpu_table, links
from dstrain.facts.model import families, parameter_tensors
from dstrain.monitor.sinks.registry import Guarded
from dstrain.monitor.sinks.sink import End, Table
from dstrain.plan.configuration import DEFAULTS
from dstrain.plan.memory.layers import activations, dense
from dstrain.plan.memory.layers import families as layer_families

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "extending"
EXAMPLES = {"tests/cli/test_hello.py", "dstrain/cli/<verb>.py", "newone", "apply_liger_kernel_to_newone"}
"""Files and symbols that a reader of the pages makes."""
ELSEWHERE = {"Qwen3VLProcessor"}
"""Symbols of other packages that the code does not name."""


@cache
def symbols() -> set[str]:
    """Returns every name and every string of the code."""
    paths = [path for folder in ("dstrain", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    found = {getattr(node, field, None) for node in nodes for field in ("id", "attr", "name", "arg", "value")}
    return {each for each in found if isinstance(each, str)}


def examples(page: str) -> list[str]:
    """Returns the Python blocks of a page."""
    text = (PAGES / page).read_text(encoding="utf-8")
    found = re.finditer(r"^( *)```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return ["\n".join(line.removeprefix(each[1]) for line in each[2].splitlines()).strip() for each in found]


def example(page: str) -> str:
    """Returns the first Python block of a page."""
    return examples(page)[0]


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_the_steps_name_files_and_symbols_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:dstrain|tests|docs|benchmarks|launch|ds_templates)/[^`\s]*)`", text)
    assert [path for path in paths if path not in EXAMPLES and not (ROOT / path).exists()] == []
    named = re.findall(r"`([A-Za-z_]+)` (?:in|of)\s+`((?:dstrain|tests)/[^`\s]*\.py)`", text)
    missing = [(name, path) for name, path in named if name not in (ROOT / path).read_text(encoding="utf-8")]
    assert missing == []
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert set(re.findall(r"`([A-Za-z_]\w*)`", prose)) - EXAMPLES - ELSEWHERE <= symbols()


def test_the_gpu_of_the_page_is_a_row() -> None:
    row = eval(example("gpu.md"), vars(gpu_table))
    assert isinstance(row, gpu_table.Row)
    assert row.link in links.LINKS


def test_the_family_of_the_page_is_planned_like_the_one_that_it_resembles(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, row, attention, layer = examples("model-family.md")
    names = dict(vars(parameter_tensors))
    exec(tensors, names)
    monkeypatch.setattr(parameter_tensors, "newone", names["newone"], raising=False)
    monkeypatch.setattr(families, "FAMILIES", families.FAMILIES | eval(f"{{{row}}}", vars(families)))
    assert attention.startswith("def newone_attention(")  # whose body the reader writes
    like_qwen3 = dense.qwen3_attention
    monkeypatch.setattr(dense, "newone_attention", like_qwen3, raising=False)
    known = layer_families.LAYER_CODE | eval(f"{{{layer}}}", vars(layer_families))
    monkeypatch.setattr(activations, "LAYER_CODE", known)
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "max_position_embeddings": 4096,
    }
    config = {**sizes, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
    newone, qwen3 = (
        families.from_config({"model_type": name, **config}, name=name, source=name) for name in ("newone", "qwen3")
    )
    assert newone.num_params == qwen3.num_params
    assert activations.profile(newone, DEFAULTS) == activations.profile(qwen3, DEFAULTS)


def test_the_rule_of_the_page_finds_its_mistake() -> None:
    rule = eval(example("lint-rule.md"), vars(no_effect))
    assert isinstance(rule, Rule)
    assert rule.id not in {present.id for present in engine.RULES}
    document, _ = engine.read('{"zero_optimization": {"stage": 2, "reduce_bucket_size": 1}}', "ds_config.json")
    assert document is not None
    [fault] = rule.find(Subject(document=document, is_trainers=False))
    assert fault.problem == "reduce_bucket_size is 1"


def test_the_sink_of_the_page_draws_points(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(example("sink.md"), names)
    messages: list[str] = []
    sink = Guarded("print", names["open_sink"](None, messages.append), messages.append)
    sink.log({"loss": 1.0}, 3)
    sink.show(Table(name="report", step=3, text="good", columns=(), rows=()))
    sink.finish(End.SUCCESS)
    assert capsys.readouterr().out == "3 {'loss': 1.0}\ngood\n"
    assert messages == []


def test_the_verb_of_the_page_answers(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(example("verb.md"), names)
    command: click.Command = names["command"]
    assert "Example:" in (command.help or "")
    command.main([], standalone_mode=False)
    assert capsys.readouterr().out == "hello\n"
