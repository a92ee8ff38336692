"""The generated parts of the READMEs are what the code says, and both READMEs keep step."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import click
import pytest

from benchmarks.published import report
from benchmarks.published.answers import Answer
from benchmarks.published.score import score
from dstrain.cli.main import cli

ROOT = Path(__file__).parent.parent
README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"


def module_map() -> str:
    """Returns one line for every module: its path and the first sentence of its docstring."""
    lines = ["| module | what it does |", "|---|---|"]
    for path in sorted((ROOT / "dstrain").rglob("*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first = re.split(r"(?<=\.)\s", doc.replace("\n", " "), maxsplit=1)[0]
        lines.append(f"| `{path.relative_to(ROOT)}` | {first} |")
    return "\n".join(lines)


def commands() -> list[tuple[str, click.Command]]:
    """Returns every command with its full name."""
    found: list[tuple[str, click.Command]] = []

    def walk(name: str, command: click.Command) -> None:
        found.append((name, command))
        if isinstance(command, click.Group):
            context = click.Context(command)
            for child in command.list_commands(context):
                inner = command.get_command(context, child)
                assert inner is not None
                walk(f"{name} {child}", inner)

    walk("dstrain", cli)
    return found


def cli_reference() -> str:
    """Returns the help of every command."""
    parts = []
    for name, command in commands():
        settings = {**cli.context_settings, "terminal_width": 100}
        context = click.Context(command, info_name=name, **settings)  # type: ignore[arg-type]
        parts.append(f"#### `{name}`\n\n```\n{command.get_help(context)}\n```")
    return "\n\n".join(parts)


def job_reference() -> str:
    """Returns a row for every key of a job file: name, default and the docstring under its field."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    prefixes = {"Job": "", "Lora": "lora.", "Monitor": "monitor."}
    classes = {node.name: node for node in ast.parse((ROOT / "dstrain/job/schema.py").read_text(encoding="utf-8")).body
               if isinstance(node, ast.ClassDef)}  # fmt: skip
    for name, prefix in prefixes.items():
        for field, doc in pairwise(classes[name].body):
            if not (isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr)):
                continue
            if isinstance(field.value, ast.Call):
                continue  # a section, whose keys have rows of their own, or env
            default = "required" if field.value is None else f"`{_plain_default(field.value)}`"
            text = ast.literal_eval(doc.value).replace("\n", " ")
            rows.append(f"| `{prefix}{ast.unparse(field.target)}` | {default} | {text} |")
    return "\n".join(rows)


def _plain_default(value: ast.expr) -> str:
    """Returns a default as it is written in YAML."""
    if isinstance(value, ast.Attribute):
        return value.attr.lower()
    if isinstance(value, ast.Tuple):
        return f"[{', '.join(map(_plain_default, value.elts))}]"
    plain = ast.literal_eval(value)
    return json.dumps(plain) if isinstance(plain, bool) or plain is None else str(plain)


def _run(*words: str, cwd: Path = ROOT, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a command on a machine without a GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80", "PYTHONPATH": str(ROOT), "HOME": "/"}
    line = [sys.executable, *words]
    return subprocess.run(line, capture_output=True, text=True, env=environment, check=check, cwd=cwd)


@cache
def gen_config_output() -> str:
    """Returns what the first command prints on a machine without a GPU."""
    done = _run("-m", "dstrain.cli", "gen-config", "--gpus", "16", "--model", "qwen3-32b", "--dry-run")
    return f"```\n{done.stderr.rstrip()}\n```"


def plan_output() -> str:
    """Returns what `dstrain plan` prints."""
    done = _run("-m", "dstrain.cli", "plan", "--gpus", "8", "--gpu", "h100", "--model", "qwen3-8b", "--top", "3")
    return f"```\n{done.stdout.rstrip()}\n```"


@cache
def edits_output() -> str:
    """Returns what lint, diff, explain and gen-config say of edited files."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)

        def typed(*words: str, fails: bool = False) -> str:
            done = _run("-m", "dstrain.cli", *words, cwd=place, check=not fails)
            return f"$ dstrain {' '.join(words)}\n{done.stdout.rstrip()}"

        _run(
            "-m",
            "dstrain.cli",
            "gen-config",
            "--gpus",
            "16",
            "--model",
            "qwen3-32b",
            "--hosts",
            "gpu[01-02]",
            cwd=place,
        )
        _replace(place / "ds_config.json", '"overlap_comm": true', '"overlap_com": false')
        _replace(place / "job.yaml", "seed: 42", "seed: 7")
        found = [typed("lint", fails=True)]
        typed("lint", "--fix")
        found += [typed("diff"), typed("explain", "overlap_comm"), typed("gen-config", "--seq-len", "8192", "--diff")]
    return "```\n" + "\n\n".join(found) + "\n```"


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def published_table(answers: tuple[Answer, ...]) -> str:
    """Returns how the planner does on published runs, as `benchmarks/predict.py --markdown` prints it."""
    return report.markdown(score(answers)).rstrip()


SECTIONS: dict[str, Callable[[], str]] = {
    "module map": module_map,
    "job": job_reference,
    "command line": cli_reference,
    "gen-config": gen_config_output,
    "plan": plan_output,
    "edits": edits_output,
}


@pytest.mark.parametrize(
    ("readme", "name"),
    [*((README, name) for name in (*SECTIONS, "published")), (CHINESE, "gen-config"), (CHINESE, "edits")],
    ids=lambda value: value.name if isinstance(value, Path) else value,
)
def test_a_generated_part_is_what_the_code_says(readme: Path, name: str, request: pytest.FixtureRequest) -> None:
    text = readme.read_text(encoding="utf-8")
    start, end = f"<!-- generated: {name} -->\n", f"\n<!-- end: {name} -->"
    before, rest = text.split(start)
    present, after = rest.split(end)
    wanted = SECTIONS[name]() if name in SECTIONS else published_table(request.getfixturevalue("answers"))
    if request.config.getoption("--update"):
        readme.write_text(before + start + wanted + end + after, encoding="utf-8")
    else:
        assert present == wanted, "run pytest --update"


def code_blocks(text: str) -> list[str]:
    """Returns the shell blocks of a text, without comments."""
    blocks = re.findall(r"```(?:sh|yaml|json)\n(.*?)```", text, re.DOTALL)
    return [re.sub(r"\s*#.*", "", block) for block in blocks]


def test_the_chinese_first_pages_have_the_same_commands() -> None:
    english, chinese = README.read_text(encoding="utf-8"), CHINESE.read_text(encoding="utf-8")
    pages = english.split("<!-- end of the first pages -->")[0]
    assert code_blocks(pages) == code_blocks(chinese)
    assert len(re.findall(r"^## ", pages, re.MULTILINE)) == len(re.findall(r"^## ", chinese, re.MULTILINE))


@pytest.mark.parametrize("name", [name for name, _ in commands()])
def test_every_command_has_an_example(name: str) -> None:
    command = dict(commands())[name]
    assert "Example:" in (command.help or "")


@pytest.mark.parametrize("name", [name for name, _ in commands()])
def test_every_option_has_help(name: str) -> None:
    for parameter in dict(commands())[name].params:
        assert not isinstance(parameter, click.Option) or parameter.help, parameter.name


def test_every_module_says_what_it_is() -> None:
    assert not [line for line in module_map().splitlines() if line.endswith("|  |")]
