"""Editors complete, explain and underline ds_config.json and job.yaml: real language servers, driven without a screen.

`make servers` installs them; VS Code runs the same JSON server, and its YAML extension the same YAML server.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dstrain.config.schema import schema_files
from tests.config.lsp import Editor

pytestmark = pytest.mark.editors

ROOT = Path(__file__).parents[2]
SERVERS = ROOT / ".cache" / "language_servers" / "node_modules" / ".bin"
GOLDEN = ROOT / "tests" / "golden" / "qwen3-32b-16xa100"

CONFIG = """{
  "$schema": "./.dstrain/ds_config.schema.json",
  "gradient_clipping": "auto",
  "zero_optimization": {
    "stage": 5,
    "overlap_com": true,
    "cpu_offload": true
  }
}
"""
TYPING = """{
  "$schema": "./.dstrain/ds_config.schema.json",
  "gradient_clipping": ,
  "zero_optimization": {
    "stage": 3,

  }
}
"""
JOB = """# yaml-language-server: $schema=./.dstrain/job.schema.json
model: Qwen/Qwen3-8B
output_dir: output
seq_length: 4096
method: loar
"""
TYPING_JOB = """# yaml-language-server: $schema=./.dstrain/job.schema.json
model: Qwen/Qwen3-8B
output_dir: output
method: |
lora:
  |
""".replace("|", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder as gen-config leaves it, without the files that are open in the editor."""
    made: Path = tmp_path_factory.mktemp("job")
    for name, text in schema_files().items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(text, encoding="utf-8")
    return made


def editor(name: str, folder: Path, need: Callable[[object, str], None]) -> Iterator[Editor]:
    server = SERVERS / name
    need(shutil.which("node"), "node is not installed")
    need(server.exists(), f"{name} is not installed: make servers")
    with Editor([str(server), "--stdio"], folder, {"yaml": {"schemaStore": {"enable": False}}}) as running:
        yield running


@pytest.fixture(scope="module")
def json_editor(folder: Path, need: Callable[[object, str], None]) -> Iterator[Editor]:
    yield from editor("vscode-json-language-server", folder, need)


@pytest.fixture(scope="module")
def yaml_editor(folder: Path, need: Callable[[object, str], None]) -> Iterator[Editor]:
    yield from editor("yaml-language-server", folder, need)


def underlined(text: str, found: list[dict[str, object]]) -> dict[str, str]:
    """Returns the underlined parts of a text, each with its message."""
    lines, marked = text.splitlines(), {}
    for each in found:
        start, end = each["range"]["start"], each["range"]["end"]  # type: ignore[index]
        marked[lines[start["line"]][start["character"] : end["character"]]] = str(each["message"])
    return marked


def place(text: str, word: str) -> tuple[int, int]:
    """Returns line and column of the first letter of a word."""
    before = text[: text.index(word)]
    return before.count("\n"), len(before) - (before.rfind("\n") + 1)


def test_a_golden_configuration_has_nothing_underlined(json_editor: Editor, folder: Path) -> None:
    text = (GOLDEN / "ds_config.json").read_text(encoding="utf-8")
    assert json_editor.open(folder / "golden.json", text) == []


def test_a_misspelt_key_a_wrong_number_and_an_old_key_are_underlined(json_editor: Editor, folder: Path) -> None:
    assert underlined(CONFIG, json_editor.open(folder / "ds_config.json", CONFIG)) == {
        '"overlap_com"': "Property overlap_com is not allowed.",
        "5": "Value is above the maximum of 3.",
        '"cpu_offload": true': "Deprecated: write zero_optimization.offload_optimizer with device cpu.",
    }


def test_a_key_is_explained_under_the_pointer(json_editor: Editor, folder: Path) -> None:
    json_editor.open(folder / "ds_config.json", CONFIG)
    said = json_editor.hover(folder / "ds_config.json", *place(CONFIG, "gradient_clipping")).replace("\\", "")
    assert "Maximum global L2 norm of the gradients" in said
    assert "Default: 1.0 since 0.19.3; 0.0 before." in said
    assert '"auto": the Trainer fills in max_grad_norm.' in said


def test_keys_of_a_section_are_offered_and_no_old_ones(json_editor: Editor, folder: Path) -> None:
    json_editor.open(folder / "typing.json", TYPING)
    offered = json_editor.complete(folder / "typing.json", *place(TYPING, "\n\n  }"))
    assert {"overlap_comm", "reduce_bucket_size", "offload_optimizer"} <= set(offered)
    assert not {"stage", "cpu_offload", "mics_shard_size"} & set(offered)
    assert "Reduces gradients during the backward pass" in offered["overlap_comm"]["documentation"]


def test_auto_is_offered_where_the_trainer_fills_it_in(json_editor: Editor, folder: Path) -> None:
    json_editor.open(folder / "typing.json", TYPING)
    line, column = place(TYPING, ',\n  "zero_opt')
    assert '"auto"' in json_editor.complete(folder / "typing.json", line, column)


def test_a_golden_job_has_nothing_underlined(yaml_editor: Editor, folder: Path) -> None:
    text = (GOLDEN / "job.yaml").read_text(encoding="utf-8")
    assert yaml_editor.open(folder / "golden.yaml", text) == []


def test_a_misspelt_key_and_word_of_a_job_are_underlined(yaml_editor: Editor, folder: Path) -> None:
    marked = underlined(JOB, yaml_editor.open(folder / "job.yaml", JOB))
    assert marked.pop("seq_length") == "Property seq_length is not allowed."
    assert list(marked) == ["loar"]
    assert '"lora"' in marked["loar"]


def test_a_key_of_a_job_is_explained_under_the_pointer(yaml_editor: Editor, folder: Path) -> None:
    yaml_editor.open(folder / "job.yaml", JOB)
    said = yaml_editor.hover(folder / "job.yaml", *place(JOB, "output_dir"))
    assert "The run directory, relative to the job file: metrics, checkpoints, the final model" in said


def test_keys_and_words_of_a_job_are_offered(yaml_editor: Editor, folder: Path) -> None:
    yaml_editor.open(folder / "typing.yaml", TYPING_JOB)
    assert {"rank", "alpha", "dropout", "targets"} <= set(yaml_editor.complete(folder / "typing.yaml", 5, 2))
    assert {"full", "lora", "qlora"} <= set(yaml_editor.complete(folder / "typing.yaml", 3, len("method: ")))
