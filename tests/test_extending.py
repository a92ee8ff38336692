"""The pages that say how to add something name files and symbols that exist, and their examples work."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks import named_peaks
from dstrain.config.lint import engine
from dstrain.config.lint.rule import Rule, Subject
from dstrain.config.lint.rules import no_effect
from dstrain.facts.cluster import gpu_table
from dstrain.facts.cluster.cluster import LINKS
from dstrain.facts.model import families
from dstrain.monitor.sinks.registry import Guarded
from dstrain.monitor.sinks.sink import End, Table
from dstrain.plan.configuration import DEFAULTS
from dstrain.plan.memory.layers import activations, dense
from dstrain.plan.memory.layers import families as layer_families
from tests.sources import nodes_of, text_of

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "extending"
EXAMPLES = {"tests/cli/test_hello.py", "dstrain/cli/verbs/<verb>.py", "newone", "apply_liger_kernel_to_newone"}
"""Files and symbols that a reader of the pages makes."""
ELSEWHERE = {"Qwen3VLProcessor"}
"""Symbols of other packages that the code does not name."""


@cache
def modules() -> tuple[Path, ...]:
    return tuple(
        path for folder in ("dstrain", "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))
    )


@cache
def symbols(path: Path) -> set[str]:
    """Returns every name and every string of a module."""
    fields = ("id", "attr", "name", "arg", "value")
    found = {getattr(node, field, None) for node in nodes_of(path) for field in fields}
    return {each for each in found if isinstance(each, str)}


def unknown(names: set[str]) -> set[str]:
    """Returns those that are no name and no string of the code; only files that hold one of them are parsed."""
    left = set(names)
    for path in modules():
        if left and re.search(rf"\b(?:{'|'.join(left)})\b", text_of(path)):
            left -= symbols(path)
    return left


def examples(page: str, language: str = "python") -> list[str]:
    """Returns the blocks of a page in a language."""
    text = (PAGES / page).read_text(encoding="utf-8")
    found = re.finditer(rf"^( *)```{language}\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
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
    assert unknown(set(re.findall(r"`([A-Za-z_]\w*)`", prose)) - EXAMPLES - ELSEWHERE) == set()


def test_the_gpu_of_the_page_is_a_row() -> None:
    row = eval(example("gpu.md"), vars(gpu_table))
    assert isinstance(row, gpu_table.Row)
    assert row.link in LINKS


def test_the_family_of_the_page_is_planned_like_the_one_that_it_resembles(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, row, attention, layer = examples("model-family.md")
    names = dict(vars(families))
    exec(tensors, names)
    monkeypatch.setattr(families, "newone", names["newone"], raising=False)
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
    assert named_peaks.profile(newone, DEFAULTS) == named_peaks.profile(qwen3, DEFAULTS)


@pytest.mark.commands
def test_the_choice_of_the_page_is_an_option_that_plans_show_and_files_keep(tmp_path: Path) -> None:
    for folder in ("dstrain", "ds_templates", "launch", "hostfiles"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    field, option, words = examples("planner-choice.md")
    steps = (
        ("dstrain/plan/configuration.py", "\n    @property\n    def is_offloaded", field),
        ("dstrain/plan/request.py", "\n    def __post_init__", option),
        ("dstrain/plan/labels.py", "\n\ndef title_parts", words),
        ("ds_templates/_zero12.json.j2", '    "contiguous_gradients"', *examples("planner-choice.md", "jinja")),
    )
    for name, below, block in steps:
        above, _, rest = (tmp_path / name).read_text(encoding="utf-8").partition(below)
        assert rest, name
        lines = textwrap.indent(block, "    ")
        (tmp_path / name).write_text(f"{above}{lines}\n{below}{rest}", encoding="utf-8")
    asked = [
        "gen-config",
        "--gpus",
        "2",
        "--gpu",
        "h100",
        "--model",
        "qwen3-0.6b",
        "--zero-stage",
        "2",
        "--round-robin",
    ]
    command = [sys.executable, "-m", "dstrain.cli", *asked, "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "round-robin gradients" in done.stderr
    config = json.loads((tmp_path / "out" / "ds_config.json").read_text(encoding="utf-8"))
    assert config["zero_optimization"]["round_robin_gradients"] is True
    lock = json.loads((tmp_path / "out" / ".dstrain" / "lock.json").read_text(encoding="utf-8"))
    assert lock["inputs"]["round_robin"] is True


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
